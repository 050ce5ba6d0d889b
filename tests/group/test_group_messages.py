"""What a group says to its workers, however long and odd it is."""

from __future__ import annotations

import asyncio

import pytest

from asynccache import BatchFailed, RankFailure
from asynccache.worker import Topology
from asynccache.worker import messages as m
from asynccache.worker.group import WorkerGroup
from tests.group.group_kit import GroupWorld, play, settings
from tests.simulated.loop import SimulatedLoop

PAGES = 300


@pytest.mark.parametrize("reason", ["bad file \udcff", "x" * (17 << 20)])
def test_a_batch_fails_alone_whatever_the_reason_says(reason: str) -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(16, 40))
        world.begin()
        async with world.cache as cache:
            assert cache.worker is not None
            number = cache.send_batch()
            (await anext(cache.worker)).end()
            (await anext(world.process(1).face)).fail(reason)
            with pytest.raises(BatchFailed) as raised:
                async with asyncio.timeout(60.0):
                    await cache.batch_ended(number)
            assert raised.value.reasons[1][:8] == reason[:8]
        await world.group.ended()
        await world.aclose()

    play(main)


def test_a_head_that_cannot_say_something_ends_the_group_and_all_are_told() -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(16, 40))
        world.begin()
        told: list[BaseException] = []
        try:
            async with world.cache as cache:
                group = cache._opened().worker
                assert isinstance(group, WorkerGroup)
                waiting = asyncio.create_task(cache.batch_ended(cache.send_batch()))
                group._put(m.DeletePages(12345, bytes(65 << 20)))
                async with asyncio.timeout(60.0):
                    told += filter(None, await asyncio.gather(waiting, return_exceptions=True))
        except RankFailure as failure:
            told.append(failure)
        assert [str(one)[:48] for one in told] == ["rank 0: the head cannot send its DeletePages: it"] * 2
        await world.group.ended()
        assert "the head cannot send its Delete" in str(world.process(1).failure)
        await world.aclose()

    play(main)
