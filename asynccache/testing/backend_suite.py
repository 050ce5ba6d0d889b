"""The conformance suite of the storage contract: tests that every backend must pass.

In a pytest module, write a subclass of ``BackendSuite`` whose name begins with ``Test``. Give it a fixture
``open_backend`` that returns a coroutine function, which opens your backend for ``LAYOUT``. Set ``persistent = True``
if an instance must find what an earlier one has stored before it was closed. The suite needs pytest and pytest-asyncio.
No test sleeps.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from hashlib import sha256
from random import Random

import pytest
import pytest_asyncio

from asynccache.errors import BackendError
from asynccache.storage import (
    HEADER_BYTES,
    RECORD_SCHEMA,
    CheckedStore,
    Hint,
    Hintable,
    Layered,
    PageKey,
    Record,
    Result,
    StorageBackend,
    StoreLayout,
)
from asynccache.testing.wrapped_backend import WrappedBackend

LAYOUT = StoreLayout({"full": 16384, "swa": 4096, "odd": 1000}, RECORD_SCHEMA)

OpenBackend = Callable[[], Awaitable[StorageBackend]]


def page_key(name: str, pool: str = "full") -> PageKey:
    """Return the key of a page by ``name``. Another name or another pool gives another key."""
    return PageKey(pool, sha256(f"{pool}/{name}".encode()).digest())


def content(key: PageKey, size: int) -> bytes:
    """Return ``size`` bytes that are made from the key, and differ from those of any other key."""
    return Random(key.key).randbytes(size)


def aligned(size: int) -> memoryview:
    """Return ``size`` bytes of memory that begins at a multiple of the system's page size."""
    return memoryview(mmap.mmap(-1, max(1, size)))[:size]


def record_of(key: PageKey, layout: StoreLayout = LAYOUT) -> Record:
    """Return a record to put. Its header and payload are made from the key."""
    size = layout.page_bytes[key.pool]
    record = blank(key, layout)
    record.header[:] = content(key, HEADER_BYTES + size)[-HEADER_BYTES:]
    record.payload[:] = content(key, size)
    return record


def blank(key: PageKey, layout: StoreLayout = LAYOUT) -> Record:
    """Return an empty record, to be filled by a get."""
    return Record(aligned(HEADER_BYTES), aligned(layout.page_bytes[key.pool]))


def same(a: Sequence[Record], b: Sequence[Record]) -> bool:
    """Return True if all headers and payloads are equal."""
    return all(x.header == y.header and x.payload == y.payload for x, y in zip(a, b, strict=True))


async def put_all(backend: StorageBackend, keys: Sequence[PageKey]) -> list[Record]:
    """Store each key's own record and check that all are stored. Returns the records."""
    records = [record_of(key) for key in keys]
    assert await backend.put(keys, records) == [Result.HIT] * len(keys)
    return records


async def get_all(backend: StorageBackend, keys: Sequence[PageKey]) -> tuple[list[Result], list[Record]]:
    """Read the keys into new records. Returns the results and the records."""
    records = [blank(key) for key in keys]
    return await backend.get(keys, records), records


def keys_of(count: int, pool: str = "full") -> list[PageKey]:
    """Return ``count`` different keys."""
    return [page_key(str(i), pool) for i in range(count)]


