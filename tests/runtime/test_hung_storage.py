"""A store that does not answer is late, and nobody waits for it who can go on without it."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from random import Random
from typing import Any

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache, CacheFull, PrefetchHandle, PrefetchStatus
from asynccache.core.audit import check
from asynccache.memory.cpu import CpuDevice
from asynccache.runtime.lease import Lease
from asynccache.runtime.prefetch import GRACE
from asynccache.runtime.save import PATIENCE, Lateness, StoreCall
from asynccache.storage import Breaker, CheckedStore, PageKey, Record, Result, settled
from asynccache.storage.checked import store_layout
from asynccache.testing.wrapped_backend import WrappedBackend
from asynccache.worker.local import BATCH_PAGES
from tests.runtime.runtime_kit import PAGE, local, opened, parts, settings, text
from tests.simulated.backend import Hostility, SimulatedBackend
from tests.simulated.device import SimulatedDevice
from tests.simulated.loop import SimulatedLoop, simulate

# A store that does not answer delays a request by no more than its prefetch policy allows, and a short grace.


class Hangs(WrappedBackend):
    """From ``hung.set()`` on, ``verb`` does not answer before ``answers.set()`` or for ``deaf`` seconds, nor does
    ``put`` unless ``alone``, and they cannot be cancelled till then: as a client whose buffers somebody else writes
    to."""

    def __init__(self, verb: str, deaf: float = 1e6, *, alone: bool = False) -> None:
        super().__init__(SimulatedBackend(Random(1), Hostility(delay=0.0)))
        self.verbs = (verb,) if alone else (verb, "put")
        self.deaf = deaf
        self.hung = asyncio.Event()
        self.answers = asyncio.Event()
        self.holding = 0

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        await self._hang("exists")
        return await self.inner.exists(keys)

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        await self._hang("get")
        return await self.inner.get(keys, records)

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        await self._hang("put")
        return await self.inner.put(keys, records)

    async def clear(self) -> None:
        await self._hang("clear")
        await self.inner.clear()

    async def _hang(self, verb: str) -> None:
        if self.hung.is_set() and verb in self.verbs:
            self.holding += 1
            try:
                await settled([asyncio.ensure_future(self._answer())])
            finally:
                self.holding -= 1

    async def _answer(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self.deaf):
                await self.answers.wait()


async def serve(cache: AsyncCache, tokens: list[int]) -> int:
    async with cache.lease(tokens) as lease:
        await lease.loaded()
        await lease.commit(tokens)
        return lease.cached


@pytest.mark.parametrize(("policy", "within"), [("best_effort", GRACE), ("timeout", 1.0 + GRACE)])
@pytest.mark.parametrize("verb", ["exists", "get"])
def test_a_lease_goes_in_without_a_prefetch_that_hangs(verb: str, policy: str, within: float) -> None:
    async def main(loop: SimulatedLoop) -> None:
        device = SimulatedDevice(seed=1, latency=(0.0, 0.001))
        backend = Hangs(verb)
        config = settings(40, 80, prefetch_policy=policy, prefetch_timeout_per_1k=0.0, close_timeout=5.0)
        async with AsyncCache(config, device=device, storage=backend) as cache:
            await serve(cache, text(10, seed=1))
            await cache.flush()
            await cache.invalidate("somebody else")
            await forget_host(cache)
            backend.hung.set()
            for number in range(4):
                began = loop.time()
                assert await serve(cache, text(10, seed=1 if number % 2 else 50 + number)) in (0, 36)
                assert loop.time() - began < within + 0.1
            check(parts(cache).core)
            backend.answers.set()
            await asyncio.sleep(1.0)
            await cache.flush()
            assert backend.holding == 0
            parts(cache).prefetches.drop_claims()
            check(parts(cache).core, idle=True)
        await device.aclose()

    for seed in range(3):
        simulate(main, seed)


async def forget_host(cache: AsyncCache) -> None:
    """Push out what device and host have, so that storage is asked."""
    for seed in range(200, 216):
        await serve(cache, text(10, seed=seed))
    await cache.flush()


def test_while_storage_is_away_nobody_joins_a_fetch_that_hangs() -> None:
    """The fetch goes on for as long as its store holds the pages; who comes when the breaker is open misses at once."""

    async def main(loop: SimulatedLoop) -> None:
        device = SimulatedDevice(seed=1, latency=(0.0, 0.001))
        backend = Hangs("get", deaf=60.0)
        config = settings(40, 80, prefetch_timeout_per_1k=0.0, close_timeout=5.0)
        breaker = Breaker(threshold=1, backoff=1000.0)
        store = CheckedStore(backend, store_layout(config.pools()), threads=0, slow=0.5, breaker=breaker)
        async with AsyncCache(config, device=device, storage=store) as cache:
            await serve(cache, text(10, seed=1))
            await cache.flush()
            await forget_host(cache)
            backend.hung.set()
            await serve(cache, [*text(10, seed=1), 7])
            assert breaker.opened == 1
            parts(cache).prefetches.drop_claims()
            for extra in range(3):
                began = loop.time()
                await serve(cache, text(10, seed=1) + text(10, seed=70 + extra))
                assert loop.time() - began < 0.1
            assert cache.statistics().lookups.missed_requests["backend_down"] >= 1
            backend.answers.set()
        await store.aclose()
        await device.aclose()

    simulate(main, 1)


def test_those_in_line_do_not_wait_for_one_call_that_hangs_after_the_other() -> None:
    """Each would be waited for at the head of the line, for ``GRACE``; not once the store is left alone."""

    async def main(loop: SimulatedLoop) -> None:
        device = SimulatedDevice(seed=1, latency=(0.0, 0.001))
        backend = Hangs("get", deaf=60.0)
        config = settings(80, 120, prefetch_timeout_per_1k=0.0, close_timeout=5.0)
        breaker = Breaker(threshold=1, backoff=1000.0)
        store = CheckedStore(backend, store_layout(config.pools()), threads=0, slow=0.5, breaker=breaker)
        async with AsyncCache(config, device=device, storage=store) as cache:
            texts = [text(10, seed=seed) for seed in range(6)]
            await store_only(cache, texts)
            backend.hung.set()
            began = loop.time()
            requests = [asyncio.ensure_future(serve(cache, tokens)) for tokens in texts]
            await asyncio.sleep(1.05)                  # all have had their time, and the breaker is open
            assert breaker.opened == 1
            assert backend.holding > 1
            came = loop.time()
            await serve(cache, text(10, seed=70))
            assert loop.time() - came < 0.1
            assert await asyncio.gather(*requests) == [0] * 6
            assert loop.time() - began < 1.0 + GRACE
            backend.answers.set()
        await store.aclose()
        await device.aclose()

    simulate(main, 1)


async def store_only(cache: AsyncCache, texts: list[list[int]]) -> None:
    """Have them in storage and nowhere else."""
    for tokens in texts:
        await serve(cache, tokens)
    await cache.flush()
    await forget_host(cache)


def test_the_breaker_ends_even_that() -> None:
    """After a few of them nobody waits for it at all; and it comes back by itself."""

    async def main(loop: SimulatedLoop) -> None:
        device = SimulatedDevice(seed=1, latency=(0.0, 0.001))
        backend = Hangs("get", deaf=5.0)
        config = settings(40, 80, prefetch_timeout_per_1k=0.0, close_timeout=5.0)
        store = CheckedStore(backend, store_layout(config.pools()), threads=0, slow=2.0)
        async with AsyncCache(config, device=device, storage=store) as cache:
            for number in range(6):
                await serve(cache, text(10, seed=number))
            await forget_host(cache)
            backend.hung.set()
            waited = []
            for number in range(60):
                began = loop.time()
                await serve(cache, text(10, seed=300 + number) if number % 6 else text(10, seed=number // 6 % 6))
                waited.append(round(loop.time() - began, 2))
                await asyncio.sleep(0.2)
            backend.hung.clear()
            backend.answers.set()
            assert max(waited) < 1.0 + GRACE + 0.1
            assert sum(wait > 0.1 for wait in waited) <= 7, waited
            await asyncio.sleep(20.0)
            before = store.stats()["get_pages"]
            for _ in range(10):
                await forget_host(cache)
                await serve(cache, text(10, seed=3))
            assert store.stats()["get_pages"] > before, "hits come back by themselves"
        await store.aclose()
        await device.aclose()

    simulate(main, 1)


# A store that does not answer is late, whatever it was asked: then nobody waits for it who can go on without it.
#
# Deadlines run beside each other, from each request's own arrival.


FOREVER = 1e6
SOON = 0.05
"""Seconds for copies between device and host."""

DEAF = pytest.mark.parametrize("deaf", [30.0, FOREVER], ids=["for a while", "for ever"])

Body = Callable[[AsyncCache, Hangs, SimulatedLoop], Coroutine[Any, Any, None]]


def play(body: Body, verb: str, deaf: float = FOREVER, device: int = 20, host: int = 20, **more: Any) -> None:
    """Run ``body`` in a cache whose store will hang in ``verb`` alone; afterwards the store answers, and nothing is
    left behind."""

    async def main(loop: SimulatedLoop) -> None:
        copies = SimulatedDevice(seed=1, latency=(0.0, 0.001))
        backend = Hangs(verb, deaf, alone=True)
        terms = {"prefetch_policy": "best_effort", "prefetch_timeout_per_1k": 0.0, "close_timeout": 5.0, **more}
        config = settings(device, host, **terms)
        store = CheckedStore(backend, store_layout(config.pools()), threads=0)
        async with AsyncCache(config, device=copies, storage=store) as cache:
            await body(cache, backend, loop)
            check(parts(cache).core)
            backend.answers.set()
            await asyncio.sleep(1.0)
            assert backend.holding == 0
            await cache.flush()
            parts(cache).prefetches.drop_claims()
            check(parts(cache).core, idle=True)
        await store.aclose()
        await copies.aclose()

    simulate(main, 1)


async def timed(work: Awaitable[object]) -> float:
    """Return how many seconds ``work`` takes."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.timeout(3600):
        await work
    return loop.time() - began


