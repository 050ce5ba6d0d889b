"""A store that does not answer delays a request by no more than its prefetch policy allows, and a short grace."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from random import Random

import pytest

from asynccache import AsyncCache
from asynccache.core.audit import check
from asynccache.runtime.prefetch import GRACE
from asynccache.storage import Breaker, CheckedStore, PageKey, Record, Result, settled
from asynccache.storage.checked import store_layout
from asynccache.testing.wrapped_backend import WrappedBackend
from tests.runtime.runtime_kit import parts, settings, text
from tests.simulated.backend import Hostility, SimulatedBackend
from tests.simulated.device import SimulatedDevice
from tests.simulated.loop import SimulatedLoop, simulate


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
