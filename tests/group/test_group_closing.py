"""How a cache with workers closes: who waits is told, a worker that lags may finish, and all ends in its time."""

from __future__ import annotations

import asyncio

import pytest

from asynccache import CacheClosed
from asynccache.testing.simulated_loop import SimulatedLoop
from asynccache.worker import Topology
from tests.group.group_kit import GroupWorld, play, settings


def test_who_waits_for_a_batch_when_the_cache_closes_is_told_and_who_asks_later_too() -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(16))
        world.begin()
        async with world.cache as cache:
            number = cache.send_batch()
            waiting = asyncio.create_task(cache.batch_ended(number))
            await asyncio.sleep(0.1)
            await cache.aclose(1.0)
        async with asyncio.timeout(60.0):
            with pytest.raises(CacheClosed, match="closed before the batch was over"):
                await waiting
            with pytest.raises(CacheClosed, match="closed before the batch was over"):
                await cache.batch_ended(number)
        await world.group.ended()
        await world.aclose()

    play(main)