async def enter_and_leave(cache: AsyncCache, tokens: list[int]) -> None:
    async with cache.lease(tokens):
        pass


@asynccontextmanager
async def full_of_unsaved(cache: AsyncCache, backend: Hangs) -> AsyncIterator[Lease]:
    """Nine pages that only the device has, a host whose pages wait for a store that does not take them, and a lease of
    one page that holds what the rest leaves. Yields that lease."""
    backend.hung.set()
    go, ready = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with cache.lease(text(10, seed=1)) as lease:
            await lease.commit(text(10, seed=1))
            ready.set()
            await go.wait()

    holder = asyncio.ensure_future(hold())
    await ready.wait()
    await asyncio.ensure_future(serve(cache, text(9, seed=2)))
    async with cache.lease(text(1, seed=3)) as lease:
        await lease.commit(text(1, seed=3))
        yield lease
    go.set()
    await holder


@asynccontextmanager
async def claimed_and_fetching(cache: AsyncCache, backend: Hangs) -> AsyncIterator[Lease]:
    """A host half of which is claimed, and for the other half of which a store is asked that hangs. Yields a lease that
    holds half of the device; the other half is an only copy."""
    for seed in (1, 2):
        await serve(cache, text(10, seed=seed))
    await cache.flush()
    for seed in range(200, 206):
        await serve(cache, text(10, seed=seed))
    await cache.flush()
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


