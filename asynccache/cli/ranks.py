"""``stress`` and ``replay`` over several ranks, seen from the command: a process of this machine for each rank, with
pools and stores of its own, and what each has to report.

The command's process is the head: it has the cache's core and its requests, as with one rank, and no device. In place
of an engine's computation it sends the ranks batches that say which pages to fill and which to verify. ``rank`` is the
program of each process.

No process outlives the run, even if the command is killed. The command holds a pipe to the standard input of each
process. When the pipe closes, the process ends within ``FAREWELL`` seconds, wherever it is. Each process is in a
session of its own, so Ctrl-C reaches the command alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from asynccache import AsyncCache
from asynccache.cli import report
from asynccache.cli.engine import BegunBatch, Comparison, PageRun
from asynccache.cli.options import RunSettings
from asynccache.cli.rank import Duty, packed, shard_config, store_url, understood
from asynccache.cli.report import Tally
from asynccache.config import CacheConfig
from asynccache.core.settings import ComponentKind
from asynccache.errors import BackendError, BatchFailed, CacheClosed, RankFailure
from asynccache.worker import Topology, listen
from asynccache.worker.link import SECRET

COMMAND: Sequence[str] = (sys.executable, "-m", "asynccache.cli.rank")
ARRIVAL = 30.0
"""Seconds until the next rank must have come: each imports torch first."""
_EXIT = 10.0
_LOOK = 0.02


class RankedEngine:
    """An engine whose work is sent to all ranks, as a batch. ``pools``: by component, how many pools all ranks have
    together."""

    slowdown = 1.0
    """The work is done in the processes of the ranks, and is not measured."""

    def __init__(self, cache: AsyncCache, pools: Mapping[ComponentKind, int]) -> None:
        self._cache = cache
        self._pools = pools

    def close(self) -> None:
        """Do nothing: the ranks end with the cache."""

    def begin(self, pieces: Sequence[PageRun], *, verifies: bool) -> BegunBatch:
        number = self._cache.send_batch(packed(pieces, verifies=verifies))
        count = sum(len(piece.ids) * self._pools[piece.component] for piece in pieces) if verifies else 0
        return BegunBatch(number, lambda: self._verdict(number, count))

    async def _verdict(self, number: int, count: int) -> Comparison:
        try:
            await self._cache.batch_ended(number)
        except BatchFailed as error:
            found = [understood(rank, reason) for rank, reason in error.reasons.items()]
            wrong = [one for one in found if one is not None]
            if len(wrong) < len(found):
                raise
            return Comparison(count, sum(one.wrong for one in wrong), tuple(what for one in wrong for what in one.what))
        return Comparison(count, 0)


class Member:
    """The process of one rank."""

    def __init__(self, duty: Duty, secret: str) -> None:
        self.rank = duty.rank
        self.early_end = ""
        """Why the process ended before it was told to, or was given up; "": it did not."""
        self.account: Mapping[str, Any] | None = None
        """The rank's part of the report, which the process writes at its end; None: it wrote none."""
        self._said, self._log = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  closed in ``end``
        self.process = subprocess.Popen(
            [*COMMAND, str(duty.rank)], stdin=subprocess.PIPE, stdout=self._said, stderr=self._log,
            start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1", SECRET: secret},
        )  # fmt: skip
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(msgspec.json.encode(duty) + b"\n")
            self.process.stdin.flush()

    def note_end(self) -> None:
        """If the process has ended by now, it did so by itself: note how, and the last line of its standard error."""
        status = self.process.poll()
        if status is None or self.early_end:
            return
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        self.early_end = f"ended with status {status}" if status >= 0 else f"was killed by signal {-status}"
        self.early_end += f": {lines[-1]}" if lines else ""

    def end(self) -> None:
        """Read what the process wrote, when it has ended. To be called once."""
        self.process.wait()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self._said.seek(0)
        with suppress(ValueError):
            self.account = json.load(self._said)
        self._said.close()
        self._log.close()


