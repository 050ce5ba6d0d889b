"""Waiters that share what they wait for and nothing else; calls in slices that are cancelled on the way."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache, PrefetchResult, PrefetchStatus
from asynccache.core.cache import Grant, LeaseRequest
from asynccache.core.plan import More, Status, Wait
from asynccache.hashes import extend_chain, namespace_digest
from asynccache.runtime import tokens as tokens_module
from asynccache.runtime.core_calls import holding
from asynccache.runtime.prefetch import CachedOnArrival, Prefetch, PrefetchHandle
from asynccache.runtime.save import unsaved
from asynccache.runtime.tokens import Chain
from tests.runtime.runtime_kit import PAGE, compute, opened, parts, serve, settings, text, turns, until


async def test_one_of_two_who_await_a_handle_is_cancelled_and_the_other_is_told() -> None:
    async with opened(settings()) as cache:
        prefetch = Prefetch(parts(cache).prefetches, b"", b"", CachedOnArrival(0, 0))
        handle = PrefetchHandle(prefetch, b"", None)

        async def wait() -> PrefetchResult:
            return await handle

        one, two = asyncio.create_task(wait()), asyncio.create_task(wait())
        await turns(3)
        one.cancel()
        await turns(3)
        assert one.cancelled()
        assert not two.done(), "the other one's future is its own"
        prefetch.finish(PrefetchStatus.MISS)
        assert await asyncio.wait_for(two, 60) == PrefetchResult(PrefetchStatus.MISS, 0)


@pytest.mark.parametrize(("page_size", "on_the_loop"), [(1, True), (16, True), (511, True), (512, False)])
async def test_small_pages_are_hashed_on_the_loop_a_few_at_a_time_and_large_ones_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, page_size: int, on_the_loop: bool
) -> None:
    calls: list[tuple[int, int]] = []

    def spy(parent: bytes, key: bytes, start: int, stop: int, page_bytes: int) -> bytes:
        calls.append((threading.get_ident(), stop - start))
        return extend_chain(parent, key, start, stop, page_bytes)

    monkeypatch.setattr(tokens_module, "extend_chain", spy)
    pages = 200
    await Chain(namespace_digest("m", page_size), page_size).extend(np.arange(page_size * pages, dtype="<i4").tobytes())
    assert sum(size for _, size in calls) == pages * page_size * 4
    assert all((thread == threading.get_ident()) == on_the_loop for thread, _ in calls)
    if on_the_loop:  # about a microsecond a page, and 2 ns a byte
        assert max(size / (page_size * 4) + 0.002 * size for _, size in calls) < 100


class Sliced:
    """Has a call of the core answer with so many slices that do nothing first."""

    def __init__(self, cache: AsyncCache, name: str, slices: int = 3) -> None:
        self.core, self.name, self.slices = parts(cache).core, name, slices
        self.call = getattr(self.core, name)
        setattr(self.core, name, self)

    def __call__(self, *args: Any, **terms: Any) -> Any:
        if self.slices:
            self.slices -= 1
            return More(self.core.world.plan())
        return self.call(*args, **terms)


@pytest.mark.source
async def test_an_extend_that_is_cancelled_between_slices_is_finished_and_then_cancelled() -> None:
    async with opened(settings(device=8)) as cache:
        async with cache.lease(text(2)) as lease:
            sliced = Sliced(cache, "extend")
            growing = asyncio.create_task(lease.extend(4 * PAGE))
            await asyncio.sleep(0)
            assert parts(cache).driver.lock.locked()
            growing.cancel()
            await asyncio.wait([growing])
            assert growing.cancelled()
            assert not sliced.slices
            assert lease.pages.size == 6, "what was granted is the lease's"
            lease.release()
            assert cache.statistics().device["full"].free == 8


@pytest.mark.source
async def test_a_lease_cancelled_while_it_asks_in_slices_whether_to_stop_its_prefetch_ends_there() -> None:
    storage = MemoryBackend()
    async with opened(settings(device=16, host=16), storage=storage) as cache:
        async with cache.lease(text(4)) as lease:
            compute(cache, lease, text(4))
            await lease.commit(text(4))
        assert await cache.flush() == (0, 0)
    go = asyncio.Event()
    read = storage.get

    async def held(*args: Any) -> Any:
        await go.wait()
        return await read(*args)

    storage.get = held  # type: ignore[method-assign,assignment]
    async with opened(settings(device=16, host=16, prefetch_policy="best_effort"), storage=storage) as cache:
        handle = cache.prefetch(text(4))
        await turns()
        sliced = Sliced(cache, "lease")
        entering = asyncio.create_task(cache.lease(text(4), prefetch=handle).__aenter__())
        await until(lambda: sliced.slices < 3)
        entering.cancel()
        await turns()
        assert not sliced.slices, "the slices went on"
        assert entering.cancelled()
        assert cache.statistics().leases == 0
        go.set()
        await handle
    await storage.aclose()


@pytest.mark.source
async def test_a_keep_that_is_cancelled_between_slices_keeps_nothing() -> None:
    async with opened(settings(device=8)) as cache:
        await serve(cache, text(2))
        sliced = Sliced(cache, "lease")
        keeping = asyncio.create_task(cache.keep(text(2)))
        await asyncio.sleep(0)
        keeping.cancel()
        await asyncio.wait([keeping])
        assert keeping.cancelled()
        assert not sliced.slices
        assert cache.statistics().kept_tokens == 0
        assert cache.statistics().leases == 0


@pytest.mark.source
async def test_a_commit_that_must_wait_asks_the_core_again_only_when_what_it_waits_for_has_ended() -> None:
    async with opened(settings(device=8)) as cache:
        driver, core = parts(cache).driver, parts(cache).core
        commit, asked = core.commit, 0

        def waiting(*args: Any) -> Any:
            nonlocal asked
            asked += 1
            return Wait(ops=(999,)) if 999 in driver.ops else commit(*args)

        core.commit = waiting  # type: ignore[method-assign,assignment]
        async with cache.lease(text(2)) as lease:
            driver.ops.open(999)
            committing = asyncio.create_task(lease.commit(text(2)))
            await turns()
            assert (asked, driver.lock.locked(), committing.done()) == (1, False, False)
            driver.ops.end(999, Status.DONE)
            await asyncio.wait_for(committing, 60)
        assert asked == 2
        assert (await cache.match(text(2))).device == 2 * PAGE


async def test_a_survey_that_waits_for_the_tree_asks_about_what_came_meanwhile() -> None:
    async with opened(settings()) as cache:
        driver, key = parts(cache).driver, np.array(text(2), "<i4").tobytes()
        async with holding(driver.lock):
            survey = asyncio.create_task(unsaved(driver))
            await turns(3)
            grant = driver.core.lease(LeaseRequest(b"new", key, 0, 2 * PAGE, 0))
            assert isinstance(grant, Grant)
            driver.perform(driver.core.commit(grant.lease, key, b"").plan)
            driver.perform(driver.core.release(grant.lease))
        assert (await survey).host == 2