@pytest.mark.parametrize("verb", ["put", "clear", "get", "exists"])
@DEAF
@pytest.mark.parametrize("what", ["lease", "extend"])
def test_whoever_needs_room_waits_no_longer_than_the_stores_patience(verb: str, deaf: float, what: str) -> None:
    async def body(cache: AsyncCache, backend: Hangs, loop: SimulatedLoop) -> None:
        async with WORRIES[verb](cache, backend) as lease:
            entering = asyncio.ensure_future(enter_and_leave(cache, text(5, seed=9)))
            took = await timed(lease.extend(5 * PAGE, wait=True) if what == "extend" else entering)
            assert took < PATIENCE + SOON + (GRACE if what == "lease" and verb == "exists" else 0.0)
            entering.cancel()

    unsaved = verb in ("put", "clear")
    play(body, verb, deaf, host=10 if unsaved else 20, write_back_watermark=0.0 if unsaved else 0.25)


@pytest.mark.parametrize(
    ("verb", "policy"),
    [*itertools.product(("put", "get"), ("best_effort", "timeout", "wait_complete")), ("exists", "best_effort"),
     ("exists", "timeout")],
)  # fmt: skip
@DEAF
def test_a_request_that_needs_nothing_of_the_store_hardly_waits(verb: str, deaf: float, policy: str) -> None:
    """While others do who need it. Where the store does not even answer questions, nobody knows who needs nothing of
    it, and each waits for as long as the policy says (under ``wait_complete`` until there is an answer)."""
    allowed = PATIENCE + SOON + ({"best_effort": 0.0, "timeout": 1.0}[policy] + GRACE if verb == "exists" else 0.0)

    async def body(cache: AsyncCache, backend: Hangs, loop: SimulatedLoop) -> None:
        for seed in range(3):
            await serve(cache, text(5, seed=seed))
        await cache.flush()
        for seed in range(200, 212):
            await serve(cache, text(10, seed=seed))
        await cache.flush()
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

    play(body, verb, deaf, prefetch_policy=policy, host=60)


