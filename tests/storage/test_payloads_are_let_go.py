"""A store that was closed keeps no page that it was handed, whatever went wrong: the mapping of the page can be closed.

The garbage collector is off, so that nothing is let go by chance.
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from asynccache_backends.file import FileBackend
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache
from asynccache.errors import BackendError, ConfigError, Unavailable
from asynccache.storage import (
    CheckedStore,
    PageKey,
    Record,
    Result,
    StorageBackend,
    StoreLayout,
    StoreOptions,
    completed,
    parse_url,
)
from asynccache.storage.checked import store_layout
from asynccache.storage.tiers import AttachedStore, TieredStore
from asynccache.testing.wrapped_backend import WrappedBackend
from tests.runtime.runtime_kit import local, serve, settings, text

PAGES = 3
SMALL, LARGE = 4096, 256 << 10
"""Below and above what is checked on the spot instead of in a thread."""


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def keys() -> list[PageKey]:
    return [PageKey("full", bytes([i]) * 32) for i in range(PAGES)]


class Hostile(WrappedBackend):
    """``how`` says what becomes of gets and puts, which keep what they are handed in their frames and errors."""

    def __init__(self, inner: StorageBackend, how: str) -> None:
        super().__init__(inner)
        self.how = how
        self.inside = asyncio.Event()

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        await self._suffer(records)
        return await super().get(keys, records)

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        await self._suffer(records)
        return await super().put(keys, records)

    async def _suffer(self, records: Sequence[Record]) -> None:
        first = records[0].payload
        self.inside.set()
        if self.how == "is unavailable":
            raise Unavailable(f"no answer about {len(first)} bytes")
        if self.how == "has a bug":
            raise ValueError("a bug", first)
        if self.how == "has two":
            try:
                raise KeyError(first)
            except KeyError as error:
                raise BackendError("a bug in a bug") from error
        if self.how == "hangs":
            await asyncio.Event().wait()
        if self.how == "raises a group":
            raise ExceptionGroup("bugs", [ValueError(first), OSError(5, "bad")])
        if self.how == "raises what cannot be copied":
            raise Particular(first, code=5)


class Particular(Exception):
    """An error that is made in a way of its own, and says what it has."""

    def __init__(self, page: memoryview, *, code: int) -> None:
        super().__init__()
        self.page, self.code = page, code

    def __str__(self) -> str:
        return f"code {self.code} for {self.page.nbytes} bytes"


HOW = ["is unavailable", "has a bug", "has two", "hangs", "raises a group", "raises what cannot be copied", "works"]
Store = CheckedStore | TieredStore


def checked(backend: StorageBackend, size: int) -> CheckedStore:
    hangs = isinstance(backend, Hostile) and backend.how == "hangs"
    layout = StoreLayout({"full": size}, b"schema")
    return CheckedStore(backend, layout, timeout=0.02 if hangs else 60.0, threads=2)


def one(hostile: StorageBackend, size: int) -> Store:
    return checked(hostile, size)


def near(hostile: StorageBackend, size: int) -> Store:
    """Asked first, and given what the farther one has."""
    tiers = TieredStore()
    tiers.attach(AttachedStore(checked(hostile, size), StoreOptions("near")))
    tiers.attach(AttachedStore(checked(MemoryBackend(), size), StoreOptions("far")))
    return tiers


def far(hostile: StorageBackend, size: int) -> Store:
    tiers = TieredStore()
    tiers.attach(AttachedStore(checked(MemoryBackend(), size), StoreOptions("near")))
    tiers.attach(AttachedStore(checked(hostile, size), StoreOptions("far")))
    return tiers


def payloads(memory: mmap.mmap, size: int) -> list[memoryview]:
    return [memoryview(memory)[i * size : (i + 1) * size] for i in range(PAGES)]


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("make", [one, near, far])
@pytest.mark.parametrize("how", HOW)
async def test_a_mapping_can_be_closed_after_the_store(
    how: str, make: Callable[[StorageBackend, int], Store], size: int
) -> None:
    memory = mmap.mmap(-1, PAGES * size)
    store = make(Hostile(MemoryBackend(), how), size)
    put = await store.put(keys(), payloads(memory, size))
    got = await store.get(keys(), payloads(memory, size))
    assert (Result.HIT in put) is (how == "works" or make is not one)
    assert (Result.HIT in got) is (Result.HIT in put)
    await store.aclose()
    if isinstance(store, CheckedStore) and how != "works":
        assert isinstance(store.last_error, Exception)
        assert str(store.last_error) or how == "hangs"
    await asyncio.sleep(0)  # asyncio itself keeps a cancellation until the task that heard of it waits again
    memory.close()


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("make", [one, near, far])
@pytest.mark.parametrize("verb", ["put", "get"])
async def test_so_it_can_when_the_call_was_cancelled(
    verb: str, make: Callable[[StorageBackend, int], Store], size: int
) -> None:
    memory, hostile = mmap.mmap(-1, PAGES * size), Hostile(MemoryBackend(), "works")
    store = make(hostile, size)
    if make is far:
        await store.put(keys()[:1], payloads(memory, size)[:1])
    hostile.how = "hangs"
    hostile.inside.clear()
    call: Callable[[Sequence[PageKey], Sequence[memoryview]], Awaitable[list[Result]]] = getattr(store, verb)
    calling = asyncio.ensure_future(call(keys(), payloads(memory, size)))
    await hostile.inside.wait()
    calling.cancel()
    await asyncio.wait([calling])
    del calling, call
    await store.aclose()
    memory.close()


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("count", range(12))
async def test_so_it_can_when_the_call_was_cancelled_after_any_number_of_turns(count: int, size: int) -> None:
    memory, store = mmap.mmap(-1, PAGES * size), checked(MemoryBackend(), size)
    for call in (store.put, store.get):
        calling = asyncio.ensure_future(call(keys(), payloads(memory, size)))
        for _ in range(count):
            await asyncio.sleep(0)
        calling.cancel()
        await asyncio.wait([calling])
    del calling, call
    await store.aclose()
    memory.close()


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_so_it_can_when_the_caller_called_for_the_whole_and_had_pages_at_hand(size: int) -> None:
    """The error that ``flush`` raises has gone through the caller's own frames."""

    class Full(MemoryBackend):
        async def flush(self) -> None:
            raise Unavailable("the disk is full")

    memory, store = mmap.mmap(-1, PAGES * size), checked(Full(), size)

    async def save(mine: list[memoryview]) -> list[Result]:
        stored = await store.put(keys(), mine)
        await store.flush()
        return stored

    with pytest.raises(Unavailable):
        await save(payloads(memory, size))
    assert isinstance(store.last_error, Unavailable)
    await store.aclose()
    gc.collect()  # what pytest keeps of the error is its own
    memory.close()


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_so_it_can_after_a_store_of_files_that_cannot_be_read_any_more(tmp_path: Path, size: int) -> None:
    memory, layout = mmap.mmap(-1, PAGES * size), StoreLayout({"full": size}, b"schema")
    backend = await FileBackend.open(parse_url(f"file:{tmp_path / 'kv'}"), layout)
    store = CheckedStore(backend, layout, timeout=5.0)
    assert await store.put(keys(), payloads(memory, size)) == [Result.HIT] * PAGES
    segments = list((tmp_path / "kv").glob("segment-*.kv"))
    assert segments
    for segment in segments:
        segment.write_bytes(b"")
    assert Result.HIT not in await store.get(keys(), payloads(memory, size))
    await store.aclose()
    assert (await store.put(keys(), payloads(memory, size))) == [Result.FAILED] * PAGES
    memory.close()


