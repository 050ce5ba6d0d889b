"""Prefetch: one fetch for everybody, stopped as policy says, revoked after its I/O has let go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache, CacheFull, PrefetchHandle, PrefetchPolicy, PrefetchResult, PrefetchStatus
from asynccache.runtime import prefetch as prefetch_module
from tests.runtime.runtime_kit import (
    PAGE,
    HeldBackend,
    assert_cached_bytes,
    compute,
    opened,
    parts,
    serve,
    settings,
    settled,
    text,
    turns,
    until,
)


@asynccontextmanager
async def stored(pages: int = 6, pools: tuple[str, ...] = ("full",), **more: Any) -> AsyncIterator[HeldBackend]:
    """A store that has ``text(pages)``."""
    storage = HeldBackend()
    async with opened(settings(device=16, host=32, **more), storage=storage) as cache:
        await serve(cache, text(pages), pools)
        assert await cache.flush() == (0, 0)
    yield storage


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch_module, "BATCH_PAGES", 2)


def policy(name: PrefetchPolicy, **more: Any) -> Any:
    return settings(device=16, host=32, prefetch_policy=name, **more)


async def waits(handle: PrefetchHandle) -> PrefetchResult:
    return await handle


async def test_a_handle_is_awaited_by_many_and_told_the_same_though_one_is_cancelled() -> None:
    async with stored() as storage, opened(policy(PrefetchPolicy.WAIT_COMPLETE), storage=storage) as cache:
        storage.hold()
        handle = cache.prefetch(text(6))
        waiting = [asyncio.create_task(waits(handle)) for _ in range(3)]
        await turns()
        waiting[0].cancel()
        await turns()
        assert waiting[0].cancelled()
        storage.let()
        assert await asyncio.gather(*waiting[1:]) == [PrefetchResult(PrefetchStatus.COMPLETE, 24, "")] * 2
        assert (await cache.match(text(6))).host == 24
        assert cache.prefetch(text(6)).done()  # below the threshold: nothing to fetch


@pytest.mark.parametrize("threshold", [PAGE, 16])
async def test_a_page_that_fails_shortens_the_fetch_and_below_the_threshold_it_is_revoked(threshold: int) -> None:
    config = policy(PrefetchPolicy.WAIT_COMPLETE, prefetch_threshold=threshold)
    async with stored() as storage, opened(config, storage=storage) as cache:
        storage.corrupt = {3}
        if threshold == PAGE:
            assert await cache.prefetch(text(6)) == (PrefetchStatus.PARTIAL, 12, "")
            assert await serve(cache, text(6, extra=1)) == 12
        else:
            assert (await cache.prefetch(text(6))).status is PrefetchStatus.MISS
            assert cache.statistics().host["full"].free == 32
        assert cache.statistics().storage["corrupt_pages"] == 1


async def test_a_cancelled_handle_gives_its_pages_back_after_its_read_has_let_go() -> None:
    async with stored() as storage, opened(policy(PrefetchPolicy.WAIT_COMPLETE), storage=storage) as cache:
        storage.hold()
        handle = cache.prefetch(text(6))
        await until(lambda: storage.waiting == 1)
        handle.cancel()
        await turns()
        assert not handle.done()
        assert cache.statistics().host["full"].free == 30, "the read still writes to these pages"
        storage.let()
        assert (await handle).status is PrefetchStatus.CANCELLED
        assert cache.statistics().host["full"].free == 32


async def test_a_shared_fetch_is_revoked_only_when_the_last_one_leaves() -> None:
    async with stored() as storage, opened(policy(PrefetchPolicy.WAIT_COMPLETE), storage=storage) as cache:
        storage.hold()
        first, second = cache.prefetch(text(6)), cache.prefetch(text(6))
        await until(lambda: storage.waiting == 1)
        await turns()
        first.cancel()
        assert (await first).status is PrefetchStatus.CANCELLED
        storage.let()
        assert (await second).tokens == 24
        assert cache.statistics().stages["prefetch"].pages == 6


async def test_wait_complete_waits_for_all_of_it() -> None:
    async with stored() as storage, opened(policy(PrefetchPolicy.WAIT_COMPLETE), storage=storage) as cache:
        storage.hold()
        entering = asyncio.create_task(cache.lease(text(6, extra=1)).__aenter__())
        for _ in range(3):
            await until(lambda: storage.waiting == 1)
            assert not entering.done()
            storage.let(1)
            await turns()
        lease = await entering
        assert (lease.cached, lease.hits) == (24, (0, 0, 24))
        lease.release()


async def test_best_effort_stops_at_the_head_when_its_pages_are_there() -> None:
    async with stored() as storage, opened(policy(PrefetchPolicy.BEST_EFFORT), storage=storage) as cache:
        storage.hold()
        handle = cache.prefetch(text(6, extra=1))
        await until(lambda: storage.waiting == 1)
        entering = asyncio.create_task(cache.lease(text(6, extra=1), prefetch=handle).__aenter__())
        await turns()
        assert not entering.done()  # the read that is under way still has to let go
        storage.let()
        lease = await entering
        await lease.loaded()
        assert (lease.cached, lease.hits) == (8, (0, 0, 8))
        assert_cached_bytes(cache, lease, text(6))
        lease.release()


async def test_best_effort_does_not_stop_while_the_pages_are_not_there() -> None:
    async with stored() as storage, opened(policy(PrefetchPolicy.BEST_EFFORT), storage=storage) as cache:
        holder = await cache.lease(text(16, seed=5)).__aenter__()
        entering = asyncio.create_task(cache.lease(text(6, extra=1)).__aenter__())
        await until(lambda: cache.statistics().prefetches["complete"] == 1)
        assert not entering.done()
        holder.release()
        lease = await entering
        assert lease.cached == 24
        lease.release()


async def test_timeout_stops_when_its_time_is_over() -> None:
    config = policy(PrefetchPolicy.TIMEOUT, prefetch_timeout_base=0.2, prefetch_timeout_per_1k=0)
    async with stored() as storage, opened(config, storage=storage) as cache:
        storage.hold()
        entering = asyncio.create_task(cache.lease(text(6, extra=1)).__aenter__())
        await until(lambda: storage.waiting == 1)
        storage.let(1)
        await until(lambda: storage.waiting == 1)
        handle = next(iter(parts(cache).prefetches.unended))
        await until(lambda: handle.wish > 0)
        storage.let()
        lease = await entering
        assert lease.cached == 16
        lease.release()


async def test_a_lease_that_waits_for_its_prefetch_blocks_nobody() -> None:
    async with stored() as storage, opened(policy(PrefetchPolicy.WAIT_COMPLETE), storage=storage) as cache:
        storage.hold()
        cold = asyncio.create_task(cache.lease(text(6, extra=1)).__aenter__())
        await until(lambda: storage.waiting == 1)
        async with cache.lease(text(1, seed=9), wait=False):
            pass
        storage.let()
        (await cold).release()


async def test_wait_false_does_not_wait_for_a_prefetch() -> None:
    async with stored() as storage, opened(policy(PrefetchPolicy.BEST_EFFORT), storage=storage) as cache:
        storage.hold()
        handle = cache.prefetch(text(6))
        await until(lambda: storage.waiting == 1)
        with pytest.raises(CacheFull):
            await cache.lease(text(6), prefetch=handle, wait=False).__aenter__()
        storage.let()
        await handle
        async with cache.lease(text(6, extra=1), prefetch=handle, wait=False) as lease:
            assert 0 < lease.cached < 24


async def test_a_window_is_fetched_whole_or_not_at_all() -> None:
    pools = ("full", "swa")
    config = policy(PrefetchPolicy.WAIT_COMPLETE, swa=16)
    async with stored(6, pools, swa=16) as storage, opened(config, storage=storage) as cache:
        storage.corrupt = {6}  # FULL's six pages are read first; then a page of the window
        result = await cache.prefetch(text(6, extra=1))
        assert result.tokens < 24
        storage.corrupt = set()
        cached = await serve(cache, text(6, extra=1), pools)
        assert cached == result.tokens
        assert cache.statistics().host["swa"].free >= 32 - 4


async def test_a_window_is_fetched_for_an_end_that_a_lease_of_the_same_tokens_can_have() -> None:
    """A lease leaves at least one token to be computed: of a prompt of whole pages it cannot have the last page, and
    the window of that page's end is of no use to it. FULL's pages are, to whoever goes on from there."""
    pools = ("full", "swa")
    async with stored(6, pools, swa=16) as storage:
        config = policy(PrefetchPolicy.WAIT_COMPLETE, swa=16)
        for prompt, cached in ((text(6), 20), (text(6, extra=1), 24), (text(5, extra=3), 20)):
            async with opened(config, storage=storage) as cache:
                assert await cache.prefetch(prompt) == PrefetchResult(PrefetchStatus.COMPLETE, cached)
                assert await serve(cache, prompt, pools) == cached
            async with opened(config, storage=storage) as cache:
                assert await serve(cache, prompt, pools) == cached, "by the lease's own prefetch"
        async with opened(config, storage=storage) as cache:
            assert (await cache.prefetch(text(1))).reason == "below the threshold", "a lease can have nothing of it"
    async with stored(6) as storage, opened(policy(PrefetchPolicy.WAIT_COMPLETE), storage=storage) as cache:
        assert (await cache.prefetch(text(6))).tokens == 24


@pytest.mark.parametrize("computed", [2, 6])
async def test_what_another_request_computed_meanwhile_does_not_count_as_stored(computed: int) -> None:
    """Between the arrival of a request and its prefetch's turn. Storage has six pages in both cases."""
    async with stored() as storage, opened(policy(PrefetchPolicy.BEST_EFFORT), storage=storage) as cache:
        storage.hold()
        async with cache.lease(text(computed)) as first:
            assert first.cached == 0
            storage.let()
            await settled(cache)
            compute(cache, first, text(computed), ("full",))
            commit = asyncio.create_task(first.commit(text(computed)))
            handle = cache.prefetch(text(6))
            await commit
            brought = (await handle).tokens
        assert brought == (6 - computed) * PAGE
        async with cache.lease(text(6, extra=1), prefetch=handle) as lease:
            assert lease.hits == (computed * PAGE, 0, brought)
        assert cache.statistics().lookups.hits["storage"] == brought