@DEAF
@pytest.mark.parametrize(("policy", "within"), [("best_effort", GRACE), ("timeout", 1.0 + GRACE)])
def test_requests_for_the_pages_of_a_store_that_hangs_wait_beside_each_other(
    policy: str, within: float, deaf: float
) -> None:
    """And one that comes behind them, which needs nothing of the store, does not wait for them."""
    number = 30

    async def body(cache: AsyncCache, backend: Hangs, loop: SimulatedLoop) -> None:
        texts = [text(4, seed=seed) for seed in range(number)]
        for tokens in texts:
            await serve(cache, tokens)
        await cache.flush()
        for seed in range(1000, 1000 + 12 * number):
            await serve(cache, text(5, seed=seed))
        await cache.flush()
        backend.hung.set()
        handles = [cache.prefetch([*tokens, 7]) for tokens in texts]
        await asyncio.sleep(0.01)
        assert backend.holding > 1

        async def ask(tokens: list[int], handle: PrefetchHandle) -> None:
            async with cache.lease([*tokens, 7], prefetch=handle) as lease:
                assert lease.cached == 0

        requests = [asyncio.ensure_future(timed(ask(*each))) for each in zip(texts, handles, strict=True)]

        async def come_later() -> float:
            await asyncio.sleep(within - 0.3)
            return await timed(serve(cache, text(1, seed=9999)[:3]))

        later = asyncio.ensure_future(come_later())
        assert max(await asyncio.gather(*requests)) < within + SOON
        assert await later < SOON

    play(body, "get", deaf, device=20 * number, host=40 * number, prefetch_policy=policy)


def test_a_request_at_the_head_of_the_line_is_not_waited_for_while_its_prefetch_stops() -> None:
    """It comes back to its position: who came later is granted nothing that it could have, once it is in line."""

    async def body(cache: AsyncCache, backend: Hangs, loop: SimulatedLoop) -> None:
        await serve(cache, text(10, seed=1))
        await cache.flush()
        for seed in range(200, 206):
            await serve(cache, text(10, seed=seed))
        await cache.flush()
        backend.hung.set()
        order: list[int] = []

        async def ask(tokens: list[int], seconds: float, handle: PrefetchHandle | None = None) -> None:
            async with cache.lease(tokens, prefetch=handle):
                order.append(tokens[0])
                await asyncio.sleep(seconds)

        handle = cache.prefetch(text(10, seed=1))
        await asyncio.sleep(0.01)
        stopping = asyncio.ensure_future(ask(text(10, seed=1), 0.0, handle))
        await asyncio.sleep(0.01)
        beside = asyncio.ensure_future(ask(text(15, seed=7), 1.0))
        await asyncio.sleep(GRACE)
        assert order == [text(1, seed=7)[0]]
        assert len(parts(cache).driver.line) == 1
        behind = asyncio.ensure_future(ask(text(5, seed=8), 0.0))
        await asyncio.gather(stopping, beside, behind)
        assert order == [text(1, seed=seed)[0] for seed in (7, 1, 8)]

    play(body, "get")


