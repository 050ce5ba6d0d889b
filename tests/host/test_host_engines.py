"""Caches and crowds of processes on one host process: what one has stored the others find, and it fits its memory."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from asynccache import AsyncCache, CacheConfig, Full
from tests.host.host_kit import serving, socket_path
from tests.host.host_processes import (
    ClientProcess,
    Crowd,
    insist_on_every_slot,
    killed_clients,
    memory_use,
    server_process,
)
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


@pytest.mark.asyncio
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


@pytest.mark.asyncio
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
@pytest.mark.asyncio
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
@pytest.mark.asyncio
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