async def test_so_it_can_after_pages_of_a_wrong_size_were_refused() -> None:
    memory = mmap.mmap(-1, PAGES * SMALL)
    for make in (one, near):
        store = make(MemoryBackend(), LARGE)
        with suppress(ConfigError):
            await store.put(keys(), payloads(memory, SMALL))
            pytest.fail("they were taken")
        await store.aclose()
    await asyncio.sleep(0)
    memory.close()


async def test_so_it_can_after_work_that_had_to_be_completed_failed() -> None:
    memory = mmap.mmap(-1, PAGES * SMALL)

    async def work(mine: list[memoryview]) -> None:
        await asyncio.sleep(0)
        raise ValueError(len(mine))

    with suppress(ValueError):
        await completed(work(payloads(memory, SMALL)))
    await asyncio.sleep(0)
    memory.close()


@pytest.mark.parametrize("how", ["is unavailable", "has a bug"])
async def test_a_store_that_outlives_a_cache_keeps_none_of_its_memory(how: str) -> None:
    config = settings(host=16)
    layout = store_layout(config.pools())
    store = CheckedStore(Hostile(MemoryBackend(), how), layout, timeout=60.0)
    cache = await AsyncCache(config, storage=store).__aenter__()
    host = weakref.ref(local(cache).mover.host_pools["full"].memory.obj)
    await serve(cache, text(4))
    await cache.aclose()
    assert store.last_error is not None
    del cache
    gc.collect()
    assert host() is None
    await store.aclose()
