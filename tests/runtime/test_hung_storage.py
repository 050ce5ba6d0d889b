"""A store that does not answer is late, and nobody waits for it who can go on without it."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from random import Random
from typing import Any

import pytest

from asynccache import AsyncCache, CacheFull, PrefetchHandle, PrefetchResult, PrefetchStatus
from asynccache.core.audit import check
from asynccache.runtime.lease import Lease
from asynccache.runtime.prefetch import GRACE
from asynccache.runtime.save import PATIENCE, Lateness, StoreCall
from asynccache.storage import Breaker, PageKey
from asynccache.worker.local import BATCH_PAGES
from tests.runtime.runtime_kit import (
    PAGE,
    Attended,
    cache_over,
    entering,
    local,
    now,
    opened,
    parts,
    publish,
    settings,
    simulated,
    store_only,
    text,
)
from tests.runtime.runtime_kit import Hangs as Hangs
from tests.simulated.backend import Hostility, SimulatedBackend
from tests.simulated.loop import SimulatedLoop, simulate

# A store that does not answer is late, whatever it was asked: then nobody waits for it who can go on without it.
#
# Deadlines run beside each other, from each request's own arrival.


serve = publish
FOREVER = 1e6
SOON = 0.05
"""Seconds for copies between device and host."""

DEAF = pytest.mark.parametrize("deaf", [30.0, FOREVER], ids=["for a while", "for ever"])


@asynccontextmanager
async def hanging(
    verb: str, deaf: float = FOREVER, device: int = 20, host: int = 20, **more: Any
) -> AsyncIterator[tuple[AsyncCache, Hangs]]:
    """A cache whose store will hang in ``verb`` alone; afterwards the store answers, and nothing is left behind."""
    backend = Hangs(verb, deaf, alone=True)
    terms = {"prefetch_policy": "best_effort", "prefetch_timeout_per_1k": 0.0, "close_timeout": 5.0, **more}
    async with cache_over(backend, settings(device, host, **terms)) as cache:
        yield cache, backend
        check(parts(cache).core)
        backend.answers.set()
        await asyncio.sleep(1.0)
        assert backend.holding == 0
        await cache.flush()
        parts(cache).prefetches.drop_claims()
        check(parts(cache).core, idle=True)


def play(
    body: Callable[[AsyncCache, Hangs, SimulatedLoop], Coroutine[Any, Any, None]], verb: str, deaf: float = FOREVER,
    device: int = 20, host: int = 20, **more: Any,
) -> None:  # fmt: skip
    """Run ``body`` in such a cache."""

    async def main(loop: SimulatedLoop) -> None:
        async with hanging(verb, deaf, device, host, **more) as (cache, backend):
            await body(cache, backend, loop)

    simulate(main, 1)


async def timed(work: Awaitable[object]) -> float:
    """Return how many seconds ``work`` takes."""
    began = now()
    async with asyncio.timeout(3600):
        await work
    return now() - began


@pytest.mark.parametrize(("policy", "within"), [("best_effort", GRACE), ("timeout", 1.0 + GRACE)])
@pytest.mark.parametrize("verb", ["exists", "get"])
@simulated
async def test_a_lease_goes_in_without_a_prefetch_that_hangs(verb: str, policy: str, within: float) -> None:
    async with hanging(verb, device=40, host=80, prefetch_policy=policy) as (cache, backend):
        backend.verbs = (verb, "put")
        await store_only(cache, text(10, seed=1))
        backend.hung.set()
        for number in range(4):
            began = now()
            assert await serve(cache, text(10, seed=1 if number % 2 else 50 + number)) in (0, 36)
            assert now() - began < within + 0.1


@simulated
async def test_while_storage_is_away_nobody_joins_a_fetch_that_hangs() -> None:
    """The fetch goes on for as long as its store holds the pages; who comes when the breaker is open misses at once."""
    backend, breaker = Hangs("get", deaf=60.0), Breaker(threshold=1, backoff=1000.0)
    config = settings(40, 80, prefetch_timeout_per_1k=0.0, close_timeout=5.0)
    async with cache_over(backend, config, slow=0.5, breaker=breaker) as cache:
        await store_only(cache, text(10, seed=1))
        backend.hung.set()
        await serve(cache, [*text(10, seed=1), 7])
        assert breaker.opened == 1
        parts(cache).prefetches.drop_claims()
        for extra in range(3):
            assert await timed(serve(cache, text(10, seed=1) + text(10, seed=70 + extra))) < 0.1
        assert cache.statistics().lookups.missed_requests["backend_down"] >= 1
        backend.answers.set()


@simulated
async def test_the_breaker_ends_even_that() -> None:
    """After a few of them nobody waits for it at all; and it comes back by itself."""
    backend = Hangs("get", deaf=5.0)
    config = settings(40, 80, prefetch_timeout_per_1k=0.0, close_timeout=5.0)
    async with cache_over(backend, config, slow=2.0) as cache:
        await store_only(cache, *(text(10, seed=number) for number in range(6)))
        backend.hung.set()
        waited = []
        for number in range(60):
            seed = 300 + number if number % 6 else number // 6 % 6
            waited.append(round(await timed(serve(cache, text(10, seed=seed))), 2))
            await asyncio.sleep(0.2)
        backend.hung.clear()
        backend.answers.set()
        assert max(waited) < 1.0 + GRACE + 0.1
        assert sum(wait > 0.1 for wait in waited) <= 7, waited
        await asyncio.sleep(20.0)
        before = cache.statistics().storage["get_pages"]
        for _ in range(10):
            await store_only(cache, text(10, seed=3))
        assert cache.statistics().storage["get_pages"] > before, "hits come back by themselves"


async def enter_and_leave(cache: AsyncCache, tokens: list[int]) -> None:
    async with cache.lease(tokens):
        pass


@asynccontextmanager
async def full_of_unsaved(cache: AsyncCache, backend: Hangs) -> AsyncIterator[Lease]:
    """Nine pages that only the device has, a host whose pages wait for a store that does not take them, and a lease of
    one page that holds what the rest leaves. Yields that lease."""
    backend.hung.set()
    holder = await entering(cache, 10, 1)
    await holder.commit(text(10, seed=1))
    await asyncio.ensure_future(serve(cache, text(9, seed=2)))
    async with cache.lease(text(1, seed=3)) as lease:
        await lease.commit(text(1, seed=3))
        yield lease
    holder.release()


@asynccontextmanager
async def claimed_and_fetching(cache: AsyncCache, backend: Hangs) -> AsyncIterator[Lease]:
    """A host half of which is claimed, and for the other half of which a store is asked that hangs. Yields a lease that
    holds half of the device; the other half is an only copy."""
    await store_only(cache, text(10, seed=1), text(10, seed=2), others=range(200, 206))
    claim = cache.prefetch([*text(10, seed=1), 7])
    await claim
    backend.hung.set()
    fetching = cache.prefetch([*text(10, seed=2), 7])
    await asyncio.sleep(0)
    await serve(cache, text(10, seed=500))
    async with cache.lease(text(10, seed=600)) as lease:
        await lease.commit(text(10, seed=600))
        yield lease
    fetching.cancel()
    claim.cancel()


@asynccontextmanager
async def clearing(cache: AsyncCache, backend: Hangs) -> AsyncIterator[Lease]:
    """As ``full_of_unsaved``, but it is being cleared that the store does not come to an end with."""
    backend.hung.set()
    reset = asyncio.ensure_future(cache.reset())
    await asyncio.sleep(0.01)
    async with full_of_unsaved(cache, backend) as lease:
        yield lease
    backend.answers.set()
    await reset


WORRIES = {"clear": clearing, "put": full_of_unsaved, "get": claimed_and_fetching, "exists": claimed_and_fetching}


@pytest.mark.parametrize("verb", WORRIES)
@DEAF
@pytest.mark.parametrize("what", ["lease", "extend"])
@simulated
async def test_whoever_needs_room_waits_no_longer_than_the_stores_patience(verb: str, deaf: float, what: str) -> None:
    terms = (10, 0.0) if verb in ("put", "clear") else (20, 0.25)
    async with hanging(verb, deaf, host=terms[0], write_back_watermark=terms[1]) as (cache, backend):
        async with WORRIES[verb](cache, backend) as lease:
            entering_it = asyncio.ensure_future(enter_and_leave(cache, text(5, seed=9)))
            took = await timed(lease.extend(5 * PAGE, wait=True) if what == "extend" else entering_it)
            assert took < PATIENCE + SOON + (GRACE if what == "lease" and verb == "exists" else 0.0)
            entering_it.cancel()


@pytest.mark.parametrize(
    ("verb", "policy"),
    [*itertools.product(("put", "get"), ("best_effort", "timeout", "wait_complete")), ("exists", "best_effort"),
     ("exists", "timeout")],
)  # fmt: skip
@DEAF
@simulated
async def test_a_request_that_needs_nothing_of_the_store_hardly_waits(verb: str, deaf: float, policy: str) -> None:
    """While others do who need it. Where the store does not even answer questions, nobody knows who needs nothing of
    it, and each waits for as long as the policy says (under ``wait_complete`` until there is an answer)."""
    allowed = PATIENCE + SOON + ({"best_effort": 0.0, "timeout": 1.0}[policy] + GRACE if verb == "exists" else 0.0)
    async with hanging(verb, deaf, prefetch_policy=policy, host=60) as (cache, backend):
        await store_only(cache, *(text(5, seed=seed) for seed in range(3)))
        backend.hung.set()
        needy = [asyncio.ensure_future(serve(cache, [*text(5, seed=seed), 7])) for seed in range(3)]
        await asyncio.sleep(0)
        for seed in range(300, 312):
            assert await timed(serve(cache, text(10, seed=seed))) < allowed
        if policy != "wait_complete":
            await asyncio.gather(*needy)
        for task in needy:
            task.cancel()
        await asyncio.wait(needy)


@DEAF
@pytest.mark.parametrize(("policy", "within"), [("best_effort", GRACE), ("timeout", 1.0 + GRACE)])
@simulated
async def test_requests_for_the_pages_of_a_store_that_hangs_wait_beside_each_other(
    policy: str, within: float, deaf: float
) -> None:
    """And one that comes behind them, which needs nothing of the store, does not wait for them."""
    number = 30
    async with hanging("get", deaf, 20 * number, 40 * number, prefetch_policy=policy) as (cache, backend):
        texts = [text(4, seed=seed) for seed in range(number)]
        await store_only(cache, *texts, others=range(1000, 1000 + 6 * number))
        backend.hung.set()
        handles = [cache.prefetch([*tokens, 7]) for tokens in texts]
        await asyncio.sleep(0.01)
        assert backend.holding > 1

        async def ask(tokens: list[int], handle: PrefetchHandle) -> None:
            async with cache.lease([*tokens, 7], prefetch=handle) as lease:
                assert lease.cached == 0

        requests = [asyncio.ensure_future(timed(ask(*each))) for each in zip(texts, handles, strict=True)]
        await asyncio.sleep(within - 0.3)
        assert await timed(serve(cache, text(1, seed=9999)[:3])) < SOON
        assert max(await asyncio.gather(*requests)) < within + SOON


@simulated
async def test_a_request_at_the_head_of_the_line_is_not_waited_for_while_its_prefetch_stops() -> None:
    """It comes back to its position: who came later is granted nothing that it could have, once it is in line."""
    async with hanging("get") as (cache, backend):
        await store_only(cache, text(10, seed=1), others=range(200, 206))
        backend.hung.set()
        order: list[int] = []

        async def ask(pages: int, seed: int, seconds: float, handle: PrefetchHandle | None = None) -> None:
            async with cache.lease(text(pages, seed), prefetch=handle):
                order.append(seed)
                await asyncio.sleep(seconds)

        handle = cache.prefetch(text(10, seed=1))
        await asyncio.sleep(0.01)
        stopping = asyncio.ensure_future(ask(10, 1, 0.0, handle))
        await asyncio.sleep(0.01)
        beside = asyncio.ensure_future(ask(15, 7, 1.0))
        await asyncio.sleep(GRACE)
        assert (order, len(parts(cache).driver.line)) == ([7], 1)
        behind = asyncio.ensure_future(ask(5, 8, 0.0))
        await asyncio.gather(stopping, beside, behind)
        assert order == [7, 1, 8]


async def ended(handle: PrefetchHandle) -> PrefetchResult:
    return await handle


@simulated
async def test_a_prefetch_that_is_told_to_stop_ends_soon_and_leaves_its_fetch_to_those_who_share_it() -> None:
    async with hanging("get") as (cache, backend):
        await store_only(cache, text(6, seed=1), others=range(200, 206))
        backend.hung.set()
        first, second, third = (cache.prefetch(text(6, seed=1)) for _ in range(3))
        await asyncio.sleep(0.01)
        for handle in (first, second):
            handle.stop()
            handle.stop()
            assert not handle.done()
        third.cancel()
        assert await timed(asyncio.gather(ended(first), ended(second))) == pytest.approx(GRACE, abs=0.001)
        assert (await third).status is PrefetchStatus.CANCELLED
        fourth = cache.prefetch(text(6, seed=1))
        backend.hung.clear()
        backend.answers.set()
        assert (await fourth).tokens == 6 * PAGE
        assert first.result is not None
        assert first.result[:2] == (PrefetchStatus.MISS, 0)
        assert cache.statistics().prefetches["miss"] >= 2


@pytest.mark.parametrize("shorter", [True, False])
@simulated
async def test_a_match_that_stands_in_its_own_way_is_given_up_although_a_store_hangs(shorter: bool) -> None:
    """The state of the match and those that the request asks for are more than there are. Who wants no shorter match
    is refused: nothing could end this wait but the store."""
    async with hanging("put", mamba=3) as (cache, backend):
        async with cache.lease(text(4, extra=1), states=3) as lease:
            await lease.commit(text(4), checkpoint=(4 * PAGE, int(lease.states[1])))
        await cache.flush()
        backend.hung.set()
        async with cache.lease(text(2, seed=5), states=0) as lease:  # a question and a write
            await lease.commit(text(2, seed=5))
        asking = asyncio.ensure_future(cache.lease(text(4, extra=1), states=3, shorter=shorter).__aenter__())
        assert await timed(asyncio.wait([asking])) < PATIENCE + SOON
        if shorter:
            (await asking).release()
        else:
            with pytest.raises(CacheFull, match="nothing is in flight"):
                await asking


@simulated
async def test_one_slow_read_loses_no_page_of_requests_that_read_nothing() -> None:
    backend, pages = Hangs("get", 0.3, alone=True), dict[PageKey, tuple[bytes, bytes]]()
    backend.inner = SimulatedBackend(Random(1), Hostility(delay=0.045), pages)
    config = settings(24, 20, prefetch_policy="wait_complete", prefetch_threshold=32, write_back_watermark=0.0)
    async with cache_over(backend, config) as cache:
        await serve(cache, text(9, seed=1))
    backend.inner = SimulatedBackend(Random(1), Hostility(delay=0.045), pages)
    backend.hung.set()
    async with cache_over(backend, config) as cache:
        assert await serve(cache, text(9, seed=1)) == 32, "the read was slow, and good"
        assert now() > 0.3
        for seed in range(100, 130):
            await serve(cache, text(7, seed=seed))
        assert cache.statistics().core.lost_pages == 0


# Lateness itself. Storage is late from a call's patience on until one of its kind ends in time, or none is under way.


READ, WRITE = StoreCall.READ, StoreCall.WRITE


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ([(kind, 0.0, 0.09) for kind in StoreCall], []),
        ([(WRITE, 0.0, 1.0), (READ, 1.0, 1.05), (WRITE, 1.05, 1.1)], [(0.1, True), (1.1, False)]),
        ([(READ, 0.0, 1.0), (WRITE, 1.0, 1.05)], [(0.1, True), (1.0, False)]),
        ([(READ, 0.0, 1.0), (READ, 0.95, 1.04)], [(0.1, True), (1.04, False)]),
        ([(READ, 0.0, 2.0), *((WRITE, i / 4, i / 4 + 0.249) for i in range(4)),
          *((kind, 1.0, 1.05) for kind in StoreCall)], [(0.1, True), (2.0, False)]),
        ([(READ, 0.0, -0.2), (READ, 0.3, 0.3)], [(0.1, True), (0.2, False)]),
    ],
    ids=["in time", "a write", "a read", "reads beside each other", "any call", "cancelled, and one that fails"],
)  # fmt: skip
@simulated
async def test_storage_is_late_while_any_call_is(
    calls: list[tuple[StoreCall, float, float]], told: list[tuple[float, bool]]
) -> None:
    """``calls``: when each begins and ends; with a minus, it is cancelled then; at once, it raises."""
    heard: list[tuple[float, bool]] = []
    lateness = Lateness(lambda late: heard.append((round(now(), 3), late)))

    async def call(kind: StoreCall, begin: float, end: float) -> None:
        await asyncio.sleep(begin)
        with suppress(ValueError, TimeoutError), lateness.call(kind):
            if begin == end:
                raise ValueError("broken")
            async with asyncio.timeout(-end if end < 0 else None):
                await asyncio.sleep(9.0 if end < 0 else end - begin)

    await asyncio.gather(*(call(*each) for each in calls))
    assert heard == told


# One long prompt does not hold the loop, also over a store that answers without suspending: in one turn of the loop
# so many pages are asked for, hashed, read and written, and no more.


PAGES = 20 * BATCH_PAGES


class Counting(Attended):
    """Counts the pages of its calls, by verb and turn of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0
        self.pages = defaultdict[str, Counter[int]](Counter)

    async def before(self, verb: str, keys: Sequence[PageKey] = ()) -> None:
        self.pages[verb][self.turn] += len(keys)

    @contextmanager
    def counted(self, cache: AsyncCache) -> Iterator[None]:
        """Turns are counted meanwhile, and keys that are hashed. In each there are few."""
        loop, mapped = asyncio.get_running_loop(), local(cache)._map
        usual, going = mapped.keys, True

        def turn() -> None:
            self.turn += 1
            if going:
                loop.call_soon(turn)

        def keys(pool: str, hashes: bytes) -> list[PageKey]:
            self.pages["key"][self.turn] += len(hashes) // 32
            return usual(pool, hashes)

        mapped.keys = keys  # type: ignore[method-assign]
        turn()
        yield
        going = False
        mapped.keys = usual  # type: ignore[method-assign]
        for verb, counter in self.pages.items():
            assert max(counter.values(), default=0) <= BATCH_PAGES * (2 if verb == "key" else 1), verb


