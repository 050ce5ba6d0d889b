"""The tree lock by itself: first come, first served; taken without an await only while it is free; cancelled safely."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from asynccache.runtime.core_calls import acquire, holding
from asynccache.runtime.driver import TreeLock
from tests.runtime.runtime_kit import turns


async def test_it_is_taken_without_an_await_while_it_is_free_and_not_otherwise() -> None:
    lock = TreeLock()
    assert lock.take()
    assert lock.locked()
    assert not lock.take()
    lock.release()
    assert not lock.locked()
    with pytest.raises(StopIteration):
        acquire(lock).send(None)
    assert lock.locked()


def test_releasing_what_nobody_holds_is_a_bug() -> None:
    with pytest.raises(RuntimeError, match="does not hold"):
        TreeLock().release()


async def test_it_passes_on_in_the_order_of_arrival_and_is_never_free_in_between() -> None:
    lock, order = TreeLock(), list[int]()

    async def work(number: int) -> None:
        async with holding(lock):
            order.append(number)
            await asyncio.sleep(0)

    lock.take()
    tasks = [asyncio.ensure_future(work(number)) for number in range(5)]
    await turns(2)
    lock.release()
    assert not lock.take(), "the first that waits has it already"
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3, 4]
    assert not lock.locked()


async def test_who_is_cancelled_takes_nothing_also_when_it_had_been_handed_the_lock() -> None:
    lock = TreeLock()
    lock.take()
    first, second, third = (asyncio.ensure_future(acquire(lock)) for _ in range(3))
    await turns(2)
    first.cancel()
    lock.release()  # before the first could take itself out: the second has it
    second.cancel()  # after it was handed over
    await asyncio.gather(first, second, return_exceptions=True)
    await third
    assert lock.locked()
    lock.release()
    assert not lock.locked()


async def test_a_coroutine_that_is_closed_while_it_waits_hands_nobody_elses_lock_on() -> None:
    lock = TreeLock()
    lock.take()
    waits = asyncio.ensure_future(acquire(lock))
    await turns(1)
    closed = acquire(lock)
    closed.send(None)
    closed.close()
    await turns(2)
    assert not waits.done(), "the first holder has not released it"
    lock.release()
    await waits


@pytest.mark.parametrize("seed", range(20))
async def test_never_two_holders_and_never_nobody_while_somebody_waits(seed: int) -> None:
    random, lock, inside, served = Random(seed), TreeLock(), 0, 0

    async def work() -> None:
        nonlocal inside, served
        if not lock.take():
            await acquire(lock)
        try:
            inside += 1
            assert inside == 1
            for _ in range(random.randrange(3)):
                await asyncio.sleep(0)
            served += 1
        finally:
            inside -= 1
            lock.release()

    tasks = []
    for _ in range(60):
        tasks.append(asyncio.ensure_future(work()))
        await turns(random.randrange(3))
        if random.random() < 0.4:
            random.choice(tasks).cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert not lock.locked()
    assert served == sum(result is None for result in results)
    assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
