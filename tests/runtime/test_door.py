"""A lease's way in, and who is woken when there may be room."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, nullcontext
from typing import Any

import numpy as np
import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache import (
    AsyncCache,
    CacheClosed,
    CacheFull,
    ConfigError,
    LoadFailed,
)
from asynccache.core.audit import check
from asynccache.core.cache import Grant, LeaseRequest
from asynccache.core.ledger import COMPUTE
from asynccache.core.plan import More, Status, Wait
from asynccache.hashes import extend_chain, namespace_digest
from asynccache.runtime import tokens as tokens_module
from asynccache.runtime.core_calls import holding
from asynccache.runtime.driver import TreeLock
from asynccache.runtime.prefetch import GRACE, HELD_FOR, PrefetchHandle
from asynccache.runtime.save import PATIENCE, unsaved
from asynccache.runtime.tokens import Chain
from tests.runtime.runtime_kit import (
    PAGE,
    Hangs,
    assert_cached_bytes,
    cache_over,
    compute,
    enter,
    entering,
    failing_loads,
    fence_all,
    few_steps,
    gate,
    now,
    on_the_host,
    opened,
    parts,
    publish,
    push_out,
    serve,
    settings,
    settled,
    simulated,
    store_only,
    text,
    turns,
    until,
)

# A lease's way in: all or nothing, first come, first served; a lease that gives up its place leaves nothing behind.


async def test_what_can_never_fit_raises_at_once_even_behind_others() -> None:
    async with opened(settings(device=8)) as cache:
        first = await enter(cache, 8, 1)
        waits = entering(cache, 8, 2)
        await turns()
        with pytest.raises(CacheFull, match=f"^full: {9 * PAGE} tokens are asked for, .* room for {8 * PAGE}$"):
            await asyncio.create_task(enter(cache, 9, 3))
        first.release()
        (await waits).release()


async def test_the_line_is_first_come_first_served_and_nobody_overtakes() -> None:
    async with opened(settings(device=8)) as cache:
        first = await enter(cache, 6, 1)
        big, small = entering(cache, 8, 2), entering(cache, 1, 3)
        await turns()
        assert cache.statistics().waiting == 2  # the small one would fit
        with pytest.raises(CacheFull):
            await asyncio.create_task(enter(cache, 1, 4, wait=False))
        first.release()
        lease = await big
        assert not small.done()
        lease.release()
        (await small).release()


@pytest.mark.parametrize(("terms", "error"), [({"wait": False}, CacheFull), ({"timeout": 0.01}, TimeoutError)])
async def test_a_deadline_ends_the_wait(terms: dict[str, Any], error: type[Exception]) -> None:
    async with opened(settings(device=8)) as cache:
        first = await enter(cache, 8, 1)
        with pytest.raises(error):
            await asyncio.create_task(enter(cache, 1, 2, **terms))
        assert cache.statistics().waiting == 0
        first.release()
        (await enter(cache, 1, 2, **terms)).release()


async def test_a_lease_that_is_aborted_while_it_waits_leaves_the_line_and_is_never_granted() -> None:
    async with opened(settings(device=8)) as cache:
        first = await enter(cache, 6, 1)
        lease = cache.lease(text(8, 2))
        aborted, small = asyncio.create_task(lease.__aenter__()), entering(cache, 1, 3)
        await turns()
        assert cache.statistics().waiting == 2
        lease.abort()
        lease.abort()
        with pytest.raises(asyncio.CancelledError):
            await aborted
        assert aborted.cancelling() == 1
        (await small).release()
        first.release()
        with pytest.raises(RuntimeError, match="released"):
            await lease.__aenter__()


async def test_a_lease_is_asked_for_the_tokens_as_they_were_then() -> None:
    async with opened(settings(device=8)) as cache:
        await serve(cache, text(3))
        tokens = text(3)
        lease = cache.lease(tokens)
        tokens[0] += 1
        async with lease:
            assert lease.cached == 2 * PAGE


@pytest.mark.parametrize("terms", [{"new_tokens": -1}, {"states": 1}, {"states": -1}], ids=str)
async def test_unusable_terms_name_themselves(terms: dict[str, int]) -> None:
    async with opened(settings()) as cache:
        with pytest.raises(ConfigError, match=str(next(iter(terms.values())))):
            await enter(cache, 1, 1, **terms)
        with pytest.raises(ConfigError, match="at least one"):
            await enter(cache, 0, 1)


@pytest.mark.parametrize("alone", [True, False])
async def test_a_lease_enters_the_namespace_that_there_is_when_it_is_entered(alone: bool) -> None:
    """It was asked for before its namespace was invalidated, alone or with all others. It finds nothing of before, and
    what it commits is found by those after it."""
    async with opened(settings(device=16)) as cache:
        async with cache.lease(text(3), namespace="tenant") as first:
            await first.commit(text(3))
        late = cache.lease(text(3), namespace="tenant")
        await (cache.invalidate("tenant") if alone else cache.reset())
        async with late:
            assert late.cached == 0
            await late.commit(text(3))
        async with cache.lease(text(3), namespace="tenant") as after:
            assert after.cached == 2 * PAGE


@pytest.mark.parametrize(("outdated", "publishes"), [("tenant", False), ("other", True), (None, True), ("all", False)])
@pytest.mark.parametrize("entered", [False, True])
async def test_what_was_invalidated_while_a_lease_was_held_decides_whether_it_publishes(
    outdated: str | None, publishes: bool, entered: bool
) -> None:
    """``entered``: that namespace, or all of them, had been invalidated before, since the lease was asked for."""
    async with opened(settings(device=16)) as cache:

        async def outdate() -> None:
            await (cache.reset() if outdated == "all" else cache.invalidate(outdated))

        lease = cache.lease(text(3), namespace="tenant")
        if entered:
            await outdate()
        async with lease:
            await outdate()
            await lease.commit(text(3))
        assert (await cache.match(text(3), namespace="tenant")).device == (3 * PAGE if publishes else 0)


async def test_a_task_that_holds_a_lease_does_not_wait_for_another() -> None:
    async with opened(settings(device=8)) as cache:
        async with cache.lease(text(5, seed=1)):
            async with cache.lease(text(3, seed=2)):  # it fits: no waiting
                with pytest.raises(RuntimeError, match="holds a lease"):
                    await enter(cache, 1, 3)
            assert cache.statistics().waiting == 0


async def test_extend_never_waits() -> None:
    async with opened(settings(device=8)) as cache:
        async with cache.lease(text(4, seed=1)) as lease:
            assert (await lease.extend(4 * PAGE)).size == 8
            with pytest.raises(CacheFull):
                await lease.extend(1)
            lease.truncate(5 * PAGE)
            assert lease.pages.size == 5
            assert (await lease.extend(1)).size == 6


async def test_a_lease_is_entered_once_and_released_once() -> None:
    async with opened(settings()) as cache:
        lease = await enter(cache, 2, 1)
        with pytest.raises(RuntimeError, match="held"):
            await lease.__aenter__()
        with pytest.raises(StopIteration):
            lease.__aexit__(None, None, None).send(None)  # without an await
        lease.release()
        with pytest.raises(RuntimeError, match="released"):
            await lease.commit(text(2, 1))
        with pytest.raises(RuntimeError, match="released"):
            _ = lease.pages


# One way to be woken: whatever could let somebody go on wakes whoever waits for room, be it a lease in line, a lease
# that grows, or a prefetch.


AT_ONCE = 0.05

Cause = AsyncIterator[float]
"""What wakes: prepared up to its ``yield``, from which on others wait, and then let happen. It yields within how many
seconds it wakes."""


async def an_outcome(cache: AsyncCache, backend: Hangs) -> Cause:
    event = gate(cache)
    async with cache.lease(text(2)) as lease:
        await lease.commit(text(2), after=event)
        await asyncio.sleep(AT_ONCE)
        yield AT_ONCE
        event.open()
        await asyncio.sleep(AT_ONCE)


async def a_release(cache: AsyncCache, backend: Hangs) -> Cause:
    lease = await cache.lease(text(2)).__aenter__()
    yield 0.0
    lease.release()


async def pages_that_the_engine_has_let_go_of(cache: AsyncCache, backend: Hangs) -> Cause:
    event = gate(cache)
    lease = await cache.lease(text(2)).__aenter__()
    lease.release(after=event)
    await asyncio.sleep(AT_ONCE)
    yield AT_ONCE
    event.open()


async def a_window_that_moves_on(cache: AsyncCache, backend: Hangs) -> Cause:
    async with cache.lease(text(10)) as lease:
        yield 0.0
        lease.advance(9 * PAGE)


async def tokens_that_were_rejected(cache: AsyncCache, backend: Hangs) -> Cause:
    async with cache.lease(text(2), new_tokens=4 * PAGE) as lease:
        yield 0.0
        lease.truncate(2 * PAGE)


async def a_load_that_fails(cache: AsyncCache, backend: Hangs) -> Cause:
    await on_the_host(cache, text(4))
    with failing_loads(cache):
        lease = await cache.lease(text(4, extra=1)).__aenter__()
        assert lease.loading
        yield AT_ONCE
        await asyncio.sleep(AT_ONCE)
    lease.release()


async def a_namespace_that_is_forgotten(cache: AsyncCache, backend: Hangs) -> Cause:
    await publish(cache, text(4))
    await settled(cache)
    yield AT_ONCE
    await cache.invalidate()


async def a_prefix_that_is_kept_no_longer(cache: AsyncCache, backend: Hangs) -> Cause:
    await publish(cache, text(2))
    assert (await cache.keep(text(2), ttl=1.0)).tokens
    yield 1.0


async def fetched(cache: AsyncCache) -> PrefetchHandle:
    await store_only(cache, text(4), others=range(1, 8))
    handle = cache.prefetch(text(4, extra=1))
    assert (await handle).tokens
    return handle


async def a_claim_that_is_dropped(cache: AsyncCache, backend: Hangs) -> Cause:
    handle = await fetched(cache)
    yield 0.0
    handle.cancel()


async def a_claims_timer(cache: AsyncCache, backend: Hangs) -> Cause:
    handle = await fetched(cache)
    yield HELD_FOR
    assert handle.done(), "a handle that is dropped drops its claim"


async def a_prefetch_that_ends(cache: AsyncCache, backend: Hangs) -> Cause:
    handle = cache.prefetch(text(4, extra=1))
    yield AT_ONCE
    assert not (await handle).tokens


async def a_question_that_is_late(cache: AsyncCache, backend: Hangs) -> Cause:
    backend.verbs = ("exists",)
    backend.hung.set()
    handle = cache.prefetch(text(4, extra=1))
    yield PATIENCE
    handle.cancel()


async def a_read_that_is_late(cache: AsyncCache, backend: Hangs) -> Cause:
    await store_only(cache, text(4), others=range(1, 8))
    backend.hung.set()
    handle = cache.prefetch(text(4, extra=1))
    await asyncio.sleep(AT_ONCE)
    yield PATIENCE
    handle.cancel()


async def a_write_that_is_late(cache: AsyncCache, backend: Hangs) -> Cause:
    backend.verbs = ("put",)
    backend.hung.set()
    await publish(cache, text(4))
    await asyncio.sleep(AT_ONCE)
    yield PATIENCE


async def a_prefetch_that_is_not_answered(cache: AsyncCache, backend: Hangs) -> Cause:
    await store_only(cache, text(4), others=range(1, 8))
    backend.hung.set()
    handle = cache.prefetch(text(4, extra=1))
    await asyncio.sleep(2 * PATIENCE)
    handle.stop()
    yield GRACE
    assert not (await handle).tokens


CAUSES = (
    an_outcome, a_release, pages_that_the_engine_has_let_go_of, a_window_that_moves_on, tokens_that_were_rejected,
    a_load_that_fails, a_namespace_that_is_forgotten, a_prefix_that_is_kept_no_longer, a_claim_that_is_dropped,
    a_claims_timer, a_prefetch_that_ends, a_question_that_is_late, a_read_that_is_late, a_write_that_is_late,
    a_prefetch_that_is_not_answered,
)  # fmt: skip


def waiters(cache: AsyncCache) -> dict[str, asyncio.Future[None]]:
    """Wait in every way in which one can wait for room."""
    driver = parts(cache).driver
    made = {"growth": driver.wait_to_grow()}
    for name, line in (("lease", driver.line), ("prefetch", driver.prefetch_line)):
        place = line.join(line.ticket())
        line.sleep(place)
        assert place.signal is not None
        made[name] = place.signal
    return made


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.__name__)
@simulated
async def test_whatever_could_let_somebody_go_on_wakes_everybody(cause: Callable[[AsyncCache, Hangs], Cause]) -> None:
    backend = Hangs("get", alone=True)
    config = settings(20, 20, swa=20 * (cause is a_window_that_moves_on), prefetch_policy="best_effort",
                      prefetch_quota=1.0, close_timeout=5.0)  # fmt: skip
    async with cache_over(backend, config) as cache:
        async with aclosing(cause(cache, backend)) as steps:  # type: ignore[type-var]
            within = await anext(steps)
            waiting, began = waiters(cache), now()
            happens = asyncio.ensure_future(anext(steps, None))
            await asyncio.wait(waiting.values(), timeout=within + AT_ONCE)
            assert [kind for kind, waiter in waiting.items() if not waiter.done()] == [], "they sleep on"
            assert now() - began <= within + AT_ONCE
            await happens
        backend.answers.set()


@simulated
async def test_a_cache_that_closes_lets_nobody_wait() -> None:
    async with cache_over(MemoryBackend(), settings(8, 8, close_timeout=0.1)) as cache:
        event = gate(cache)
        async with cache.lease(text(4)) as other:
            await other.commit(text(4), after=event)
        lease = await enter(cache, 4, 1)
        growing = asyncio.ensure_future(lease.extend(2 * PAGE, wait=True))
        await asyncio.sleep(AT_ONCE)
        assert len(parts(cache).driver.growing) == 1
        waiting = waiters(cache)
        asyncio.get_running_loop().call_later(1.0, event.open)
        await cache.aclose()
        for waiter in (waiting["lease"], waiting["prefetch"], growing):
            with pytest.raises(CacheClosed):
                await waiter
        assert parts(cache).driver.growing == {waiting["growth"]}
        with pytest.raises(CacheClosed):
            parts(cache).driver.wait_to_grow()
        lease.release()


async def test_who_grows_in_vain_waits_in_no_line_and_leaves_nothing_behind_when_it_is_cancelled() -> None:
    async with opened(settings(8, 8)) as cache:
        event, driver = gate(cache), parts(cache).driver
        async with cache.lease(text(4)) as other:
            await other.commit(text(4), after=event)
        async with cache.lease(text(4, seed=1)) as lease:
            for cancelled in (True, False):
                growing = asyncio.ensure_future(lease.extend(2 * PAGE, wait=True))
                await until(lambda: len(driver.growing) == 1)
                if cancelled:
                    growing.cancel()
                    await asyncio.wait([growing])
                else:
                    event.open()
                assert growing.cancelled() or len(await growing) == 6
                assert (len(driver.growing), len(lease.pages)) == (0, 4 if cancelled else 6)


# Cancelled at any await, a call is done or undone; those who share what it waits for go on.


async def request(cache: AsyncCache, seed: int) -> None:
    async with cache.lease(text(7, seed), new_tokens=PAGE) as lease:
        await lease.loaded()
        await lease.extend(0)
        await lease.commit(text(7, seed))


async def request_in_line(cache: AsyncCache, seed: int) -> None:
    async with cache.lease(text(8, 50 + seed)):
        waiting = asyncio.create_task(request(cache, seed))
        try:
            await turns(5)
        except asyncio.CancelledError:
            waiting.cancel()
            raise
    await waiting


async def request_beside_another_holder(cache: AsyncCache, seed: int) -> None:
    """Each of its calls finds the tree lock taken."""
    contending = asyncio.ensure_future(contend(parts(cache).driver.lock))
    try:
        await request(cache, seed)
    finally:
        contending.cancel()


async def contend(lock: TreeLock) -> None:
    while True:
        async with holding(lock):
            await asyncio.sleep(0)
        await asyncio.sleep(0)


async def keep(cache: AsyncCache, seed: int) -> None:
    (await cache.keep(text(6, seed))).release()


async def prefetch(cache: AsyncCache, seed: int) -> None:
    await cache.prefetch(text(6, seed))


async def save(cache: AsyncCache, seed: int) -> None:
    await serve(cache, text(6, seed), ("full", "swa"))
    await cache.flush()


async def forget(cache: AsyncCache, seed: int) -> None:
    await serve(cache, text(6, seed), ("full", "swa"))
    await (cache.invalidate() if seed else cache.reset())


CALLS = [request, request_in_line, request_beside_another_holder, keep, prefetch, save, forget]


@pytest.mark.parametrize("sliced", [False, pytest.param(True, marks=pytest.mark.source)])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
async def test_a_call_that_is_cancelled_at_any_await_is_done_or_undone_and_leaves_nothing_behind(
    call: Callable[[AsyncCache, int], Coroutine[Any, Any, None]], sliced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``sliced``: the core's calls take many slices, and some of the awaits are between two of them."""
    if sliced:
        few_steps(monkeypatch)
    async with opened(settings(device=8, host=32, swa=8, mamba=6), storage=MemoryBackend()) as cache:
        for seed in range(3):
            await serve(cache, text(6, seed), ("full", "swa"))
            await settled(cache)
        core, driver, turn, cut = parts(cache).core, parts(cache).driver, 0, True
        while cut:
            task = asyncio.create_task(call(cache, turn % 3))
            await turns(turn)
            cut = task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await turns()
            await settled(cache)
            parts(cache).prefetches.drop_claims()
            await until(lambda: not core.world.ledger.count[COMPUTE])
            assert not driver.lock.locked()
            async with holding(driver.lock):
                while core.world.dead_roots:  # what an invalidation has left, slice by slice
                    driver.perform(driver.call_locked(core.follow_up))
            check(core, idle=True)
            assert (cache.statistics().waiting, cache.statistics().kept_tokens) == (0, 0)
            turn += 1
            assert turn < 1000, "it never ended by itself"
        assert turn > 3 or call in (keep, prefetch)


