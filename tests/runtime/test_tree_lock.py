"""The tree lock and the two queues: who may split a node, in which order, for how long."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache, CacheClosed, CacheFull, PrefetchHandle
from asynccache.core.audit import check
from asynccache.core.plan import BackupHost, More, Outcome, Plan
from asynccache.errors import InvariantViolation
from asynccache.memory.signals import HostGate
from asynccache.runtime.core_calls import acquire, holding
from asynccache.runtime.driver import Driver, TreeLock
from asynccache.runtime.head import FREEZE_EVERY
from asynccache.runtime.lease import Lease
from tests.runtime.runtime_kit import (
    PAGE,
    HeldBackend,
    compute,
    enter,
    entering,
    few_steps,
    free,
    gate,
    local,
    opened,
    parts,
    serve,
    settings,
    settled,
    text,
    turns,
    until,
)
from tests.runtime.test_door import contend
from tests.simulated.synchronous import SPACE, SynchronousRuntime, core_config, spell
from tests.simulated.world import play

# The tree lock and the two queues: who may split a node, and how outcomes and completed prefetches reach the core.


@pytest.mark.parametrize("call", ["split", "drain"])
async def test_a_call_that_may_split_is_refused_while_nobody_holds_the_tree_lock(call: str) -> None:
    cache = await AsyncCache(settings()).__aenter__()
    await serve(cache, text(4))
    core, driver = parts(cache).core, parts(cache).driver
    (node,) = next(iter(core.world.roots.values())).children.values()  # type: ignore[union-attr]
    refused: Callable[[], object] = partial(driver.call_unlocked, core.world.split, node, 2)
    if call == "drain":
        refused = partial(driver.call_locked, core.drain, core.walk())
    with pytest.raises(InvariantViolation, match="tree lock"):
        refused()
    assert core.statistics().splits == 0
    assert "tree lock" in str(cache.closed)
    with pytest.raises(CacheClosed):
        await cache.match(text(4))
    await cache.aclose()


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
def test_the_worlds_find_a_commit_that_does_not_take_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core call made as if it could not split: some world splits a node in it."""
    monkeypatch.setattr(Driver, "call_locked", Driver.call_unlocked)
    with pytest.raises(BaseException) as caught:
        list(map(play, range(8)))
    assert "tree lock" in "".join(traceback.format_exception(caught.value))


# what cannot await leaves its work to the next holder


@pytest.mark.parametrize("who", ["the next holder", "the ack task"])
async def test_a_release_evicts_nothing_and_the_next_holder_of_the_lock_does(who: str) -> None:
    async with opened(settings(device=16)) as cache:
        lease = await enter(cache, 4)
        await lease.commit(text(4))
        await cache.invalidate()
        lease.release()
        assert free(cache) == 12, "nothing was evicted by the release"
        assert parts(cache).core.behind
        await (cache.match(text(1)) if who == "the next holder" else turns())
        assert free(cache) == 16
        assert not parts(cache).core.behind


# the queue of outcomes


@contextmanager
def held_outcomes(cache: AsyncCache) -> Iterator[list[Outcome]]:
    """Outcomes of backups to the host are kept from the core meanwhile."""
    held: list[Outcome] = []
    stage = local(cache).backup_host
    post, stage._ended = stage._ended, lambda status, ops: held.extend(Outcome(op, status) for op in ops)
    yield held
    stage._ended = post


@asynccontextmanager
async def with_an_outcome_that_waits() -> AsyncIterator[tuple[AsyncCache, Outcome]]:
    """A backup has landed, and nobody has told the core."""
    async with opened(settings(device=60, host=60)) as cache:
        with held_outcomes(cache) as held:
            await serve(cache, text(4))
            await until(lambda: len(held) == 1)
        assert backups(cache) == 1
        yield cache, held[0]


async def test_what_the_ack_task_has_in_its_hands_is_applied_by_whoever_takes_the_lock_first() -> None:
    async with with_an_outcome_that_waits() as (cache, outcome):
        driver = parts(cache).driver
        async with holding(driver.lock):
            driver.post(outcome)
            await turns()  # the ack task has taken it out of the queue, and waits for the lock
            assert driver.acks.empty()
            assert (driver.unapplied, backups(cache)) == (1, 1)
            driver.apply_outcomes()
            assert (driver.unapplied, backups(cache)) == (0, 0)


