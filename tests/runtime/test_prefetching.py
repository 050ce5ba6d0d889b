"""Prefetch: one fetch for everybody, stopped as policy says, revoked after its I/O has let go."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from random import Random
from typing import Any

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache import (
    AsyncCache,
    CacheClosed,
    CacheFull,
    PrefetchHandle,
    PrefetchPolicy,
    PrefetchResult,
    PrefetchStatus,
)
from asynccache.core.cache import Begin, More, PrefetchBegun, Skip, Wait
from asynccache.core.plan import EMPTY, Plan
from asynccache.memory.cpu import CpuDevice
from asynccache.runtime import prefetch as prefetch_module
from asynccache.runtime.core_calls import holding
from asynccache.runtime.driver import FetchCommit
from asynccache.runtime.prefetch import Fetch, Wish
from asynccache.storage import PageKey
from tests.runtime.runtime_kit import (
    PAGE,
    Attended,
    HeldBackend,
    assert_cached_bytes,
    cache_over,
    compute,
    gate,
    now,
    opened,
    parts,
    publish,
    push_out,
    serve,
    settings,
    settled,
    simulated,
    text,
    turns,
    until,
)
from tests.simulated.backend import Hostility, SimulatedBackend


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


@simulated
async def test_a_lease_that_comes_late_waits_for_what_is_left_of_its_prefetchs_time() -> None:
    class Stays(HeldBackend):
        async def aclose(self) -> None:
            """The next cache finds its pages."""

    storage = Stays()
    storage.inner = SimulatedBackend(Random(1), Hostility(delay=0.0))
    async with cache_over(storage, settings(16, 32)) as cache:
        await serve(cache, text(6))
        assert await cache.flush() == (0, 0)
    storage.hold()
    config = policy(PrefetchPolicy.TIMEOUT, prefetch_timeout_base=10.0, prefetch_timeout_per_1k=0)
    async with cache_over(storage, config, timeout=100.0) as cache:
        began, handle = now(), cache.prefetch(text(6))
        await asyncio.sleep(8.0)
        entering = asyncio.create_task(cache.lease(text(6, extra=1), prefetch=handle).__aenter__())
        while not handle._prefetch.wish:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert 9.9 < now() - began < 10.1
        storage.let()
        (await entering).release()


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
        storage.corrupt = ()
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


# Pages that a prefetch brought are there when its lease comes, however many others want the host; and no pin leaks.


TEXTS = 4
PAGES = 6


def warm(host: int, device: int = 32) -> AbstractAsyncContextManager[tuple[AsyncCache, Questions]]:
    """A cache with this little room, and a store that has every text."""
    texts = [text(PAGES, seed) for seed in range(TEXTS)]
    return questioned(texts, host=host, device=device, prefetch_quota=1.0)


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
    async with questioned(prefetch_quota=0.25) as (cache, storage):
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


# A prefetch asks before it takes. A question has no page, no pin and no operation; one of which storage has nothing
# waits for nobody's fetch; one asks for all who want the same pages; and what hangs keeps the quota from nobody for
# good.


THREE_TEXTS = [text(PAGES, seed) for seed in range(3)]


class Questions(HeldBackend):
    """Notes the pages of each question; questions wait while ``hearing`` is not set."""

    def __init__(self) -> None:
        super().__init__()
        self.questions: list[list[PageKey]] = []
        self.hearing = asyncio.Event()
        self.hearing.set()

    async def before(self, verb: str, keys: Sequence[PageKey] = ()) -> None:
        if verb == "exists":
            self.questions.append(list(keys))
            await self.hearing.wait()
        await super().before(verb, keys)


@asynccontextmanager
async def questioned(
    texts: Sequence[list[int]] = THREE_TEXTS, host: int = 32, device: int = 32, **more: Any
) -> AsyncIterator[tuple[AsyncCache, Questions]]:
    """A cache without pages, and a store that has ``texts``."""
    storage = Questions()
    async with opened(settings(device=64, host=64), storage=storage) as cache:
        for tokens in texts:
            await serve(cache, tokens)
        await cache.flush()
    storage.questions.clear()
    more.setdefault("prefetch_policy", "wait_complete")
    async with opened(settings(device=device, host=host, **more), storage=storage) as cache:
        yield cache, storage


def operations(cache: AsyncCache) -> int:
    return cache.statistics().core.operations["prefetch"]


async def test_one_of_which_storage_has_nothing_does_not_wait_for_the_fetches_of_others() -> None:
    async with questioned(prefetch_quota=0.25) as (cache, storage):
        storage.hold()
        hung = cache.prefetch(text(PAGES))
        await until(lambda: storage.waiting == 1)
        in_line = cache.prefetch(text(PAGES, 1))
        fresh = cache.prefetch(text(PAGES, 70))
        await turns()
        assert not in_line.done(), "the quota is taken"
        assert fresh.done()
        assert (await fresh).status is PrefetchStatus.MISS
        assert await serve(cache, text(PAGES, 71)) == 0
        storage.let()
        assert [(await handle).tokens for handle in (hung, in_line)] == [4 * PAGES] * 2


async def test_a_question_that_hangs_has_no_page_no_pin_and_no_operation() -> None:
    async with questioned() as (cache, storage):
        await serve(cache, text(2))
        await settled(cache)
        before = cache.statistics()
        storage.hearing.clear()
        handle = cache.prefetch(text(PAGES))
        await until(lambda: storage.questions != [])
        await turns()
        now = cache.statistics()
        assert (now.device, now.host, now.core.operations) == (before.device, before.host, before.core.operations)
        storage.hearing.set()
        assert (await handle).tokens == 4 * (PAGES - 2)


async def test_what_storage_has_says_how_much_room_is_needed() -> None:
    """Of a prompt of twelve pages it has six, and no more room than that is there."""
    async with questioned(prefetch_quota=1.0, host=12) as (cache, storage):
        storage.hold()
        first = cache.prefetch(text(PAGES))
        await until(lambda: storage.waiting == 1)
        second = cache.prefetch(text(PAGES, 1) + text(PAGES, 80))
        await until(lambda: operations(cache) == 2)
        storage.let()
        assert [(await handle).tokens for handle in (first, second)] == [4 * PAGES] * 2
        assert (await second).status is PrefetchStatus.PARTIAL


@pytest.mark.parametrize("common", [0, PAGES - 1, PAGES])
async def test_one_asks_for_all_who_want_the_same_pages(common: int) -> None:
    """Also if it hears that there is nothing: then it is the same for the others, whatever their prompts go on with."""
    async with questioned() as (cache, storage):
        prompts = [text(common, 70) + text(PAGES - common, 80 + turn) for turn in range(5)]
        handles = [cache.prefetch(prompt) for prompt in prompts]
        assert [(await handle).status for handle in handles] == [PrefetchStatus.MISS] * 5
        assert len(storage.questions) == (1 if common else 5)


async def test_of_those_who_share_a_fetch_each_fetches_what_is_its_own() -> None:
    prompts = [text(3) + text(3, 90 + turn) for turn in range(3)]
    async with questioned([*prompts]) as (cache, _):
        handles = [cache.prefetch(prompt) for prompt in prompts]
        assert [(await handle).tokens for handle in handles] == [4 * PAGES] * 3
        assert cache.statistics().stages["prefetch"].pages == 3 + 3 * 3, "what they share was read once"


async def test_pages_that_the_tree_lost_after_the_question_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with questioned(host=8, device=8, prefetch_quota=1.0) as (cache, _):
        await serve(cache, text(3))
        await cache.flush()
        usual = Fetch._begin
        late: list[Fetch] = []

        async def begin_late(fetch: Fetch, end: int) -> bool:
            if not late:
                late.append(fetch)
                assert fetch.shape.anchor == 3 * 4
                for seed in (20, 21):
                    await serve(cache, text(8, seed))
                    await cache.flush()
                assert (await cache.match(text(PAGES))).host == 0
            return await usual(fetch, end)

        monkeypatch.setattr(Fetch, "_begin", begin_late)
        handle = cache.prefetch(text(PAGES))
        await handle
        assert (await cache.match(text(PAGES))).host == 4 * PAGES
        assert late[0].shape.anchor == 0


async def test_behind_a_fetch_that_hangs_with_the_quota_a_prefetch_begins_after_its_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefetch_module, "PATIENCE", 0.02)
    async with questioned(prefetch_quota=0.25) as (cache, storage):
        storage.hold()
        hung = cache.prefetch(text(PAGES))
        await until(lambda: storage.waiting == 1)
        entering = asyncio.create_task(serve(cache, text(PAGES, 1, extra=1)))
        await until(lambda: storage.waiting == 2)
        assert operations(cache) == 2
        storage.let()
        assert await entering == 4 * PAGES
        assert (await hung).tokens == 4 * PAGES


async def test_nobody_joins_a_fetch_that_was_given_up() -> None:
    async with questioned() as (cache, storage):
        storage.hold()
        hung = cache.prefetch(text(PAGES))
        await until(lambda: storage.waiting == 1)
        hung.cancel()
        again = cache.prefetch(text(PAGES))
        await until(lambda: storage.waiting == 2)
        storage.let()
        assert (await again).tokens == 4 * PAGES
        assert (await hung).status is PrefetchStatus.CANCELLED


async def test_a_prefetch_that_is_a_miss_claims_what_the_host_has_of_its_prompt() -> None:
    async with questioned(host=8, device=16, prefetch_quota=1.0) as (cache, _):
        await (brought := cache.prefetch(text(PAGES)))
        brought.cancel()
        handle = cache.prefetch(text(PAGES) + text(PAGES, 70))
        assert (await handle).status is PrefetchStatus.MISS
        late = cache.prefetch(text(PAGES, 1))
        await turns(50)
        assert (await cache.match(text(PAGES))).host == 4 * PAGES
        assert not late.done(), "it waits for room, which is claimed"
        handle.cancel()
        assert (await late).tokens == 4 * PAGES


# A prefetch that is told to stop before its fetch has begun reads nothing, and stops nobody else's fetch. A prefetch
# gives up when its anchor leaves the host. A store that raises anything is a miss.


@pytest.mark.parametrize(
    ("wish", "status"), [(Wish.STOP, PrefetchStatus.MISS), (Wish.CANCEL, PrefetchStatus.CANCELLED)]
)
async def test_a_handle_that_is_told_while_it_waits_for_the_lock_reads_nothing(
    wish: Wish, status: PrefetchStatus
) -> None:
    config = settings(device=16, host=32, prefetch_policy=PrefetchPolicy.BEST_EFFORT)
    async with stored() as storage, opened(config, storage=storage) as cache:
        async with holding(parts(cache).driver.lock):
            handle = cache.prefetch(text(6))
            await turns()
            handle._prefetch.tell(wish)
        await turns()
        ended, result = handle.done(), handle.result
        await settled(cache)
        assert ended
        assert result is not None
        assert result.status is status
        assert cache.statistics().stages["prefetch"].pages == 0
        assert cache.statistics().host["full"].free == 32


@pytest.mark.parametrize("wish", [Wish.STOP, Wish.CANCEL])
async def test_a_handle_that_ends_while_another_asks_for_it_stops_nobody_elses_fetch(wish: Wish) -> None:
    config = settings(device=16, host=32, prefetch_policy=PrefetchPolicy.BEST_EFFORT)
    async with stored() as storage, opened(config, storage=storage) as cache:
        async with holding(parts(cache).driver.lock):
            first, second = cache.prefetch(text(6)), cache.prefetch(text(6))
            await turns()
            second._prefetch.tell(wish)
            await turns()
            assert second.done()
        assert (await first).tokens == 24
        assert (await second).status is (PrefetchStatus.MISS if wish is Wish.STOP else PrefetchStatus.CANCELLED)
        assert storage.asked == 1 + 3, "one asked for both, in three parts; before them, the request that computed it"


class Buggy(Attended):
    """Raises what no backend should."""

    async def before(self, verb: str, keys: Sequence[PageKey] = ()) -> None:
        if verb in ("exists", "put"):
            raise ValueError("a bug")


@pytest.mark.source
async def test_a_prefetch_gives_up_when_what_it_hangs_on_does_not_stay_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its backup ends, and something else takes the room before the prefetch looks: it went on for ever."""
    tried = 0

    def gone_again(*_: object) -> Wait:
        nonlocal tried
        tried += 1
        return Wait(EMPTY, (1 << 40,))

    async with stored() as storage, opened(settings(device=16, host=32), storage=storage) as cache:
        monkeypatch.setattr(parts(cache).core, "prefetch_open", gone_again)
        async with asyncio.timeout(5.0):
            result = await cache.prefetch(text(6))
        assert result.status is PrefetchStatus.SKIPPED
        assert result.reason == "the anchor does not stay on the host"
        assert 1 < tried < 10


