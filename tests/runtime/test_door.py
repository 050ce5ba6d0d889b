"""A lease's way in: all or nothing, first come, first served; a lease that gives up its place leaves nothing behind."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine
from typing import Any

import pytest

from asynccache import AsyncCache, CacheFull, ConfigError, LoadFailed
from asynccache.core.audit import check
from asynccache.core.plan import Status
from asynccache.memory.cpu import CpuDevice
from asynccache.runtime.lease import Lease
from tests.runtime.runtime_kit import (
    PAGE,
    fence_all,
    local,
    opened,
    parts,
    push_out,
    serve,
    settings,
    settled,
    text,
    turns,
    until,
)


async def enter(cache: AsyncCache, pages: int, seed: int, **terms: Any) -> Lease:
    return await cache.lease(text(pages, seed), **terms).__aenter__()


def entering(cache: AsyncCache, pages: int, seed: int, **terms: Any) -> asyncio.Task[Lease]:
    return asyncio.create_task(enter(cache, pages, seed, **terms))


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
        first.release()
        lease = await big
        assert not small.done()
        lease.release()
        (await small).release()


async def test_a_new_lease_that_would_fit_does_not_overtake_the_line() -> None:
    async with opened(settings(device=8)) as cache:
        first = await enter(cache, 6, 1)
        big = entering(cache, 8, 2)
        await turns()
        with pytest.raises(CacheFull):
            await asyncio.create_task(enter(cache, 1, 3, wait=False))
        big.cancel()
        await asyncio.gather(big, return_exceptions=True)
        first.release()


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
        with pytest.raises(ConfigError, match=r"tokens\[1\]=-1"):
            cache.lease([1, -1])
        with pytest.raises(ConfigError, match="at least one"):
            cache.lease([])


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


async def test_leaving_the_line_wakes_the_next() -> None:
    async with opened(settings(device=8)) as cache:
        first = await enter(cache, 6, 1)
        big, small = entering(cache, 8, 2), entering(cache, 1, 3)
        await turns()
        big.cancel()
        (await small).release()
        first.release()
        assert big.cancelled()


async def test_an_ack_wakes_the_head() -> None:
    """The only evictable pages are without a host copy: the lease waits for their backups and nothing else."""
    async with opened(settings(device=8, host=16)) as cache:
        await serve(cache, text(8, seed=1))
        async with cache.lease(text(8, seed=2)) as lease:
            assert lease.pages.size == 8
        assert (await cache.match(text(8, seed=1))).host == 8 * PAGE
        assert cache.statistics().core.lost_pages == 0


async def test_wait_false_never_waits() -> None:
    async with opened(settings(device=8)) as cache:
        first = await enter(cache, 8, 1)
        with pytest.raises(CacheFull):
            await enter(cache, 1, 2, wait=False)
        assert cache.statistics().waiting == 0
        first.release()
        (await enter(cache, 1, 2, wait=False)).release()


async def test_a_deadline_ends_the_wait() -> None:
    async with opened(settings(device=8)) as cache:
        first = await enter(cache, 8, 1)
        with pytest.raises(TimeoutError):
            await asyncio.create_task(enter(cache, 1, 2, timeout=0.01))
        assert cache.statistics().waiting == 0
        first.release()


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
        lease.release()
        lease.release()
        with pytest.raises(RuntimeError, match="released"):
            await lease.commit(text(2, 1))
        with pytest.raises(RuntimeError, match="released"):
            _ = lease.pages


def test_leaving_a_lease_contains_no_await() -> None:
    source = inspect.getsource(Lease.__aexit__)
    assert "await" not in source.split('"""')[-1]
    with pytest.raises(StopIteration):
        Lease.__aexit__(_Nothing(), None, None, None).send(None)  # type: ignore[arg-type]


class _Nothing:
    def release(self) -> None: ...


@pytest.mark.parametrize(
    "terms", [{"new_tokens": -1}, {"states": 1}, {"states": -1}], ids=["new_tokens", "no mamba", "negative"]
)
async def test_unusable_terms_name_themselves(terms: dict[str, int]) -> None:
    async with opened(settings()) as cache:
        with pytest.raises(ConfigError, match=str(next(iter(terms.values())))):
            await enter(cache, 1, 1, **terms)
        with pytest.raises(ConfigError, match="at least one"):
            await enter(cache, 0, 1)


