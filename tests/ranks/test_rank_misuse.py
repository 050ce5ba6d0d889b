"""What a scheduler must not do with ``step()``, and does: it is told so by name, and the others hear of it at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import pytest

from asynccache import AsyncCache, CacheConfig, Full
from asynccache.core import audit
from asynccache.errors import BackendError, RankFailure
from asynccache.memory.cpu import CpuDevice
from asynccache.ranks import Topology
from asynccache.ranks.gloo import connect
from asynccache.testing.simulated_backend import HONEST, SimulatedBackend
from asynccache.testing.simulated_device import SimulatedDevice
from asynccache.testing.simulated_loop import SimulatedLoop, simulate
from asynccache.testing.simulated_ranks import SimulatedRanks
from tests.ranks.test_rank_closing import Slow

PAGE, TIMEOUT = 4, 30.0
CONFIG = CacheConfig(
    model="misused", page_size=PAGE,
    components=(Full(bytes_per_token=8, device_tokens=8 * PAGE, host_tokens=32 * PAGE, layers=1),),
)  # fmt: skip
WAITING = [
    (Topology(tp=2), 0), (Topology(tp=2), 1), (Topology(pp=2), 1), (Topology(tp=2, pp=2), 0), (Topology(tp=2, pp=2), 3)
]  # fmt: skip
"""A rank that waits for others in its step: a first stage of one rank does not."""

Script = Callable[[int, AsyncCache], Awaitable[Any]]


def together(topology: Topology, script: Script) -> list[Any]:
    """What ``script`` says, or what leaving the cache raises, by rank."""

    async def world(loop: SimulatedLoop) -> list[Any]:
        net = SimulatedRanks(topology, Random(1), timeout=TIMEOUT)
        devices = [SimulatedDevice(seed=rank) for rank in range(topology.ranks)]

        async def lived(rank: int) -> Any:
            async with AsyncCache(CONFIG, device=devices[rank], ranks=net.member(rank)) as cache:
                return await script(rank, cache)

        said = await asyncio.gather(*map(lived, range(topology.ranks)), return_exceptions=True)
        for device in devices:
            await device.aclose()
        return said

    return simulate(world, 1)


async def begin(cache: AsyncCache, first: int = 0) -> None:
    """Something is in flight afterwards."""
    text = list(range(first, first + 2 * PAGE))
    async with cache.lease(text, wait=False) as lease:
        await lease.commit(text)
    assert cache.in_flight


async def step_on(cache: AsyncCache, pause: float = 1.5) -> None:
    while True:
        await asyncio.sleep(pause)
        await cache.step()


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(("topology", "odd"), WAITING, ids=str)
def test_a_second_task_that_steps_is_refused_and_nobody_is_harmed(topology: Topology, odd: int) -> None:
    refused = asyncio.Event()

    async def script(rank: int, cache: AsyncCache) -> int:
        await begin(cache)
        if rank == odd:
            first = asyncio.get_running_loop().create_task(cache.step())
            await asyncio.sleep(1.0)
            for _ in range(2):
                with pytest.raises(RuntimeError, match="another task of this rank is in a step"):
                    await cache.step()
            refused.set()
            await first
        else:
            await refused.wait()
            await cache.step()
        await cache.step()  # from here on this task is the one that steps
        await cache.flush()
        await begin(cache, 100)
        await cache.flush()
        lockstep = cache._opened().lockstep
        assert lockstep is not None
        return lockstep.chain.digest

    assert len(set(together(topology, script))) == 1


@pytest.mark.parametrize(("topology", "odd"), WAITING, ids=str)
def test_after_a_step_that_was_cancelled_everybody_is_told_of_it(topology: Topology, odd: int) -> None:
    async def script(rank: int, cache: AsyncCache) -> str:
        await begin(cache)
        if rank == odd:
            step = asyncio.get_running_loop().create_task(cache.step())
            await asyncio.sleep(1.0)
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
            for call in (cache.step, cache.flush, cache.reset):
                with pytest.raises(RankFailure, match="a step was cancelled on this rank"):
                    await call()
        else:
            began = now()
            with pytest.raises(RankFailure):
                await step_on(cache)
            assert now() - began < TIMEOUT / 2
        audit.check(cache.core)
        assert not cache.core.active_leases()
        return "told"

    said = together(topology, script)
    assert "a step was cancelled on this rank" in str(said[odd])
    assert all(isinstance(one, RankFailure) for one in said), said


async def one_of(cache: AsyncCache, guest: SimulatedBackend, script: Random) -> None:
    """A call that waits: for copies, for the store, for other ranks."""
    detach, attach = partial(cache.detach_storage, "guest"), partial(cache.attach_storage, guest, name="guest")
    change: Callable[[], Awaitable[object]] = detach if "guest" in cache.stores else attach
    calls: Sequence[Callable[[], Awaitable[object]]] = (cache.flush, cache.reset, cache.invalidate, change)
    await begin(cache, script.randrange(1000))
    await script.choice(calls)()


@pytest.mark.parametrize("seed", range(25))
def test_a_call_that_is_cancelled_on_one_rank_is_no_divergence(seed: int) -> None:
    """All go on, or all are told, at once."""
    topology = (Topology(tp=2), Topology(pp=2), Topology(tp=3), Topology(pp=3), Topology(tp=2, pp=2))[seed % 5]
    guests = [SimulatedBackend(Random(rank), replace(HONEST, delay=0.02)) for rank in range(topology.ranks)]

    async def script(rank: int, cache: AsyncCache) -> str:
        same, own = Random(seed), Random(f"{seed}/{rank}")
        began = now()
        try:
            for number in range(8):
                short = number == seed % 8 and rank == seed % topology.ranks
                with suppress(BackendError, TimeoutError):
                    async with asyncio.timeout(own.random() * 0.04 if short else None):
                        await one_of(cache, guests[rank], same)
                await cache.step()
        except RankFailure:
            return "told"
        finally:
            assert now() - began < TIMEOUT / 2
            audit.check(cache.core)
            assert not cache.core.active_leases()
        return "well"

    said = together(topology, script)
    assert said == ["well"] * topology.ranks or all(isinstance(one, RankFailure) for one in said)


@pytest.mark.ranks
@pytest.mark.parametrize("topology", [Topology(tp=2), Topology(pp=2)], ids=str)
def test_over_gloo_too_they_are_told_long_before_the_time_out(topology: Topology, tmp_path: Path) -> None:
    """And before the connections are closed."""
    told = Event()

    async def rank(number: int) -> str:
        ranks = await connect(topology, number, f"file://{tmp_path}/meeting", timeout=10 * TIMEOUT)
        device, store = CpuDevice(), Slow(Random(number), HONEST)
        try:
            async with AsyncCache(CONFIG, device=device, storage=store, ranks=ranks) as cache:
                await begin(cache)
                await (step_on(cache, 0.01) if number == 0 else cancel(cache))
        except RankFailure as error:
            return str(error)
        finally:
            if number == 0:
                told.set()
            await asyncio.to_thread(told.wait, TIMEOUT)
            await ranks.aclose()
            await store.aclose()
            await device.aclose()
        return "well"

    async def cancel(cache: AsyncCache) -> None:
        step: asyncio.Task[None] | None = None
        while step is None or not step.cancelled():
            step = asyncio.get_running_loop().create_task(cache.step())
            await asyncio.sleep(0)
            step.cancel()
            await asyncio.wait([step])
        await cache.step()

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda number: asyncio.run(rank(number)), range(2)))
    assert told.is_set()
    assert "another rank failed" in said[0] or "a later stage said so" in said[0]
    assert said[1] == "a step was cancelled on this rank"