async def test_the_cache_goes_on_without_a_store_that_raises_anything() -> None:
    storage = Buggy()
    async with opened(settings(device=16, host=32), storage=storage) as cache:
        assert (await cache.prefetch(text(6))).tokens == 0
        assert await serve(cache, text(6)) == 0
        assert (await cache.flush()).storage == 6
        assert await serve(cache, text(6, extra=1)) == 24


# The completion of a prefetch travels in the queue of acks. A fetch puts its commit there and does not make it; who
# holds the tree lock does. What is queued can be given up, and hears of the end of the cache.


COMPLETE = settings(device=16, host=32, prefetch_policy="wait_complete")


@asynccontextmanager
async def queued(cache: AsyncCache) -> AsyncIterator[PrefetchHandle]:
    """A prefetch whose fetch has queued its commit. The caller holds the tree lock: it runs before the ack task."""
    driver, put = parts(cache).driver, asyncio.Event()
    usual = driver.post_commit

    def post(commit: FetchCommit) -> None:
        put.set()
        usual(commit)

    driver.post_commit = post  # type: ignore[method-assign]
    handle = cache.prefetch(text(6))
    async with asyncio.timeout(5.0):
        await put.wait()
    driver.post_commit = usual  # type: ignore[method-assign]
    async with holding(driver.lock):
        yield handle