def test_a_prefetch_that_is_told_to_stop_ends_soon_and_leaves_its_fetch_to_those_who_share_it() -> None:
    async def body(cache: AsyncCache, backend: Hangs, loop: SimulatedLoop) -> None:
        await serve(cache, text(6, seed=1))
        await cache.flush()
        await cache.invalidate("somebody else")
        for seed in range(200, 206):
            await serve(cache, text(10, seed=seed))
        await cache.flush()
        backend.hung.set()
        first, second, third = (cache.prefetch(text(6, seed=1)) for _ in range(3))
        await asyncio.sleep(0.01)

        async def ended(handle: object) -> None:
            await handle  # type: ignore[misc]

        for handle in (first, second):
            handle.stop()
            handle.stop()
            assert not handle.done()
        third.cancel()
        assert await timed(asyncio.gather(ended(first), ended(second))) == pytest.approx(GRACE, abs=0.001)
        assert first.result is not None
        assert first.result[:2] == (PrefetchStatus.MISS, 0)
        assert (await third).status is PrefetchStatus.CANCELLED
        fourth = cache.prefetch(text(6, seed=1))
        backend.hung.clear()
        backend.answers.set()
        assert (await fourth).tokens == 6 * PAGE
        assert first.result[:2] == (PrefetchStatus.MISS, 0)
        assert cache.statistics().prefetches["miss"] >= 2

    play(body, "get")


def test_what_the_host_has_is_kept_for_a_request_whose_prefetch_is_not_answered() -> None:
    """Also when the store lets go of it at last."""

    async def body(cache: AsyncCache, backend: Hangs, loop: SimulatedLoop) -> None:
        await serve(cache, text(6, seed=1))
        await cache.flush()
        for seed in range(200, 206):
            await serve(cache, text(10, seed=seed))
        await cache.flush()
        assert (await cache.prefetch(text(2, seed=1))).tokens == 2 * PAGE
        backend.hung.set()
        handle = cache.prefetch(text(6, seed=1))
        await asyncio.sleep(0.01)
        handle.stop()
        assert (await handle)[:2] == (PrefetchStatus.MISS, 0)
        backend.hung.clear()
        backend.answers.set()
        await asyncio.sleep(1.0)
        for seed in range(300, 310):
            await serve(cache, text(10, seed=seed))
        assert (await cache.match(text(6, seed=1))).host == 2 * PAGE
        handle.cancel()

    play(body, "get")


@pytest.mark.parametrize("verb", ["put", "exists"])
def test_a_match_that_stands_in_its_own_way_is_given_up_although_a_store_hangs(verb: str) -> None:
    """The state of the match and those that the request asks for are more than there are."""

    async def body(cache: AsyncCache, backend: Hangs, loop: SimulatedLoop) -> None:
        async def ask() -> int:
            async with cache.lease(text(4, extra=1), states=3) as lease:
                await lease.loaded()
                checkpoint = (4 * PAGE, int(lease.states[1])) if not lease.cached else None
                await lease.commit(text(4), checkpoint=checkpoint)
                return lease.cached

        await ask()
        await cache.flush()
        assert await cache.match(text(4, extra=1)) != (0,) * 6
        backend.hung.set()
        async with cache.lease(text(2, seed=5), states=0) as lease:  # a question and a write
            await lease.commit(text(2, seed=5))
        fetching = cache.prefetch(text(4, extra=1) + text(2, seed=6))
        await asyncio.sleep(0.01)
        assert await timed(asyncio.ensure_future(ask())) < PATIENCE + SOON
        fetching.cancel()

    play(body, verb, mamba=3)