class Ranks:
    """The ranks of one run."""

    def __init__(self, settings: RunSettings, config: CacheConfig, tally: Tally) -> None:
        self.members: list[Member] = []
        self._settings = settings
        self._config = config
        self._tally = tally
        self._topology = Topology(settings.tp, settings.cp, settings.pp)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[tuple[AsyncCache, RankedEngine]]:
        """Start the ranks and open the cache over them, and end both. If the group fails meanwhile or cannot close
        cleanly, that is noted as a problem and not raised. Cancelling kills the ranks."""
        settings, config, topology, secret = self._settings, self._config, self._topology, secrets.token_hex()
        shards = [shard_config(config, topology, rank) for rank in range(topology.ranks)]
        pools = Counter(spec.component for shard in shards for spec in shard.pools() if spec.bytes_per_page)
        whole = replace(config, storage=tuple(map(store_url, config.stores)))
        opened = False
        async with listen(
            "127.0.0.1:0", topology, secret=secret.encode(), own=None, timeout=settings.rank_timeout, arrival=ARRIVAL
        ) as workers, self._started(workers.address, secret):
            cache = AsyncCache(whole, workers=workers, debug=False)
            watching = asyncio.create_task(self._watch_over(cache))
            try:
                async with cache:
                    opened = True
                    watching.cancel()
                    if not settings.quiet:
                        pids = ", ".join(f"rank {one.rank} is process {one.process.pid}" for one in self.members)
                        print(pids, file=sys.stderr, flush=True)
                    yield cache, RankedEngine(cache, pools)
            except (CacheClosed, RankFailure, BackendError) as error:
                await asyncio.sleep(0.1)  # a killed process's link ends a little before its exit status can be read
                closing = isinstance(error, BackendError)
                ended = [] if closing else self._note_ends()
                if not opened and not ended:
                    raise
                if not opened:
                    raise RankFailure(ended[0].early_end, ended[0].rank) from None
                failure = error if isinstance(error, RankFailure) else error.__cause__
                sentence = f"the cache {'could not close cleanly' if closing else 'closed itself'}: "
                sentence += str(error) if closing else repr(failure or error)
                if isinstance(failure, RankFailure) and failure.rank is not None:
                    lost = self.members[failure.rank]
                    how = f"{lost.early_end}: it " if lost.early_end else ""
                    sentence = sentence if closing else f"rank {lost.rank} {how}{failure.reason}"
                    lost.early_end = lost.early_end or failure.reason
                    lost.process.kill()  # so that nobody waits for it
                self._tally.problem(sentence)
            finally:
                watching.cancel()
                with suppress(asyncio.CancelledError):
                    await watching

    @asynccontextmanager
    async def _started(self, address: str, secret: str) -> AsyncIterator[None]:
        """Start a process for each rank, and end all at the end: unless an error is being raised, wait first, at most
        ``_EXIT`` seconds, until they end by themselves."""
        settings = replace(self._settings, config=None, cache=None, quiet=True)
        try:
            for rank in range(settings.ranks):
                self.members.append(Member(Duty(rank, address, settings), secret))
            yield
            with suppress(TimeoutError):
                async with asyncio.timeout(_EXIT):
                    await self._ends(settings.ranks)
        finally:
            for member in self.members:
                member.process.kill()
            for member in self.members:
                member.end()

    async def _ends(self, count: int) -> None:
        """Return when ``count`` processes have ended. Cancelling it stops the waiting."""
        while sum(one.process.poll() is not None for one in self.members) < count:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK)  # nothing tells of a process's end on every loop

    def _note_ends(self) -> list[Member]:
        """Note how the processes that have ended did so by themselves, and return these."""
        for member in self.members:
            member.note_end()
        return [member for member in self.members if member.early_end]

    async def _watch_over(self, cache: AsyncCache) -> None:
        """Close the cache when a rank ends. This watch runs until the cache is open, because the cache would wait
        ``ARRIVAL`` seconds for a rank that has ended."""
        await self._ends(1)
        self._note_ends()
        await cache.aclose(0.0)

    def count(self) -> int:
        """Count the pages that the ranks have really verified, and not those that they were asked to verify, if every
        rank has an account. Return how many tasks the ranks have left."""
        accounts = [one.account for one in self.members if one.account is not None]
        if len(accounts) == len(self.members):
            self._tally.verified = sum(account["verify"]["pages"] for account in accounts)
            self._tally.mismatches = sum(account["verify"]["mismatches"] for account in accounts)
        return sum(account["leaks"]["tasks"] for account in accounts)

    def told_in(self, result: report.Report) -> report.Report:
        """Return the report with what the ranks report: each one's entry, and what all have used."""
        accounts = [one.account for one in self.members if one.account is not None]
        return result | {
            "topology": {"tp": self._topology.tp, "cp": self._topology.cp, "pp": self._topology.pp},
            "ranks": [entry(one, self._topology) for one in self.members],
            "cpu_s": round(result["cpu_s"] + sum(account["cpu_s"] for account in accounts), 3),
            "rss_bytes": result["rss_bytes"] + sum(account["rss_bytes"] for account in accounts),
        }  # fmt: skip


def entry(member: Member, topology: Topology) -> dict[str, Any]:
    """Return the entry of one rank in the report."""
    return {
        "rank": member.rank, **topology.place(member.rank)._asdict(), "pid": member.process.pid,
        "lost": (member.early_end or None) if member.account is None else None, "failure": None,
        **(member.account or {}),
    }  # fmt: skip
