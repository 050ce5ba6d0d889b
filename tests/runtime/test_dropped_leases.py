"""A lease that is dropped without its ``async with`` ending gives its pages back, and says where it was taken."""

from __future__ import annotations

import asyncio
import copy
import gc
import sys
import threading
import warnings
from types import FrameType

import pytest

from asynccache import AsyncCache, CacheFull, Lease
from asynccache.memory.cpu import CpuDevice
from tests.runtime.runtime_kit import (
    PAGE,
    compute,
    opened,
    parts,
    serve,
    settings,
    settled,
    text,
    turns,
    until,
)


def line_of(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _drop(things: list[asyncio.Task[None]]) -> None:
    things.clear()
    gc.collect()


def free(cache: AsyncCache) -> int:
    return cache.statistics().device["full"].free


async def test_a_dropped_lease_gives_its_pages_back_and_names_its_place() -> None:
    async with opened(settings(device=8)) as cache:
        frame = sys._getframe()
        lease = await cache.lease(text(6)).__aenter__(); place = line_of(frame)  # noqa: E702  on one line
        with pytest.warns(ResourceWarning, match=r"^Lease\(0 cached, .*taken at .*without being released") as told:
            del lease
        assert place in str(told[0].message)
        assert free(cache) == 2, "it is given back by the loop, not wherever garbage is found"
        await turns()
        assert free(cache) == 8
        assert cache.statistics().leases == 0


async def test_whoever_waits_for_the_dropped_pages_gets_them() -> None:
    async with opened(settings(device=8)) as cache:
        lease = await cache.lease(text(8)).__aenter__()
        waits = asyncio.create_task(cache.lease(text(1, seed=2)).__aenter__())
        await turns()
        assert not waits.done()
        with pytest.warns(ResourceWarning):
            del lease
        (await waits).release()


async def test_a_task_that_failed_with_its_lease_keeps_nothing_alive() -> None:
    """Its traceback does, as long as somebody has it: the cache itself has neither the lease nor the task."""
    async with opened(settings(device=8)) as cache:

        async def careless() -> None:
            lease = await cache.lease(text(8)).__aenter__()
            raise ValueError(lease)

        tasks = [asyncio.create_task(careless())]
        await asyncio.wait(tasks)
        assert isinstance(tasks[0].exception(), ValueError)
        assert free(cache) == 0
        with pytest.warns(ResourceWarning):
            _drop(tasks)
        await turns()
        assert free(cache) == 8


async def test_dropped_pages_wait_for_the_events_that_the_lease_has_been_told() -> None:
    device = CpuDevice()
    async with opened(settings(device=8), device=device) as cache:
        ready = device.gate()
        lease = await cache.lease(text(2), new_tokens=6 * PAGE).__aenter__()
        compute(cache, lease, text(2))
        await lease.commit(text(2), after=ready)
        with pytest.warns(ResourceWarning):
            del lease
        await turns()
        assert cache.statistics().leases == 0
        assert free(cache) == 0
        ready.open()
        await until(lambda: free(cache) == 6)
        assert await serve(cache, [*text(2), 1]) == 2 * PAGE
    await device.aclose()


@pytest.mark.source
async def test_garbage_that_another_thread_finds_is_given_back_by_the_loop() -> None:
    async with opened(settings(device=8)) as cache:
        leases = [await cache.lease(text(8)).__aenter__()]
        threads: list[int] = []
        release = parts(cache).core.release

        def watched(*args: object, **more: object) -> object:
            threads.append(threading.get_ident())
            return release(*args, **more)  # type: ignore[arg-type]

        parts(cache).core.release = watched  # type: ignore[method-assign, assignment]
        with pytest.warns(ResourceWarning):
            await asyncio.to_thread(leases.clear)
        await until(lambda: free(cache) == 8)
        assert threads == [threading.get_ident()]


async def test_a_warning_that_is_an_error_keeps_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(settings(device=8)) as cache:
        lease = await cache.lease(text(8)).__aenter__()
        heard: list[object] = []
        monkeypatch.setattr(sys, "unraisablehook", lambda args: heard.append(args.exc_type))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            del lease
            gc.collect()
        monkeypatch.undo()
        assert heard == [ResourceWarning]
        await turns()
        assert free(cache) == 8


@pytest.mark.parametrize("how", ["released", "left", "never entered", "entered in vain", "of a closed cache"])
async def test_a_lease_that_holds_nothing_says_nothing(how: str) -> None:
    lease: Lease | None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with opened(settings(device=8), idle=how != "of a closed cache") as cache:
            lease = cache.lease(text(2), wait=how != "entered in vain")
            if how == "left":
                async with lease:
                    pass
            elif how in ("released", "of a closed cache"):
                await lease.__aenter__()
                if how == "released":
                    lease.release()
            elif how == "entered in vain":
                async with cache.lease(text(8, 1)):
                    with pytest.raises(CacheFull):
                        await lease.__aenter__()
            if how != "of a closed cache":
                del lease
                gc.collect()
                await turns()
        lease = None
        gc.collect()


async def test_a_held_lease_still_keeps_its_task_from_waiting_for_another() -> None:
    async with opened(settings(device=8)) as cache:
        async with cache.lease(text(8)):
            with pytest.raises(RuntimeError, match="this task holds a lease"):
                await cache.lease(text(1, seed=2)).__aenter__()
        await settled(cache)
        await serve(cache, text(1, seed=2))


async def test_a_lease_that_outlives_its_loop_is_garbage_like_any_other() -> None:
    """Nobody is there to give anything back, and nothing is said."""
    ended = asyncio.new_event_loop()
    ended.close()
    async with opened(settings(device=8), idle=False) as cache:
        lease = await cache.lease(text(8)).__aenter__()
        lease._head = copy.copy(lease._head)
        lease._head.loop = ended
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            del lease
            gc.collect()