class Sliced:
    """Has a call of the core answer with so many slices that do nothing first."""

    def __init__(self, cache: AsyncCache, name: str, slices: int = 3) -> None:
        self.core, self.name, self.slices = parts(cache).core, name, slices
        self.call = getattr(self.core, name)
        setattr(self.core, name, self)

    def __call__(self, *args: Any, **terms: Any) -> Any:
        if self.slices:
            self.slices -= 1
            return More(self.core.world.plan())
        return self.call(*args, **terms)


@pytest.mark.source
async def test_an_extend_that_is_cancelled_between_slices_is_finished_and_then_cancelled() -> None:
    async with opened(settings(device=8)) as cache:
        async with cache.lease(text(2)) as lease:
            sliced = Sliced(cache, "extend")
            growing = asyncio.create_task(lease.extend(4 * PAGE))
            await asyncio.sleep(0)
            assert parts(cache).driver.lock.locked()
            growing.cancel()
            await asyncio.wait([growing])
            assert growing.cancelled()
            assert not sliced.slices
            assert lease.pages.size == 6, "what was granted is the lease's"
            lease.release()
            assert cache.statistics().device["full"].free == 8


@pytest.mark.source
async def test_a_lease_cancelled_while_it_asks_in_slices_whether_to_stop_its_prefetch_ends_there() -> None:
    storage = MemoryBackend()
    async with opened(settings(device=16, host=16), storage=storage) as cache:
        async with cache.lease(text(4)) as lease:
            compute(cache, lease, text(4))
            await lease.commit(text(4))
        assert await cache.flush() == (0, 0)
    go = asyncio.Event()
    read = storage.get

    async def held(*args: Any) -> Any:
        await go.wait()
        return await read(*args)

    storage.get = held  # type: ignore[method-assign,assignment]
    async with opened(settings(device=16, host=16, prefetch_policy="best_effort"), storage=storage) as cache:
        handle = cache.prefetch(text(4))
        await turns()
        sliced = Sliced(cache, "lease")
        entering = asyncio.create_task(cache.lease(text(4), prefetch=handle).__aenter__())
        await until(lambda: sliced.slices < 3)
        entering.cancel()
        await turns()
        assert not sliced.slices, "the slices went on"
        assert entering.cancelled()
        assert cache.statistics().leases == 0
        go.set()
        await handle
    await storage.aclose()


