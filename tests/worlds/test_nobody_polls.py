"""Nobody polls: a world in which all wait for something that will not come has no timer left, and is a deadlock."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from asynccache import AsyncCache, CacheConfig, Full
from tests.simulated.backend import HONEST, SimulatedBackend
from tests.simulated.device import SimulatedDevice
from tests.simulated.loop import Deadlock, SimulatedLoop, simulate

CONFIG = CacheConfig(
    model="m", components=(Full(bytes_per_token=8, device_tokens=32, host_tokens=64),), page_size=4,
    prefetch_policy="wait_complete",  # type: ignore[arg-type]
    prefetch_threshold=4,
)  # fmt: skip


@pytest.mark.parametrize("stored", [False, True])
def test_a_request_that_waits_for_pages_costs_nothing(stored: bool) -> None:
    async def world(loop: SimulatedLoop) -> None:
        storage = SimulatedBackend(Random(1), HONEST) if stored else None
        cache = AsyncCache(CONFIG, device=SimulatedDevice(seed=1, latency=(0.0, 0.001)), storage=storage)
        await cache.__aenter__()
        async with cache.lease(list(range(16))) as lease:
            await lease.commit(list(range(16)))
        await cache.flush()
        for_ever = await cache.lease(list(range(100, 132))).__aenter__()
        waiting = asyncio.create_task(cache.lease(list(range(200, 216))).__aenter__(), name="waits for pages")
        await asyncio.sleep(1000)
        assert not waiting.done()
        assert for_ever.pages.size == 8
        await waiting

    with pytest.raises(Deadlock, match="waits for pages"):
        simulate(world, 1)
