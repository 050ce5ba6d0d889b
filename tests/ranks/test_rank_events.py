"""An engine's events fire at other times on other ranks; what the cache does with them is the same on all."""

from __future__ import annotations

from random import Random

import pytest

from asynccache import AsyncCache, CacheConfig, Full
from asynccache.ranks import Topology
from asynccache.testing.simulated_device import SimulatedDevice
from asynccache.testing.simulated_loop import SimulatedLoop, simulate
from asynccache.testing.simulated_ranks import SimulatedRanks

PAGE = 4
CONFIG = CacheConfig(
    model="events", page_size=PAGE,
    components=(Full(bytes_per_token=8, device_tokens=16 * PAGE, host_tokens=32 * PAGE),),
)  # fmt: skip


@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize("commits", [False, True])
def test_pages_retire_on_all_ranks_or_on_none(early: int, commits: bool) -> None:
    """On rank ``early`` the work is over before the release, on the other one after it."""

    async def lived(cache: AsyncCache, device: SimulatedDevice, rank: int) -> int:
        async with cache:
            tokens, work = list(range(6 * PAGE)), device.gate()
            lease = await cache.lease(tokens, new_tokens=PAGE, wait=False).__aenter__()
            if commits:
                await lease.commit(tokens, ready=work)
            if rank == early:
                work.open()
            lease.release(after=work)
            await cache.step()
            work.open()
            while cache.in_flight:
                await cache.step()
            return cache.core.statistics().device[0].free

    async def world(loop: SimulatedLoop) -> list[int]:
        net = SimulatedRanks(Topology(tp=2), Random(1))
        devices = [SimulatedDevice(seed=rank) for rank in range(2)]
        caches = [AsyncCache(CONFIG, device=device, ranks=net.member(rank)) for rank, device in enumerate(devices)]
        lives = [loop.create_task(lived(cache, devices[rank], rank)) for rank, cache in enumerate(caches)]
        free = [await life for life in lives]
        for device in devices:
            await device.aclose()
        return free

    assert simulate(world, 1) == [16 - 6 * commits] * 2
