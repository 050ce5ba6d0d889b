"""Stores behind a host process: written behind, read through, hanging, failing, corrupt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from asynccache_backends.host import HostBackend
from asynccache_backends.memory import MemoryBackend

from asynccache.errors import BackendError, Unavailable
from asynccache.host import behind as behind_module
from asynccache.host.server import HostServer
from asynccache.storage import PageKey, Result
from asynccache.testing.backend_suite import get_all, keys_of, page_key, put_all, record_of, same
from asynccache.testing.wrapped_backend import WrappedBackend
from tests.host.host_kit import client, heir, opened, served, serving, socket_path
from tests.waiting import turns, until

MISS, HIT, CORRUPT, FAILED = Result


def folder(path: Path) -> str:
    return f"file:{path}/kv?capacity=64MiB"


def store_of(server: HostServer, at: int = 0) -> Any:
    assert server.behind is not None
    return server.behind.stores[at]


async def written(server: HostServer) -> None:
    assert server.behind is not None
    assert await server.behind.flush() == ""


class Gate(WrappedBackend):
    """A backend whose calls of some verbs hang while ``shut`` has them, or raise while ``down`` is true. While
    ``after`` is true a read hangs when it has read."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.shut: set[str] = set()
        self.down = self.after = False
        self.opened = asyncio.Event()
        self.asked: list[str] = []
        for verb in ("exists", "get", "put", "delete", "clear"):
            setattr(self, verb, partial(self._through, verb))

    async def _through(self, verb: str, *given: Any) -> Any:
        self.asked.append(verb)
        if self.down:
            raise Unavailable("down")
        while verb in self.shut:
            self.opened.clear()
            await self.opened.wait()
        found = await getattr(self.inner, verb)(*given)
        while verb == "get" and self.after:
            self.asked.append("read")
            self.opened.clear()
            await self.opened.wait()
        return found

    def open_all(self) -> None:
        self.shut.clear()
        self.opened.set()


@asynccontextmanager
async def gated(
    folders: Path, stored: Sequence[PageKey] = (), **more: Any
) -> AsyncIterator[tuple[HostServer, Gate, HostBackend]]:
    """A server with a gate before its store, and a client. ``stored``: pages that only the store has."""
    async with served(stores=[folder(folders)], **more) as (server, backend):
        store = store_of(server)
        gate = store.backend = Gate(store.backend)
        await put_all(backend, stored)
        await written(server)
        server.table.clear()
        gate.asked.clear()
        yield server, gate, backend
        gate.open_all()
        gate.down = False


async def test_what_was_stored_survives_the_server_on_disk(tmp_path: Path) -> None:
    path = socket_path()
    keys = [page_key(str(i), ("full", "swa", "odd")[i % 3]) for i in range(90)]  # sizes that the server was not told of
    async with serving(path, stores=[folder(tmp_path)]) as server:
        backend = await client(path)
        stored = await put_all(backend, keys)
        await backend.flush()
        assert server.counts()["file.written"] == 90
        await backend.aclose()
    async with serving(path, stores=[folder(tmp_path)]) as server:
        backend = await client(path)
        assert backend.stats()["pages"] == 0
        assert await backend.exists(keys) == [HIT] * 90
        results, fetched = await get_all(backend, keys)
        assert results == [HIT] * 90
        assert same(stored, fetched)
        assert backend.stats()["pages"] == 90, "they are in the memory now"
        store_of(server).counts.clear()
        assert (await get_all(backend, keys))[0] == [HIT] * 90
        assert store_of(server).counts["read"] == 0
        server.table.audit()
        await backend.aclose()


async def test_several_stores_are_written_and_the_nearest_that_has_a_page_is_read(tmp_path: Path) -> None:
    keys = keys_of(12)
    urls = ["memory:?name=near", folder(tmp_path) + "&name=far"]
    async with served(stores=urls) as (server, backend):
        stored = await put_all(backend, keys)
        await written(server)
        near, far = store_of(server), store_of(server, 1)
        assert near.counts["written"] == far.counts["written"] == 12
        await near.backend.delete(keys[6:])
        server.table.clear()
        results, fetched = await get_all(backend, keys)
        assert results == [HIT] * 12
        assert same(stored, fetched)
        assert (near.counts["read"], far.counts["read"]) == (6, 6)


