"""Events besides releases that wake the first in line; commits that meet pages on their way; the effect of retention
and write policies in a cache that runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache, CacheConfig, PrefetchStatus
from asynccache.core.plan import Status
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.signals import HostGate
from asynccache.runtime.lease import Lease
from asynccache.storage import PageKey, Record, Result
from tests.runtime.runtime_kit import (
    PAGE,
    assert_cached_bytes,
    compute,
    fence_all,
    local,
    opened,
    parts,
    push_out,
    serve,
    settings,
    settled,
    text,
    turns,
    until,
)


async def enter(cache: AsyncCache, tokens: Sequence[int]) -> Lease:
    return await cache.lease(tokens).__aenter__()


async def on_the_host(cache: AsyncCache, tokens: Sequence[int], device: int) -> None:
    """Serve ``tokens``; afterwards their pages are on the host alone."""
    await serve(cache, tokens)
    await settled(cache)
    await push_out(cache, device)
    assert (await cache.match(tokens)).device == 0


def failing_loads(cache: AsyncCache) -> None:
    """Every load_back from now on is reported as failed."""
    stage = local(cache).load_back
    post = stage._ended
    stage._ended = lambda _, ops: post(Status.FAILED, ops)


class Held:
    """A device whose loads wait until they are let through."""

    async def __aenter__(self) -> Held:
        self.device = CpuDevice()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.device.aclose()

    def loads(self, cache: AsyncCache) -> HostGate:
        gate = self.device.gate()
        fence_all(cache, gate)
        return gate


async def test_a_failed_load_wakes_the_head() -> None:
    """The lease whose load failed is not released: what it gave up is enough for the next."""
    async with Held() as held, opened(settings(device=8, host=16), device=held.device) as cache:
        await on_the_host(cache, text(4), 8)
        gate = held.loads(cache)
        failing_loads(cache)
        first = await enter(cache, text(4, extra=1))
        assert first.cached == 4 * PAGE
        waiting = asyncio.create_task(enter(cache, text(7, seed=2)))
        await turns()
        assert cache.statistics().waiting == 1
        gate.open()
        (await asyncio.wait_for(waiting, 60)).release()
        assert first.pages.size == 5
        first.release()


class HeldReads(MemoryBackend):
    """Reads wait for ``go``."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.reading = 0

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        self.reading += 1
        await self.go.wait()
        return await super().get(keys, records)


async def test_a_revoked_prefetch_wakes_the_next_one_and_a_lease_that_waits_for_it() -> None:
    storage = HeldReads()
    async with opened(settings(device=16, host=16), storage=storage) as cache:
        for seed in (1, 2):
            await serve(cache, text(6, seed))
        assert await cache.flush() == (0, 0)
    config = settings(device=16, host=6, prefetch_quota=1.0, prefetch_policy="wait_complete")
    async with opened(config, storage=storage) as cache:
        first = cache.prefetch(text(6, seed=1))
        await until(lambda: storage.reading == 1)
        waiting = asyncio.create_task(enter(cache, text(6, seed=2, extra=1)))
        await turns()
        assert storage.reading == 1, "the first one has all of the quota"
        first.cancel()
        storage.go.set()
        assert (await first).status is PrefetchStatus.CANCELLED
        lease = await asyncio.wait_for(waiting, 60)
        assert lease.hits == (0, 0, 6 * PAGE)
        lease.release()
    await storage.aclose()


@pytest.mark.parametrize("fails", [False, True], ids=["they arrive", "their load fails"])
async def test_a_commit_waits_for_pages_on_their_way_that_it_does_not_hold(fails: bool) -> None:
    """Somebody else is loading what this request has computed meanwhile: its own pages become duplicates, or, when
    the load fails, the tree's."""
    async with Held() as held, opened(settings(device=16, host=16), device=held.device) as cache:
        mine = await enter(cache, text(4, extra=1))
        await asyncio.create_task(on_the_host_of_others(cache))
        gate = held.loads(cache)
        if fails:
            failing_loads(cache)
        other = await asyncio.create_task(enter(cache, text(4, extra=2)))
        assert (mine.cached, other.cached) == (0, 4 * PAGE)
        own = mine.pages[:4].tolist()
        compute(cache, mine, text(4))
        commit = asyncio.create_task(mine.commit(text(4, extra=1)))
        await turns(50)
        assert not commit.done()
        assert not parts(cache).driver.lock.locked(), "it waits outside the lock"
        gate.open()
        table = (await commit)[:4].tolist()
        assert (table == own) == fails
        other.release()
        mine.release()
        async with cache.lease(text(4, extra=1)) as lease:
            await lease.loaded()
            assert lease.hits == (4 * PAGE, 0, 0)
            assert_cached_bytes(cache, lease, text(4))


async def on_the_host_of_others(cache: AsyncCache) -> None:
    await on_the_host(cache, text(4), 11)


# retention


async def test_a_conversation_that_is_said_to_have_ended_goes_before_older_ones_and_leaves_what_is_shared() -> None:
    async with opened(settings(device=14)) as cache:
        shared = text(2, seed=1)
        await serve(cache, shared + text(4, seed=2))
        async with cache.lease(shared + text(4, seed=3)) as lease:
            compute(cache, lease, shared + text(4, seed=3))
            await lease.commit(shared + text(4, seed=3))
            lease.release(ended=True)
        await push_out(cache, 8)
        assert (await cache.match(shared + text(4, seed=2))).device == 6 * PAGE, "older, but it may go on"
        assert (await cache.match(shared + text(4, seed=3))).device == 2 * PAGE


async def test_without_a_hint_the_least_recently_used_goes_first() -> None:
    async with opened(settings(device=14)) as cache:
        shared = text(2, seed=1)
        for seed in (2, 3):
            await serve(cache, shared + text(4, seed=seed))
        await push_out(cache, 8)
        assert (await cache.match(shared + text(4, seed=2))).device == 2 * PAGE
        assert (await cache.match(shared + text(4, seed=3))).device == 6 * PAGE


# write policies


def backed_up(cache: AsyncCache) -> int:
    return cache.statistics().stages["backup_host"].pages


def policy(name: str, **more: object) -> CacheConfig:
    return settings(device=20, host=40, write_policy=name, **more)  # type: ignore[arg-type]


async def test_write_through_saves_what_is_committed() -> None:
    async with opened(policy("write_through")) as cache:
        await serve(cache, text(4))
        await settled(cache)
        assert backed_up(cache) == 4


async def test_selective_saves_what_is_committed_twice_and_counts_a_requests_chunks_once() -> None:
    async with opened(policy("write_through_selective")) as cache:
        async with cache.lease(text(6)) as lease:
            compute(cache, lease, text(6))
            for pages in (2, 4, 6):
                await lease.commit(text(pages))
        await settled(cache)
        assert backed_up(cache) == 0
        await serve(cache, text(6) + text(2, seed=2))
        await settled(cache)
        assert backed_up(cache) == 6
        assert (await cache.match(text(6))).device == 6 * PAGE


async def test_write_back_saves_the_coldest_when_free_pages_run_low() -> None:
    async with opened(policy("write_back", write_back_watermark=0.3)) as cache:
        for seed in range(3):
            await serve(cache, text(4, seed))
            await settled(cache)
        assert backed_up(cache) == 0, "eight of twenty pages are free"
        await serve(cache, text(4, seed=3))
        await settled(cache)
        assert 0 < backed_up(cache) < 16
        await push_out(cache, 20)
        assert cache.statistics().core.lost_pages == 0
        assert await serve(cache, text(4, seed=0, extra=1)) == 4 * PAGE
