"""Nobody keeps a page of memory that a call, or a store, was handed: the mapping can be closed."""

from __future__ import annotations

import asyncio
import gc
import mmap
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache
from asynccache.errors import ConfigError, Unavailable
from asynccache.storage import (
    CheckedStore,
    PageKey,
    Pages,
    Record,
    Result,
    StorageBackend,
    StoreLayout,
    StoreOptions,
    completed,
)
from asynccache.storage.checked import store_layout
from asynccache.storage.loop_thread import PendingCall, Rows
from asynccache.storage.tiers import AttachedStore, TieredStore
from tests.runtime.runtime_kit import local, serve, settings, text
from tests.storage.pages_kit import (
    FAILED,
    HIT,
    MISS,
    PATIENCE,
    SIZE,
    Misbehaving,
    keys,
    memory,
    open_pages,
    result,
    thread_names,
    until,
)
from tests.waiting import until as until_it_is_so

# When a future is done nobody has any of its memory, whatever became of the call: the mapping can be closed.
#
# The garbage collector is off, so that nothing is let go by chance. ``mmap.close`` raises while anybody has a view
# of it.


SIZES = [SIZE, LARGE := 256 << 10]                     # below and above what is checked on the spot
WHERE = ["alone", "near", "far"]
HOW = ["works", "has two", "answers too little", "hangs"]


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def stores(which: str, hostile: StorageBackend) -> list[str | StorageBackend]:
    """The hostile one alone, before another, or after it."""
    found: dict[str, list[str | StorageBackend]] = {
        "alone": [hostile], "near": [hostile, "memory:"], "far": ["memory:", hostile],
    }
    return found[which]


