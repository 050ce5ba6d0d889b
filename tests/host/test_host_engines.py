"""Caches and crowds of processes on one host process: what one has stored the others find; and what is said of
pages beforehand reaches the server, keeps its bounds and harms nobody."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from asynccache import AsyncCache, CacheConfig, Full
from asynccache.host import wire
from asynccache.storage import Hint, PageKey, Pages, Result
from asynccache.testing.backend_suite import page_key, put_all
from tests.host.host_kit import client, served, serving, socket_path
from tests.host.host_processes import (
    ClientProcess,
    Crowd,
    insist_on_every_slot,
    killed_clients,
    memory_use,
    server_process,
)
from tests.host.test_host_behind import gated
from tests.waiting import until

PAGE = 16
LAYERS = 2


def config(url: str, weights: str = "a") -> CacheConfig:
    """A small cache on this store."""
    full = Full(bytes_per_token=64, layers=LAYERS, device_tokens=2048, host_tokens=4096)
    return CacheConfig(model=f"weights-{weights}", components=(full,), page_size=PAGE, storage=url)


async def compute(cache: AsyncCache, prompt: list[int], value: int) -> int:
    """Serve a prompt: compare what is cached with ``value``, compute the rest. Returns how many tokens were cached."""
    async with cache.lease(prompt, new_tokens=1, prefetch=cache.prefetch(prompt)) as lease:
        await lease.loaded()
        known = lease.cached // PAGE
        for layer in range(LAYERS):
            pages = cache.pools["full"].layer(layer)
            assert (pages[lease.pages[:known].tolist()] == value + layer).all(), "a hit has other bytes"
            pages[lease.pages[known:].tolist()] = value + layer
        await lease.commit(prompt)
        return lease.cached


async def test_two_caches_find_what_the_other_stored() -> None:
    path, one, other = socket_path(), list(range(1000)), list(range(5000, 6000))
    async with serving(path) as server:
        url = f"host:{path}?label=chat"
        async with AsyncCache(config(url)) as first, AsyncCache(config(url)) as second:
            assert await compute(first, one, 7) == 0
            await first.flush()
            assert server.table.counts["stored"] == 1000 // PAGE
            assert await compute(second, one, 7) == 992
            assert await compute(second, other, 9) == 0
            await second.flush()
            assert await compute(first, other, 9) == 992
            async with AsyncCache(config(url, "b")) as stranger:
                assert await compute(stranger, one, 5) == 0, "other weights"
        assert server.table.known_labels["chat"].counts["hits"] == 2 * (1000 // PAGE)
        server.table.audit()


async def test_a_cache_that_is_opened_again_finds_its_pages_and_without_a_server_none() -> None:
    path, prompt = socket_path(), list(range(1000))
    async with AsyncCache(config(f"host:{path}")) as early:
        assert await compute(early, prompt, 7) == 0
        began = time.monotonic()
        assert (await early.flush()).storage == 1000 // PAGE
        assert time.monotonic() - began < 1.0
    async with serving(path):
        for cached in (0, 992, 992):
            async with AsyncCache(config(f"host:{path}")) as cache:
                assert await compute(cache, prompt, 7) == cached
    async with AsyncCache(config(f"host:{path}")) as late:
        assert await compute(late, prompt, 7) == 0


# Many processes on one server at once: eight clients with pages of several sizes, and two stresses.


MORE = 64 << 20


@pytest.mark.slow(30)
async def test_a_crowd_gets_right_pages_and_takes_no_more_memory_than_was_asked_for() -> None:
    asked = 96 << 20
    with server_process(socket_path(), "96MiB") as server:
        await server.counts()
        with Crowd(server, 35, "--requests", "160") as crowd:
            uses = []
            while crowd.together:
                uses.append(memory_use(server, crowd.pids))
                await asyncio.sleep(0.4)
            moved, asking = await asyncio.to_thread(crowd.reports)
        assert uses, "nobody has looked"
        assert max(one.shared for one in uses) <= asked
        assert max(one.shared + one.server for one in uses) <= asked + MORE
        for found in moved:
            assert (found["wrong"], found["corrupt"]) == (0, 0)
            assert found["hits"] > 0
        for report in asking:
            assert (report["verify"]["mismatches"], report["storage"]["corrupt_pages"]) == (0, 0)
        assert sum(report["stages"]["prefetch"]["pages"] for report in asking) > 0, "nothing came from the server"
        counts = await insist_on_every_slot(server)
        assert (counts["damaged"], counts["malformed"], counts["freed_by_death"]) == (0, 0, 0)
        assert counts["evicted"] > 0
        assert server.stop() == 0


# In huge pages, where some are reserved: clients that are killed, a server that takes over.


FREE = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
HUGE = 12


def free() -> int:
    """How many huge pages are free."""
    return int(FREE.read_text()) if FREE.exists() else 0


@pytest.mark.slow(10)
async def test_huge_pages_are_taken_used_handed_over_and_given_back() -> None:
    before = free()
    if before < HUGE:
        pytest.skip(f"{before} huge pages are free, and {HUGE} are needed: sysctl vm.nr_hugepages")
    path = socket_path()
    with server_process(path, f"{2 * HUGE}MiB", "--huge") as server:
        counts, _ = await server.counts()
        assert free() == before - HUGE
        await killed_clients(server, seed=3, kills=3)
        first = server.process
        stored = (await insist_on_every_slot(server))["pages"]
        assert stored > 0
        server.start("--replace", "--huge")
        assert await asyncio.to_thread(first.wait, 60) == 0
        counts = await insist_on_every_slot(server)
        assert (counts["pages"], free()) == (stored, before - HUGE), "the same memory"
        one = await asyncio.to_thread(ClientProcess, path, 4, 2.0)
        found = await asyncio.to_thread(one.report)
        assert (found["wrong"], found["corrupt"]) == (0, 0)
        assert found["hits"] > 0
        assert server.stop() == 0
    await until(lambda: free() == before, "huge pages are not given back")


# What clients say of pages beforehand.


MISS, HIT, FAILED = Result.MISS, Result.HIT, Result.FAILED
SMALL = 4 << 20


def named(name: str, count: int) -> list[PageKey]:
    return [page_key(f"{name} {number}") for number in range(count)]


async def test_pages_that_are_kept_stay_and_those_that_have_ended_go_first() -> None:
    async with served(memory=SMALL) as (server, backend):
        old, newer = named("old", 20), named("newer", 20)
        await put_all(backend, old)
        await put_all(backend, newer)
        assert await backend.hint(Hint.KEEP, old[:10], 60.0) == [HIT] * 10
        assert await backend.hint(Hint.ENDED, newer, 0.0) == [HIT] * 20
        at = 0
        while not server.table.counts["evicted"] >= 20:
            await put_all(backend, named(f"more {at}", 1))
            at += 1
        assert (await backend.exists(newer)).count(HIT) == 0
        assert await backend.exists(old) == [HIT] * 20, "the oldest of all, but for those that have ended"
        while not server.table.counts["evicted"] >= 200:
            await put_all(backend, named(f"more {at}", 1))
            at += 1
        assert await backend.exists(old) == [HIT] * 10 + [MISS] * 10
        counts = (await backend.server_counts())[0]
        assert (counts["ended"], counts["kept"], counts["not_kept"]) == (20, 10, 0)
        assert counts["kept_bytes"] == 10 * 16384


async def test_a_prefetched_page_is_in_the_memory_before_somebody_reads_it(tmp_path: Path) -> None:
    keys = named("page", 5)
    async with gated(tmp_path, keys) as (server, _, backend):
        assert await backend.hint(Hint.PREFETCH, [*keys, *named("none", 2)], 0.0) == [HIT] * 5 + [MISS] * 2
        assert {key.key for key in keys} <= set(server.table.index)
        assert server.table.counts["prefetched"] == 7


async def test_a_prefetch_from_a_disk_that_hangs_is_answered_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asynccache.host.behind.LATE", 0.05)
    keys = named("page", 5)
    async with gated(tmp_path, keys) as (_, gate, backend):
        gate.shut.add("get")
        async with asyncio.timeout(2):
            assert await backend.hint(Hint.PREFETCH, keys, 0.0) == [FAILED] * 5
        gate.open_all()


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
        keys = named("page", 3)
        for verb in Hint:
            assert await server_side.hint(verb, keys, 5.0) == [MISS] * 3
        assert not any(isinstance(one, wire.Hint) for one in heard)
        assert server_side.stats()["untold_hints"] == 3
        await put_all(server_side, keys)
        assert await server_side.exists(keys) == [HIT] * 3
        await server_side.aclose()


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
