"""Every task has an owner, and every wait an end, also when a worker dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from asynccache import AsyncCache, CacheClosed
from asynccache.core.plan import Move, Outcome, Status
from asynccache.errors import InvariantViolation
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.device import Event
from tests.runtime.runtime_kit import (
    compute,
    fence_all,
    local,
    opened,
    parts,
    push_out,
    serve,
    settings,
    settled,
    text,
    until,
)


class Boom(Exception):
    pass


async def test_a_worker_that_dies_closes_the_cache_with_its_error_and_nobody_hangs() -> None:
    async with CpuDeviceOf() as device:
        cache = await AsyncCache(settings(device=8, host=16), device=device).__aenter__()
        await serve(cache, text(4, seed=1))
        await settled(cache)
        await push_out(cache, 8)
        gate = device.gate()
        fence_all(cache, gate)
        lease = await cache.lease(text(4, seed=1, extra=1)).__aenter__()
        other = await cache.lease(text(3, seed=3)).__aenter__()
        waiting: list[asyncio.Task[object]] = [
            asyncio.create_task(lease.loaded()),
            asyncio.create_task(cache.lease(text(8, seed=2)).__aenter__()),
        ]
        await until(lambda: len(parts(cache).driver.line) == 1)
        local(cache).mover.backup = broken  # type: ignore[method-assign]
        await other.commit(text(3, seed=3))  # its backup kills the worker
        waiting.append(asyncio.create_task(cache.flush()))

        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [CacheClosed] * 3
        assert {type(result.__cause__) for result in results if isinstance(result, CacheClosed)} == {Boom}
        with pytest.raises(CacheClosed):
            await cache.match(text(1))
        lease.release()
        other.release()
        gate.open()
        with pytest.raises(CacheClosed) as closed:
            await cache.__aexit__(None, None, None)
        assert isinstance(closed.value.__cause__, Boom)


def broken(moves: Sequence[Move], after: Sequence[Event] = ()) -> Event:
    raise Boom("the worker")


async def test_the_users_task_is_not_cancelled_when_a_worker_dies() -> None:
    async with CpuDeviceOf() as device:
        cache = await AsyncCache(settings(), device=device).__aenter__()
        parts(cache).supervisor.fail(Boom())
        for _ in range(10):
            await asyncio.sleep(0)  # a cancellation would arrive here
        report = await cache.aclose()
        assert isinstance(report.error, Boom)


class CpuDeviceOf:
    async def __aenter__(self) -> CpuDevice:
        self.device = CpuDevice()
        return self.device

    async def __aexit__(self, *_: object) -> None:
        await self.device.aclose()


async def test_aclose_works_from_any_task_and_again() -> None:
    async with CpuDeviceOf() as device:
        cache = await AsyncCache(settings(), device=device).__aenter__()
        first, second = await asyncio.gather(asyncio.create_task(cache.aclose()), asyncio.create_task(cache.aclose()))
        assert first == second == await cache.aclose()
        with pytest.raises(CacheClosed):
            async with cache.lease(text(1)):
                pass


async def test_cancelling_aclose_stops_the_waiting_and_closing_goes_on() -> None:
    async with CpuDeviceOf() as device:
        cache = await AsyncCache(settings(host=16), device=device).__aenter__()
        closing = asyncio.create_task(cache.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert (await cache.aclose()).error is None
        assert len(parts(cache).supervisor) == 0


def begin(work: Coroutine[Any, Any, Any]) -> None:
    """Up to its first await."""
    try:
        work.send(None)
    except StopIteration:
        return
    work.close()


async def test_another_threads_call_raises() -> None:
    async with opened(settings(host=16)) as cache:
        await serve(cache, text(2))
        kept, handle, left = await cache.keep(text(2)), cache.prefetch(text(1)), cache.lease(text(1))
        async with cache.lease(text(1)) as lease:
            calls: dict[str, Callable[[], object]] = {
                "match": lambda: begin(cache.match(text(1))),
                "prefetch": lambda: cache.prefetch(text(1)),
                "keep": lambda: begin(cache.keep(text(1))),
                "aclose": lambda: begin(cache.aclose()),
                "enter": lambda: begin(left.__aenter__()),
                "loaded": lambda: begin(lease.loaded()),
                "layer": lambda: begin(lease.layer(0)),
                "extend": lambda: begin(lease.extend(1)),
                "commit": lambda: begin(lease.commit(text(1))),
                "adopt": lease.adopt,
                "advance": lambda: lease.advance(4),
                "truncate": lambda: lease.truncate(4),
                "release": lease.release,
                "await a handle": lambda: next(handle.__await__()),
                "cancel a handle": handle.cancel,
                "release what is kept": kept.release,
            }  # fmt: skip
            for name, call in calls.items():
                with pytest.raises(RuntimeError, match="thread") as caught:
                    await asyncio.to_thread(call)
                assert "belongs to" in str(caught.value), name
        kept.release()


async def test_an_engine_in_a_worker_thread_hands_off_commit_and_release() -> None:
    async with opened(settings()) as cache:
        tokens = text(3)
        lease = await cache.lease(tokens).__aenter__()
        compute(cache, lease, tokens)
        loop = asyncio.get_running_loop()

        def engine() -> list[int]:
            pages = asyncio.run_coroutine_threadsafe(lease.commit(tokens), loop).result(10).tolist()
            loop.call_soon_threadsafe(lease.release)
            return list(pages)

        pages = await asyncio.to_thread(engine)
        await until(lambda: cache.statistics().leases == 0)
        async with cache.lease(text(3, extra=1)) as again:
            assert again.pages.tolist()[:3] == pages
            assert again.cached == 12


async def test_a_hand_off_that_fails_tells_its_thread_and_kills_no_worker() -> None:
    async with opened(settings()) as cache:
        loop = asyncio.get_running_loop()
        async with cache.lease(text(2)) as lease:

            def engine() -> BaseException | None:
                return asyncio.run_coroutine_threadsafe(lease.commit(text(2, seed=7)), loop).exception(10)

            error = await asyncio.to_thread(engine)
            assert "do not begin with the prompt" in str(error)
        assert (await cache.match(text(2))).device == 0


async def test_a_core_that_refuses_an_outcome_closes_the_cache() -> None:
    async with CpuDeviceOf() as device:
        cache = await AsyncCache(settings(), device=device).__aenter__()
        parts(cache).driver.post(Outcome(12345, Status.DONE))
        with pytest.raises((InvariantViolation, CacheClosed)):
            await cache.match(text(1))
        assert isinstance((await cache.aclose()).error, InvariantViolation)
