"""What clients say of pages beforehand: it reaches the server, keeps its bounds, and harms nobody."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asynccache.host import wire
from asynccache.storage import Hint, PageKey, Pages, Result
from asynccache.testing.backend_suite import page_key, put_all
from tests.host.host_kit import client, served, serving, socket_path
from tests.host.test_host_behind import folder, gated, written

MISS, HIT = Result.MISS, Result.HIT
MEMORY = 4 << 20


def keys_of(name: str, count: int) -> list[PageKey]:
    return [page_key(f"{name} {number}") for number in range(count)]


@pytest.mark.asyncio
async def test_pages_that_are_kept_stay_and_those_that_have_ended_go_first() -> None:
    async with served(memory=MEMORY) as (server, backend):
        old, newer = keys_of("old", 20), keys_of("newer", 20)
        await put_all(backend, old)
        await put_all(backend, newer)
        assert await backend.hint(Hint.KEEP, old[:10], 60.0) == [HIT] * 10
        assert await backend.hint(Hint.ENDED, newer, 0.0) == [HIT] * 20
        at = 0
        while not server.table.counts["evicted"] >= 20:
            await put_all(backend, keys_of(f"more {at}", 1))
            at += 1
        assert (await backend.exists(newer)).count(HIT) == 0
        assert await backend.exists(old) == [HIT] * 20, "the oldest of all, but for those that have ended"
        while not server.table.counts["evicted"] >= 200:
            await put_all(backend, keys_of(f"more {at}", 1))
            at += 1
        assert await backend.exists(old) == [HIT] * 10 + [MISS] * 10
        counts = (await backend.server_counts())[0]
        assert (counts["ended"], counts["kept"], counts["not_kept"]) == (20, 10, 0)
        assert counts["kept_bytes"] == 10 * 16384


@pytest.mark.asyncio
async def test_what_is_kept_is_kept_by_the_next_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(memory=MEMORY) as (server, backend):
        keys = keys_of("kept", 3)
        await put_all(backend, keys)
        await backend.hint(Hint.KEEP, keys, 60.0)
        snapshot = server._snapshot([])
        assert sorted(key for key, _ in snapshot.books.kept_for) == sorted(key.key for key in keys)
        assert all(59 < seconds <= 60 for _, seconds in snapshot.books.kept_for)


@pytest.mark.asyncio
async def test_a_prefetched_page_is_in_the_memory_before_somebody_reads_it(tmp_path: Path) -> None:
    async with served(stores=[folder(tmp_path)]) as (server, backend):
        keys = keys_of("page", 5)
        await put_all(backend, keys)
        await written(server)
        server.table.clear()
        assert await backend.hint(Hint.PREFETCH, [*keys, *keys_of("none", 2)], 0.0) == [HIT] * 5 + [MISS] * 2
        assert {key.key for key in keys} <= set(server.table.index)
        assert server.table.counts["prefetched"] == 7


@pytest.mark.asyncio
async def test_a_prefetch_from_a_disk_that_hangs_is_answered_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asynccache.host.behind.LATE", 0.05)
    async with gated(tmp_path) as (server, gate, backend):
        keys = keys_of("page", 5)
        await put_all(backend, keys)
        await written(server)
        server.table.clear()
        gate.shut.add("get")
        async with asyncio.timeout(2):
            assert await backend.hint(Hint.PREFETCH, keys, 0.0) == [Result.FAILED] * 5
        gate.open_all()


@pytest.mark.asyncio
async def test_a_server_of_the_version_before_is_told_nothing_and_serves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    path = socket_path()
    heard: list[Any] = []
    async with serving(path):
        monkeypatch.setattr(wire, "VERSION", 1)
        server_side = await client(path)
        monkeypatch.undo()
        assert server_side._connection.channel is not None
        assert server_side._connection.channel.version == 1
        channel_class, real = type(server_side._connection.channel), server_side._connection.channel.ask

        async def noted(channel: Any, make: Any) -> Any:
            heard.append(make(0))
            return await real(make)

        monkeypatch.setattr(channel_class, "ask", noted)
        keys = keys_of("page", 3)
        for verb in Hint:
            assert await server_side.hint(verb, keys, 5.0) == [MISS] * 3
        assert not any(isinstance(one, wire.Hint) for one in heard)
        assert server_side.stats()["untold_hints"] == 3
        await put_all(server_side, keys)
        assert await server_side.exists(keys) == [HIT] * 3
        await server_side.aclose()


@pytest.mark.asyncio
async def test_hints_without_a_cache_reach_the_server_and_other_stores_are_counted(tmp_path: Path) -> None:
    path = socket_path()
    async with serving(path) as server:
        storage = [f"host:{path}", f"file:{tmp_path}/kv?capacity=64MiB"]

        def engine() -> None:
            memory = bytearray(range(256)) * 16 * 4
            with Pages.open(storage, memory, 4096, "tests") as pages:
                keys = [b"a", b"b", b"c", b"d"]
                assert pages.put(keys, range(4)).result() == [HIT] * 4
                assert pages.hint(Hint.KEEP, keys[:2], 30.0).result() == [HIT] * 2
                assert pages.hint(Hint.ENDED, keys).result() == [HIT] * 4
                assert pages.hint(Hint.ENDED, [b"none"]).result() == [MISS]
                assert pages.store_stats()["file"]["unheard_hints"] == 3
                assert pages.store_stats()["host"]["hinted_pages"] == 6

        await asyncio.to_thread(engine)
        assert server.table.counts["kept"] == 2
