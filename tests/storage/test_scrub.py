"""Reading a store through: what is damaged is found, dropped and counted, and nothing else is."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import pytest
from asynccache_backends.file import FileBackend
from asynccache_backends.file.segments import BLOCK_BYTES
from asynccache_backends.memory import MemoryBackend

from asynccache.errors import ConfigError, Unavailable
from asynccache.storage import (
    RECORD_SCHEMA,
    CheckedStore,
    PageKey,
    Part,
    Result,
    Scrubbed,
    StoreLayout,
    Verify,
    parse_url,
)
from asynccache.testing.backend_suite import LAYOUT, aligned, keys_of, page_key
from asynccache.testing.wrapped_backend import WrappedBackend
from tests.simulated.backend import SimulatedBackend
from tests.simulated.loop import SimulatedLoop, simulate
from tests.storage.page_kit import fill

FULL = LAYOUT.page_bytes["full"]
KEYS = keys_of(60)
SECOND = BLOCK_BYTES + 42 * FULL
OPTIONS = "capacity=64MiB&segment=4MiB"


async def open_at(folder: Path, options: str = OPTIONS, layout: StoreLayout = LAYOUT) -> CheckedStore:
    return CheckedStore(await FileBackend.open(parse_url(f"file:{folder}?{options}"), layout), layout)


async def read(store: CheckedStore, keys: Sequence[PageKey]) -> list[Result]:
    return await store.get(keys, [aligned(LAYOUT.page_bytes[key.pool]) for key in keys])


def segment(folder: Path) -> Path:
    return folder / f"segment-{1:016x}.kv"


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


async def test_a_good_store_stays_as_it_is(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "s")
    await fill(store, KEYS)
    await fill(store, [page_key("odd", "odd")])
    await store.delete(KEYS[3:5])
    assert await store.scrub() == Scrubbed(59, 58 * FULL + 1000, 0, 0)
    assert await read(store, KEYS) == [Result.HIT] * 3 + [Result.MISS] * 2 + [Result.HIT] * 55
    assert store.stats()["errors"] == 0
    await store.aclose()


@pytest.mark.parametrize("closed", [True, False])
async def test_a_flipped_bit_costs_its_page_for_ever(tmp_path: Path, closed: bool) -> None:
    store = await open_at(tmp_path / "s")
    await fill(store, KEYS)
    if closed:
        await store.aclose()
        store = await open_at(tmp_path / "s")
    flip(segment(tmp_path / "s"), SECOND + BLOCK_BYTES + 5 * FULL + 77)
    assert await store.scrub() == Scrubbed(60, 60 * FULL, 1, 0)
    assert store.stats()["corrupt_pages"] == 1
    expected = [Result.MISS if i == 47 else Result.HIT for i in range(60)]
    assert await read(store, KEYS) == expected
    assert await store.scrub() == Scrubbed(59, 59 * FULL, 0, 0)
    shutil.copytree(tmp_path / "s", tmp_path / "crashed")
    await store.aclose()
    for folder in ("s", "crashed"):
        store = await open_at(tmp_path / folder)
        assert await store.exists(KEYS) == expected
        await store.aclose()


@pytest.mark.parametrize("at", [0, 45, 64, 64 + 96 * 3 + 40])
async def test_a_damaged_header_block_costs_its_group(tmp_path: Path, at: int) -> None:
    store = await open_at(tmp_path / "s")
    await fill(store, KEYS)
    flip(segment(tmp_path / "s"), at)
    assert await store.scrub() == Scrubbed(60, 60 * FULL, 42, 0)
    assert await read(store, KEYS) == [Result.MISS] * 42 + [Result.HIT] * 18
    await store.aclose()


async def test_what_was_cut_off_is_dropped(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "s")
    await fill(store, KEYS)
    os.truncate(segment(tmp_path / "s"), SECOND + BLOCK_BYTES + 3 * FULL + 5)
    assert await store.scrub() == Scrubbed(60, 60 * FULL, 15, 0)
    assert await read(store, KEYS) == [Result.HIT] * 45 + [Result.MISS] * 15
    await store.aclose()


def unreadable(*_: object) -> int:
    raise OSError(5, "Input/output error")


async def all_good(keys: Sequence[PageKey], records: Sequence[object]) -> list[bool]:
    return [True] * len(keys)


async def test_what_cannot_be_read_is_counted_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_at(tmp_path / "s")
    await fill(store, KEYS)
    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", unreadable)
        assert await store.scrub() == Scrubbed(0, 0, 0, 60)
    assert store.stats()["errors"] == 2
    assert await read(store, KEYS) == [Result.HIT] * 60
    assert isinstance(store.backend, FileBackend)
    part, *_ = store.backend.parts()
    await store.clear()
    assert await store.backend.scrub(part, all_good) == Scrubbed(), "it is no error: its segment was reclaimed"
    await store.aclose()


async def test_to_be_scrubbed_is_not_to_be_wanted(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "s")
    await fill(store, KEYS)
    await store.scrub()
    assert isinstance(store.backend, FileBackend)
    assert [group.hot for group in store.backend._log.index.holders.values()] == [0, 0]
    await store.aclose()


async def test_a_page_that_was_put_again_meanwhile_is_not_the_bad_one(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "s")
    await fill(store, KEYS)
    backend = store.backend
    assert isinstance(backend, FileBackend)

    async def late(keys: Sequence[PageKey], records: Sequence[object]) -> list[bool]:
        await store.delete(KEYS[:2])
        await fill(store, KEYS[:1])
        return [False] * 3 + [True] * (len(keys) - 3)

    (part,) = (part for part in backend.parts() if part.pages == 42)
    assert await backend.scrub(part, late) == Scrubbed(42, 42 * FULL, 1, 0)
    assert await read(store, KEYS[:4]) == [Result.HIT, Result.MISS, Result.MISS, Result.HIT]
    await store.aclose()


async def test_a_scrub_whose_tasks_are_all_cancelled_waits_for_the_thread_that_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``asyncio.run`` cancels all tasks when it is interrupted; the folder must not be closed under the thread."""
    store = await open_at(tmp_path / "s")
    await fill(store, KEYS)
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
    await store.aclose()


async def test_a_store_in_use_is_scrubbed_while_segments_come_and_go(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "s", "capacity=4MiB&segment=1MiB")
    rng = Random("scrub")

    async def use() -> None:
        for batch in range(25):
            keys = [page_key(f"{batch}/{i}") for i in range(25)]
            await fill(store, keys)
            assert set(await read(store, keys)) <= {Result.HIT, Result.MISS}
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
    await store.aclose()


async def test_cancelling_it_leaves_nothing_open_and_nothing_forgotten(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "s")
    await fill(store, KEYS)
    before = len(os.listdir("/proc/self/fd"))
    for turns in range(12):
        scrubbing = asyncio.ensure_future(store.scrub())
        for _ in range(turns):
            await asyncio.sleep(0)
        scrubbing.cancel()
        await asyncio.wait([scrubbing])
        assert scrubbing.cancelled()
        assert len(os.listdir("/proc/self/fd")) == before
    assert await read(store, KEYS) == [Result.HIT] * 60
    await store.aclose()


async def test_closing_waits_for_the_part_that_is_being_read(tmp_path: Path) -> None:
    store = await open_at(tmp_path / "s")
    await fill(store, KEYS)
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
    keys = keys_of(500)
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
