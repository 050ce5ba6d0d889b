"""Listing by the memory and the file store, and collecting by the file store: old pages, and the room of dead ones."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from asynccache_backends.file import FileBackend
from asynccache_backends.memory import MemoryBackend

from asynccache.storage import (
    HEADER_BYTES,
    CheckedStore,
    Collectable,
    Collected,
    Listable,
    PageKey,
    Result,
    Stored,
    parse_url,
)
from asynccache.storage.contract import StoreLayout
from asynccache.testing.backend_suite import LAYOUT, page_key
from tests.storage.file_store_kit import open_at
from tests.storage.page_kit import fill, get

SMALL = "capacity=16MiB&segment=256KiB"
LOOKED_AT = StoreLayout({}, LAYOUT.schema)


def keys_of(count: int, pool: str = "full", first: int = 0) -> list[PageKey]:
    return [page_key(str(i), pool) for i in range(first, first + count)]


async def listed(store: CheckedStore) -> list[Stored]:
    assert isinstance(store.backend, Listable)
    return [page async for batch in store.backend.listing() for page in batch]


async def collect(store: CheckedStore, older_than: float | None = None) -> Collected:
    assert isinstance(store.backend, Collectable)
    return await store.backend.collect(older_than)


async def open_kind(kind: str, folder: Path) -> CheckedStore:
    return CheckedStore(MemoryBackend(), LAYOUT) if kind == "memory" else await open_at(folder, SMALL)


class Clock:
    """``time.time``, at will."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.time", clock)
    return clock


@pytest.mark.parametrize("kind", ["memory", "file"])
async def test_every_page_is_listed_once_with_its_size_and_time(kind: str, tmp_path: Path, clock: Clock) -> None:
    store = await open_kind(kind, tmp_path / "kv")
    assert await listed(store) == []
    full, odd = keys_of(60, "full"), keys_of(20, "odd", first=60)
    await fill(store, full)
    clock.now += 50
    await fill(store, odd)
    await store.delete(full[:5])
    found = {page.key: page for page in await listed(store)}
    assert len(found) == len(await listed(store)) == 75
    for key, written in [(key, 1_000_000) for key in full[5:]] + [(key, 1_000_050) for key in odd]:
        known = written if kind == "file" else 0.0
        assert found[key.key] == Stored(key.key, HEADER_BYTES + LAYOUT.page_bytes[key.pool], known)
    await store.aclose()


async def test_old_pages_are_collected_and_young_ones_stay(tmp_path: Path, clock: Clock) -> None:
    store = await open_at(tmp_path / "kv", SMALL)
    old, young = keys_of(40, "full"), keys_of(40, "full", first=40)
    await fill(store, old)
    clock.now += 100
    await fill(store, young)
    assert (await collect(store, 101)).pages == 0
    found = await collect(store, 100)
    assert found.pages == 0                             # written exactly so long ago
    found = await collect(store, 60)
    assert (found.pages, found.size > 0) == (40, True)
    assert await get(store, old) == [Result.MISS] * 40
    assert await get(store, young) == [Result.HIT] * 40
    assert (await collect(store, 60)).pages == 0
    await store.aclose()


async def test_times_outlive_a_clean_end_and_a_scan(tmp_path: Path, clock: Clock) -> None:
    store = await open_at(tmp_path / "kv", SMALL)
    await fill(store, keys_of(30))
    await store.aclose()
    clock.now += 1000
    for again in ("from the footer", "from the segment"):
        store = await open_at(tmp_path / "kv", SMALL)
        assert {page.written for page in await listed(store)} == {1_000_000.0}, again
        await store.aclose()
        for path in (tmp_path / "kv").glob("segment-*.kv"):
            os.truncate(path, path.stat().st_size - 1)


async def test_the_room_of_dead_pages_comes_back(tmp_path: Path, clock: Clock) -> None:
    """The segments of many dead pages go, and what is alive in them is found elsewhere, as old as it is."""
    store = await open_at(tmp_path / "kv", SMALL)
    keys = keys_of(150)
    await fill(store, keys)
    clock.now += 10
    keep = keys[::5]
    await store.delete([key for key in keys if key not in keep])
    before = store.stats()
    found = await collect(store)
    assert found.pages == 0
    assert 60 < found.waste <= 120                     # what is dead in the active segment stays
    after = store.stats()
    assert after["disk_bytes"] < before["disk_bytes"]
    assert after["pages"] == len(keep)
    assert await get(store, keep) == [Result.HIT] * len(keep)
    assert {page.written for page in await listed(store)} == {1_000_000.0}
    await store.aclose()
    again = await open_at(tmp_path / "kv", SMALL)
    assert await get(again, keys) == [Result.HIT if key in keep else Result.MISS for key in keys]
    await again.aclose()


