"""A run of several ranks from settings to report: start them, conduct, add up what they say."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from asynccache.cli import report
from asynccache.cli.ranked import merge
from asynccache.cli.ranked.conductor import Conductor
from asynccache.cli.ranked.crew import Crew
from asynccache.cli.ranked.messages import Arrival, Job, arrival
from asynccache.cli.ranked.shard import shard_config
from asynccache.cli.ranked.watch import RankedWatch
from asynccache.cli.request import Request
from asynccache.cli.session import Session
from asynccache.config import CacheConfig
from asynccache.ranks import Topology


class RankedSession(Session):
    """As ``Session``; the caches are elsewhere."""

    async def run(self) -> report.Report:
        """The report. Cancelling it kills the ranks."""
        source, config = await self._prepare()
        with tempfile.TemporaryDirectory(prefix="asynccache-ranks-") as folder:
            jobs = self._jobs(config, Path(folder))
            async with Crew(jobs, Path(folder)) as crew:
                conductor = Conductor(crew, source, self._settings, self._packed, self._tally.problem)
                await conductor.opened()
                self._tell(crew)
                await self._conduct(conductor)
            return self._merged(crew, conductor)

    @property
    def _topology(self) -> Topology:
        return Topology(self._settings.tp, self._settings.cp, self._settings.pp)

    def _jobs(self, config: CacheConfig, folder: Path) -> list[Job]:
        topology, meeting = self._topology, (folder / "meeting").as_uri()
        return [Job(rank, topology, meeting, self._settings, shard_config(config, topology, rank))
                for rank in range(topology.ranks)]

    def _packed(self, request: Request) -> Arrival:
        return arrival(request, None if self._requests is None else self._requests[request.number])

    def _tell(self, crew: Crew) -> None:
        if not self._settings.quiet:
            pids = ", ".join(f"rank {member.rank} is process {member.process.pid}" for member in crew.members)
            print(pids, file=sys.stderr, flush=True)

    async def _conduct(self, conductor: Conductor) -> None:
        loop, duration = asyncio.get_running_loop(), self._duration()
        watch = RankedWatch(self._settings, conductor, self._meter, duration)
        self._meter.start()
        showing = asyncio.create_task(self._display.show(watch.take))
        ending = None if duration is None else loop.call_later(duration, conductor.stop)
        try:
            with self._presses.told_to(lambda count: loop.call_soon_threadsafe(_interrupt, conductor, watch, count)):
                await conductor.run()
        finally:
            if ending is not None:
                ending.cancel()
            self._meter.stop()
            showing.cancel()
            with suppress(asyncio.CancelledError):
                await showing

    def _merged(self, crew: Crew, conductor: Conductor) -> report.Report:
        ended, tally = conductor.ended, self._tally
        merge.problems(ended, tally)
        if ended:
            merge.tallies([one.tally for _, one in sorted(ended.items())], tally)
        if not conductor.failed and (what := merge.disagreement(ended)) is not None:
            tally.problem(f"ranks do not tell the same: {what}")
        self.trace = next((one.failure.trace for one in ended.values() if one.failure and one.failure.trace), None)
        facts = merge.all_facts([one.facts for _, one in sorted(ended.items())])
        result = self._report({"stages": {}, "evicted": {}, "lost_pages": 0} | facts, merge.all_leaks(ended.values()))
        result["loop_lag_ms"] = merge.worst([one.lag for one in ended.values()])
        result["run_queue_ms"] = merge.worst([one.run_queue for one in ended.values()])
        result["cpu_s"] = round(sum(one.cpu for one in ended.values()), 3)
        result["rss_bytes"] = sum(one.memory for one in ended.values())
        return result | self._about_ranks(crew, conductor)

    def _about_ranks(self, crew: Crew, conductor: Conductor) -> report.Report:
        topology = self._topology
        entries = [merge.entry(member.rank, topology, member.process.pid, conductor.ended.get(member.rank),
                               conductor.lost.get(member.rank)) for member in crew.members]
        compared = conductor.compared
        return {
            "topology": {"tp": topology.tp, "cp": topology.cp, "pp": topology.pp}, "ranks": entries,
            "compared": {"ticks": compared.ticks, "trees": compared.trees, "steps": conductor.steps},
        }


def _interrupt(conductor: Conductor, watch: RankedWatch, count: int) -> None:
    """Once: no new requests. Twice: abort those that run."""
    if count == 1:
        conductor.stop()
        watch.note = "interrupted: finishing what runs; press Ctrl-C again to abort it"
    else:
        conductor.abort()