def test_what_could_never_be_had_is_refused_although_a_store_hangs() -> None:
    """With a longer match or not at all: nothing could end this wait but the store."""

    async def body(cache: AsyncCache, backend: Hangs, loop: SimulatedLoop) -> None:
        async with cache.lease(text(4, extra=1), states=3) as lease:
            await lease.commit(text(4), checkpoint=(4 * PAGE, int(lease.states[1])))
        await cache.flush()
        backend.hung.set()
        await serve(cache, text(2, seed=5))

        async def refused() -> None:
            with pytest.raises(CacheFull, match="nothing is in flight"):
                await cache.lease(text(4, extra=1), states=3, shorter=False).__aenter__()

        assert await timed(asyncio.ensure_future(refused())) < PATIENCE + SOON

    play(body, "put", mamba=3)


# lateness itself


def heard(body: Callable[[Lateness], Coroutine[Any, Any, None]]) -> list[tuple[float, bool]]:
    """Return what a ``Lateness`` tells during ``body``, and when."""
    told: list[tuple[float, bool]] = []

    async def main(loop: SimulatedLoop) -> None:
        await body(Lateness(lambda late: told.append((round(loop.time(), 3), late))))

    simulate(main, 1)
    return told


async def call(lateness: Lateness, seconds: float, kind: StoreCall = StoreCall.READ) -> None:
    with lateness.call(kind):
        await asyncio.sleep(seconds)


def test_a_call_in_time_makes_nothing_late() -> None:
    async def body(lateness: Lateness) -> None:
        await asyncio.gather(*(call(lateness, 0.09, kind) for kind in StoreCall))

    assert heard(body) == []


def test_storage_is_late_from_a_writes_patience_on_until_a_write_ends_in_time() -> None:
    async def body(lateness: Lateness) -> None:
        await call(lateness, 1.0, StoreCall.WRITE)
        await call(lateness, 0.05, StoreCall.READ)
        await call(lateness, 0.05, StoreCall.WRITE)

    assert heard(body) == [(0.1, True), (1.1, False)]


def test_storage_is_late_from_a_reads_patience_on_until_a_read_ends_in_time_or_none_is_under_way() -> None:
    async def one_after_the_other(lateness: Lateness) -> None:
        await call(lateness, 1.0)
        await call(lateness, 0.05, StoreCall.WRITE)

    async def beside_each_other(lateness: Lateness) -> None:
        hangs = asyncio.ensure_future(call(lateness, 1.0))
        await asyncio.sleep(0.95)
        await asyncio.gather(hangs, call(lateness, 0.09))

    assert heard(one_after_the_other) == [(0.1, True), (1.0, False)]
    assert heard(beside_each_other) == [(0.1, True), (1.04, False)]


def test_one_slow_read_loses_no_page_of_requests_that_read_nothing() -> None:
    async def main(loop: SimulatedLoop) -> None:
        device = SimulatedDevice(seed=1, latency=(0.0, 0.001))
        backend = Hangs("get", 0.3, alone=True)
        backend.inner = SimulatedBackend(Random(1), Hostility(delay=0.045))
        config = settings(24, 20, prefetch_policy="wait_complete", prefetch_threshold=32, write_back_watermark=0.0)
        store = CheckedStore(backend, store_layout(config.pools()), threads=0)
        stored = text(9, seed=1)
        async with AsyncCache(config, device=device, storage=store) as cache:
            await serve(cache, stored)
        backend.hung.set()
        async with AsyncCache(config, device=device, storage=store) as cache:
            assert await serve(cache, stored) == 32, "the read was slow, and good"
            assert loop.time() > 0.3
            for seed in range(100, 130):
                await serve(cache, text(7, seed=seed))
            assert cache.statistics().core.lost_pages == 0
        await store.aclose()
        await device.aclose()

    simulate(main, 1)