async def test_a_grant_waits_for_no_queue() -> None:
    """However many outcomes wait, whoever finds the lock free applies them and is granted without one turn."""
    async with opened(settings(device=64, host=64)) as cache:
        driver = parts(cache).driver
        with held_outcomes(cache) as held:
            for seed in range(5):
                await serve(cache, text(2, seed))
            await until(lambda: len(held) == 5)
        for outcome in held:
            driver.post(outcome)
        with pytest.raises(StopIteration) as entered:
            cache.lease(text(2, 9)).__aenter__().send(None)
        assert driver.unapplied == 0
        entered.value.value.release()


# the queue of completed prefetches


@asynccontextmanager
async def fetched_while_it_is_saved(*seeds: int) -> AsyncIterator[tuple[AsyncCache, list[PrefetchHandle], HostGate]]:
    """Prefetches have read their pages, and the first one's are on their way to the host from a lease that has
    computed them, behind the event of its batch."""
    storage = HeldBackend()
    async with opened(settings(device=64, host=64), storage=storage) as cache:
        for seed in seeds:
            await serve(cache, text(6, seed))
        await cache.flush()
    async with opened(settings(device=64, host=64), storage=storage, idle=False) as cache:
        lease = await enter(cache, 6, seeds[0], wait=False)
        storage.hold()
        handles = [cache.prefetch(text(6, seed)) for seed in seeds]
        await until(lambda: storage.waiting == len(seeds))
        computed = gate(cache)
        compute(cache, lease, text(6, seeds[0]))
        await lease.commit(text(6, seeds[0]), after=computed)
        assert backups(cache) == 1
        storage.let()
        yield cache, handles, computed
        computed.open()
        lease.release(after=computed)


async def test_a_prefetch_that_must_wait_for_a_backup_is_queued_again_and_nothing_waits_behind_it() -> None:
    async with fetched_while_it_is_saved(1, 2) as (cache, (first, second), computed):
        assert (await second).tokens == 6 * PAGE
        await turns()
        assert not first.done()
        assert not parts(cache).driver.lock.locked(), "who waits for a backup does not hold the lock"
        computed.open()
        await first
        assert (await cache.match(text(6, 1))).host == 6 * PAGE


async def test_closing_ends_a_prefetch_whose_commit_waits_and_its_pages_go_back() -> None:
    async with fetched_while_it_is_saved(1) as (cache, (handle,), _):
        await turns()
        core = parts(cache).core
        assert core.statistics().operations["prefetch"] == 1
        await cache.aclose(timeout=0.0)
        assert core.statistics().operations["prefetch"] == 0
        assert handle.done()
        check(core)


# The tree lock by itself: first come, first served; taken without an await only while it is free; cancelled safely.


async def test_it_is_taken_without_an_await_while_it_is_free_and_not_otherwise() -> None:
    lock = TreeLock()
    assert lock.take()
    assert not lock.take()
    lock.release()
    with pytest.raises(StopIteration):
        acquire(lock).send(None)
    assert lock.locked()
    lock.release()
    with pytest.raises(RuntimeError, match="does not hold"):
        lock.release()


async def test_it_passes_on_in_the_order_of_arrival_and_is_never_free_in_between() -> None:
    lock, order = TreeLock(), list[int]()

    async def work(number: int) -> None:
        async with holding(lock):
            order.append(number)
            await asyncio.sleep(0)

    lock.take()
    tasks = [asyncio.ensure_future(work(number)) for number in range(5)]
    await turns(2)
    lock.release()
    assert not lock.take(), "the first that waits has it already"
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3, 4]
    assert not lock.locked()


async def test_who_is_cancelled_takes_nothing_also_when_it_had_been_handed_the_lock() -> None:
    lock = TreeLock()
    lock.take()
    first, second, third = (asyncio.ensure_future(acquire(lock)) for _ in range(3))
    await turns(2)
    first.cancel()
    lock.release()  # before the first could take itself out: the second has it
    second.cancel()  # after it was handed over
    await asyncio.gather(first, second, return_exceptions=True)
    await turns(2)
    assert third.done(), "it was not handed on"
    assert lock.locked()
    lock.release()
    assert not lock.locked()


async def test_a_coroutine_that_is_closed_while_it_waits_hands_nobody_elses_lock_on() -> None:
    lock = TreeLock()
    lock.take()
    waits = asyncio.ensure_future(acquire(lock))
    await turns(1)
    closed = acquire(lock)
    closed.send(None)
    closed.close()
    await turns(2)
    assert not waits.done(), "the first holder has not released it"
    lock.release()
    await waits


