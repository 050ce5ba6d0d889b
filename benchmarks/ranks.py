"""The time that operations take between a head and its workers, over TCP: ``python -m benchmarks.ranks``.

The head of a real group hands operations to workers, each in a process of its own. A worker takes an operation as it
always does, but ends the copy at once, without touching a byte. So what is measured is the way there and back, with
encoding and folding. *one* is a single operation; *plan* is 64 operations of one plan, until the last outcome would be
handed to the core. *echo* is the same number of bytes, sent from the same loop to the same processes, each of which has
a plain TCP echo beside its worker. Operations and echoes take turns one by one, so that both meet the same machine.
With more processes than cores, both are mostly the wait for a core. The core's decisions and the bytes of the echo are
made before the clock starts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

import uvloop

from asynccache.cli.meter import spread
from asynccache.cli.output import Tell
from asynccache.config import CacheConfig, Full
from asynccache.core.plan import Move, Outcome, Status
from asynccache.worker.group import WorkerGroup, open_group
from asynccache.worker.link import SECRET
from asynccache.worker.local import EmbedderParts
from asynccache.worker.messages import encode
from asynccache.worker.rank_server import ORDERS, RankServer, connect
from asynccache.worker.ranks import Topology, Workers, listen
from asynccache.worker.work import CopyKind, Reports, Work
from benchmarks.parsing import integer
from benchmarks.tables import Chart, Row, bench

Figures = dict[str, Any]

RANKS = (2, 4)
PLAN = 64
PAGES = 32
WARM = 50
TIMEOUT = 30.0
GOAL_RATIO = 1.5
GOAL_CPU_US = 30.0
LIMIT = 120.0
WORKER = "worker"               # the first argument of a process that is a worker
_DONE = Status.DONE
_CONFIG = CacheConfig(model="bench", components=(Full(bytes_per_token=16, device_tokens=1024, host_tokens=1024),))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark to ``parser``."""
    parser.add_argument("--workers", nargs="+", type=integer(1, 4096), default=list(RANKS), metavar="N",
                        help=f"how many processes (default: {' '.join(map(str, RANKS))})")
    parser.add_argument("--rounds", type=integer(1, 4096), default=1000, metavar="N",
                        help="operations per figure; plans are a fifth as many (default: %(default)s)")


def run(args: argparse.Namespace, tell: Tell) -> Figures:
    """Measure with every number of workers, and return the figures."""
    found = {}
    for count in args.workers:
        tell(f"{count} workers")
        found[str(count)] = uvloop.run(_measure(count, args.rounds))
    return {"bench": "ranks", "workers": found, "goals": {"ratio": GOAL_RATIO, "cpu_us": GOAL_CPU_US}}


def charts(figures: Figures) -> Iterator[Chart]:
    """Yield the times of operations beside the echo's, and the head's CPU time."""
    rows = [Row(f"{count} workers, {name}", [*(one[key] for key in ("p50_us", "p99_us", "echo_p50_us", "ratio"))],
                missed=one["ratio"] > GOAL_RATIO)
            for count, found in figures["workers"].items() for name in ("one", "plan") for one in [found[name]]]
    yield Chart("Operations on their way to workers and back: µs", ("p50", "p99", "echo p50", "ratio"), rows, [
        f"{count} workers: the head's CPU an operation and worker: {found['cpu_us']:.1f} µs"
        for count, found in figures["workers"].items()
    ])  # fmt: skip


# the head


async def _measure(count: int, rounds: int) -> Figures:
    secret = secrets.token_hex()
    async with listen("127.0.0.1:0", Topology(tp=count), secret=secret.encode(), own=None, timeout=TIMEOUT,
                      arrival=LIMIT) as workers:
        processes = [_process(rank, workers.address, secret) for rank in range(count)]
        try:
            async with asyncio.timeout(LIMIT):
                return await _with_group(workers, processes, rounds)
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def _process(rank: int, address: str, secret: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.ranks", WORKER, str(rank), address]
    env = os.environ | {SECRET: secret}
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=env)