@pytest.mark.source
async def test_a_keep_that_is_cancelled_between_slices_keeps_nothing() -> None:
    async with opened(settings(device=8)) as cache:
        await serve(cache, text(2))
        sliced = Sliced(cache, "lease")
        keeping = asyncio.create_task(cache.keep(text(2)))
        await asyncio.sleep(0)
        keeping.cancel()
        await asyncio.wait([keeping])
        assert keeping.cancelled()
        assert not sliced.slices
        assert cache.statistics().kept_tokens == 0
        assert cache.statistics().leases == 0


@pytest.mark.source
async def test_a_commit_that_must_wait_asks_the_core_again_only_when_what_it_waits_for_has_ended() -> None:
    async with opened(settings(device=8)) as cache:
        driver, core = parts(cache).driver, parts(cache).core
        commit, asked = core.commit, 0

        def waiting(*args: Any) -> Any:
            nonlocal asked
            asked += 1
            return Wait(ops=(999,)) if 999 in driver.ops else commit(*args)

        core.commit = waiting  # type: ignore[method-assign,assignment]
        async with cache.lease(text(2)) as lease:
            driver.ops.open(999)
            committing = asyncio.create_task(lease.commit(text(2)))
            await turns()
            assert (asked, driver.lock.locked(), committing.done()) == (1, False, False)
            driver.ops.end(999, Status.DONE)
            await asyncio.wait_for(committing, 60)
        assert asked == 2
        assert (await cache.match(text(2))).device == 2 * PAGE