@pytest.mark.parametrize("seed", range(20))
async def test_never_two_holders_and_never_nobody_while_somebody_waits(seed: int) -> None:
    random, lock, inside, served = Random(seed), TreeLock(), 0, 0

    async def work() -> None:
        nonlocal inside, served
        if not lock.take():
            await acquire(lock)
        try:
            inside += 1
            assert inside == 1
            for _ in range(random.randrange(3)):
                await asyncio.sleep(0)
            served += 1
        finally:
            inside -= 1
            lock.release()

    tasks = []
    for _ in range(60):
        tasks.append(asyncio.ensure_future(work()))
        await turns(random.randrange(3))
        if random.random() < 0.4:
            random.choice(tasks).cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert not lock.locked()
    assert served == sum(result is None for result in results)
    assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)


# Calls that go over the whole tree hold the tree lock for one slice at a time, so that requests go on between two.


NODES = 40


@pytest.mark.source
@pytest.mark.parametrize("call", ["aclose", "detach_storage", "flush", "invalidate", "reset"])
async def test_between_two_slices_the_lock_is_free(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few_steps(monkeypatch)
    async with opened(settings(device=2 * NODES, host=2 * NODES), storage=MemoryBackend(), idle=False) as cache:
        for seed in range(NODES):
            await serve(cache, text(1, seed))
        await settled(cache)
        driver, holds, slices = parts(cache).driver, 0, Counter[int]()
        locked, release = driver.call_locked, TreeLock.release

        def counted(*arguments: Any, **more: Any) -> Any:
            answer = locked(*arguments, **more)
            slices[holds] += isinstance(answer, More)
            return answer

        def released(lock: TreeLock) -> None:
            nonlocal holds
            holds += 1
            release(lock)

        driver.call_locked = counted  # type: ignore[method-assign]
        monkeypatch.setattr(TreeLock, "release", released)
        await getattr(cache, call)()
        assert slices.total() >= NODES // 4 - 1
        assert max(slices.values()) == 1


@pytest.mark.source
async def test_an_invalidation_deletes_what_was_published_or_left_the_tree_while_it_went_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few_steps(monkeypatch)
    storage = MemoryBackend()
    async with opened(settings(device=2 * NODES, host=2 * NODES), storage=storage) as cache:
        for seed in range(NODES):
            await serve(cache, text(1, seed), namespace="gone")
        holder = await cache.lease(text(1, NODES - 1), namespace="gone").__aenter__()
        await cache.flush()
        assert storage.stats()["pages"] == NODES
        await cache.invalidate("gone")
        assert storage.stats()["pages"] == 0
        holder.release()


# Two laws of the driver, seen from outside: outcomes that wait are applied before anything is decided on top of them,
# and the effects of a core call are in the queues before any other task runs.


CALLS = ("lease", "commit", "extend", "release", "advance", "truncate", "complete", "drain", "prefetch_open",
         "prefetch_take_full", "prefetch_take_aux", "prefetch_commit", "prefetch_release")  # fmt: skip


def backups(cache: AsyncCache) -> int:
    """In flight, as far as the core knows."""
    return parts(cache).core.statistics().operations["backup_host"]


def watch(cache: AsyncCache, call: str) -> list[int]:
    """Backups in flight at each call of the core from now on."""
    core, seen = parts(cache).core, list[int]()
    inner = getattr(core, call)

    def spy(*arguments: Any, **more: Any) -> Any:
        seen.append(backups(cache))
        return inner(*arguments, **more)

    setattr(core, call, spy)
    return seen


@pytest.mark.source
@pytest.mark.parametrize("call", ["lease", "match", "commit", "extend"])
async def test_whoever_gets_the_lock_applies_what_waits_before_asking_the_core(call: str) -> None:
    async with with_an_outcome_that_waits() as (cache, outcome):
        driver, tokens = parts(cache).driver, text(2, seed=3)
        async with cache.lease(tokens) as lease:
            compute(cache, lease, tokens)
            work: dict[str, Callable[[], Awaitable[object]]] = {
                "lease": lambda: serve(cache, text(4, seed=2)), "match": lambda: cache.match(text(4)),
                "commit": lambda: lease.commit(tokens), "extend": lambda: lease.extend(1),
            }  # fmt: skip
            async with holding(driver.lock):
                using = asyncio.ensure_future(work[call]())
                await turns()  # it is in line for the lock, before the ack task
                seen = watch(cache, call)
                driver.post(outcome)
            await using
            assert seen[0] == 0


@pytest.mark.source
async def test_between_two_slices_what_waits_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    few_steps(monkeypatch)
    async with with_an_outcome_that_waits() as (cache, outcome):
        for seed in range(1, 15):
            await serve(cache, text(4, seed))
        await until(lambda: backups(cache) == 1)
        seen = watch(cache, "lease")
        entering_it = entering(cache, 56, 9999)
        await asyncio.sleep(0)
        assert parts(cache).driver.lock.locked(), "the grant takes several slices"
        before = len(seen)
        assert seen == [1] * before
        parts(cache).driver.post(outcome)  # the ack task cannot come by
        (await entering_it).release()
        assert seen[before:] == [0] * (len(seen) - before) != []


class Promptness:
    """Fails when a plan with effects is not performed in the turn of the loop in which the core made it."""

    def __init__(self, cache: AsyncCache) -> None:
        self.plans = 0
        self.late: list[str] = []
        self._performed: set[int] = set()
        self._kept: list[Plan] = []
        core, driver = parts(cache).core, parts(cache).driver
        for name in CALLS:
            setattr(core, name, self._watched(name, getattr(core, name)))
        perform = driver.perform

        def spy(plan: Plan, *more: Any, **named: Any) -> None:
            self._performed.add(id(plan))
            perform(plan, *more, **named)

        driver.perform = spy  # type: ignore[method-assign]

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def spy(*arguments: Any, **named: Any) -> Any:
            answer = call(*arguments, **named)
            plan = answer if isinstance(answer, Plan) else getattr(answer, "plan", None)
            if isinstance(plan, Plan) and (plan.effects or plan.ended):
                self.plans += 1
                self._kept.append(plan)  # ids stay unique
                asyncio.get_running_loop().call_soon(self._look, name, plan)
            return answer

        return spy

    def _look(self, name: str, plan: Plan) -> None:
        if id(plan) not in self._performed:
            self.late.append(name)


@pytest.mark.source
async def test_what_the_core_decides_is_in_the_queues_before_anybody_else_runs() -> None:
    storage = MemoryBackend()
    for _ in range(2):
        async with opened(settings(device=24, host=32, swa=24, mamba=40), storage=storage) as cache:
            prompt = Promptness(cache)

            async def request(number: int) -> None:
                tokens = text(2) + text(3, number % 6)
                async with cache.lease(tokens, new_tokens=PAGE) as lease:
                    await lease.loaded()
                    await grow(lease, tokens)

            contending = asyncio.ensure_future(contend(parts(cache).driver.lock))
            await asyncio.gather(*(request(number) for number in range(24)))
            contending.cancel()
            await cache.flush()
            assert prompt.late == []
            assert prompt.plans > 50


async def grow(lease: Lease, tokens: list[int]) -> None:
    await lease.commit(tokens[: 3 * PAGE])
    with suppress(CacheFull):
        await lease.extend(1)
    lease.advance(len(tokens))
    await lease.commit(tokens)
    lease.truncate(len(tokens))


# When outcomes take effect, and what the garbage collector is told.


@pytest.mark.source
async def test_the_ack_task_drains_everything_at_once() -> None:
    async with opened(settings(device=64, host=64)) as cache:
        driver, calls = parts(cache).driver, []
        complete = parts(cache).core.complete

        def spy(outcomes: Sequence[Outcome]) -> object:
            calls.append(len(outcomes))
            return complete(outcomes)

        parts(cache).core.complete = spy  # type: ignore[method-assign,assignment]
        for seed in range(5):
            await serve(cache, text(2, seed))
        await acquire(driver.lock)
        waiting = driver.unapplied + len(driver.saving)
        await until(lambda: driver.unapplied == len(driver.saving))
        calls.clear()
        driver.lock.release()
        await until(lambda: not driver.saving)
        assert waiting
        assert len(calls) == 1


async def test_the_collector_is_told_every_few_thousand_commits_and_not_before() -> None:
    async with opened(settings(freeze_gc=True)) as cache:
        head = parts(cache)
        try:
            before = gc.get_freeze_count()
            for head.commits in range(0, FREEZE_EVERY, 100):
                head._freeze()
            assert gc.get_freeze_count() <= before  # less: what was frozen may be freed
            head.commits = FREEZE_EVERY
            head._freeze()
            assert gc.get_freeze_count() > before
        finally:
            gc.unfreeze()


def test_torch_comes_with_the_first_cache_and_not_before() -> None:
    code = (
        "import sys, asynccache as a; a.CacheConfig; a.CacheFull; a.AsyncCache; assert 'torch' not in sys.modules;"
        "a.AsyncCache(a.CacheConfig(model='m', components=(a.Full(bytes_per_token=4, device_tokens=16),)));"
        "assert 'torch' in sys.modules; assert set(a.__all__) == set(dir(a))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


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
