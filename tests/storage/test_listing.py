"""Stores that are read through: listed, collected, scrubbed."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from asynccache_backends.file.segments import BLOCK_BYTES
from asynccache_backends.memory import MemoryBackend

from asynccache.errors import ConfigError, Unavailable
from asynccache.storage import (
    HEADER_BYTES,
    RECORD_SCHEMA,
    CheckedStore,
    Collectable,
    Collected,
    Listable,
    PageKey,
    Part,
    Result,
    Scrubbed,
    Stored,
    Verify,
)
from asynccache.storage.contract import StoreLayout
from asynccache.testing.backend_suite import LAYOUT, page_key
from asynccache.testing.backend_suite import keys_of as suite_keys
from asynccache.testing.wrapped_backend import WrappedBackend
from tests.simulated.backend import SimulatedBackend
from tests.simulated.loop import SimulatedLoop, simulate
from tests.storage.pages_kit import edit, file_backend, fill, flip, get, open_at, segment

# Listing by the memory and the file store, and collecting by the file store: old pages, and the room of dead ones.


SMALL = "capacity=16MiB&segment=256KiB"
LOOKED_AT = StoreLayout({}, LAYOUT.schema)


def keys_of(count: int, pool: str = "full", first: int = 0) -> list[PageKey]:
    return suite_keys(first + count, pool)[first:]


async def listed(store: CheckedStore) -> list[Stored]:
    assert isinstance(store.backend, Listable)
    return [page async for batch in store.backend.listing() for page in batch]


async def collect(store: CheckedStore, older_than: float | None = None) -> Collected:
    assert isinstance(store.backend, Collectable)
    return await store.backend.collect(older_than)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """``now`` is what ``time.time`` says."""
    clock = SimpleNamespace(now=1_000_000.0)
    monkeypatch.setattr("time.time", lambda: clock.now)
    return clock


@pytest.mark.parametrize("kind", ["memory", "file"])
async def test_every_page_is_listed_once_with_its_size_and_time(
    kind: str, tmp_path: Path, clock: SimpleNamespace
) -> None:
    store = CheckedStore(MemoryBackend(), LAYOUT) if kind == "memory" else await open_at(tmp_path / "kv", SMALL)
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


async def test_old_pages_are_collected_and_young_ones_stay(tmp_path: Path, clock: SimpleNamespace) -> None:
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


async def test_times_outlive_a_clean_end_and_a_scan(tmp_path: Path, clock: SimpleNamespace) -> None:
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


@pytest.mark.parametrize("looked_at", [False, True])
async def test_the_room_of_dead_pages_comes_back(looked_at: bool, tmp_path: Path, clock: SimpleNamespace) -> None:
    """The segments of many dead pages go, and what is alive in them is found elsewhere, as old as it is. The tool that
    looks at a store does not know its capacity: nothing may leave for want of room."""
    store, keys = await open_at(tmp_path / "kv", SMALL), keys_of(150)
    await fill(store, keys)
    clock.now += 10
    keep = keys[::5]
    await store.delete([key for key in keys if key not in keep])
    if looked_at:
        await store.aclose()
        store = await open_at(tmp_path / "kv", "capacity=768KiB&segment=256KiB", LOOKED_AT)  # far less than it holds
    before = store.stats()
    found = await collect(store)
    assert (found.pages, found.size > 0) == (0, True)
    assert found.waste == 120 if looked_at else 60 < found.waste <= 120  # what is dead in the active segment stays
    after = store.stats()
    assert after["disk_bytes"] < before["disk_bytes"] / (2 if looked_at else 1)
    assert after["pages"] == len(keep)
    assert not looked_at or await collect(store) == Collected()
    assert {page.written for page in await listed(store)} == {1_000_000.0}
    await store.aclose()
    again = await open_at(tmp_path / "kv", SMALL)
    assert await get(again, keys) == [Result.HIT if key in keep else Result.MISS for key in keys]


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


async def test_a_segment_with_a_page_that_cannot_be_read_stays(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "kv", "capacity=16MiB&segment=256KiB&direct=off")
    keys = keys_of(15)
    await fill(store, keys)
    await fill(store, keys_of(15, first=100))              # another segment is the active one
    await store.delete(keys[:14])
    if (sealing := file_backend(store)._log._sealing) is not None:
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


async def test_what_is_mostly_alive_is_not_moved(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "kv", SMALL)
    keys = keys_of(60)
    await fill(store, keys)
    await store.delete(keys[::4])
    assert await collect(store) == Collected()
    assert store.stats()["moved_pages"] == 0


# Reading a store through: what is damaged is found, dropped and counted, and nothing else is.


FULL = LAYOUT.page_bytes["full"]
KEYS = suite_keys(60)
SECOND = BLOCK_BYTES + 42 * FULL
OPTIONS = "capacity=64MiB&segment=4MiB"


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> CheckedStore:
    """60 pages in two groups of one segment."""
    store = await open_at(tmp_path / "s", OPTIONS)
    await fill(store, KEYS)
    return store


async def test_a_good_store_stays_as_it_is(store: CheckedStore) -> None:
    await fill(store, [page_key("odd", "odd")])
    await store.delete(KEYS[3:5])
    assert await store.scrub() == Scrubbed(59, 58 * FULL + 1000, 0, 0)
    assert await get(store, KEYS) == [Result.HIT] * 3 + [Result.MISS] * 2 + [Result.HIT] * 55
    assert store.stats()["errors"] == 0


@pytest.mark.parametrize("closed", [True, False])
async def test_a_flipped_bit_costs_its_page_for_ever(tmp_path: Path, store: CheckedStore, closed: bool) -> None:
    if closed:
        await store.aclose()
        store = await open_at(tmp_path / "s", OPTIONS)
    edit(segment(tmp_path / "s"), flip(SECOND + BLOCK_BYTES + 5 * FULL + 77))
    assert await store.scrub() == Scrubbed(60, 60 * FULL, 1, 0)
    assert store.stats()["corrupt_pages"] == 1
    expected = [Result.MISS if i == 47 else Result.HIT for i in range(60)]
    assert await get(store, KEYS) == expected
    assert await store.scrub() == Scrubbed(59, 59 * FULL, 0, 0)
    shutil.copytree(tmp_path / "s", tmp_path / "crashed")
    await store.aclose()
    for folder in ("s", "crashed"):
        store = await open_at(tmp_path / folder, OPTIONS)
        assert await store.exists(KEYS) == expected
        await store.aclose()


@pytest.mark.parametrize(
    ("change", "lost"),
    [*((flip(at), range(42)) for at in (0, 45, 64, 64 + 96 * 3 + 40)),
     (lambda data: data.__delitem__(slice(SECOND + BLOCK_BYTES + 3 * FULL + 5, None)), range(45, 60))],
)  # fmt: skip
async def test_what_a_damaged_header_block_named_or_was_cut_off_is_dropped(
    tmp_path: Path, store: CheckedStore, change: Callable[[bytearray], object], lost: range
) -> None:
    edit(segment(tmp_path / "s"), change)
    assert await store.scrub() == Scrubbed(60, 60 * FULL, len(lost), 0)
    assert await get(store, KEYS) == [Result.MISS if i in lost else Result.HIT for i in range(60)]


def unreadable(*_: object) -> int:
    raise OSError(5, "Input/output error")


async def all_good(keys: Sequence[PageKey], records: Sequence[object]) -> list[bool]:
    return [True] * len(keys)


async def test_what_cannot_be_read_is_counted_and_left_alone(
    store: CheckedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", unreadable)
        assert await store.scrub() == Scrubbed(0, 0, 0, 60)
    assert store.stats()["errors"] == 2
    assert await get(store, KEYS) == [Result.HIT] * 60
    part, *_ = file_backend(store).parts()
    await store.clear()
    assert await file_backend(store).scrub(part, all_good) == Scrubbed(), "it is no error: its segment was reclaimed"


async def test_to_be_scrubbed_is_not_to_be_wanted(store: CheckedStore) -> None:
    await store.scrub()
    assert [group.hot for group in file_backend(store)._log.index.holders.values()] == [0, 0]


async def test_a_page_that_was_put_again_meanwhile_is_not_the_bad_one(store: CheckedStore) -> None:
    backend = file_backend(store)

    async def late(keys: Sequence[PageKey], records: Sequence[object]) -> list[bool]:
        await store.delete(KEYS[:2])
        await fill(store, KEYS[:1])
        return [False] * 3 + [True] * (len(keys) - 3)

    (part,) = (part for part in backend.parts() if part.pages == 42)
    assert await backend.scrub(part, late) == Scrubbed(42, 42 * FULL, 1, 0)
    assert await get(store, KEYS[:4]) == [Result.HIT, Result.MISS, Result.MISS, Result.HIT]


async def test_a_scrub_whose_tasks_are_all_cancelled_waits_for_the_thread_that_reads(
    store: CheckedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``asyncio.run`` cancels all tasks when it is interrupted; the folder must not be closed under the thread."""
    begun, go_on, preadv = Event(), Event(), os.preadv

    def slow(*args: Any) -> Any:
        begun.set()
        go_on.wait(10)
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", slow)
    others = asyncio.all_tasks()
    scrubbing = asyncio.ensure_future(store.scrub())
    await asyncio.to_thread(begun.wait, 10)
    for task in asyncio.all_tasks() - others:
        task.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not scrubbing.done(), "the thread still reads"
    go_on.set()
    await asyncio.wait([scrubbing])
    assert scrubbing.cancelled()