@pytest.mark.source
async def test_while_a_call_runs_in_slices_the_loop_turns_and_nobody_interleaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few_steps(monkeypatch)
    async with opened(settings(device=30)) as cache:
        for seed in range(10):
            await serve(cache, text(3, seed))
        big = entering(cache, 30, 9999)
        await asyncio.sleep(0)
        assert parts(cache).driver.lock.locked()
        assert not big.done()
        small = entering(cache, 1, 3)
        (await big).release()
        (await small).release()


async def test_a_lease_that_shares_a_failed_load_says_how_much_is_valid() -> None:
    async with opened(settings(device=12, host=16)) as cache:
        await on_the_host(cache, text(4, seed=1))
        with failing_loads(cache):
            async with cache.lease(text(4, 1, extra=1)) as one, cache.lease(text(4, 1, extra=2)) as two:
                for lease in (one, two):
                    with pytest.raises(LoadFailed) as failed:
                        await lease.loaded()
                    assert failed.value.valid == 0
                    with pytest.raises(LoadFailed):
                        await lease.commit(text(4, 1, extra=1))
        assert await serve(cache, text(4, 1, extra=1)) == 4 * PAGE


async def test_a_waiter_of_a_shared_load_that_is_cancelled_hurts_nobody_else() -> None:
    async with opened(settings(device=12, host=16)) as cache:
        await on_the_host(cache, text(4, seed=1))
        event = gate(cache)
        fence_all(cache, event)
        async with cache.lease(text(4, 1, extra=1)) as one, cache.lease(text(4, 1, extra=2)) as two:
            waits = [asyncio.create_task(lease.loaded()) for lease in (one, two, two)]
            await turns()
            waits[0].cancel()
            await turns()
            event.open()
            await asyncio.gather(*waits[1:])
            await until(waits[0].cancelled)