async def test_a_store_that_hangs_harms_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind_module, "LATE", 0.5)
    keys = keys_of(20)
    async with gated(tmp_path) as (server, gate, backend):
        gate.shut = {"put", "get", "exists"}
        stored = await put_all(backend, keys)
        began = time.monotonic()
        assert await backend.exists([*keys, page_key("none")]) == [HIT] * 20 + [FAILED]
        assert time.monotonic() - began < 2.0
        await until(lambda: bool(store_of(server).late))
        for _ in range(5):  # it is late now, so nobody waits
            began = time.monotonic()
            results, _ = await get_all(backend, [*keys, page_key("none")])
            assert results == [HIT] * 20 + [FAILED]
            assert time.monotonic() - began < 0.45
        more = [PageKey("full", bytes([n, 1]) * 16) for n in range(200)]
        for at in range(0, 200, 50):
            await put_all(backend, more[at : at + 50])
        gate.open_all()
        await until(lambda: server.behind is not None and not store_of(server).late)
        assert await backend.exists([page_key("none")]) == [MISS]
        await written(server)
        server.table.clear()
        results, fetched = await get_all(backend, keys)
        assert results == [HIT] * 20
        assert same(stored, fetched)
        server.table.audit()


async def test_a_read_that_comes_late_is_in_the_memory_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(behind_module, "LATE", 0.1)
    keys = keys_of(5)
    async with gated(tmp_path, keys) as (server, gate, backend):
        gate.shut = {"get"}
        assert (await get_all(backend, keys))[0] == [FAILED] * 5
        gate.open_all()
        await until(lambda: len(server.table.index) == 5)
        gate.asked.clear()
        assert (await get_all(backend, keys))[0] == [HIT] * 5
        assert "get" not in gate.asked


async def test_a_store_that_is_down_loses_writes_and_nothing_else_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of(10)
    async with gated(tmp_path) as (server, gate, backend):
        gate.down = True
        await put_all(backend, keys)
        assert (await get_all(backend, keys))[0] == [HIT] * 10
        await until(lambda: store_of(server).counts["dropped"] == 10)
        assert [line for line in caplog.messages if "does not take all pages" in line] == [
            "store 'file' does not take all pages; memory goes on"]
        assert set(await backend.exists(keys_of(3, "swa"))) == {FAILED}


async def test_two_reads_of_one_page_are_one(tmp_path: Path) -> None:
    keys = keys_of(8)
    async with gated(tmp_path, keys) as (server, gate, one):
        two = await client(server.path)
        answers = await asyncio.gather(*(get_all(one if n % 2 else two, keys) for n in range(6)))
        assert [results for results, _ in answers] == [[HIT] * 8] * 6
        assert gate.asked.count("get") == 1
        await two.aclose()


async def test_what_is_deleted_while_it_is_read_or_written_stays_deleted(tmp_path: Path) -> None:
    keys = keys_of(6)
    async with gated(tmp_path) as (server, gate, backend):
        gate.shut = {"put"}
        await put_all(backend, keys)
        await until(lambda: "put" in gate.asked)
        deleting = asyncio.create_task(backend.delete(keys[:3]))
        await asyncio.sleep(0.05)
        gate.open_all()
        await deleting
        await written(server)
        server.table.clear()
        assert await backend.exists(keys) == [MISS] * 3 + [HIT] * 3
        gate.shut = {"get"}
        reading = asyncio.create_task(get_all(backend, keys[3:]))
        await until(lambda: "get" in gate.asked)
        await backend.clear()
        gate.open_all()
        assert HIT not in (await reading)[0]
        assert await backend.exists(keys) == [MISS] * 6
        server.table.audit()


async def test_a_scribbled_page_is_corrupt_once_and_comes_back_from_the_disk(tmp_path: Path) -> None:
    path, keys = socket_path(), keys_of(20)
    async with serving(path, stores=[folder(tmp_path)]) as server, opened(path) as store:
        pages = [record_of(key).payload for key in keys]
        assert await store.put(keys, pages) == [HIT] * 20
        await written(server)
        at = server.memory.layout.payloads_at
        server.memory.view[at:] = b"\xa5" * (server.memory.layout.size - at)
        fetched = [bytearray(16384) for _ in keys]
        assert await store.get(keys, [memoryview(one) for one in fetched]) == [CORRUPT] * 20
        assert await store.get(keys, [memoryview(one) for one in fetched]) == [HIT] * 20
        assert fetched == pages


