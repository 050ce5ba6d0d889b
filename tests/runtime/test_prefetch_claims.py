"""Pages that a prefetch brought are there when its lease comes, however many others want the host; and no pin leaks."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from asynccache import AsyncCache, CacheFull, PrefetchStatus
from asynccache.core.cache import Begin, More, PrefetchBegun, Skip, Wait
from asynccache.runtime import prefetch as prefetch_module
from tests.runtime.runtime_kit import opened, parts, push_out, serve, settings, settled, text, turns, until
from tests.runtime.test_prefetching import HeldBackend

TEXTS = 4
PAGES = 6


@asynccontextmanager
async def warm(host: int, device: int = 32, idle: bool = True) -> AsyncIterator[tuple[AsyncCache, HeldBackend]]:
    """A cache with this little room, and a store that has every text."""
    storage = HeldBackend()
    async with opened(settings(device=64, host=64), storage=storage) as cache:
        for seed in range(TEXTS):
            await serve(cache, text(PAGES, seed))
        await cache.flush()
    config = settings(device, host, prefetch_policy="wait_complete", prefetch_quota=1.0)
    async with opened(config, storage=storage, idle=idle) as cache:
        yield cache, storage
    await storage.aclose()


def pinned(cache: AsyncCache) -> int:
    """Host pages of FULL that are held."""
    host = cache.statistics().host["full"]
    return host.capacity - host.free - host.evictable


async def test_many_at_a_time_on_a_small_host_hit_as_much_as_one_at_a_time() -> None:
    async with warm(host=8) as (cache, _):
        hits = await asyncio.gather(*(serve(cache, text(PAGES, seed, extra=1)) for seed in range(TEXTS)))
        assert hits == [4 * PAGES] * TEXTS


async def test_a_handle_keeps_what_it_brought_until_its_lease_is_granted() -> None:
    async with warm(host=8) as (cache, _):
        handle = cache.prefetch(text(PAGES, extra=1))
        await handle
        assert pinned(cache) == PAGES
        other = asyncio.create_task(_prefetched(cache, 1))
        await turns()
        assert not other.done(), "it waits for room"
        async with cache.lease(text(PAGES, extra=1), prefetch=handle) as lease:
            assert lease.cached == 4 * PAGES
            await lease.loaded()
            await settled(cache)
            assert (await other) == 4 * PAGES


async def _prefetched(cache: AsyncCache, seed: int) -> int:
    return (await cache.prefetch(text(PAGES, seed))).tokens


async def test_what_was_on_the_host_already_is_kept_too() -> None:
    async with warm(host=8) as (cache, _):
        assert await _prefetched(cache, 0)
        gc.collect()
        await turns()
        assert pinned(cache) == 0
        handle = cache.prefetch(text(PAGES, extra=1))
        assert (await handle).status is PrefetchStatus.SKIPPED
        assert pinned(cache) == PAGES
        handle.cancel()
        assert pinned(cache) == 0


async def test_a_handle_that_is_cancelled_or_dropped_keeps_nothing() -> None:
    async with warm(host=16) as (cache, _):
        handles = [cache.prefetch(text(PAGES, seed)) for seed in range(2)]
        for handle in handles:
            await handle
        assert pinned(cache) == 2 * PAGES
        handles.pop().cancel()
        assert pinned(cache) == PAGES
        del handles, handle
        await turns()
        assert pinned(cache) == 0


async def test_a_handle_that_no_lease_takes_keeps_nothing_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynccache.runtime.prefetch.HELD_FOR", 0.05)
    async with warm(host=16, device=12) as (cache, _):
        holder = await cache.lease(text(12, seed=9)).__aenter__()
        handles = [cache.prefetch(text(PAGES, seed, extra=1)) for seed in range(2)]
        waiting = asyncio.create_task(cache.lease(text(PAGES, extra=1), prefetch=handles[0]).__aenter__())
        await until(lambda: pinned(cache) == 2 * PAGES)
        await until(lambda: pinned(cache) == PAGES)
        assert not waiting.done()
        holder.release()
        lease = await waiting
        assert lease.cached == 4 * PAGES, "the claim of one that stands in line does not run out"
        lease.release()


async def test_each_of_those_who_share_a_fetch_has_a_claim() -> None:
    async with warm(host=16) as (cache, storage):
        storage.hold()
        handles = [cache.prefetch(text(PAGES, extra=1)) for _ in range(2)]
        await until(lambda: storage.waiting == 1)
        await turns()
        storage.let()
        for handle in handles:
            await handle
        assert cache.statistics().stages["prefetch"].pages == PAGES
        handles[0].cancel()
        assert pinned(cache) == PAGES
        handles[1].cancel()
        assert pinned(cache) == 0


async def test_a_lease_that_gives_up_leaves_the_claim_to_the_next_one() -> None:
    async with warm(host=16, device=12) as (cache, _):
        async with cache.lease(text(12, seed=9)):
            handle = cache.prefetch(text(PAGES, extra=1))
            await handle
            with pytest.raises(CacheFull):
                await cache.lease(text(PAGES, extra=1), prefetch=handle, wait=False).__aenter__()
        assert pinned(cache) == PAGES
        async with cache.lease(text(PAGES, extra=1), prefetch=handle) as lease:
            assert lease.cached == 4 * PAGES
            await lease.loaded()
        await settled(cache)
        assert pinned(cache) == 0


async def test_closing_does_not_wait_for_those_who_never_came() -> None:
    async with warm(host=8, idle=False) as (cache, _):
        handle = cache.prefetch(text(PAGES))
        await handle
        report = await cache.aclose()
        assert report == (0, 0, None)
        assert not cache.core.active_claims()


async def test_an_invalidated_handle_keeps_nothing() -> None:
    async with warm(host=8) as (cache, _):
        handle = cache.prefetch(text(PAGES))
        await handle
        await cache.invalidate()
        assert cache.statistics().host["full"].free == 8
        assert (await handle).tokens == 4 * PAGES


async def test_the_head_of_the_line_waits_for_room_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch_module, "PATIENCE", 0.02)
    async with warm(host=8, device=12) as (cache, _):
        async with cache.lease(text(12, seed=9)):
            handle = cache.prefetch(text(PAGES, extra=1))
            await handle
            waiting = asyncio.create_task(cache.lease(text(PAGES, extra=1), prefetch=handle).__aenter__())
            await turns()
            late = cache.prefetch(text(PAGES, 1))
            assert (await late) == (PrefetchStatus.PARTIAL, 2 * 4, ""), "two pages of the host were free"
        lease = await waiting
        assert lease.cached == 4 * PAGES
        lease.release()


@pytest.mark.source
async def test_who_waits_for_the_quota_is_served_in_turn() -> None:
    storage = HeldBackend()
    async with opened(settings(device=64, host=64), storage=storage) as cache:
        for seed in range(3):
            await serve(cache, text(PAGES, seed))
        await cache.flush()
    config = settings(device=32, host=32, prefetch_policy="wait_complete", prefetch_quota=0.25)
    async with opened(config, storage=storage) as cache:
        storage.hold()
        first, second = cache.prefetch(text(PAGES)), cache.prefetch(text(PAGES, 1))
        await until(lambda: storage.waiting == 1)
        small = cache.prefetch(text(2, 2))  # it would fit the quota beside the first
        again = cache.prefetch(text(PAGES))  # it shares the first
        await turns()
        assert cache.statistics().core.operations["prefetch"] == 1, "it overtook the one before it"
        tries: list[bytes] = []
        core, ask = parts(cache).core, parts(cache).core.prefetch_open

        def asked(space: bytes, key: bytes, begin: Begin = Begin.NEXT) -> PrefetchBegun | Wait | Skip | More:
            tries.append(key)
            return ask(space, key, begin)

        core.prefetch_open = asked  # type: ignore[method-assign]
        await turns(50)
        assert tries == [], "who waits does not ask"
        storage.let()
        assert [(await handle).tokens for handle in (first, second, small, again)] == [24, 24, 8, 24]
        keys = [handle._prefetch.key for handle in (second, small, again)]
        assert [key for key in tries if key != keys[2]][:2] == keys[:2]
    await storage.aclose()


async def test_a_lease_gets_claims_out_of_its_way() -> None:
    async with warm(host=8, device=8) as (cache, _):
        handle = cache.prefetch(text(PAGES))
        await handle
        await serve(cache, text(8, seed=8))  # the host has no room for it: the only copy
        await settled(cache)
        await push_out(cache, 8)
        await settled(cache)
        assert cache.statistics().core.lost_pages == 0
        assert pinned(cache) == 0
        handle.cancel()
