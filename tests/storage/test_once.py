"""Puts of the same pages at the same time: each page is written by one call, and none is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from asynccache_backends.once import OncePerKey

from asynccache.storage import PageKey, Result
from asynccache.testing.backend_suite import keys_of

KEYS = keys_of(4)
HIT, FAILED = Result.HIT, Result.FAILED


class Store:
    """What was written, by call. Each write waits for ``go``; ``failing`` ones store nothing."""

    def __init__(self) -> None:
        self.puts = OncePerKey()
        self.stored: set[bytes] = set()
        self.written: list[list[bytes]] = []
        self.failing = 0
        self.go = asyncio.Event()

    async def put(self, keys: Sequence[PageKey]) -> list[Result]:
        results = [FAILED] * len(keys)

        async def write(fresh: list[int]) -> None:
            names = [keys[i].key for i in fresh]
            self.written.append(names)
            fails, self.failing = self.failing > 0, self.failing - 1
            await self.go.wait()
            if not fails:
                self.stored.update(names)
                for i in fresh:
                    results[i] = HIT

        await self.puts.put(keys, results, self.stored.__contains__, write)
        return results


def names(keys: Sequence[PageKey]) -> list[bytes]:
    return [key.key for key in keys]


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_a_page_that_another_call_is_writing_is_waited_for_and_not_written_twice() -> None:
    store = Store()
    first = asyncio.ensure_future(store.put(KEYS[:3]))
    await turns()
    second = asyncio.ensure_future(store.put(KEYS[1:]))
    await turns()
    assert store.written == [names(KEYS[:3]), names(KEYS[3:])]
    store.go.set()
    assert [await first, await second] == [[HIT] * 3] * 2
    assert not store.puts.under_way


@pytest.mark.asyncio
async def test_a_page_that_another_call_did_not_store_is_written_after_all() -> None:
    store = Store()
    store.failing = 1
    first = asyncio.ensure_future(store.put(KEYS[:2]))
    await turns()
    second = asyncio.ensure_future(store.put(KEYS[:2]))
    await turns()
    store.go.set()
    assert [await first, await second] == [[FAILED] * 2, [HIT] * 2]
    assert store.written == [names(KEYS[:2])] * 2


@pytest.mark.asyncio
async def test_a_page_whose_call_was_cancelled_is_written_by_the_one_that_waits() -> None:
    store = Store()
    first = asyncio.ensure_future(store.put(KEYS[:2]))
    await turns()
    second = asyncio.ensure_future(store.put(KEYS[:2]))
    await turns()
    first.cancel()
    await turns()
    assert store.written == [names(KEYS[:2])] * 2
    store.go.set()
    assert await second == [HIT] * 2
    assert first.cancelled()
    assert not store.puts.under_way


@pytest.mark.asyncio
async def test_pages_that_are_stored_and_keys_that_come_twice_are_written_once() -> None:
    store = Store()
    store.go.set()
    assert await store.put([KEYS[0], KEYS[0], KEYS[1]]) == [HIT] * 3
    assert await store.put(KEYS[:3]) == [HIT] * 3
    assert store.written == [names(KEYS[:2]), names(KEYS[2:3])]
