"""A run of several ranks, from settings to report: it starts the ranks, serves requests as with one rank, and reads
each rank's account."""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from asynccache import AsyncCache
from asynccache.cli import leaks, report
from asynccache.cli.meter import Spread
from asynccache.cli.options import RunSettings
from asynccache.cli.ranked.crew import Crew, Member
from asynccache.cli.ranked.duty import Duty
from asynccache.cli.ranked.engine import RankedEngine, RankedStream
from asynccache.cli.ranked.shard import shard_config, store_url
from asynccache.cli.request import RunRequest, Source
from asynccache.cli.serving import EngineStream, Server
from asynccache.cli.session import Session
from asynccache.config import CacheConfig
from asynccache.core.settings import ComponentKind
from asynccache.errors import CacheClosed, RankFailure
from asynccache.worker import Topology, Workers, listen

ARRIVAL = 120.0
_NOTHING: dict[str, Any] = {
    "stages": {}, "evicted": {}, "lost_pages": 0, "failed_loads": 0, "splits": 0, "nodes": 0, "prefetches": {},
    "storage": {}, "stores": {}, "tiers": {"device": {}, "host": {}},
}  # fmt: skip


class RankedServer(Server):
    """A server of which every other request acts like an engine with a stream: it goes on while its work is queued."""

    async def _compute(self, request: RunRequest, stream: EngineStream, pieces: Sequence[Any]) -> object:
        if request.number % 2:
            return await super()._compute(request, stream, pieces)
        assert isinstance(stream, RankedStream)
        stream.begin(pieces)
        return stream.work


class RankedSession(Session):
    """A ``Session`` whose devices are in the processes of the ranks."""

    async def run(self) -> report.Report:
        """Carry out the run, and return its report. Cancelling it kills the ranks."""
        before = asyncio.all_tasks()
        source, config = await self._prepare()
        topology = _topology(self._settings)
        shards = [shard_config(config, topology, rank) for rank in range(topology.ranks)]
        urls = tuple(map(store_url, config.stores))
        whole = replace(config, storage=None if not urls else urls[0] if len(urls) == 1 else urls)
        secret = secrets.token_hex()
        with tempfile.TemporaryDirectory(prefix="asynccache-ranks-") as folder:
            async with listen(
                "127.0.0.1:0", topology, secret=secret.encode(), own=None, timeout=self._settings.rank_timeout,
                arrival=ARRIVAL,
            ) as workers:  # fmt: skip
                duties = [_duty(self._settings, rank, workers.address) for rank in range(topology.ranks)]
                async with Crew(duties, secret, Path(folder)) as crew:
                    cache = AsyncCache(whole, workers=workers)
                    found = _NOTHING | await self._served(cache, crew, workers, _pools(shards), source)
        left: leaks.Leaks = found.pop("left", leaks.Leaks())
        self._add_up(crew.members)
        tasks = len(asyncio.all_tasks() - before) + sum(one.account["tasks"] for one in crew.members if one.account)
        result = self._report(found, left._replace(tasks=tasks))
        return result | _about(result, crew, topology)

    async def _served(
        self, cache: AsyncCache, crew: Crew, workers: Workers, pools: Mapping[ComponentKind, int], source: Source
    ) -> dict[str, Any]:
        """Serve all requests, and return what is found in the cache when they have ended. If the group fails meanwhile,
        that is noted as a problem and not raised."""
        found: dict[str, Any] = {}
        opened = False
        watching = asyncio.create_task(_watch_over(crew, cache))
        try:
            async with cache:
                opened = True
                watching.cancel()
                self._tell(crew)
                server = RankedServer(cache, RankedEngine(cache, pools), self._settings, self._tally)
                try:
                    await self._drive(cache, server, source)
                finally:
                    self._meter.stop()
                found = await self._finish(cache)
        except (CacheClosed, RankFailure) as error:
            await asyncio.sleep(0.1)                       # a process that was killed is gone before it can be asked
            crew.note_ends()
            if not opened:
                raise _not_opened(crew, error) from None
            failure = _failure(error)
            self._tally.problem(_lost(crew, failure))
            if isinstance(failure, RankFailure) and failure.rank is not None:
                crew.give_up(failure.rank, failure.reason)
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
        return found

    def _tell(self, crew: Crew) -> None:
        if not self._settings.quiet:
            pids = ", ".join(f"rank {member.rank} is process {member.process.pid}" for member in crew.members)
            print(pids, file=sys.stderr, flush=True)

    def _add_up(self, members: Sequence[Member]) -> None:
        """Count the pages that ranks have verified, instead of those that they were asked to verify."""
        accounts = [member.account for member in members if member.account is not None]
        if len(accounts) == len(members):
            self._tally.verified = sum(account["verified"] for account in accounts)
            self._tally.mismatches = sum(account["mismatches"] for account in accounts)


