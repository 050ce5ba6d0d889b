"""A store with many keys hands them over in parts, a turn of the loop for each, before it is used; and what changes
meanwhile is right in the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from asynccache_backends import memory, page_index
from asynccache_backends.memory import MemoryBackend
from asynccache_backends.page_index import PageIndex

from asynccache import AsyncCache
from asynccache.core.plan import Publish
from asynccache.events import Notice, StorageReport
from asynccache.storage import Record
from asynccache.testing.backend_suite import keys_of, record_of
from tests.runtime.runtime_kit import parts, settings

KEYS = 40


class Holder:
    def __init__(self, keys: Sequence[bytes]) -> None:
        self._all = list(keys)

    def keys(self) -> list[bytes]:
        return self._all


class Index(PageIndex[Holder]):
    position_bits = 6

    def put(self, *keys: bytes) -> None:
        number = self._hold(Holder(keys))
        self._locations.update({key: (number << self.position_bits) + at for at, key in enumerate(keys)})
        self._changed(True, keys)

    def drop(self, key: bytes) -> None:
        del self._locations[key]
        self._changed(False, [key])


def test_the_keys_of_an_index_come_in_parts_though_pages_come_go_and_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_index, "PART", 3)
    index, told = Index(), set[bytes]()
    pages = [bytes([i]) for i in range(12)]
    for at in range(0, 12, 4):
        index.put(*pages[at : at + 4])
    rest = iter(index.watched(lambda there, keys: (told.update if there else told.difference_update)(keys)))
    told.update(part := next(rest))
    assert len(part) == 3
    index.drop(pages[0])   # told before
    index.drop(pages[11])  # not yet
    index.tell, tell = None, index.tell
    index.put(pages[9])    # it moves, of which nobody hears, to where nobody has looked
    index.tell = tell
    index.put(b"new")
    sizes = []
    for part in rest:
        told.update(part)
        sizes.append(len(part))
    assert told == {*pages[1:11], b"new"}
    assert max(sizes) <= 3


@pytest.mark.asyncio
async def test_attaching_a_store_tells_its_keys_in_parts_outside_the_tree_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LISTED", 4)
    backend = MemoryBackend()
    keys = keys_of(KEYS, "odd")
    records: list[Record] = [record_of(key) for key in keys]
    await backend.put(keys, records)
    notices: list[tuple[int, Notice]] = []
    turn, locked = 0, list[bool]()

    def heard(notice: Notice) -> None:
        notices.append((turn, notice))
        locked.append(parts(cache).driver.lock.locked())

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    cache = AsyncCache(settings(host=32), on_event=heard)
    async with cache:
        counting = asyncio.create_task(count())
        await cache.attach_storage(backend)
        counting.cancel()
        reports = [(turn, notice) for turn, notice in notices if isinstance(notice, StorageReport)]
        assert sum(len(report.keys) for _, report in reports) == KEYS
        assert max(len(report.keys) for _, report in reports) == 4
        assert len({turn for turn, _ in reports}) >= KEYS // 4 // 2
        assert not any(locked)
        assert not [notice for _, notice in notices if isinstance(notice, Publish)]
    await backend.aclose()