@pytest.mark.parametrize("fails", [False, True], ids=["they arrive", "their load fails"])
async def test_a_commit_waits_for_pages_on_their_way_that_it_does_not_hold(fails: bool) -> None:
    """Somebody else is loading what this request has computed meanwhile: its own pages become duplicates, or, when
    the load fails, the tree's."""
    async with opened(settings(device=16, host=16)) as cache:
        mine = await enter(cache, 4, extra=1)
        await asyncio.create_task(serve(cache, text(4)))
        await settled(cache)
        await asyncio.create_task(push_out(cache, 11))
        event = gate(cache)
        fence_all(cache, event)
        other = await entering(cache, 4, extra=2)
        assert (mine.cached, other.cached) == (0, 4 * PAGE)
        own = mine.pages[:4].tolist()
        compute(cache, mine, text(4))
        commit = asyncio.create_task(mine.commit(text(4, extra=1)))
        await turns(50)
        assert not commit.done()
        assert not parts(cache).driver.lock.locked(), "it waits outside the lock"
        with failing_loads(cache) if fails else nullcontext():
            event.open()
            assert ((await commit)[:4].tolist() == own) == fails
        other.release()
        mine.release()
        async with cache.lease(text(4, extra=1)) as lease:
            await lease.loaded()
            assert lease.hits == (4 * PAGE, 0, 0)
            assert_cached_bytes(cache, lease, text(4))