@pytest.mark.parametrize("verb", ["put", "get"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("which", WHERE)
@pytest.mark.parametrize("how", HOW)
def test_a_mapping_can_be_closed_when_the_future_is_done(how: str, which: str, size: int, verb: str) -> None:
    made, hostile = memory(size), Misbehaving(**{verb: how})
    with open_pages(stores(which, hostile), made, size) as pages:
        future = getattr(pages, verb)(keys(4), range(4), timeout=0.05 if how == "hangs" else None)
        found = result(future)
        made.close()
        assert len(found) == 4
        assert hostile.began
        errors = pages.last_errors  # are kept, and keep nothing
        assert bool(errors) is (how not in ("works", "hangs"))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("url", ["memory:", "file:{}/kv", "file:{}/kv?direct=off"])
@pytest.mark.slow(1)
def test_so_it_can_again_and_again_with_the_stores_there_are(url: str, size: int, tmp_path: Path) -> None:
    """A thread of a store's may still be about to drop its last reference when the loop hears that it is done."""
    with open_pages(url.format(tmp_path), kept := memory(size), size) as pages:
        other = pages._pools["pages"].rows
        for number in range(60):
            made = memory(size)
            other._memory = made
            assert result(pages.put(keys(8, str(number)), range(8))) == [HIT] * 8
            made.close()
            made = other._memory = mmap.mmap(-1, 8 * size)
            assert result(pages.get(keys(8, str(number)), range(8))) == [HIT] * 8
            made.close()
    kept.close()


def test_so_it_can_when_the_call_was_cancelled_before_it_began() -> None:
    made, stuck = memory(), Misbehaving()
    with open_pages(stuck, made) as pages:
        cancelled = []

        def hold() -> None:  # on the loop: nothing is taken up meanwhile
            future = pages.get(keys(4), range(4))
            assert future.cancel()
            cancelled.append(future)
            made.close()

        pages._serving.ask(hold)
        with pytest.raises(CancelledError):
            cancelled[0].result(PATIENCE)
        assert result(pages.exists([])) == []
        assert stuck.began == []


def test_a_store_that_cannot_let_go_keeps_the_future_open_and_the_mapping() -> None:
    """Until the memory is free nobody is told that it is: neither by the deadline of the call nor by ``close``."""
    made, store = memory(), Misbehaving(get="is stuck")
    pages = open_pages(store, made)
    future = pages.get(keys(2), [0, 1], timeout=0.01)
    store.inside.wait(PATIENCE)
    until(lambda: pages.stats()["late_calls"] == 1)
    assert not future.done()
    assert pages._serving.close(0, 0.05) is False
    assert pages._serving.held() == 2
    assert not future.done()
    with pytest.raises(BufferError):
        made.close()
    assert store.closed == 0
    store.gate.set()
    assert result(future) == [FAILED] * 2
    made.close()
    assert pages.close() == (2, 0, True)


class Keeping(MemoryBackend):
    """Does more than it may with what it is to read into."""

    def __init__(self, keep: Callable[[Sequence[Record]], object]) -> None:
        super().__init__()
        self.keep = keep

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        self.keep(records)
        return await super().get(keys, records)


def test_what_a_store_keeps_against_its_contract_is_of_no_use_to_it() -> None:
    kept: list[Record] = []
    made = memory()
    with open_pages(Keeping(kept.extend), made) as pages:
        assert result(pages.get(keys(2), [0, 1])) == [MISS] * 2
        made.close()
        assert pages.stats()["kept_pages"] == 0
    with pytest.raises(ValueError, match="released"):
        kept[0].payload[0] = 1


@pytest.mark.parametrize("how", ["an array", "a slice"])
def test_what_a_store_has_made_something_of_and_keeps_is_counted(how: str) -> None:
    kept: list[object] = []

    def keep(records: Sequence[Record]) -> None:
        page = records[1].payload
        kept.append(np.frombuffer(page, np.uint8) if how == "an array" else page[10:20])

    made = memory()
    with open_pages(Keeping(keep), made) as pages:
        assert result(pages.get(keys(3), [0, 1, 2])) == [MISS] * 3
        assert pages.stats()["kept_pages"] == 3
    kept.clear()
    made.close()


def test_a_future_is_not_done_before_a_thread_of_the_store_has_dropped_what_it_had() -> None:
    """By its contract a store has let go when it answers, but for what its threads are about to forget."""
    held: list[object] = []

    def keep(records: Sequence[Record]) -> None:
        held.append(np.frombuffer(records[0].payload, np.uint8))
        asyncio.get_running_loop().call_later(0.005, held.clear)

    made = memory()
    with open_pages(Keeping(keep), made) as pages:
        assert result(pages.get(keys(1), [0])) == [MISS]
        made.close()
        assert pages.stats()["kept_pages"] == 0


def test_a_memoryview_that_was_given_can_be_released_while_the_stores_are_open() -> None:
    made = memory()
    given = memoryview(made)
    with open_pages("memory:", given) as pages:  # type: ignore[arg-type]
        assert result(pages.put(keys(1), [0])) == [HIT]
        given.release()
        made.close()
        future = pages.get(keys(1), [0])
        with pytest.raises(ConfigError, match="memory of pool 'pages' is a memoryview without bytes to use"):
            future.result(PATIENCE)


def test_memory_of_another_size_than_it_had_is_refused() -> None:
    given = bytearray(8 * SIZE)
    with Pages.open("memory:", given, SIZE, "m") as pages:
        assert result(pages.put(keys(1), [0])) == [HIT]
        del given[SIZE:]
        with pytest.raises(ConfigError, match=f"has {SIZE} bytes now and had {8 * SIZE}"):
            pages.get(keys(1), [7]).result(PATIENCE)


@pytest.mark.parametrize("url", ["file:{}/kv?capacity=nonsense", "file:{}/file", "nothing:", "memory:?write=maybe"])
def test_an_error_of_open_keeps_no_memory_and_leaves_nothing(url: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    made, before = memory(), thread_names()
    try:
        Pages.open(["memory:?name=m", url.format(tmp_path)], memoryview(made), SIZE, "m")
        pytest.fail("it was opened")
    except (ConfigError, Unavailable) as error:
        kept = error
        made.close()
    assert kept.__traceback__ is not None  # with this frame, and what it has
    assert thread_names() == before
    assert not list(tmp_path.glob("kv/*"))


def test_a_store_that_was_opened_is_closed_if_the_next_one_cannot_be(tmp_path: Path) -> None:
    """The folder's lock is free again, and no thread is left."""
    made, before = memory(), thread_names()
    (tmp_path / "file").write_text("no folder")
    for _ in range(2):
        with pytest.raises(Unavailable):
            open_pages([f"file:{tmp_path}/kv?name=one", f"file:{tmp_path}/file?name=two"], made)
    assert thread_names() == before
    open_pages(f"file:{tmp_path}/kv", made).close()


def test_a_store_that_refuses_the_memory_leaves_nothing_either() -> None:
    class Refusing(MemoryBackend):
        def register(self, pool: str, memory: memoryview) -> None:
            if not pool.startswith("#"):
                raise Unavailable(f"{pool}: no more regions")

    made, before, first = memory(), thread_names(), Misbehaving()
    try:
        Pages.open([first, Refusing()], memoryview(made), SIZE, "m")
        pytest.fail("it was opened")
    except Unavailable as error:
        kept = error
        made.close()
    assert str(kept) == "pages: no more regions"
    assert thread_names() == before
    assert first.closed == 0  # its owner's


def test_a_call_of_thousands_of_pages_is_one_short_line_in_a_log() -> None:
    """A loop in debug mode prints the arguments of callbacks that are slow."""
    call = PendingCall("get", [PageKey("full", bytes(32))] * 5000, Rows("full", bytearray(64), 64), [0] * 5000, None)
    assert repr(call) == "PendingCall(get, 5000 pages of 'full')"


# A store that was closed keeps no page that it was handed, whatever went wrong: the mapping of the page can be closed.
#
# The garbage collector is off, so that nothing is let go by chance.


PAGES = 3
def page_keys() -> list[PageKey]:
    return [PageKey("full", bytes([i]) * 32) for i in range(PAGES)]


WAYS = ["is unavailable", "has a bug", "has two", "hangs", "raises a group", "raises what cannot be copied", "works"]
Store = CheckedStore | TieredStore


def checked(backend: StorageBackend, size: int) -> CheckedStore:
    hangs = isinstance(backend, Misbehaving) and "hangs" in backend.how.values()
    layout = StoreLayout({"full": size}, b"schema")
    return CheckedStore(backend, layout, timeout=0.02 if hangs else 60.0, threads=2)


def opened(which: str, hostile: StorageBackend, size: int) -> Store:
    """Near it is asked first, and given what the farther one has."""
    if which == "alone":
        return checked(hostile, size)
    tiers = TieredStore()
    for name in ("near", "far"):
        tiers.attach(AttachedStore(checked(hostile if name == which else MemoryBackend(), size), StoreOptions(name)))
    return tiers


def payloads(memory: mmap.mmap, size: int) -> list[memoryview]:
    return [memoryview(memory)[i * size : (i + 1) * size] for i in range(PAGES)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("which", WHERE)
@pytest.mark.parametrize("how", WAYS)
async def test_a_mapping_can_be_closed_after_the_store(how: str, which: str, size: int) -> None:
    memory = mmap.mmap(-1, PAGES * size)
    store = opened(which, Misbehaving(get=how, put=how), size)
    put = await store.put(page_keys(), payloads(memory, size))
    got = await store.get(page_keys(), payloads(memory, size))
    assert (Result.HIT in put) is (how == "works" or which != "alone")
    assert (Result.HIT in got) is (Result.HIT in put)
    await store.aclose()
    if isinstance(store, CheckedStore) and how != "works":
        assert isinstance(store.last_error, Exception)
        assert str(store.last_error) or how == "hangs"
    await asyncio.sleep(0)  # asyncio itself keeps a cancellation until the task that heard of it waits again
    memory.close()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("which", WHERE)
@pytest.mark.parametrize("verb", ["put", "get"])
async def test_so_it_can_when_the_call_was_cancelled(verb: str, which: str, size: int) -> None:
    memory, hostile = mmap.mmap(-1, PAGES * size), Misbehaving()
    store = opened(which, hostile, size)
    if which == "far":
        await store.put(page_keys()[:1], payloads(memory, size)[:1])
    hostile.how = {"get": "hangs", "put": "hangs"}
    hostile.inside.clear()
    call: Callable[[Sequence[PageKey], Sequence[memoryview]], Awaitable[list[Result]]] = getattr(store, verb)
    calling = asyncio.ensure_future(call(page_keys(), payloads(memory, size)))
    await until_it_is_so(hostile.inside.is_set)
    calling.cancel()
    await asyncio.wait([calling])
    del calling, call
    await store.aclose()
    memory.close()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", range(12))
async def test_so_it_can_when_the_call_was_cancelled_after_any_number_of_turns(count: int, size: int) -> None:
    memory, store = mmap.mmap(-1, PAGES * size), checked(MemoryBackend(), size)
    for call in (store.put, store.get):
        calling = asyncio.ensure_future(call(page_keys(), payloads(memory, size)))
        for _ in range(count):
            await asyncio.sleep(0)
        calling.cancel()
        await asyncio.wait([calling])
    del calling, call
    await store.aclose()
    memory.close()


@pytest.mark.parametrize("size", SIZES)
async def test_so_it_can_when_the_caller_called_for_the_whole_and_had_pages_at_hand(size: int) -> None:
    """The error that ``flush`` raises has gone through the caller's own frames."""

    memory, store = mmap.mmap(-1, PAGES * size), checked(Misbehaving(flush="is unavailable"), size)

    async def save(mine: list[memoryview]) -> list[Result]:
        stored = await store.put(page_keys(), mine)
        await store.flush()
        return stored

    with pytest.raises(Unavailable):
        await save(payloads(memory, size))
    assert isinstance(store.last_error, Unavailable)
    await store.aclose()
    gc.collect()  # what pytest keeps of the error is its own
    memory.close()


async def test_so_it_can_after_work_that_had_to_be_completed_failed() -> None:
    memory = mmap.mmap(-1, PAGES * SIZE)

    async def work(mine: list[memoryview]) -> None:
        await asyncio.sleep(0)
        raise ValueError(len(mine))

    with suppress(ValueError):
        await completed(work(payloads(memory, SIZE)))
    await asyncio.sleep(0)
    memory.close()


@pytest.mark.parametrize("how", ["is unavailable", "has a bug"])
async def test_a_store_that_outlives_a_cache_keeps_none_of_its_memory(how: str) -> None:
    config = settings(host=16)
    layout = store_layout(config.pools())
    store = CheckedStore(Misbehaving(get=how, put=how), layout, timeout=60.0)
    cache = await AsyncCache(config, storage=store).__aenter__()
    host = weakref.ref(local(cache).mover.host_pools["full"].memory.obj)
    await serve(cache, text(4))
    await cache.aclose()
    assert store.last_error is not None
    del cache
    gc.collect()
    assert host() is None
    await store.aclose()
