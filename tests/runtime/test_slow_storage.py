"""A store that is too slow for what is written slows backups and drops them, and no request waits for it.

In simulated time, so the latencies of requests are exact and only what the cache itself waits for is in them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from asynccache import AsyncCache
from asynccache.core.audit import check
from asynccache.runtime.cache import CacheStatistics
from asynccache.storage import PageKey, Record, Result
from asynccache.testing.slow_backend import SlowBackend
from tests.runtime.runtime_kit import HeldBackend, cache_over, local, now, parts, publish, settings, simulated, text
from tests.simulated.backend import Hostility, SimulatedBackend
from tests.simulated.device import SimulatedDevice
from tests.simulated.loop import SimulatedLoop, simulate

pytestmark = pytest.mark.slow

LENGTH = 12
AT_ONCE = Hostility(delay=0.0)


class SlowPuts(SlowBackend):
    """Reads and questions are answered at once."""

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        return await self.inner.exists(keys)

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        return await self.inner.get(keys, records)


async def serve(cache: AsyncCache, number: int) -> float:
    """Returns the seconds from asking for a lease to its commit, without the computing."""
    tokens = text(4, seed=number % 7) + text(LENGTH - 4, seed=1000 + number)
    began = now()
    async with cache.lease(tokens) as lease:
        await lease.loaded()
        entered = now()
        await asyncio.sleep(0.02)
        computed = now()
        await lease.commit(tokens)
        return now() - computed + entered - began


def run(backend: Any, requests: int = 300, host: int = 72) -> tuple[list[float], CacheStatistics]:
    """The latencies of requests of 12 pages, four at a time, for a device of 60 pages, in order."""

    async def main(loop: SimulatedLoop) -> tuple[list[float], CacheStatistics]:
        device, places = SimulatedDevice(seed=1, latency=(0.0, 0.001)), asyncio.Semaphore(4)

        async def one(number: int) -> float:
            async with places:
                return await serve(cache, number)

        async with AsyncCache(settings(60, host, close_timeout=0.5), device=device, storage=backend) as cache:
            latencies = await asyncio.gather(*map(one, range(requests)))
            statistics = cache.statistics()
            check(parts(cache).core)
        await device.aclose()
        return sorted(latencies), statistics

    return simulate(main, 1)


def store(put_seconds: float) -> SlowPuts:
    return SlowPuts(SimulatedBackend(Random(1), AT_ONCE), latency=put_seconds)


@pytest.mark.parametrize("host", [20, 36, 72])
def test_requests_do_not_wait_for_a_store_that_is_a_hundred_times_too_slow(host: int) -> None:
    """A commit every 5 ms, a put of 0.5 s: far more than the store could ever take. A host of 20 pages holds one prompt
    and not two; 72 are more than the device has."""
    (alone, _), (slow, statistics) = run(None, 500, host), run(store(0.5), 500, host)
    assert statistics.dropped_backups > 200 or host == 20
    assert statistics.stages["backup_storage"].ops > 0, "what was not dropped was stored"
    assert slow[495] <= 2 * alone[495] + 0.012, "a load or two (eight seeds: 7 to 11 ms), never a put"
    assert slow[-5] <= 0.02, "but those that found out that it is late"
    assert slow[-1] < 0.2
    assert statistics.lookups.requests == 500


def test_nothing_is_dropped_for_a_store_that_keeps_up() -> None:
    _, statistics = run(store(0.001), host=200)
    assert statistics.dropped_backups == 0
    assert statistics.stages["backup_storage"].errors == 0


@simulated
async def test_what_waits_for_storage_holds_its_share_of_the_host_and_no_more() -> None:
    """Also for each component by itself: here the sliding window's host pages are what runs out."""
    most = 0
    config = settings(60, 80, swa=48, window=8, backup_quota=0.25, close_timeout=0.5)
    async with cache_over(store(3.0), config) as cache:
        for number in range(60):
            await serve(cache, number)
            shelf = cache.statistics().host["full"]
            most = max(most, shelf.capacity - shelf.free - shelf.evictable)
    assert most <= 80 * 0.25 + LENGTH + 4, "the share, the one that came last, and a backup under way"
    assert most >= 80 * 0.25 - LENGTH


async def write(cache: AsyncCache, numbers: range, each: float = 0.0) -> None:
    """Prompts of 12 pages, and ``each`` seconds after every one."""
    for number in numbers:
        await publish(cache, text(LENGTH, seed=number))
        await asyncio.sleep(each)


@simulated
async def test_the_oldest_is_dropped_and_the_newest_kept() -> None:
    inner = SimulatedBackend(Random(1), AT_ONCE)
    gate = HeldBackend("put", held=True)
    gate.inner = inner
    async with cache_over(gate, settings(200, 200, backup_quota=0.2)) as cache:
        await write(cache, range(10), 0.1)  # 40 pages may wait: three operations of 12
        assert cache.statistics().dropped_backups == 7
        gate.let()
        await asyncio.sleep(1.0)
        seen = [key.key for key in inner.pages]  # in the order in which they were stored
        pools, core, space = local(cache)._map, parts(cache).core, parts(cache).namespaces.space(None)
        first = {n: pools.key("full", core.known_hashes(space, _key(n))[:32]).key for n in range(10)}
        stored = sorted(range(10), key=lambda number: seen.index(first[number]))
    assert stored[:3] == [0, 8, 9], "the first was in flight"
    assert sorted(stored[3:]) == [1, 2, 3, 4, 5, 6, 7], "and when there is time, what was dropped is stored"


def _key(number: int) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in text(LENGTH, seed=number))


@pytest.mark.parametrize("quota", [0.0, 0.1, 1.0])
@simulated
async def test_flush_stores_everything_however_little_may_wait(quota: float) -> None:
    backend = SimulatedBackend(Random(1), AT_ONCE)
    gate = HeldBackend("put", held=True)
    gate.inner = backend
    async with cache_over(gate, settings(200, 200, backup_quota=quota)) as cache:
        await write(cache, range(15))
        await asyncio.sleep(0.1)
        gate.let()
        assert await cache.flush(timeout=60.0) == (0, 0)
        assert len(backend.pages) == 15 * LENGTH
        check(parts(cache).core, idle=True)


@simulated
async def test_closing_stores_what_was_dropped() -> None:
    slow = store(0.5)
    async with cache_over(slow, settings(200, 200, backup_quota=0.1)) as cache:
        await write(cache, range(15))
        await asyncio.sleep(0.1)
        assert cache.statistics().dropped_backups > 0
        assert await cache.aclose() == (0, 0, None)
        assert slow.stats()["pages"] == 15 * LENGTH


@simulated
async def test_a_batch_that_is_late_gives_up_for_those_that_wait() -> None:
    """One prompt of most of the host, at a crawl: it does not keep its pages pinned while others wait."""
    async with cache_over(store(2.0), settings(1200, 1000, close_timeout=0.1)) as cache:
        await publish(cache, text(900, seed=1))
        await asyncio.sleep(0.5)
        await write(cache, range(50, 52))
        await asyncio.sleep(4.5)
        host = cache.statistics().host["full"]
        assert host.capacity - host.free - host.evictable < 100
        assert cache.statistics().stages["backup_storage"].errors == 1