async def _with_group(workers: Workers, processes: Sequence[subprocess.Popen[bytes]], rounds: int) -> Figures:
    group = await open_group(_CONFIG, EmbedderParts(), workers)
    try:
        ports = [int(await asyncio.to_thread(cast("Any", process.stdout).readline)) for process in processes]
        head = Head(group)
        found: Figures = {}
        for name, size in (("one", 1), ("plan", PLAN)):
            echo = await Echo.open(ports, len(_frame(size)))
            found[name] = await _turns(head, echo, size, rounds if size == 1 else max(10, rounds // 5))
            echo.close()
        found["cpu_us"] = await _cpu(head, len(ports), max(10, rounds // 5))
        return found
    finally:
        await group.aclose(1.0)


def _backups(first: int, size: int) -> Work:
    """Return the work for ``size`` backups of one plan, which the core makes one effect. ``first``: the first one's
    number."""
    slots = bytes(4 * PAGES * size)
    return Work(CopyKind.BACKUP, tuple(range(first, first + size)), (Move(0, slots, slots),))


def _frame(size: int) -> bytes:
    """Return as many bytes as go over each link for ``size`` operations of one plan."""
    return bytes(4) + encode([ORDERS["perform"].message(_backups(1000, size))])


class Head:
    """Hands operations to a group, and waits for the last outcome."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._op = 1000
        self._left = 0
        self._done = asyncio.Event()
        group.start(Reports(self._ended, self._failed, lambda *_: None))

    def _ended(self, status: Status, ops: Sequence[int]) -> None:
        outcomes = [Outcome(op, status) for op in ops]  # as the core takes them
        assert status is _DONE
        self._left -= len(outcomes)
        if not self._left:
            self._done.set()

    def _failed(self, error: BaseException) -> None:
        raise error

    def decide(self, size: int) -> Work:
        """Return the work for ``size`` operations of one plan."""
        self._op += size
        return _backups(self._op - size, size)

    async def way(self, work: Work) -> None:
        """Hand ``work`` to the group, and return when the last outcome is back."""
        self._done.clear()
        self._left = len(work.ops)
        self._group.perform([work])
        await self._done.wait()


class Echo:
    """Sends ``size`` bytes to each port, and waits until all are back."""

    def __init__(self, size: int) -> None:
        self._content = bytes(size)
        self._left = 0
        self._done = asyncio.Event()
        self._transports: list[asyncio.Transport] = []

    @classmethod
    async def open(cls, ports: Sequence[int], size: int) -> Echo:
        """Connect to each of ``ports`` of this machine."""
        made = cls(size)
        loop = asyncio.get_running_loop()
        for port in ports:
            transport, _ = await loop.create_connection(lambda: _Counting(made._came), "127.0.0.1", port)
            made._transports.append(transport)
        return made

    async def way(self, _: object) -> None:
        """Send the bytes to every port, and return when all are back."""
        self._done.clear()
        self._left = len(self._content) * len(self._transports)
        for transport in self._transports:
            transport.write(self._content)
        await self._done.wait()

    def _came(self, size: int) -> None:
        self._left -= size
        if not self._left:
            self._done.set()

    def close(self) -> None:
        """Close all connections."""
        for transport in self._transports:
            transport.close()


class _Counting(asyncio.Protocol):
    def __init__(self, came: Callable[[int], None]) -> None:
        self._came = came

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        self._came(len(data))


async def _turns(head: Head, echo: Echo, size: int, rounds: int) -> Figures:
    taken: dict[object, list[float]] = {head: [], echo: []}
    for at in range(WARM + rounds):
        plan = head.decide(size)
        for one in (head, echo):
            began = time.perf_counter()
            await one.way(plan)
            if at >= WARM:
                taken[one].append(time.perf_counter() - began)
    ours, bare = spread(taken[head], 1e6), spread(taken[echo], 1e6)
    return {
        "p50_us": round(ours.p50, 1), "p99_us": round(ours.p99, 1), "echo_p50_us": round(bare.p50, 1),
        "echo_p99_us": round(bare.p99, 1), "ratio": round(ours.p50 / bare.p50, 3), "bytes": len(_frame(size)),
        "rounds": rounds,
    }  # fmt: skip


async def _cpu(head: Head, workers: int, rounds: int) -> float:
    """Return the CPU time of this process, with all its threads, in µs for each operation and worker."""
    plans = [head.decide(PLAN) for _ in range(rounds)]
    began = time.process_time()
    for plan in plans:
        await head.way(plan)
    return round((time.process_time() - began) / (rounds * PLAN * workers) * 1e6, 2)


# a worker


class _Echoing(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        self._transport.write(data)


async def _work(rank: int, address: str) -> None:
    """Serve as a worker with an echo beside it, until the head closes."""

    def ends_at_once(self: RankServer, work: Work) -> None:
        self._ended(_DONE, work.ops)

    RankServer._perform = ends_at_once  # type: ignore[method-assign]
    server = await asyncio.get_running_loop().create_server(_Echoing, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    async with connect(address, rank) as worker:
        with suppress(Exception):
            await worker.ended()
    server.close()


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        uvloop.run(_work(int(sys.argv[2]), sys.argv[3]))
    else:
        sys.exit(bench(sys.modules[__name__], sys.argv[1:], prog="python -m benchmarks.ranks"))