async def test_whoever_shares_a_fetch_has_its_pages_from_storage_however_soon_the_lease_is_granted() -> None:
    async with stored() as storage, opened(policy(PrefetchPolicy.BEST_EFFORT), storage=storage) as cache:
        storage.hold()
        handles = [cache.prefetch(text(6)) for _ in range(3)]
        await until(lambda: storage.waiting == 1)
        (op,) = parts(cache).prefetches.operations()
        storage.let()
        await until(lambda: op not in parts(cache).driver.ops)
        for handle in handles:
            async with cache.lease(text(6, extra=1), prefetch=handle) as lease:
                assert lease.hits.storage == 6 * PAGE


# between two runs of the loop


def test_a_prefetch_is_begun_and_given_up_by_a_thread_whose_loop_stands_still() -> None:
    """An engine that steps its loop by itself may call what needs no ``await`` between two steps."""
    backend = MemoryBackend()

    async def stored() -> None:
        async with opened(settings(host=16), storage=backend) as cache:
            await serve(cache, text(4))
            await cache.flush()

    asyncio.run(stored())
    with asyncio.Runner() as runner:
        cache = runner.run(AsyncCache(settings(host=16), storage=backend).__aenter__())
        kept, given_up = cache.prefetch(text(4)), cache.prefetch(text(4))
        given_up.cancel()

        async def both() -> tuple[PrefetchResult, PrefetchResult]:
            return await kept, await given_up

        results = runner.run(both())
        kept.cancel()
        runner.run(cache.aclose())
    assert [result.status for result in results] == [PrefetchStatus.COMPLETE, PrefetchStatus.CANCELLED]
