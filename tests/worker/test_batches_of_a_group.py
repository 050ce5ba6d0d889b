"""The head's knowledge of a batch, whenever it asks: before the batch is over, afterwards, and when the group has
failed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

import pytest

from asynccache import AsyncCache, BatchFailed, RankFailure
from asynccache.worker import Topology, group
from tests.runtime.runtime_kit import settings
from tests.simulated.links import SimulatedGroup
from tests.simulated.loop import SimulatedLoop, simulate

Body = Callable[[AsyncCache, SimulatedGroup], Awaitable[None]]


def play(body: Body) -> None:
    """``body`` with a cache of two workers."""

    async def world(loop: SimulatedLoop) -> None:
        made = SimulatedGroup(Random(1), Topology(tp=2))
        try:
            async with AsyncCache(settings(), workers=made.workers) as cache:
                await body(cache, made)
        finally:
            await made.ended()

    simulate(world, 1)


async def end(cache: AsyncCache, made: SimulatedGroup, number: int, reason: str = "") -> None:
    """Both ranks have done with the batch; the other one could not run it, if there is a reason."""
    await made.processes[1].opened.wait()
    assert cache.worker is not None
    for face, why in ((cache.worker, ""), (made.processes[1].face, reason)):
        batch = await face.heard(number)
        assert batch is not None
        if why:
            batch.fail(why)
        else:
            batch.end()


def test_a_batch_that_could_not_run_is_told_of_also_when_it_is_over() -> None:
    async def body(cache: AsyncCache, made: SimulatedGroup) -> None:
        number = cache.send_batch()
        await end(cache, made, number, "out of memory")
        await asyncio.sleep(1)
        for _ in range(2):
            with pytest.raises(BatchFailed, match="batch 1: rank 1: out of memory"):
                await cache.batch_ended(number)
        await end(cache, made, again := cache.send_batch())
        await cache.batch_ended(again)

    play(body)


def test_what_is_remembered_of_batches_that_could_not_run_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "UNABLE", 2)

    async def body(cache: AsyncCache, made: SimulatedGroup) -> None:
        numbers = [cache.send_batch() for _ in range(3)]
        for number in numbers:
            await end(cache, made, number, "out of memory")
        await asyncio.sleep(1)
        await cache.batch_ended(numbers[0])
        for number in numbers[1:]:
            with pytest.raises(BatchFailed):
                await cache.batch_ended(number)

    play(body)


def test_who_asks_for_a_batch_of_a_group_that_has_failed_is_told() -> None:
    told: list[bool] = []

    async def body(cache: AsyncCache, made: SimulatedGroup) -> None:
        number = cache.send_batch()
        made.processes[1].kill()
        await asyncio.sleep(1)
        with pytest.raises(RankFailure, match="rank 1"):
            await cache.batch_ended(number)
        told.append(True)

    with pytest.raises(RankFailure, match="rank 1"):  # so ends the cache
        play(body)
    assert told