async def test_a_page_that_is_bad_on_disk_is_deleted_there_and_can_be_stored_again(tmp_path: Path) -> None:
    path, keys = socket_path(), keys_of(5)
    async with serving(path, stores=["memory:"]) as server, opened(path) as store:
        pages = [record_of(key).payload for key in keys]
        assert await store.put(keys, pages) == [HIT] * 5
        await written(server)
        raw = store_of(server).backend
        for data in raw._stored.values():
            data[-1] ^= 1
        server.table.clear()
        fetched = [memoryview(bytearray(16384)) for _ in keys]
        assert await store.get(keys, fetched) == [CORRUPT] * 5
        assert HIT not in await store.get(keys, fetched)
        await until(lambda: len(raw._stored) == 0)
        assert await store.put(keys, pages) == [HIT] * 5
        await written(server)
        server.table.clear()
        assert await store.get(keys, fetched) == [HIT] * 5
        assert fetched == pages


async def test_a_report_of_damage_about_another_generation_changes_nothing() -> None:
    keys = keys_of(2)
    async with served() as (_, backend):
        await put_all(backend, keys)
        await get_all(backend, keys)
        await backend.delete(keys)
        stored = await put_all(backend, keys)
        assert await backend.damaged(keys) == [MISS] * 2
        assert same(stored, (await get_all(backend, keys))[1])
        assert await backend.damaged(keys) == [HIT] * 2
        assert await backend.exists(keys) == [MISS] * 2


@pytest.mark.parametrize("verb", ["delete", "clear"])
async def test_a_page_that_is_read_while_it_is_deleted_is_gone_afterwards(tmp_path: Path, verb: str) -> None:
    keys = keys_of(3)
    async with gated(tmp_path, keys) as (server, gate, backend):
        gate.shut = {verb}
        deleting = asyncio.create_task(backend.delete(keys) if verb == "delete" else backend.clear())
        await until(lambda: verb in gate.asked)
        assert (await get_all(backend, keys))[0] == [HIT] * 3, "it is not deleted yet"
        gate.open_all()
        await deleting
        assert (await get_all(backend, keys))[0] == [MISS] * 3
        server.table.audit()


async def test_a_read_that_ends_after_its_page_was_deleted_is_not_published(tmp_path: Path) -> None:
    keys = keys_of(3)
    async with gated(tmp_path, keys) as (_, gate, backend):
        gate.shut = {"delete"}
        deleting = asyncio.create_task(backend.delete(keys))
        await until(lambda: "delete" in gate.asked)
        gate.after = True
        reading = asyncio.create_task(get_all(backend, keys))
        await until(lambda: "read" in gate.asked)
        gate.shut = set()
        gate.opened.set()
        assert await deleting == [HIT] * 3
        gate.after = False
        gate.opened.set()
        await reading
        assert (await get_all(backend, keys))[0] == [MISS] * 3


async def test_a_store_that_takes_nothing_has_no_more_pages_waiting_than_the_memory_can_hold(tmp_path: Path) -> None:
    async with gated(tmp_path, memory=1 << 20) as (server, gate, backend):
        gate.shut = {"put"}
        for at in range(0, 600, 20):
            await put_all(backend, keys_of(600)[at : at + 20])
        store = store_of(server)
        assert len(store.waiting) <= server.table.layout.slots == 64
        assert store.counts["dropped"] + len(store.waiting) + store.writing + store.counts["evicted"] > 300


@pytest.mark.slow(17)
async def test_an_answer_that_waits_for_a_store_changes_nothing_of_the_next_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store clears for long, whoever cancels it. Meanwhile pages come, and another server takes over."""
    clear, cleared = MemoryBackend.clear, asyncio.Event()

    async def slow(self: MemoryBackend) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(30.0)
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(6.0)
        await clear(self)
        cleared.set()

    monkeypatch.setattr(MemoryBackend, "clear", slow)
    keys = keys_of(20)
    async with served(stores=["memory:?timeout=60"]) as (server, one):
        two = await client(server.path)
        clearing = asyncio.create_task(one.clear())
        await asyncio.sleep(0.2)
        put = await put_all(two, keys)
        async with heir(server.path) as second:
            with suppress(BackendError):
                await clearing
            await cleared.wait()
            await turns()
            results, records = await get_all(two, keys)
            assert results == [HIT] * 20
            assert same(put, records)
            second.table.audit()
            await two.aclose()
