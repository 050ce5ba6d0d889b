"""A run of several ranks, from settings to report: it starts the ranks, serves requests as with one rank, and reads
each rank's account."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from asynccache import AsyncCache
from asynccache.cli import report
from asynccache.cli.ranked.crew import Crew, Duty, Member
from asynccache.cli.ranked.engine import RankedEngine, shard_config, store_url
from asynccache.cli.session import Session
from asynccache.cli.workloads import Source
from asynccache.config import CacheConfig
from asynccache.core.settings import ComponentKind
from asynccache.errors import BackendError, CacheClosed, RankFailure
from asynccache.worker import Topology, listen

ARRIVAL = 30.0
"""Seconds until the next rank must have come: each imports torch first."""
_NOTHING: dict[str, Any] = {
    "stages": {}, "evicted": {}, "lost_pages": 0, "failed_loads": 0, "splits": 0, "nodes": 0, "prefetches": {},
    "storage": {}, "stores": {}, "tiers": {"device": {}, "host": {}},
}  # fmt: skip


class RankedSession(Session):
    """A ``Session`` whose devices are in the processes of the ranks."""

    async def run(self) -> report.Report:
        """Carry out the run, and return its report. Cancelling it kills the ranks."""
        result = await super().run()
        accounts = [member.account for member in self._crew.members if member.account is not None]
        return result | {
            "topology": {"tp": self._topology.tp, "cp": self._topology.cp, "pp": self._topology.pp},
            "ranks": [entry(member, self._topology, self._crew.early_ends.get(member.rank))
                      for member in self._crew.members],
            "cpu_s": round(result["cpu_s"] + sum(account["cpu_s"] for account in accounts), 3),
            "rss_bytes": result["rss_bytes"] + sum(account["rss_bytes"] for account in accounts),
        }  # fmt: skip

    async def _carried_out(self, config: CacheConfig, source: Source) -> dict[str, Any]:
        """Start the ranks, serve all requests, and end the ranks. Only pages that ranks have really verified count as
        verified, and not those that they were asked to verify."""
        settings, secret = self._settings, secrets.token_hex()
        self._topology = topology = Topology(settings.tp, settings.cp, settings.pp)
        shards = [shard_config(config, topology, rank) for rank in range(topology.ranks)]
        pools = Counter(spec.component for shard in shards for spec in shard.pools() if spec.bytes_per_page)
        urls = tuple(map(store_url, config.stores))
        whole = replace(config, storage=None if not urls else urls[0] if len(urls) == 1 else urls)
        async with listen(
            "127.0.0.1:0", topology, secret=secret.encode(), own=None, timeout=settings.rank_timeout, arrival=ARRIVAL
        ) as workers:
            duties = [Duty(rank, workers.address, settings.tp, settings.cp, settings.pp, settings.device,
                           settings.loop, settings.seed, settings.faults, settings.rank_delay / 1e3)
                      for rank in range(topology.ranks)]  # fmt: skip
            async with Crew(duties, secret) as self._crew:
                found = _NOTHING | await self._over_ranks(AsyncCache(whole, workers=workers), pools, source)
        accounts = [member.account for member in self._crew.members if member.account is not None]
        if len(accounts) == len(self._crew.members):
            self._tally.verified = sum(account["verify"]["pages"] for account in accounts)
            self._tally.mismatches = sum(account["verify"]["mismatches"] for account in accounts)
        left: report.Leaks = found.pop("left", report.Leaks())
        return found | {"left": left._replace(tasks=sum(account["leaks"]["tasks"] for account in accounts))}

    async def _over_ranks(
        self, cache: AsyncCache, pools: Mapping[ComponentKind, int], source: Source
    ) -> dict[str, Any]:
        """Serve all requests, and return what is found in the cache when they have ended. If the group fails meanwhile
        or cannot close cleanly, that is noted as a problem and not raised."""
        found: dict[str, Any] = {}
        crew, opened = self._crew, False
        watching = asyncio.create_task(_watch_over(crew, cache))
        try:
            async with cache:
                opened = True
                watching.cancel()
                if not self._settings.quiet:
                    pids = ", ".join(f"rank {one.rank} is process {one.process.pid}" for one in crew.members)
                    print(pids, file=sys.stderr, flush=True)
                found = await self._served(cache, RankedEngine(cache, pools), source)
        except (CacheClosed, RankFailure) as error:
            await asyncio.sleep(0.1)  # the link of a killed process ends a little before its exit status can be read
            crew.note_ends()
            if not opened:
                raise _not_opened(crew, error) from None
            failure = (error.__cause__ if isinstance(error, CacheClosed) else None) or error
            self._tally.problem(_lost(crew, failure))
            if isinstance(failure, RankFailure) and failure.rank is not None:
                crew.give_up(failure.rank, failure.reason)
        except BackendError as error:
            if not opened:
                raise
            self._tally.problem(f"the cache could not close cleanly: {error}")
            if isinstance(lost := error.__cause__, RankFailure) and lost.rank is not None:
                crew.give_up(lost.rank, lost.reason)
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
        return found


async def _watch_over(crew: Crew, cache: AsyncCache) -> None:
    """Close the cache when a rank ends. This watch runs until the cache is open, because the cache would wait
    ``ARRIVAL`` seconds for a rank that has ended."""
    await crew.ends(1)
    crew.note_ends()
    await cache.aclose(0.0)


def _not_opened(crew: Crew, error: Exception) -> Exception:
    """Return the error for a cache that did not open: why a rank ended by itself, else ``error``."""
    if not crew.early_ends:
        return error
    rank, reason = next(iter(sorted(crew.early_ends.items())))
    return RankFailure(reason, rank)


def _lost(crew: Crew, failure: BaseException) -> str:
    if not isinstance(failure, RankFailure) or failure.rank is None:
        return f"the cache closed itself: {failure!r}"
    reason = crew.early_ends.get(failure.rank, "")
    return f"rank {failure.rank} {f'{reason}: it ' if reason else ''}{failure.reason}"


def entry(member: Member, topology: Topology, lost: str | None) -> dict[str, Any]:
    """Return the entry of one rank in the report. ``lost``: how its process ended, if it did so too early."""
    return {
        "rank": member.rank, **topology.place(member.rank)._asdict(), "pid": member.process.pid,
        "lost": lost if member.account is None else None, "failure": None, **(member.account or {}),
    }  # fmt: skip