def _topology(settings: RunSettings) -> Topology:
    return Topology(settings.tp, settings.cp, settings.pp)


def _duty(settings: RunSettings, rank: int, address: str) -> Duty:
    topology = (settings.tp, settings.cp, settings.pp)
    return Duty(rank, address, topology, settings.device, settings.loop, settings.seed, settings.faults,
                settings.rank_delay / 1e3)  # fmt: skip


def _pools(shards: Sequence[CacheConfig]) -> Mapping[ComponentKind, int]:
    """Return how many pools with bytes of each component all ranks have together."""
    return Counter(spec.component for config in shards for spec in config.pools() if spec.bytes_per_page)


async def _watch_over(crew: Crew, cache: AsyncCache) -> None:
    """Close the cache when a rank ends. This runs until the cache is open: such a rank will not come, and the cache
    would wait for it."""
    await crew.ends(1)
    crew.note_ends()
    await cache.aclose(0.0)


def _not_opened(crew: Crew, error: Exception) -> Exception:
    """Return the error for a cache that did not open: the last words of a rank that ended by itself, else ``error``."""
    if not crew.own_ends:
        return error
    rank, words = next(iter(sorted(crew.own_ends.items())))
    return RankFailure(words, rank)


def _failure(error: BaseException) -> BaseException:
    return error.__cause__ if isinstance(error, CacheClosed) and error.__cause__ is not None else error


def _lost(crew: Crew, failure: BaseException) -> str:
    if not isinstance(failure, RankFailure) or failure.rank is None:
        return f"the cache closed itself: {failure!r}"
    words = crew.own_ends.get(failure.rank, "")
    return f"rank {failure.rank} {f'{words}: it ' if words else ''}{failure.reason}"


def _about(result: report.Report, crew: Crew, topology: Topology) -> dict[str, Any]:
    """Return the report's part about ranks: every rank's entry, and the CPU seconds and bytes of all processes."""
    accounts = [member.account for member in crew.members if member.account is not None]
    return {
        "topology": {"tp": topology.tp, "cp": topology.cp, "pp": topology.pp},
        "ranks": [entry(member, topology, crew.own_ends.get(member.rank)) for member in crew.members],
        "cpu_s": round(result["cpu_s"] + sum(account["cpu"] for account in accounts), 3),
        "rss_bytes": result["rss_bytes"] + sum(account["memory"] for account in accounts),
    }


def entry(member: Member, topology: Topology, lost: str | None) -> dict[str, Any]:
    """Return the entry of one rank in the report. ``lost``: how its process ended, if it did so too early."""
    account = member.account
    one: dict[str, Any] = {
        "rank": member.rank, **topology.place(member.rank)._asdict(), "pid": member.process.pid,
        "lost": lost if account is None else None, "failure": None,
    }  # fmt: skip
    if account is None:
        return one
    return one | {
        "failure": account["failure"],
        "verify": {"pages": account["verified"], "mismatches": account["mismatches"]},
        "batches": account["batches"],
        "leaks": {"tasks": account["tasks"]},
        "loop_lag_ms": {name: round(value, 4) for name, value in Spread(*account["lag"])._asdict().items()},
        "cpu_s": round(account["cpu"], 3), "rss_bytes": account["memory"],
    }