@contextmanager
def committing_tasks(cache: AsyncCache) -> Iterator[list[str]]:
    """The names of the tasks that make commits of prefetches meanwhile."""
    core, names = parts(cache).core, list[str]()
    usual = core.prefetch_commit

    def commit(op: int, end: int, hashes: bytes, holders: Sequence[int] = ()) -> Plan | Wait:
        task = asyncio.current_task()
        names.append(task.get_name() if task is not None else "")
        return usual(op, end, hashes, holders)

    core.prefetch_commit = commit  # type: ignore[method-assign]
    yield names
    core.prefetch_commit = usual  # type: ignore[method-assign]


@pytest.mark.source
async def test_no_fetch_commits_by_itself() -> None:
    async with stored() as storage, opened(COMPLETE, storage=storage) as cache:
        with committing_tasks(cache) as names:
            handles = [cache.prefetch(text(6)), cache.prefetch(text(3, 1)), cache.prefetch(text(4) + text(1, 9))]
            assert [(await handle).tokens for handle in handles] == [24, 0, 16]
        assert names
        assert set(names) == {"asynccache-acks"}


@pytest.mark.source
async def test_a_completion_waits_in_the_queue_until_somebody_takes_the_lock() -> None:
    async with stored() as storage, opened(COMPLETE, storage=storage) as cache:
        driver = parts(cache).driver
        async with queued(cache) as handle:
            await turns()
            assert (operations(cache), driver.unapplied, handle.done()) == (1, 1, False)
            driver.apply_outcomes()
            assert (operations(cache), driver.unapplied) == (0, 0)
            await turns()
            assert handle.done(), "nothing but the commit was waited for"
        assert await handle == (PrefetchStatus.COMPLETE, 24, "")