# The effect of hints and of write policies in a cache that runs.


async def test_a_conversation_that_is_said_to_have_ended_goes_before_older_ones_and_leaves_what_is_shared() -> None:
    async with opened(settings(device=14)) as cache:
        shared = text(2, seed=1)
        await serve(cache, shared + text(4, seed=2))
        async with cache.lease(shared + text(4, seed=3)) as lease:
            await lease.commit(shared + text(4, seed=3))
            lease.release(ended=True)
        await push_out(cache, 8)
        assert (await cache.match(shared + text(4, seed=2))).device == 6 * PAGE, "older, but it may go on"
        assert (await cache.match(shared + text(4, seed=3))).device == 2 * PAGE


def backed_up(cache: AsyncCache) -> int:
    return cache.statistics().stages["backup_host"].pages


async def test_selective_saves_what_is_committed_twice_and_counts_a_requests_chunks_once() -> None:
    async with opened(settings(device=20, host=40, write_policy="write_through_selective")) as cache:
        async with cache.lease(text(6)) as lease:
            compute(cache, lease, text(6))
            for pages in (2, 4, 6):
                await lease.commit(text(pages))
        await settled(cache)
        assert backed_up(cache) == 0
        await serve(cache, text(6) + text(2, seed=2))
        await settled(cache)
        assert backed_up(cache) == 6


