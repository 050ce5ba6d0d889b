"""Stores of a group: whatever is done to one is done on all workers or on none, and what is told covers all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asynccache.errors import Unavailable
from asynccache.worker import Topology
from asynccache.worker.rank_server import PINNING
from tests.group.group_kit import GUEST, GroupWorld, play, servers, settings, text
from tests.simulated.loop import SimulatedLoop


def test_a_store_that_is_attached_beside_one_that_is_away_is_used() -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(8, 16, stored=True))
        async with world.opened() as cache:
            group: Any = cache._opened().worker
            for server in servers(world):
                breaker = server.local._stores[1].store.breaker
                for _ in range(5):
                    breaker.failure(breaker.allow(loop.time()), loop.time() + 1000, "read")
            await asyncio.sleep(0.1)
            assert group.shut
            await cache.attach_storage(GUEST, name="guest")
            await asyncio.sleep(0.1)
            assert not group.shut
            await world.serve(text(2))
            await cache.flush()
            await cache.detach_storage("guest")
            await asyncio.sleep(0.1)
            assert group.shut
        await world.aclose()

    play(main)


@pytest.mark.parametrize("well", [True, False])
def test_who_opens_a_store_may_be_silent_for_long_and_not_afterwards(well: bool) -> None:
    """Pinning the host's memory for it keeps an interpreter from its signs of life."""

    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(8, 16))
        async with world.opened() as cache:
            link = world.process(1).link
            own = servers(world)[1].local
            plain, seen = own.open_store, list[tuple[float, float]]()

            async def open_store(*order: Any, **named: Any) -> Any:
                await asyncio.sleep(0.1)
                seen.append((link._patience, link.peer._patience))
                if not well:
                    raise Unavailable("locked")
                return await plain(*order, **named)

            own.open_store = open_store
            if well:
                await cache.attach_storage(GUEST)
            else:
                with pytest.raises(Unavailable, match="rank 1: locked"):
                    await cache.attach_storage(GUEST)
            await asyncio.sleep(0.1)
            assert seen == [(max(PINNING, world.timeout),) * 2]
            assert (link._patience, link.peer._patience) == (world.timeout, world.timeout)
        await world.aclose()

    play(main)


def test_a_store_that_one_rank_cannot_open_or_whose_opening_is_cancelled_stays_open_nowhere() -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=3), settings(8, 16))
        async with world.opened() as cache:
            group: Any = cache._opened().worker
            own = servers(world)[2].local
            plain = own.open_store

            async def open_store(*order: Any, **named: Any) -> Any:
                await asyncio.sleep(0.1)
                raise Unavailable("locked")

            own.open_store = open_store
            with pytest.raises(Unavailable, match="rank 2: locked"):
                await cache.attach_storage(GUEST)
            for at in range(0, 120, 8):
                attaching = loop.create_task(cache.attach_storage(GUEST))
                await asyncio.sleep(at / 1000)
                attaching.cancel()
                await asyncio.wait([attaching])
                assert attaching.cancelled() or isinstance(attaching.exception(), Unavailable)
                assert not cache._opened().worker.stores
                assert not group._open_stores
                assert not any(server.local._stores for server in servers(world))
            own.open_store = plain
            await cache.attach_storage(GUEST)
            await asyncio.sleep(0.1)
            assert [len(server.local.stores) for server in servers(world)] == [1, 1, 1]
            await world.serve(text(2))
            await cache.detach_storage(timeout=1.0)
            assert not any(server.local._stores for server in servers(world))
        await world.aclose()

    play(main)
