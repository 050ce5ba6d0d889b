"""One way to be woken: whatever could let somebody go on wakes whoever waits for room, be it a lease in line, a lease
that grows, or a prefetch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import pytest

from asynccache import AsyncCache, CacheClosed
from asynccache.core.plan import Status
from asynccache.memory.cpu import CpuDevice
from asynccache.runtime.prefetch import GRACE, HELD_FOR
from asynccache.runtime.save import PATIENCE
from asynccache.storage import CheckedStore
from asynccache.storage.checked import store_layout
from tests.runtime.runtime_kit import PAGE, local, opened, parts, push_out, settings, settled, text, until
from tests.runtime.test_hung_storage import Hangs, serve
from tests.simulated.device import SimulatedDevice
from tests.simulated.loop import SimulatedLoop, simulate

AT_ONCE = 0.05

Cause = AsyncIterator[float]
"""What wakes: prepared up to its ``yield``, from which on others wait, and then let happen. It yields within how many
seconds it wakes."""


async def an_outcome(cache: AsyncCache, backend: Hangs, device: SimulatedDevice) -> Cause:
    gate = device.gate()
    async with cache.lease(text(2)) as lease:
        await lease.commit(text(2), after=gate)
        await asyncio.sleep(AT_ONCE)
        yield AT_ONCE
        gate.open()
        await asyncio.sleep(AT_ONCE)


async def a_release(cache: AsyncCache, backend: Hangs, device: SimulatedDevice) -> Cause:
    lease = await cache.lease(text(2)).__aenter__()
    yield 0.0
    lease.release()


async def pages_that_the_engine_has_let_go_of(cache: AsyncCache, backend: Hangs, device: SimulatedDevice) -> Cause:
    gate = device.gate()
    lease = await cache.lease(text(2)).__aenter__()
    lease.release(after=gate)
    await asyncio.sleep(AT_ONCE)
    yield AT_ONCE
    gate.open()


async def a_window_that_moves_on(cache: AsyncCache, backend: Hangs, device: SimulatedDevice) -> Cause:
    async with cache.lease(text(10)) as lease:
        yield 0.0
        lease.advance(9 * PAGE)


async def tokens_that_were_rejected(cache: AsyncCache, backend: Hangs, device: SimulatedDevice) -> Cause:
    async with cache.lease(text(2), new_tokens=4 * PAGE) as lease:
        yield 0.0
        lease.truncate(2 * PAGE)


async def a_load_that_fails(cache: AsyncCache, backend: Hangs, device: SimulatedDevice) -> Cause:
    await serve(cache, text(4))
    await settled(cache)
    await push_out(cache, 20)
    stage = local(cache).load_back
    post, stage._ended = stage._ended, lambda status, ops: post(Status.FAILED, ops)
    lease = await cache.lease(text(4, extra=1)).__aenter__()
    assert lease.loading
    yield AT_ONCE
    await asyncio.sleep(AT_ONCE)
    stage._ended = post
    lease.release()


async def a_namespace_that_is_forgotten(cache: AsyncCache, backend: Hangs, device: SimulatedDevice) -> Cause:
    await serve(cache, text(4))
    await settled(cache)
    yield AT_ONCE
    await cache.invalidate()


async def a_prefix_that_is_kept_no_longer(cache: AsyncCache, backend: Hangs, device: SimulatedDevice) -> Cause:
    await serve(cache, text(2))
    assert (await cache.keep(text(2), ttl=1.0)).tokens
    yield 1.0


async def _only_stored(cache: AsyncCache) -> None:
    await serve(cache, text(4))
    await cache.flush()
    for seed in range(1, 8):
        await serve(cache, text(10, seed=seed))
    await cache.flush()


async def a_claim_that_is_dropped(cache: AsyncCache, backend: Hangs, device: SimulatedDevice) -> Cause:
    await _only_stored(cache)
    handle = cache.prefetch(text(4, extra=1))
    assert (await handle).tokens
    yield 0.0
    handle.cancel()


async def a_claims_timer(cache: AsyncCache, backend: Hangs, device: SimulatedDevice) -> Cause:
    await _only_stored(cache)
    handle = cache.prefetch(text(4, extra=1))
    assert (await handle).tokens
    yield HELD_FOR
    assert handle.done(), "a handle that is dropped drops its claim"


async def a_prefetch_that_ends(cache: AsyncCache, backend: Hangs, device: SimulatedDevice) -> Cause:
    handle = cache.prefetch(text(4, extra=1))
    yield AT_ONCE
    assert not (await handle).tokens


async def a_question_that_is_late(cache: AsyncCache, backend: Hangs, device: SimulatedDevice) -> Cause:
    backend.verbs = ("exists",)
    backend.hung.set()
    handle = cache.prefetch(text(4, extra=1))
    yield PATIENCE
    handle.cancel()


async def a_read_that_is_late(cache: AsyncCache, backend: Hangs, device: SimulatedDevice) -> Cause:
    await _only_stored(cache)
    backend.hung.set()
    handle = cache.prefetch(text(4, extra=1))
    await asyncio.sleep(AT_ONCE)
    yield PATIENCE
    handle.cancel()


async def a_write_that_is_late(cache: AsyncCache, backend: Hangs, device: SimulatedDevice) -> Cause:
    backend.verbs = ("put",)
    backend.hung.set()
    await serve(cache, text(4))
    await asyncio.sleep(AT_ONCE)
    yield PATIENCE


async def a_prefetch_that_is_not_answered(cache: AsyncCache, backend: Hangs, device: SimulatedDevice) -> Cause:
    await _only_stored(cache)
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
def test_whatever_could_let_somebody_go_on_wakes_everybody(
    cause: Callable[[AsyncCache, Hangs, SimulatedDevice], Cause],
) -> None:
    async def main(loop: SimulatedLoop) -> None:
        device = SimulatedDevice(seed=1, latency=(0.0, 0.001))
        backend = Hangs("get", alone=True)
        config = settings(20, 20, swa=20 * (cause is a_window_that_moves_on), prefetch_policy="best_effort",
                          prefetch_quota=1.0, close_timeout=5.0)  # fmt: skip
        store = CheckedStore(backend, store_layout(config.pools()), threads=0)
        async with AsyncCache(config, device=device, storage=store) as cache:
            async with aclosing(cause(cache, backend, device)) as steps:  # type: ignore[type-var]
                within = await anext(steps)
                waiting = waiters(cache)
                began = loop.time()
                happens = asyncio.ensure_future(anext(steps, None))
                await asyncio.wait(waiting.values(), timeout=within + AT_ONCE)
                asleep = [kind for kind, waiter in waiting.items() if not waiter.done()]
                assert not asleep, f"{cause.__name__} does not wake a {asleep}"
                assert loop.time() - began <= within + AT_ONCE
                await happens
            backend.answers.set()
        await store.aclose()
        await device.aclose()

    simulate(main, 1)


def test_a_cache_that_closes_lets_nobody_wait() -> None:
    async def main(loop: SimulatedLoop) -> None:
        device = SimulatedDevice(seed=1, latency=(0.0, 0.001))
        gate = device.gate()
        async with AsyncCache(settings(8, 8, close_timeout=0.1), device=device) as cache:
            async with cache.lease(text(4)) as other:
                await other.commit(text(4), after=gate)
            lease = await cache.lease(text(4, seed=1)).__aenter__()
            growing = asyncio.ensure_future(lease.extend(2 * PAGE, wait=True))
            await asyncio.sleep(AT_ONCE)
            assert len(parts(cache).driver.growing) == 1
            waiting = waiters(cache)
            loop.call_later(1.0, gate.open)
        for kind in ("lease", "prefetch"):
            with pytest.raises(CacheClosed):
                await waiting[kind]
        with pytest.raises(CacheClosed):
            await growing
        assert parts(cache).driver.growing == {waiting["growth"]}
        lease.release()
        await device.aclose()

    simulate(main, 1)


async def test_who_grows_in_vain_waits_in_no_line_and_leaves_nothing_behind_when_it_is_cancelled() -> None:
    device = CpuDevice()
    async with opened(settings(8, 8), device=device) as cache:
        gate = device.gate()
        async with cache.lease(text(4)) as other:
            await other.commit(text(4), after=gate)
        async with cache.lease(text(4, seed=1)) as lease:
            growing = asyncio.ensure_future(lease.extend(2 * PAGE, wait=True))
            await until(lambda: len(parts(cache).driver.growing) == 1)
            growing.cancel()
            await asyncio.wait([growing])
            assert growing.cancelled()
            assert not parts(cache).driver.growing
            assert len(lease.pages) == 4
            growing = asyncio.ensure_future(lease.extend(2 * PAGE, wait=True))
            await until(lambda: len(parts(cache).driver.growing) == 1)
            gate.open()
            assert len(await growing) == 6
            assert not parts(cache).driver.growing
    await device.aclose()
