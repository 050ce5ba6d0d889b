"""How a cache with workers closes: who waits is told, a worker that lags may finish, and all ends in its time."""

from __future__ import annotations

import asyncio

import pytest

from asynccache import CacheClosed
from asynccache.errors import BackendError
from asynccache.testing.simulated_loop import SimulatedLoop
from asynccache.worker import Topology
from asynccache.worker.group import LATE
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


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("gone", [False, True])
def test_a_store_that_hangs_when_it_is_closed_delays_the_cache_no_longer_than_its_deadline(
    rank: int, gone: bool
) -> None:
    """The head's own store, too; also where the group has failed meanwhile."""

    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=3), settings(16, 40, stored=True))
        world.begin()
        cache = await world.cache.__aenter__()
        assert cache.worker is not None
        face = cache.worker if rank == 0 else world.process(rank).face
        local = face._performer.local
        assert local is not None
        go, close = asyncio.Event(), local._tiers.aclose

        async def hang() -> None:
            await go.wait()
            await close()

        local._tiers.aclose = hang  # type: ignore[method-assign]
        if gone:
            world.process(2).kill()
            await asyncio.sleep(1.0)
        begun = loop.time()
        said = ""
        try:
            async with asyncio.timeout(120.0):
                said = str((await cache.aclose(deadline=5.0)).error)
        except BackendError as error:
            said = str(error)
        assert loop.time() - begun <= 5.0 + 2 * LATE + 1.0
        assert f"rank {2 if gone and rank else rank}: " in said
        if not gone:
            assert "when the cache was to be closed: it may have lost what it had stored last" in said
        go.set()
        await world.group.ended()
        await asyncio.sleep(1.0)
        await world.aclose()

    play(main)
