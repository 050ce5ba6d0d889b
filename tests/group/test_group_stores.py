"""Stores of a group: whatever is done to one is done on all workers or on none, and what is told covers all."""

from __future__ import annotations

import asyncio
from typing import Any

from asynccache.testing.simulated_loop import SimulatedLoop
from asynccache.worker import Topology
from tests.group.group_kit import GUEST, GroupWorld, play, settings, text


def performers(world: GroupWorld) -> list[Any]:
    """What does the work on each rank."""
    group: Any = world.cache._opened().worker
    return [group.own, *(process.serving.performer for process in world.group.processes.values())]


def test_a_store_that_is_attached_beside_one_that_is_away_is_used() -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(8, 16, stored=True))
        async with world.opened() as cache:
            group: Any = cache._opened().worker
            for performer in performers(world):
                breaker = performer.local._stores._open[1].store.breaker
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