async def test_a_store_in_use_is_scrubbed_while_segments_come_and_go(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "s", "capacity=4MiB&segment=1MiB")
    rng = Random("scrub")

    async def use() -> None:
        for batch in range(25):
            keys = [page_key(f"{batch}/{i}") for i in range(25)]
            await fill(store, keys)
            assert set(await get(store, keys)) <= {Result.HIT, Result.MISS}
            await store.delete(rng.sample(keys, 2))

    await fill(store, KEYS)
    using = asyncio.ensure_future(use())
    rounds = 0
    while not using.done():
        found = await store.scrub()
        assert (found.bad, found.unread) == (0, 0)
        rounds += 1
    await using
    assert rounds > 1
    assert store.stats()["reclaimed_segments"] > 3
    assert store.stats()["errors"] == 0


async def test_closing_waits_for_the_part_that_is_being_read(store: CheckedStore) -> None:
    scrubbing = asyncio.ensure_future(store.scrub())
    await asyncio.sleep(0)
    await store.aclose()
    with pytest.raises(Unavailable, match="is closed"):
        await scrubbing


async def test_a_store_that_cannot_list_its_pages_says_so() -> None:
    store = CheckedStore(MemoryBackend(), LAYOUT)
    with pytest.raises(ConfigError, match=r"MemoryBackend.*cannot be read through"):
        await store.scrub()
    await store.aclose()