async def test_a_store_that_is_looked_at_is_compacted_without_losing_a_page(tmp_path: Path) -> None:
    """The tool does not know the store's capacity: nothing may leave for want of room."""
    store = await open_at(tmp_path / "kv", "capacity=16MiB&segment=256KiB")
    keys = keys_of(300)
    await fill(store, keys)
    keep = [key for i, key in enumerate(keys) if i % 4 == 0]
    await store.delete([key for key in keys if key not in keep])
    await store.aclose()
    url = parse_url(f"file:{tmp_path}/kv?capacity=768KiB&segment=256KiB")        # far less than it holds
    looked_at = await FileBackend.open(url, LOOKED_AT)
    before = looked_at.stats()["disk_bytes"]
    found = await looked_at.collect(None)
    assert (found.pages, found.waste, found.size > 0) == (0, 225, True)
    assert await looked_at.collect(None) == Collected()
    await looked_at.aclose()
    again = await open_at(tmp_path / "kv", SMALL)
    assert await get(again, keep) == [Result.HIT] * len(keep)
    assert again.stats()["pages"] == len(keep)
    assert again.stats()["disk_bytes"] < before / 2
    await again.aclose()


async def test_collecting_beside_writers_and_readers_loses_nothing(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "kv", SMALL)
    kept: list[PageKey] = []

    async def write(first: int) -> None:
        for at in range(first, first + 120, 12):
            keys = keys_of(12, first=at)
            await fill(store, keys)
            await store.delete(keys[3:])
            kept.extend(keys[:3])
            assert await get(store, keys[:3]) == [Result.HIT] * 3

    async def collect_often() -> None:
        for _ in range(20):
            await collect(store)
            await asyncio.sleep(0)

    await asyncio.gather(write(0), write(1000), collect_often())
    await collect(store)
    assert await get(store, kept) == [Result.HIT] * len(kept)
    await store.aclose()


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 13, 21, 34])
async def test_a_collection_that_is_cancelled_leaves_the_rest(tmp_path: Path, steps: int) -> None:
    store = await open_at(tmp_path / "kv", SMALL)
    keys = keys_of(100)
    await fill(store, keys)
    await store.delete([key for i, key in enumerate(keys) if i % 5])
    task = asyncio.create_task(collect(store))
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert await get(store, keys[::5]) == [Result.HIT] * 20
    await collect(store)
    assert await get(store, keys[::5]) == [Result.HIT] * 20
    await store.aclose()


async def test_a_full_store_loses_nothing_to_a_collection(tmp_path: Path) -> None:
    """There is no room for what is alive in a segment that is mostly dead: then it stays where it is."""
    store = await open_at(tmp_path / "kv", "capacity=1MiB&segment=256KiB")
    keys = keys_of(200)
    for at in range(0, 200, 5):
        await fill(store, keys[at : at + 5])
    there = [key for key, result in zip(keys, await store.exists(keys), strict=True) if result is Result.HIT]
    assert 30 < len(there) < 70
    keep = there[::4]
    await store.delete([key for key in there if key not in keep])
    for _ in range(3):
        await collect(store)
        assert await get(store, keep) == [Result.HIT] * len(keep)
    await store.aclose()


async def test_a_segment_with_a_page_that_cannot_be_read_stays(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "kv", "capacity=16MiB&segment=256KiB&direct=off")
    keys = keys_of(15)
    await fill(store, keys)
    await fill(store, keys_of(15, first=100))              # another segment is the active one
    await store.delete(keys[:14])
    assert isinstance(store.backend, FileBackend)
    if (sealing := store.backend._log._sealing) is not None:
        await asyncio.wait([sealing])                       # a footer written later would make the file whole again
    [path, *_] = sorted((tmp_path / "kv").glob("segment-*.kv"))
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(4096 + 14 * 16384)                    # its last page is gone
    await collect(store)
    assert path.exists()
    with path.open("r+b") as file:
        file.truncate(size)
    await collect(store)
    assert not path.exists()
    await store.aclose()


async def test_what_is_mostly_alive_is_not_moved(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "kv", SMALL)
    keys = keys_of(60)
    await fill(store, keys)
    await store.delete(keys[::4])
    assert await collect(store) == Collected()
    assert store.stats()["moved_pages"] == 0
    await store.aclose()
