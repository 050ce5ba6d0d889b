"""Two laws of the driver, seen from outside: outcomes that wait are applied before anything is decided on top of them,
and the effects of a core call are in the queues before any other task runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache, CacheFull
from asynccache.core.audit import check
from asynccache.core.plan import Outcome, Plan
from asynccache.runtime.core_calls import holding
from asynccache.runtime.driver import TreeLock
from asynccache.runtime.lease import Lease
from tests.runtime.runtime_kit import PAGE, compute, local, opened, parts, serve, settings, settled, text, turns, until

CALLS = ("lease", "commit", "extend", "release", "advance", "truncate", "complete", "drain", "prefetch_open",
         "prefetch_take_full", "prefetch_take_aux", "prefetch_commit", "prefetch_release")  # fmt: skip


@asynccontextmanager
async def with_an_outcome_that_waits() -> AsyncIterator[tuple[AsyncCache, Outcome]]:
    """A backup has landed, and nobody has told the core."""
    async with opened(settings(device=16, host=16)) as cache:
        held: list[Outcome] = []
        stage = local(cache).backup_host
        post = stage._ended
        stage._ended = lambda status, ops: held.extend(Outcome(op, status) for op in ops)
        await serve(cache, text(4))
        await until(lambda: len(held) == 1)
        stage._ended = post
        assert backups(cache) == 1
        yield cache, held[0]


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


async def enter(cache: AsyncCache) -> None:
    async with cache.lease(text(4, seed=2)):
        pass


async def look(cache: AsyncCache) -> None:
    await cache.match(text(4))


@pytest.mark.source
@pytest.mark.parametrize(("use", "call"), [(enter, "lease"), (look, "match")])
async def test_whoever_gets_the_lock_applies_what_waits_before_asking_the_core(
    use: Callable[[AsyncCache], Awaitable[None]], call: str
) -> None:
    async with with_an_outcome_that_waits() as (cache, outcome):
        driver = parts(cache).driver
        async with holding(driver.lock):
            using = asyncio.ensure_future(use(cache))
            await turns()  # it is in line for the lock, before the ack task
            seen = watch(cache, call)
            driver.post(outcome)
        await using
        assert seen[0] == 0


@pytest.mark.source
@pytest.mark.parametrize("call", ["commit", "extend"])
async def test_calls_of_a_lease_apply_what_waits_before_asking_the_core(call: str) -> None:
    async with with_an_outcome_that_waits() as (cache, outcome):
        driver, tokens = parts(cache).driver, text(2, seed=3)
        async with cache.lease(tokens) as lease:
            compute(cache, lease, tokens)
            async with holding(driver.lock):
                using = asyncio.ensure_future(lease.commit(tokens) if call == "commit" else lease.extend(1))
                await turns()
                seen = watch(cache, call)
                driver.post(outcome)
            await using
            assert seen[0] == 0


@pytest.mark.source
async def test_who_gets_in_at_once_applies_what_waits_first() -> None:
    async with with_an_outcome_that_waits() as (cache, outcome):
        seen = watch(cache, "lease")
        parts(cache).driver.post(outcome)
        entering = cache.lease(text(4, seed=2)).__aenter__()
        with pytest.raises(StopIteration) as entered:
            entering.send(None)  # without one turn of the loop
        assert seen == [0]
        entered.value.value.release()


@pytest.mark.source
@pytest.mark.slow(1)
async def test_between_two_slices_what_waits_is_applied() -> None:
    async with opened(settings(device=2404, host=2404)) as cache:
        for seed in range(800):
            await serve(cache, text(3, seed))
        await settled(cache)
        held: list[Outcome] = []
        stage = local(cache).backup_host
        post = stage._ended
        stage._ended = lambda status, ops: held.extend(Outcome(op, status) for op in ops)
        await serve(cache, text(4, seed=5000))
        await until(lambda: len(held) == 1)
        stage._ended = post
        seen = watch(cache, "lease")
        entering = asyncio.create_task(cache.lease(text(2400, seed=9999)).__aenter__())
        await asyncio.sleep(0)
        assert parts(cache).driver.lock.locked(), "the grant takes several slices"
        before = len(seen)
        assert seen == [1] * before
        parts(cache).driver.post(held[0])  # the ack task cannot come by
        (await entering).release()
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


async def contend(lock: TreeLock) -> None:
    for _ in range(200):
        async with holding(lock):
            await asyncio.sleep(0)
        await asyncio.sleep(0)


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

            await asyncio.gather(contend(parts(cache).driver.lock), *(request(number) for number in range(24)))
            await cache.flush()
            assert prompt.late == []
            assert prompt.plans > 50
    await storage.aclose()


async def grow(lease: Lease, tokens: list[int]) -> None:
    await lease.commit(tokens[: 3 * PAGE])
    with suppress(CacheFull):
        await lease.extend(1)
    lease.advance(len(tokens))
    await lease.commit(tokens)
    lease.truncate(len(tokens))


@pytest.mark.parametrize("call", ["commit", "extend"])
async def test_a_call_cancelled_at_any_turn_after_it_waited_for_the_lock_is_done_or_undone(call: str) -> None:
    async with opened(settings(device=16, host=64)) as cache:
        driver, turn, running = parts(cache).driver, 0, True
        while running:
            tokens = text(3, seed=turn)
            async with cache.lease(tokens) as lease:
                compute(cache, lease, tokens)
                async with holding(driver.lock):
                    using = asyncio.ensure_future(lease.commit(tokens) if call == "commit" else lease.extend(PAGE))
                    await turns()
                await turns(turn)
                running = not using.done()
                using.cancel()
                await asyncio.gather(using, return_exceptions=True)
                assert lease.pages.size in ((3,) if call == "commit" else (3, 4))
            await settled(cache)
            check(parts(cache).core, idle=True)
            match = await cache.match(tokens)
            assert (match.device, match.host) in {(0, 0), (3 * PAGE, 3 * PAGE)}
            turn += 1
            assert turn < 50