class Listed(WrappedBackend):
    """Ten parts of a megabyte that are read in no time."""

    def parts(self) -> list[Part]:
        return [Part(1 << 20, 1, i) for i in range(10)]

    async def scrub(self, part: Part, verify: Verify) -> Scrubbed:
        return Scrubbed(1, 1 << 20, part.place == 7, 0)


def test_it_takes_as_long_as_the_rate_says_and_tells_how_far_it_is() -> None:
    async def world(loop: SimulatedLoop) -> None:
        store = CheckedStore(Listed(SimulatedBackend(Random(1))), LAYOUT, threads=0)
        told: list[tuple[float, Scrubbed]] = []
        began = loop.time()
        found = await store.scrub(rate=float(1 << 18), tell=lambda done: told.append((loop.time() - began, done)))
        assert found == Scrubbed(10, 10 << 20, 1, 0)
        assert loop.time() - began == pytest.approx(40, abs=0.1)
        assert [done.pages for _, done in told] == list(range(1, 11))
        assert [at for at, _ in told] == pytest.approx([4.0 * i for i in range(10)], abs=0.1)

    simulate(world, 1)


async def test_opened_without_pools_a_store_is_only_looked_at(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "s", "capacity=16MiB&segment=1MiB")
    keys = suite_keys(500)
    await fill(store, keys)
    await store.aclose()
    before = {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir() if path.name.startswith("segment-")}
    looking = await open_at(tmp_path / "s", "capacity=3MiB&segment=1MiB", StoreLayout({}, RECORD_SCHEMA))
    assert looking.stats()["pages"] == 500
    assert (await looking.scrub()).pages == 500
    await looking.aclose()
    after = {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir() if path.name.startswith("segment-")}
    assert after == before
    with pytest.raises(Unavailable, match=rf"{tmp_path}/none.*no store"):
        await open_at(tmp_path / "none", "", StoreLayout({}, RECORD_SCHEMA))
    assert not (tmp_path / "none").exists()
