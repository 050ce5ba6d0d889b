"""The tree lock and the two queues: who may split a node, and how outcomes and completed prefetches reach the core."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache, CacheClosed
from asynccache.core.audit import check
from asynccache.core.plan import BackupHost, Outcome
from asynccache.core.world import World
from asynccache.errors import InvariantViolation
from asynccache.memory.cpu import CpuDevice
from asynccache.runtime.core_calls import acquire, holding
from asynccache.runtime.driver import Driver
from asynccache.storage import PageKey, Record, Result
from tests.runtime.runtime_kit import PAGE, compute, local, opened, parts, serve, settings, settled, text, turns, until
from tests.simulated.synchronous import SPACE, SynchronousRuntime, core_config, spell
from tests.simulated.world import play

SEEDS = range(8)


def splits(cache: AsyncCache) -> int:
    return cache.statistics().core.splits


async def test_a_split_outside_the_tree_lock_is_refused_and_closes_the_cache() -> None:
    device = CpuDevice()
    cache = await AsyncCache(settings(), device=device).__aenter__()
    await serve(cache, text(4))
    core, driver = parts(cache).core, parts(cache).driver
    node = next(iter(core.world.roots.values())).children
    assert node
    with pytest.raises(InvariantViolation, match="tree lock"):
        driver.call_unlocked(core.world.split, next(iter(node.values())), 2)
    assert splits(cache) == 0
    assert cache.closed is not None
    assert "tree lock" in cache.closed
    with pytest.raises(CacheClosed):
        await cache.match(text(4))
    await cache.aclose()
    await device.aclose()


async def test_a_call_that_may_split_is_refused_while_nobody_holds_the_tree_lock() -> None:
    device = CpuDevice()
    cache = await AsyncCache(settings(), device=device).__aenter__()
    with pytest.raises(InvariantViolation, match="nobody holds the tree lock"):
        parts(cache).driver.call_locked(parts(cache).core.drain, parts(cache).core.walk())
    assert cache.closed is not None
    await cache.aclose()
    await device.aclose()


@pytest.mark.source
async def test_a_call_that_may_split_is_refused_while_another_task_holds_the_tree_lock() -> None:
    """Also if that task was handed the lock by another one. The tests see to that; the runtime saves the cost."""
    async with opened(settings(device=16)) as cache:
        driver = parts(cache).driver
        handed = asyncio.Event()

        async def hold() -> None:
            async with holding(driver.lock):
                driver.perform(driver.call_locked(driver.core.follow_up))
                handed.set()
                await turns(3)

        async with holding(driver.lock):
            driver.perform(driver.call_locked(driver.core.follow_up))
            holder = asyncio.ensure_future(hold())
            gives_up = asyncio.ensure_future(hold())
            await turns(3)
            gives_up.cancel()
        await handed.wait()
        with pytest.raises(InvariantViolation, match="holds the tree lock"):
            driver.call_locked(driver.core.follow_up)
        await holder
        assert not driver.lock.locked()
        assert cache.closed is None


@pytest.mark.source
async def test_every_split_happens_while_the_lock_is_held_also_when_nobody_contends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[bool] = []
    split = World.split

    async with opened(settings(device=32, host=32)) as cache:

        def spy(world: World, *arguments: Any) -> Any:
            held.append(parts(cache).driver.lock.locked())
            return split(world, *arguments)

        monkeypatch.setattr(World, "split", spy)
        for seed in range(4):
            await serve(cache, text(3) + text(2, seed))
            await serve(cache, text(4 - seed) + text(1, 10 + seed))
    assert len(held) >= 3
    assert all(held)


def play_all() -> None:
    for seed in SEEDS:
        play(seed)


def without_the_lock(driver: Driver, call: Callable[..., Any], *arguments: Any) -> Any:
    return driver.call_unlocked(call, *arguments)


@pytest.mark.source
def test_the_worlds_find_a_commit_that_does_not_take_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core call made as if it could not split: some world splits a node in it."""
    monkeypatch.setattr(Driver, "call_locked", without_the_lock)
    with pytest.raises(BaseException) as caught:
        play_all()
    assert "tree lock" in everything(caught.value)


def everything(error: BaseException | None) -> str:
    """What an error says, with those that it came from."""
    if error is None:
        return ""
    inner = [everything(one) for one in error.exceptions] if isinstance(error, BaseExceptionGroup) else []
    return " ".join([str(error), *inner, everything(error.__cause__), everything(error.__context__)])


# what cannot await leaves its work to the next holder


async def test_a_release_evicts_nothing_and_the_next_holder_of_the_lock_does() -> None:
    async with opened(settings(device=16)) as cache:
        lease = await cache.lease(text(4)).__aenter__()
        await lease.commit(text(4))
        await cache.invalidate()
        lease.release()
        assert cache.statistics().device["full"].free == 12, "nothing was evicted by the release"
        assert parts(cache).core.behind
        await cache.match(text(1))
        assert cache.statistics().device["full"].free == 16
        assert not parts(cache).core.behind


async def test_where_nobody_takes_the_lock_the_ack_task_follows_up() -> None:
    async with opened(settings(device=16)) as cache:
        lease = await cache.lease(text(4)).__aenter__()
        await lease.commit(text(4))
        await cache.invalidate()
        lease.release()
        await turns()
        assert cache.statistics().device["full"].free == 16


