"""What the source alone shows: completions in the queue of acks, and a probe that is no use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from random import Random

import pytest

from asynccache import AsyncCache, CacheClosed, CacheConfig, PrefetchHandle, PrefetchStatus
from asynccache.core.plan import Plan, Wait
from asynccache.memory.cpu import CpuDevice
from asynccache.runtime.core_calls import holding
from asynccache.runtime.driver import FetchCommit
from asynccache.storage import CheckedStore
from asynccache.storage.checked import store_layout
from tests.runtime.runtime_kit import gate, opened, parts, publish, settings, settled, text, turns
from tests.runtime.test_prefetching import stored
from tests.simulated.backend import Hostility, SimulatedBackend
from tests.simulated.device import SimulatedDevice
from tests.simulated.loop import SimulatedLoop, simulate

pytestmark = pytest.mark.source

# The completion of a prefetch travels in the queue of acks. A fetch puts its commit there and does not make it; who
# holds the tree lock does. What is queued can be given up, and hears of the end of the cache.


def config() -> CacheConfig:
    return settings(device=16, host=32, prefetch_policy="wait_complete")


def operations(cache: AsyncCache) -> int:
    return cache.statistics().core.operations["prefetch"]


async def waits(handle: PrefetchHandle) -> None:
    await handle


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


async def test_no_fetch_commits_by_itself() -> None:
    async with stored() as storage, opened(config(), storage=storage) as cache:
        with committing_tasks(cache) as names:
            handles = [cache.prefetch(text(6)), cache.prefetch(text(3, 1)), cache.prefetch(text(4) + text(1, 9))]
            assert [(await handle).tokens for handle in handles] == [24, 0, 16]
        assert names
        assert set(names) == {"asynccache-acks"}


async def test_a_completion_waits_in_the_queue_until_somebody_takes_the_lock() -> None:
    async with stored() as storage, opened(config(), storage=storage) as cache:
        driver = parts(cache).driver
        async with queued(cache) as handle:
            await turns()
            assert (operations(cache), driver.unapplied, handle.done()) == (1, 1, False)
            driver.apply_outcomes()
            assert (operations(cache), driver.unapplied) == (0, 0)
            await turns()
            assert handle.done(), "nothing but the commit was waited for"
        assert await handle == (PrefetchStatus.COMPLETE, 24, "")


async def test_a_completion_that_is_given_up_in_the_queue_gives_its_pages_back_at_once() -> None:
    async with stored() as storage, opened(config(), storage=storage) as cache:
        async with queued(cache) as handle:
            handle.cancel()
            assert operations(cache) == 0
            assert cache.statistics().host["full"].free == 32
        assert (await handle).status is PrefetchStatus.CANCELLED
        await settled(cache)
        assert (await cache.match(text(6))).host == 0


async def test_a_completion_below_pages_of_a_batch_that_failed_brings_nothing_and_says_so() -> None:
    async with stored() as storage, opened(config(), storage=storage) as cache:
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


async def test_who_waits_for_a_completion_hears_why_the_cache_closed() -> None:
    async with stored() as storage:
        device = CpuDevice()
        cache = await AsyncCache(config(), device=device, storage=storage).__aenter__()
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


@pytest.mark.parametrize("delay", [0.0, 0.1, 2.0])
@pytest.mark.parametrize("policy", ["best_effort", "timeout", "wait_complete"])
def test_a_request_whose_prefetch_runs_tells_the_policy_of_one_use(
    policy: str, delay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(loop: SimulatedLoop) -> None:
        device = SimulatedDevice(seed=1, latency=(0.0, 0.001))
        backend = SimulatedBackend(Random(1), Hostility(delay=delay))
        config = settings(40, 40, eviction="p2c", prefetch_policy=policy, prefetch_timeout_base=0.05)
        store = CheckedStore(backend, store_layout(config.pools()), threads=0)
        async with AsyncCache(config, device=device, storage=store) as cache:
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
        await store.aclose()
        await device.aclose()

    simulate(main, 1)