@pytest.mark.source
async def test_a_completion_that_is_given_up_in_the_queue_gives_its_pages_back_at_once() -> None:
    async with stored() as storage, opened(COMPLETE, storage=storage) as cache:
        async with queued(cache) as handle:
            handle.cancel()
            assert operations(cache) == 0
            assert cache.statistics().host["full"].free == 32
        assert (await handle).status is PrefetchStatus.CANCELLED
        await settled(cache)
        assert (await cache.match(text(6))).host == 0


@pytest.mark.source
async def test_a_completion_below_pages_of_a_batch_that_failed_brings_nothing_and_says_so() -> None:
    async with stored() as storage, opened(COMPLETE, storage=storage) as cache:
        await cache.prefetch(text(2))                 # to the host alone
        ready = gate(cache)
        lease = cache.lease(text(2))
        lease._ask = lease._ask._replace(load=False)  # as if there were no room to load them
        async with lease:
            await lease.commit(text(2), after=ready)  # the pages on the host are on the device now, too
            lease.release(after=ready)
        async with queued(cache) as handle:
            await asyncio.to_thread(ready.fire, RuntimeError("out of memory"))
            await turns()
            parts(cache).driver.apply_outcomes()
        assert await handle == (PrefetchStatus.MISS, 0, "")
        await settled(cache)
        assert (await cache.match(text(6))).host == 0


@pytest.mark.source
async def test_who_waits_for_a_completion_hears_why_the_cache_closed() -> None:
    async with stored() as storage:
        device = CpuDevice()
        cache = await AsyncCache(COMPLETE, device=device, storage=storage).__aenter__()
        async with queued(cache) as handle:
            waiting = asyncio.create_task(waits(handle))
            await turns()
            parts(cache).supervisor.fail(RuntimeError("on purpose"))
            with pytest.raises(CacheClosed, match="on purpose"):
                await waiting
        await cache.aclose()
        assert operations(cache) == 0, "its task has given its pages back"
        await device.aclose()


# A lease that finds out whether its pages could be granted has not used what it found: one request tells the eviction
# policy of one use, however long its prefetch runs.


@pytest.mark.source
@pytest.mark.parametrize("delay", [0.0, 0.1, 2.0])
@pytest.mark.parametrize("policy", ["best_effort", "timeout", "wait_complete"])
@simulated
async def test_a_request_whose_prefetch_runs_tells_the_policy_of_one_use(
    policy: str, delay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(40, 40, eviction="p2c", prefetch_policy=policy, prefetch_timeout_base=0.05)
    async with cache_over(SimulatedBackend(Random(1), Hostility(delay=delay)), config) as cache:
        learner = parts(cache).core.world.policy
        use, uses = learner.use, list[int]()

        def used(*args: int) -> None:
            uses.append(args[-1])
            use(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(learner, "use", used)
        await publish(cache, text(5, seed=1))
        assert await publish(cache, text(5, seed=1) + text(5, seed=2)) == 20
        assert await publish(cache, text(5, seed=3)) == 0
        assert len(uses) == 3