def test_storage_is_late_while_any_call_is() -> None:
    async def body(lateness: Lateness) -> None:
        hangs = asyncio.ensure_future(call(lateness, 2.0))
        await asyncio.sleep(0)
        for _ in range(4):
            await call(lateness, 0.25, StoreCall.WRITE)
        await asyncio.gather(hangs, *(call(lateness, 0.05, kind) for kind in StoreCall))

    assert heard(body) == [(0.1, True), (2.0, False)]


def test_a_call_that_fails_or_is_cancelled_has_ended() -> None:
    async def body(lateness: Lateness) -> None:
        hangs = asyncio.ensure_future(call(lateness, 5.0))
        await asyncio.sleep(0.2)
        hangs.cancel()
        await asyncio.wait([hangs])
        with pytest.raises(ValueError, match="broken"), lateness.call(StoreCall.READ):
            raise ValueError("broken")

    assert heard(body) == [(0.1, True), (0.2, False)]


# One long prompt does not hold the loop, also over a store that answers without suspending: in one turn of the loop
# so many pages are asked for, hashed, read and written, and no more.


PAGES = 20 * BATCH_PAGES


class Counting(MemoryBackend):
    """Counts the pages of its calls, by verb and turn of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0
        self.pages = {verb: Counter[int]() for verb in ("exists", "get", "put", "key")}

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        self.pages["exists"][self.turn] += len(keys)
        return await super().exists(keys)

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        self.pages["get"][self.turn] += len(keys)
        return await super().get(keys, records)

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        self.pages["put"][self.turn] += len(keys)
        return await super().put(keys, records)


@contextmanager
def counted(cache: AsyncCache, storage: Counting) -> Iterator[None]:
    """Turns are counted, and keys that are hashed."""
    loop, mapped = asyncio.get_running_loop(), local(cache)._map
    usual, going = mapped.keys, True

    def turn() -> None:
        storage.turn += 1
        if going:
            loop.call_soon(turn)

    def keys(pool: str, hashes: bytes) -> list[PageKey]:
        storage.pages["key"][storage.turn] += len(hashes) // 32
        return usual(pool, hashes)

    mapped.keys = keys  # type: ignore[method-assign]
    turn()
    yield
    going = False
    mapped.keys = usual  # type: ignore[method-assign]


def most(storage: Counting, verb: str) -> int:
    return max(storage.pages[verb].values(), default=0)


@pytest.mark.parametrize("components", ["full", "full,swa", "full,mamba", "full,swa,mamba"])
async def test_a_long_prompt_is_saved_looked_up_and_read_in_many_turns(components: str) -> None:
    """Its states are not stored, so where there are any the look-up is all there is."""
    swa, mamba = 2 * PAGES * ("swa" in components), 4 * ("mamba" in components)
    config = settings(device=PAGES, host=PAGES, swa=swa, mamba=mamba, window=PAGES * PAGE // 2,
                      prefetch_policy="wait_complete", prefetch_quota=1.0)  # fmt: skip
    storage, device, prompt = Counting(), CpuDevice(), text(PAGES)
    async with opened(config, storage=storage, device=device) as cache:
        with counted(cache, storage):
            async with cache.lease(prompt, prefetch=None, wait=False) as lease:
                await lease.commit(prompt)
            assert await cache.flush() == (0, 0)
        assert sum(storage.pages["put"].values()) >= PAGES
        assert most(storage, "put") <= BATCH_PAGES
        assert most(storage, "key") <= 2 * BATCH_PAGES
    for counter in storage.pages.values():
        counter.clear()
    async with opened(config, storage=storage, device=device) as cache:
        with counted(cache, storage):
            result = await cache.prefetch([*prompt, 1])
        assert result.tokens == (0 if mamba else PAGES * PAGE)
        assert sum(storage.pages["exists"].values()) >= PAGES
        assert most(storage, "exists") <= BATCH_PAGES
        assert most(storage, "get") <= BATCH_PAGES
        assert most(storage, "key") <= 2 * BATCH_PAGES
    await storage.aclose()
    await device.aclose()