def test_a_dropped_claim_backs_nothing_up_by_itself() -> None:
    run = SynchronousRuntime(core_config(device=32, host=8))
    run.insert("abcdef")
    run.flush()
    run.perform(run.core.claim(1, SPACE, spell("abcdef")))
    run.insert("uvwxyz")  # its backup must wait for room on the host
    assert run.core.statistics().deferred_backups == 1
    run.prompt = False
    run.perform(run.core.release_claim(1))
    assert run.core.behind
    assert not run.in_flight(BackupHost)
    run.perform(run.core.follow_up())
    assert run.in_flight(BackupHost)
    assert not run.core.behind


# the queue of outcomes


async def test_what_the_ack_task_has_in_its_hands_is_applied_by_whoever_takes_the_lock_first() -> None:
    async with opened(settings(host=16)) as cache:
        driver = parts(cache).driver
        await acquire(driver.lock)
        serving = asyncio.ensure_future(serve(cache, text(2)))
        await turns()
        driver.lock.release()
        await serving
        await settled(cache)
        held: list[Outcome] = []
        stage = local(cache).backup_host
        post, stage._ended = stage._ended, lambda status, ops: held.extend(Outcome(op, status) for op in ops)
        await serve(cache, text(4, 5))
        await until(lambda: len(held) == 1)
        stage._ended = post
        async with holding(driver.lock):
            driver.post(held[0])
            await turns()  # the ack task has taken it out of the queue, and waits for the lock
            assert driver.acks.empty()
            assert driver.unapplied == 1
            driver.apply_outcomes()
            assert driver.unapplied == 0
            assert cache.statistics().core.operations["backup_host"] == 0


async def test_a_grant_waits_for_no_queue() -> None:
    """However many outcomes wait, whoever finds the lock free applies them and is granted without one turn."""
    async with opened(settings(device=64, host=64)) as cache:
        driver, held = parts(cache).driver, list[Outcome]()
        stage = local(cache).backup_host
        post, stage._ended = stage._ended, lambda status, ops: held.extend(Outcome(op, status) for op in ops)
        for seed in range(5):
            await serve(cache, text(2, seed))
        await until(lambda: len(held) == 5)
        stage._ended = post
        for outcome in held:
            driver.post(outcome)
        entering = cache.lease(text(2, 9)).__aenter__()
        with pytest.raises(StopIteration) as entered:
            entering.send(None)
        assert driver.unapplied == 0
        entered.value.value.release()


# the queue of completed prefetches


class SlowReads(MemoryBackend):
    """A store whose reads wait for ``gate``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.reading = 0

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        self.reading += 1
        await self.gate.wait()
        return await super().get(keys, records)


async def test_a_prefetch_that_must_wait_for_a_backup_is_queued_again_and_nothing_waits_behind_it() -> None:
    storage, device = SlowReads(), CpuDevice()
    async with opened(settings(device=64, host=64), device=device, storage=storage) as cache:
        for seed in (1, 2):
            await serve(cache, text(6, seed))
        await cache.flush()
    async with opened(settings(device=64, host=64), device=device, storage=storage) as cache:
        lease = await cache.lease(text(6, 1), wait=False).__aenter__()
        assert lease.cached == 0
        storage.gate.clear()
        first, second = (cache.prefetch(text(6, seed)) for seed in (1, 2))
        await until(lambda: storage.reading == 2)
        computed = device.gate()
        compute(cache, lease, text(6, 1))
        await lease.commit(text(6, 1), after=computed)
        assert cache.statistics().core.operations["backup_host"] == 1, "the host's pages of it are on their way"
        storage.gate.set()
        assert (await second).tokens == 6 * PAGE
        await turns()
        assert not first.done()
        assert not parts(cache).driver.lock.locked(), "who waits for a backup does not hold the lock"
        computed.open()
        await first
        lease.release()
        assert (await cache.match(text(6, 1))).host == 6 * PAGE
    await storage.aclose()
    await device.aclose()


async def test_closing_ends_a_prefetch_whose_commit_waits_and_its_pages_go_back() -> None:
    storage, device = SlowReads(), CpuDevice()
    async with opened(settings(device=64, host=64), device=device, storage=storage) as cache:
        await serve(cache, text(6, 1))
        await cache.flush()
    cache = await AsyncCache(settings(device=64, host=64), device=device, storage=storage).__aenter__()
    lease = await cache.lease(text(6, 1), wait=False).__aenter__()
    storage.gate.clear()
    handle = cache.prefetch(text(6, 1))
    await until(lambda: storage.reading == 1)
    computed = device.gate()
    await lease.commit(text(6, 1), after=computed)
    storage.gate.set()
    await turns()
    core = parts(cache).core
    assert core.statistics().operations["prefetch"] == 1
    assert core.statistics().operations["backup_host"] == 1
    lease.release(after=computed)
    await cache.aclose(timeout=0.0)
    assert core.statistics().operations["prefetch"] == 0
    assert handle.done()
    check(core)
    computed.open()
    await storage.aclose()
    await device.aclose()
