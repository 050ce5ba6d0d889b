"""Header buffers: lent whole, in order, never lost."""

from __future__ import annotations

import asyncio

import pytest

from asynccache.storage.checked import HeaderPool


@pytest.mark.asyncio
async def test_headers_are_different_pieces_of_one_run() -> None:
    pool = HeaderPool(8)
    for i, header in enumerate(await pool.take(8)):
        header[:] = bytes([i + 1]) * 64
    assert sorted(pool.memory[::64]) == list(range(1, 9))


@pytest.mark.asyncio
async def test_who_wants_many_is_not_overtaken_by_who_wants_few() -> None:
    pool = HeaderPool(4)
    held = await pool.take(3)
    many = asyncio.ensure_future(pool.take(4))
    await asyncio.sleep(0)
    few = asyncio.ensure_future(pool.take(1))
    await asyncio.sleep(0)
    assert not few.done()
    pool.give(held)
    pool.give(await many)
    assert len(await few) == 1


@pytest.mark.asyncio
async def test_cancelling_the_first_in_line_serves_the_next() -> None:
    pool = HeaderPool(4)
    held = await pool.take(3)
    many, few = asyncio.ensure_future(pool.take(4)), asyncio.ensure_future(pool.take(1))
    await asyncio.sleep(0)
    many.cancel()
    pool.give([*(await few), *held])
    assert pool.free == 4


@pytest.mark.asyncio
async def test_a_cancellation_that_comes_with_the_grant_gives_the_headers_back() -> None:
    pool = HeaderPool(4)
    held = await pool.take(4)
    waiter = asyncio.ensure_future(pool.take(2))
    await asyncio.sleep(0)
    pool.give(held)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert pool.free == 4