@pytest.mark.parametrize("components", ["full", "full,swa", "full,mamba", "full,swa,mamba"])
async def test_a_long_prompt_is_saved_looked_up_and_read_in_many_turns(components: str) -> None:
    """Its states are not stored, so where there are any the look-up is all there is."""
    swa, mamba = 2 * PAGES * ("swa" in components), 4 * ("mamba" in components)
    config = settings(device=PAGES, host=PAGES, swa=swa, mamba=mamba, window=PAGES * PAGE // 2,
                      prefetch_policy="wait_complete", prefetch_quota=1.0)  # fmt: skip
    storage, prompt = Counting(), text(PAGES)
    async with opened(config, storage=storage) as cache:
        with storage.counted(cache):
            async with cache.lease(prompt, prefetch=None, wait=False) as lease:
                await lease.commit(prompt)
            assert await cache.flush() == (0, 0)
        assert storage.pages["put"].total() >= PAGES
    storage.pages["exists"].clear()
    async with opened(config, storage=storage) as cache:
        with storage.counted(cache):
            result = await cache.prefetch([*prompt, 1])
        assert result.tokens == (0 if mamba else PAGES * PAGE)
        assert storage.pages["exists"].total() >= PAGES


@simulated
async def test_those_in_line_do_not_wait_for_one_call_that_hangs_after_the_other() -> None:
    """Each would be waited for at the head of the line, for ``GRACE``; not once the store is left alone."""
    backend, breaker = Hangs("get", deaf=60.0), Breaker(threshold=1, backoff=1000.0)
    config = settings(80, 120, prefetch_timeout_per_1k=0.0, close_timeout=5.0)
    async with cache_over(backend, config, slow=0.5, breaker=breaker) as cache:
        texts = [text(10, seed=seed) for seed in range(6)]
        await store_only(cache, *texts)
        backend.hung.set()
        began = now()
        requests = [asyncio.ensure_future(serve(cache, tokens)) for tokens in texts]
        await asyncio.sleep(1.05)  # all have had their time, and the breaker is open
        assert breaker.opened == 1
        assert backend.holding > 1
        assert await timed(serve(cache, text(10, seed=70))) < 0.1
        assert await asyncio.gather(*requests) == [0] * 6
        assert now() - began < 1.0 + GRACE
        backend.answers.set()