async def test_write_back_saves_the_coldest_when_free_pages_run_low() -> None:
    async with opened(settings(device=20, host=40, write_policy="write_back", write_back_watermark=0.3)) as cache:
        for seed in range(4):
            assert backed_up(cache) == 0, "eight of twenty pages are free"
            await serve(cache, text(4, seed))
            await settled(cache)
        assert 0 < backed_up(cache) < 16
        await push_out(cache, 20)
        assert cache.statistics().core.lost_pages == 0
        assert await serve(cache, text(4, seed=0, extra=1)) == 4 * PAGE


@pytest.mark.parametrize(("page_size", "on_the_loop"), [(1, True), (16, True), (511, True), (512, False)])
async def test_small_pages_are_hashed_on_the_loop_a_few_at_a_time_and_large_ones_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, page_size: int, on_the_loop: bool
) -> None:
    calls: list[tuple[int, int]] = []

    def spy(parent: bytes, key: bytes, start: int, stop: int, page_bytes: int) -> bytes:
        calls.append((threading.get_ident(), stop - start))
        return extend_chain(parent, key, start, stop, page_bytes)

    monkeypatch.setattr(tokens_module, "extend_chain", spy)
    pages = 200
    await Chain(namespace_digest("m", page_size), page_size).extend(np.arange(page_size * pages, dtype="<i4").tobytes())
    assert sum(size for _, size in calls) == pages * page_size * 4
    assert all((thread == threading.get_ident()) == on_the_loop for thread, _ in calls)
    if on_the_loop:  # about a microsecond a page, and 2 ns a byte
        assert max(size / (page_size * 4) + 0.002 * size for _, size in calls) < 100


async def test_a_survey_that_waits_for_the_tree_asks_about_what_came_meanwhile() -> None:
    async with opened(settings()) as cache:
        driver, key = parts(cache).driver, np.array(text(2), "<i4").tobytes()
        async with holding(driver.lock):
            survey = asyncio.create_task(unsaved(driver))
            await turns(3)
            grant = driver.core.lease(LeaseRequest(b"new", key, 0, 2 * PAGE, 0))
            assert isinstance(grant, Grant)
            driver.perform(driver.core.commit(grant.lease, key, b"").plan)
            driver.perform(driver.core.release(grant.lease))
        assert (await survey).host == 2


# The cap on kept prefixes holds for all of them together.


async def test_keeps_that_wait_for_the_lock_together_stay_within_the_cap() -> None:
    async with opened(settings(device=16, kept_fraction=0.25)) as cache:
        await serve(cache, text(8))
        async with holding(parts(cache).driver.lock):
            keeping = [asyncio.create_task(cache.keep(text(8))) for _ in range(3)]
            await turns()
        kept = await asyncio.gather(*keeping)
        assert sum(one.tokens for one in kept) == 4 * PAGE
        for one in kept:
            one.release()
