"""The CPU time that ``await`` adds to a call of the core: ``python -m benchmarks.runtime``.

The overhead of an operation is the CPU time of the loop's thread for that operation through ``AsyncCache``, when it
waits for nothing and moves nothing, minus that of the same core calls made directly on the same tree: one call for a
match, two for a lease. How late the loop gets is a figure of every ``asynccache stress``.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from statistics import median
from typing import Any

import numpy as np

from asynccache.cli.options import LOOPS, loop_factory
from asynccache.cli.output import Tell
from asynccache.config import CacheConfig, Full
from asynccache.core.cache import CacheCore, Grant, LeaseRequest
from asynccache.runtime.cache import AsyncCache
from asynccache.runtime.driver import TreeLock
from benchmarks.parsing import integer
from benchmarks.tables import Chart, Row, bench

Figures = dict[str, Any]

PAGE, TOKENS = 16, 2560
ROUNDS = 10
GOALS_US = {"match": 5.0, "lease + release": 8.0, "tree lock": 1.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark to ``parser``."""
    parser.add_argument("--calls", type=integer(ROUNDS), default=20_000, metavar="N",
                        help="calls that each figure is made from (default: %(default)s)")


def run(args: argparse.Namespace, tell: Tell) -> Figures:
    """Measure on both loops and return the figures."""
    overhead = {}
    for name in LOOPS:
        tell(f"calls on {name}")
        with asyncio.Runner(loop_factory=loop_factory(name)) as runner:
            overhead[name] = runner.run(measure_overhead(args.calls))
    return {"bench": "runtime", "overhead": overhead}


def charts(figures: Figures) -> Iterator[Chart]:
    """Yield the CPU time that an await adds, beside its goal."""
    yield Chart("What an await adds to a call of the core: CPU µs", ("core", "await", "adds", "goal"), [
        Row(f"{call}, {loop}", [row[f"{name}_us"] for name in ("core", "await", "adds", "goal")],
            missed=row["adds_us"] > row["goal_us"])
        for loop, calls in figures["overhead"].items() for call, row in calls.items()
    ])


async def measure_overhead(calls: int) -> Figures:
    """Measure ``match``, and a whole lease whose prompt is cached, through the cache and directly on its core."""
    config = CacheConfig(
        model="bench", components=(Full(bytes_per_token=16, device_tokens=8 * TOKENS),), page_size=PAGE,
        prefetch_threshold=0,
    )  # fmt: skip
    tokens = np.arange(TOKENS, dtype=np.int32)
    async with AsyncCache(config) as cache:
        async with cache.lease(tokens) as lease:
            await lease.commit(tokens)
        await _cache_lease(cache, tokens)  # splits off the last page, which the direct calls below may not do
        core, space = cache.core, next(iter(cache.core.world.roots))
        key = tokens.tobytes()
        ask = LeaseRequest(space, key, TOKENS - 1, TOKENS, 0)
        gc.collect()
        gc.freeze()
        pairs: dict[str, tuple[Callable[[], object], Callable[[], Awaitable[object]]]] = {
            "match": (lambda: core.match(space, tokens.tobytes()), lambda: cache.match(tokens)),
            "lease + release": (lambda: _core_lease(core, ask), lambda: _cache_lease(cache, tokens)),
        }
        found = {name: await _compare(direct, awaited, calls) for name, (direct, awaited) in pairs.items()}
        lock_us = round(_cost_of_lock(calls), 2)
        found["tree lock"] = {"core_us": 0.0, "await_us": lock_us, "adds_us": lock_us}
        gc.unfreeze()
        return {name: {**row, "goal_us": GOALS_US[name]} for name, row in found.items()}


def _cost_of_lock(calls: int) -> float:
    """µs of CPU time to take the free tree lock and give it back, minus those of an empty loop."""
    lock = TreeLock()

    def take() -> None:
        lock.take()
        lock.release()

    return median(_cpu_of(take, calls) - _cpu_of(lambda: None, calls) for _ in range(5))


def _core_lease(core: CacheCore, ask: LeaseRequest) -> None:
    grant = core.lease(ask._replace(key=bytes(memoryview(ask.key))))
    assert isinstance(grant, Grant)
    core.release(grant.lease)


async def _cache_lease(cache: AsyncCache, tokens: np.ndarray[Any, Any]) -> None:
    async with cache.lease(tokens):
        pass


async def _compare(direct: Callable[[], object], awaited: Callable[[], Awaitable[object]], calls: int) -> Figures:
    """Call both in turns, so that other work of the machine slows both alike; returns the median round of each, in
    µs."""
    core, await_ = [], []
    for _ in range(ROUNDS + 1):  # the first one warms up
        core.append(_cpu_of(direct, calls // ROUNDS))
        await_.append(await _cpu_of_awaits(awaited, calls // ROUNDS))
    core_us, await_us = median(core[1:]), median(await_[1:])
    return {"core_us": round(core_us, 2), "await_us": round(await_us, 2), "adds_us": round(await_us - core_us, 2)}


def _cpu_of(work: Callable[[], object], calls: int) -> float:
    start = time.thread_time()
    for _ in range(calls):
        work()
    return (time.thread_time() - start) / calls * 1e6


async def _cpu_of_awaits(work: Callable[[], Awaitable[object]], calls: int) -> float:
    start = time.thread_time()
    for _ in range(calls):
        await work()
    return (time.thread_time() - start) / calls * 1e6


if __name__ == "__main__":
    sys.exit(bench(sys.modules[__name__], sys.argv[1:], prog="python -m benchmarks.runtime"))