class BackendSuite:
    """The tests. Override the fixture ``open_backend``, which returns a coroutine function that opens your backend for
    ``LAYOUT``, and set ``persistent`` if what is stored outlives the instance."""

    persistent = False

    @pytest.fixture
    def open_backend(self) -> OpenBackend:
        """The function that opens the backend under test. Called again after ``aclose`` it must open the same store."""
        raise NotImplementedError("override the fixture open_backend")

    @pytest_asyncio.fixture
    async def backend(self, open_backend: OpenBackend) -> AsyncIterator[StorageBackend]:
        """The backend under test, which is closed after the test."""
        backend = await open_backend()
        yield backend
        await backend.aclose()

    @pytest.mark.asyncio
    async def test_an_empty_store_misses(self, backend: StorageBackend) -> None:
        keys = keys_of(3)
        assert await backend.exists(keys) == [Result.MISS] * 3
        assert (await get_all(backend, keys))[0] == [Result.MISS] * 3
        assert await backend.delete(keys) == [Result.MISS] * 3

    @pytest.mark.asyncio
    async def test_empty_calls_answer_nothing(self, backend: StorageBackend) -> None:
        assert await backend.exists([]) == await backend.get([], []) == await backend.put([], []) == []
        assert await backend.delete([]) == []

    @pytest.mark.asyncio
    @pytest.mark.parametrize("pool", sorted(LAYOUT.page_bytes))
    async def test_what_was_put_comes_back(self, backend: StorageBackend, pool: str) -> None:
        keys = keys_of(7, pool)
        stored = await put_all(backend, keys)
        assert await backend.exists(keys) == [Result.HIT] * 7
        results, fetched = await get_all(backend, keys)
        assert results == [Result.HIT] * 7
        assert same(stored, fetched)

    @pytest.mark.asyncio
    async def test_answers_are_in_the_order_of_the_keys(self, backend: StorageBackend) -> None:
        keys = [page_key(str(i), ("full", "swa", "odd")[i % 3]) for i in range(30)]
        stored = await put_all(backend, keys[::2])
        shuffled = Random(5).sample(range(30), 30)
        results, fetched = await get_all(backend, [keys[i] for i in shuffled])
        assert results == [Result.MISS if i % 2 else Result.HIT for i in shuffled]
        for i, record in zip(shuffled, fetched, strict=True):
            assert i % 2 or same([stored[i // 2]], [record])

    @pytest.mark.asyncio
    async def test_many_pages_in_one_call(self, backend: StorageBackend) -> None:
        keys = keys_of(300, "swa")
        stored = await put_all(backend, keys)
        results, fetched = await get_all(backend, keys[::-1])
        assert results == [Result.HIT] * 300
        assert same(stored[::-1], fetched)

    @pytest.mark.asyncio
    async def test_a_key_that_exists_keeps_its_record(self, backend: StorageBackend) -> None:
        key = page_key("kept")
        stored = await put_all(backend, [key])
        other = record_of(page_key("other"))
        assert await backend.put([key], [other]) == [Result.HIT]
        assert same(stored, (await get_all(backend, [key]))[1])

    @pytest.mark.asyncio
    async def test_a_key_twice_in_one_put(self, backend: StorageBackend) -> None:
        key = page_key("twice")
        stored = await put_all(backend, [key, key])
        assert same(stored[:1], (await get_all(backend, [key]))[1])

    @pytest.mark.asyncio
    async def test_puts_of_one_key_at_the_same_time(self, backend: StorageBackend) -> None:
        keys = keys_of(5)
        records = await asyncio.gather(*(put_all(backend, keys) for _ in range(4)))
        results, fetched = await get_all(backend, keys)
        assert results == [Result.HIT] * 5
        assert same(records[0], fetched)

    @pytest.mark.asyncio
    async def test_calls_at_the_same_time_do_not_mix(self, backend: StorageBackend) -> None:
        async def use(i: int) -> None:
            keys = [page_key(f"{i}/{j}", ("full", "odd")[i % 2]) for j in range(5)]
            stored = await put_all(backend, keys)
            results, fetched = await get_all(backend, keys)
            assert results == [Result.HIT] * 5
            assert same(stored, fetched)

        await asyncio.gather(*(use(i) for i in range(20)))

    @pytest.mark.asyncio
    async def test_deleted_keys_miss_and_can_be_put_again(self, backend: StorageBackend) -> None:
        keys = keys_of(6)
        await put_all(backend, keys)
        assert await backend.delete([keys[1], keys[4], page_key("never")]) == [Result.HIT, Result.HIT, Result.MISS]
        assert await backend.exists(keys) == [Result.MISS if i in (1, 4) else Result.HIT for i in range(6)]
        assert (await get_all(backend, keys[1:2]))[0] == [Result.MISS]
        other = record_of(page_key("other"))
        assert await backend.put(keys[1:2], [other]) == [Result.HIT]
        assert same([other], (await get_all(backend, keys[1:2]))[1])

    @pytest.mark.asyncio
    async def test_clear_forgets_everything(self, backend: StorageBackend) -> None:
        keys = keys_of(6)
        await put_all(backend, keys)
        await backend.clear()
        assert await backend.exists(keys) == [Result.MISS] * 6
        await put_all(backend, keys[:2])
        assert await backend.exists(keys) == [Result.HIT] * 2 + [Result.MISS] * 4

    @pytest.mark.asyncio
    async def test_a_record_of_another_length_is_no_hit(self, backend: StorageBackend) -> None:
        key = page_key("long")
        await put_all(backend, [key])
        small = Record(aligned(HEADER_BYTES), aligned(4096))
        assert await backend.get([key], [small]) == [Result.CORRUPT]

    @pytest.mark.asyncio
    async def test_buffers_at_odd_addresses(self, backend: StorageBackend) -> None:
        keys, memory = keys_of(4), aligned(9 * 16384)
        places = [memory[i * 16384 + 13 : (i + 1) * 16384 + 13] for i in range(8)]
        put = [Record(record_of(key).header, place) for key, place in zip(keys, places, strict=False)]
        for key, record in zip(keys, put, strict=True):
            record.payload[:] = content(key, 16384)
        assert await backend.put(keys, put) == [Result.HIT] * 4
        fetched = [Record(aligned(HEADER_BYTES), place) for place in places[4:]]
        assert await backend.get(keys, fetched) == [Result.HIT] * 4
        assert same(put, fetched)

    @pytest.mark.asyncio
    async def test_no_byte_beside_a_buffer_is_touched(self, backend: StorageBackend) -> None:
        keys, memory = keys_of(3, "odd"), aligned(8000)
        await put_all(backend, keys)
        fetched = [Record(aligned(HEADER_BYTES), memory[at : at + 1000]) for at in (500, 2500, 4500)]
        assert await backend.get(keys, fetched) == [Result.HIT] * 3
        gaps = (memory[:500], memory[1500:2500], memory[3500:4500], memory[5500:])
        assert not any(any(gap) for gap in gaps)

    @pytest.mark.asyncio
    async def test_a_cancelled_get_has_let_go(self, backend: StorageBackend) -> None:
        keys = keys_of(40)
        await put_all(backend, keys)
        for turns in range(4):
            records = [blank(key) for key in keys]
            await _cancel_after(backend.get(keys, records), turns)
            for record in records:
                record.payload[:] = bytes(record.payload.nbytes)
            assert (await get_all(backend, keys))[0] == [Result.HIT] * 40
            assert not any(any(record.payload) for record in records)

    @pytest.mark.asyncio
    async def test_a_cancelled_put_has_let_go(self, backend: StorageBackend) -> None:
        for turns in range(4):
            keys = [page_key(f"{turns}/{i}") for i in range(40)]
            records = [record_of(key) for key in keys]
            await _cancel_after(backend.put(keys, records), turns)
            for record in records:
                record.payload[:] = bytes(record.payload.nbytes)
            results, fetched = await get_all(backend, keys)
            assert set(results) <= {Result.HIT, Result.MISS}
            for key, result, record in zip(keys, results, fetched, strict=True):
                assert result is Result.MISS or same([record], [record_of(key)])

    @pytest.mark.asyncio
    async def test_stats_count_pages_and_bytes(self, backend: StorageBackend) -> None:
        before = backend.stats()
        assert (before["pages"], before["bytes"], before["errors"]) == (0, 0, 0)
        await put_all(backend, keys_of(5))
        after = backend.stats()
        assert after["pages"] == 5
        assert after["bytes"] >= 5 * LAYOUT.page_bytes["full"]

    @pytest.mark.asyncio
    async def test_a_closed_backend_says_so(self, open_backend: OpenBackend) -> None:
        backend = await open_backend()
        await put_all(backend, keys_of(1))
        await backend.flush()
        await backend.aclose()
        await backend.aclose()
        with pytest.raises(BackendError):
            await backend.exists(keys_of(1))
        with pytest.raises(BackendError):
            await get_all(backend, keys_of(1))
        with pytest.raises(BackendError):
            await backend.put(keys_of(1), [record_of(page_key("0"))])

    @pytest.mark.asyncio
    async def test_a_new_instance_finds_the_pages(self, open_backend: OpenBackend) -> None:
        backend = await open_backend()
        keys = [page_key(str(i), ("full", "swa", "odd")[i % 3]) for i in range(30)]
        stored = await put_all(backend, keys)
        await backend.delete(keys[:3])
        await backend.aclose()
        backend = await open_backend()
        results, fetched = await get_all(backend, keys)
        await backend.aclose()
        if self.persistent:
            assert results == [Result.MISS] * 3 + [Result.HIT] * 27
            assert same(stored[3:], fetched[3:])
        else:
            assert results == [Result.MISS] * 30

    @pytest.mark.asyncio
    async def test_through_a_checked_store(self, open_backend: OpenBackend) -> None:
        store = CheckedStore(await open_backend(), LAYOUT)
        keys = keys_of(50)
        pages = [record_of(key).payload for key in keys]
        assert await store.put(keys, pages) == [Result.HIT] * 50
        fetched = [blank(key).payload for key in keys]
        assert await store.get(keys, fetched) == [Result.HIT] * 50
        assert fetched == pages
        await store.aclose()

    @pytest.mark.asyncio
    async def test_hints_change_no_page(self, open_backend: OpenBackend) -> None:
        store = CheckedStore(await open_backend(), LAYOUT)
        keys, heard = keys_of(20), isinstance(store.backend, Hintable)
        pages = [record_of(key).payload for key in keys]
        await store.put(keys[:10], pages[:10])
        for verb in Hint:
            answers = await store.hint(verb, keys, 60.0)
            assert len(answers) == 20
            assert answers[10:] == [Result.MISS] * 10
            assert heard or answers == [Result.MISS] * 20
        fetched = [blank(key).payload for key in keys]
        assert await store.get(keys, fetched) == [Result.HIT] * 10 + [Result.MISS] * 10
        assert fetched[:10] == pages[:10]
        assert store.stats()["unheard_hints"] == (0 if heard else len(Hint))
        await store.aclose()

    @pytest.mark.asyncio
    async def test_a_flipped_bit_is_never_served(self, open_backend: OpenBackend) -> None:
        store = CheckedStore(FlipsOneBit(await open_backend(), victim=3), LAYOUT)
        keys = keys_of(8)
        await store.put(keys, [record_of(key).payload for key in keys])
        fetched = [blank(key).payload for key in keys]
        expected = [Result.CORRUPT if i == 3 else Result.HIT for i in range(8)]
        assert await store.get(keys, fetched) == expected
        if not isinstance(store.backend, Layered):  # which may have a good copy in another place
            assert (await store.exists(keys))[3] is Result.MISS
        assert store.stats()["corrupt_pages"] == 1
        await store.aclose()


class FlipsOneBit(WrappedBackend):
    """A backend that flips a bit of the record at index ``victim`` in every get, and answers as ``inner``."""

    def __init__(self, inner: StorageBackend, victim: int) -> None:
        super().__init__(inner)
        self._victim = victim

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """The same as ``inner.get``, except for one bit."""
        results = await self.inner.get(keys, records)
        records[self._victim].payload[77] ^= 4
        return results


async def _cancel_after(call: Awaitable[object], turns: int) -> None:
    """Run ``call`` as a task, cancel it after ``turns`` turns of the event loop, and wait until it has ended."""
    task = asyncio.ensure_future(call)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() or task.exception() is None