async def cancelled_at(work: Coroutine[Any, Any, Any], turn: int) -> bool:
    """Cancel ``work`` after so many turns of the loop; whether it was still running."""
    task = asyncio.create_task(work)
    for _ in range(turn):
        await asyncio.sleep(0)
        if task.done():
            await task
            return False
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return True


async def test_a_request_cancelled_at_any_await_leaves_nothing_behind() -> None:
    async with opened(settings(device=8, host=32, swa=8, mamba=6)) as cache:
        for seed in range(3):
            await serve(cache, text(6, seed), ("full", "swa"))
            await settled(cache)
        holder: list[Lease] = []

        async def request(seed: int) -> None:
            async with cache.lease(text(7, seed), new_tokens=PAGE) as lease:
                await lease.loaded()
                await lease.extend(0)
                await lease.commit(text(7, seed))

        turn, running = 0, True
        while running or turn < 12:
            if turn % 2:  # every other time the request has to wait in line
                holder.append(await enter(cache, 8, 50 + turn))
            running = await cancelled_at(request(turn % 3), turn)
            if holder:
                holder.pop().release()
            await settled(cache)
            check(parts(cache).core, idle=True)
            turn += 1
            assert turn < 200, "the request never ended by itself"
        assert cache.statistics().waiting == 0
        assert cache.statistics().leases == 0


@pytest.mark.source
@pytest.mark.slow(1)
async def test_cancelling_between_slices_finishes_them_and_gives_everything_back() -> None:
    async with opened(settings(device=2400)) as cache:
        for seed in range(800):
            await serve(cache, text(3, seed))
        assert cache.statistics().device["full"].free == 0
        driver, slices = parts(cache).driver, []
        perform = driver.perform

        def spy(plan: Any, *more: Any) -> None:
            slices.append(plan)
            perform(plan, *more)

        driver.perform = spy  # type: ignore[method-assign,assignment]
        task = entering(cache, 2400, 9999)
        await asyncio.sleep(0)
        assert driver.lock.locked(), "the grant takes several slices"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert len(slices) >= 2
        assert not driver.lock.locked()
        assert cache.statistics().leases == 0
        assert cache.statistics().device["full"].free == 2400


@pytest.mark.slow(1)
async def test_while_a_call_runs_in_slices_the_loop_turns_and_nobody_interleaves() -> None:
    async with opened(settings(device=2400)) as cache:
        for seed in range(800):
            await serve(cache, text(3, seed))
        big = entering(cache, 2400, 9999)
        await asyncio.sleep(0)
        assert not big.done()
        small = entering(cache, 1, 3)
        (await big).release()
        (await small).release()


async def test_a_lease_that_shares_a_failed_load_says_how_much_is_valid() -> None:
    async with opened(settings(device=12, host=16)) as cache:
        await serve(cache, text(4, seed=1))
        await settled(cache)
        await push_out(cache, 12)
        stage = local(cache).load_back
        post = stage._ended
        stage._ended = lambda _, ops: post(Status.FAILED, ops)
        async with cache.lease(text(4, 1, extra=1)) as one, cache.lease(text(4, 1, extra=2)) as two:
            for lease in (one, two):
                with pytest.raises(LoadFailed) as failed:
                    await lease.loaded()
                assert failed.value.valid == 0
                with pytest.raises(LoadFailed):
                    await lease.commit(text(4, 1, extra=1))
        stage._ended = post
        assert await serve(cache, text(4, 1, extra=1)) == 4 * PAGE


async def test_a_waiter_of_a_shared_load_that_is_cancelled_hurts_nobody_else() -> None:
    device = CpuDevice()
    async with opened(settings(device=12, host=16), device=device) as cache:
        await serve(cache, text(4, seed=1))
        await settled(cache)
        await push_out(cache, 12)
        gate = device.gate()
        fence_all(cache, gate)
        async with cache.lease(text(4, 1, extra=1)) as one, cache.lease(text(4, 1, extra=2)) as two:
            waits = [asyncio.create_task(lease.loaded()) for lease in (one, two, two)]
            await turns()
            waits[0].cancel()
            await turns()
            gate.open()
            await asyncio.gather(*waits[1:])
            await until(waits[0].cancelled)
    await device.aclose()
