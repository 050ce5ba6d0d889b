"""The slow parts of opening, measuring a GPU and pinning memory, leave the loop free."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
import torch
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache, CacheClosed, ConfigError, Lease
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.signals import HostGate
from asynccache.runtime import head as head_module
from asynccache.runtime.head import Head
from asynccache.worker import local as worker_module
from tests.runtime.runtime_kit import fence_all, local, push_out, serve, settings, settled, text, turns


class Slow(CpuDevice):
    """Memory that somebody has to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go, self.ended = threading.Event(), threading.Event(), False

    def host_tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        self.asked.set()
        assert self.go.wait(60)
        return super().host_tensor(shape)

    async def aclose(self) -> None:
        await super().aclose()
        self.ended = True


async def begun(device: Slow, monkeypatch: pytest.MonkeyPatch) -> asyncio.Task[AsyncCache]:
    """A cache on its way; the test goes on beside it."""
    monkeypatch.setattr(worker_module, "open_device", lambda name: device)
    opening = asyncio.create_task(AsyncCache(settings(device=8, host=8)).__aenter__())
    await asyncio.to_thread(device.asked.wait, 60)
    return opening


async def test_the_loop_goes_on_while_memory_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Slow()
    opening = await begun(device, monkeypatch)
    await turns(100)
    assert not opening.done()
    device.go.set()
    cache = await opening
    await cache.aclose()
    assert device.ended


@pytest.mark.parametrize("every", [False, True], ids=["the call", "every task, as asyncio.run does"])
async def test_cancelled_meanwhile_it_waits_for_the_memory_and_gives_it_back(
    every: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, others = Slow(), asyncio.all_tasks()
    opening = await begun(device, monkeypatch)
    for task in asyncio.all_tasks() - others if every else {opening}:
        task.cancel()
    await turns(100)
    assert not opening.done()
    device.go.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert device.ended


async def opened_turn_by_turn(device: CpuDevice) -> AsyncIterator[tuple[AsyncCache, asyncio.Task[AsyncCache]]]:
    """Yield caches that are being opened, with the tasks that open them: each a turn later than the one before, and the
    last one before its task is done."""
    for later in range(1000):
        cache = AsyncCache(settings(device=8, host=8), device=device)
        opening = asyncio.create_task(cache.__aenter__())
        while cache._worker is None:
            await turns(1)
        await turns(later)
        if opening.done():
            await cache.aclose()
            return
        yield cache, opening


async def test_cancelled_in_any_turn_it_leaves_nothing_open_also_when_the_opening_has_just_ended() -> None:
    device, before = CpuDevice(), asyncio.all_tasks()
    tried = 0
    async for cache, opening in opened_turn_by_turn(device):
        tried += 1
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert cache.closed == "the cache is not open"
        assert cache._worker is None
        assert asyncio.all_tasks() <= before
    assert tried > 2
    await device.aclose()


async def test_closed_in_any_turn_while_it_is_opened_the_opener_hears_that_it_was_closed() -> None:
    device, before = CpuDevice(), asyncio.all_tasks()
    tried = 0
    async for cache, opening in opened_turn_by_turn(device):
        tried += 1
        await cache.aclose()
        with pytest.raises(CacheClosed, match="while it was being opened"):
            await opening
        assert cache.closed is not None
        assert asyncio.all_tasks() <= before
    assert tried > 2
    await device.aclose()


@pytest.mark.parametrize("turns_between", [1, 2, 3, 5, 10])
@pytest.mark.parametrize("by", ["aclose", "cancel"])
async def test_what_ends_an_opening_again_does_not_interrupt_its_clean_up(
    turns_between: int, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, device, before = MemoryBackend(), Slow(), asyncio.all_tasks()
    device.go.set()
    monkeypatch.setattr(worker_module, "open_device", lambda name: device)
    started = asyncio.Event()

    async def start(parts: Head) -> None:
        started.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Head, "start", start)
    cache = AsyncCache(settings(device=8, host=8), storage=backend)
    opening = asyncio.create_task(cache.__aenter__())
    await started.wait()
    closing = [asyncio.create_task(cache.aclose())]
    for _ in range(3):
        await turns(turns_between)
        if by == "cancel":
            opening.cancel()
        else:
            closing.append(asyncio.create_task(cache.aclose()))
    await asyncio.wait([opening, *closing])
    assert device.ended
    assert cache.closed == "the cache is not open"
    assert opening.cancelled() if by == "cancel" else isinstance(opening.exception(), CacheClosed)
    assert asyncio.all_tasks() <= before
    await backend.aclose()


async def test_a_device_that_outlives_its_caches_has_its_streams_back() -> None:
    device = CpuDevice()
    before = set(threading.enumerate())
    for _ in range(5):
        async with AsyncCache(settings(device=8, host=8), device=device) as cache:
            await serve(cache, text(2))
        with pytest.raises(ConfigError):
            await AsyncCache(settings(device=8, host=8, storage="nowhere:"), device=device).__aenter__()
        for thread in set(threading.enumerate()) - before:
            if thread.name.startswith("asynccache-"):
                await asyncio.to_thread(thread.join, 60)
    assert not [t.name for t in set(threading.enumerate()) - before if t.name.startswith("asynccache-")]
    device.stream("engine")
    assert len(device._streams) == 1
    await device.aclose()


async def held(cache: AsyncCache, device: CpuDevice) -> tuple[Lease, HostGate]:
    """A lease that is loading, for as long as the gate is shut."""
    await serve(cache, text(4))
    await settled(cache)
    await push_out(cache, 8)
    gate = device.gate()
    fence_all(cache, gate)
    return await cache.lease(text(4, extra=1)).__aenter__(), gate


async def test_closing_waits_for_the_copies_on_a_device_that_outlives_it() -> None:
    device = CpuDevice()
    cache = await AsyncCache(settings(device=8, host=16), device=device).__aenter__()
    lease, gate = await held(cache, device)
    loading = asyncio.create_task(lease.loaded())
    await turns()
    lease.release()
    closing = asyncio.create_task(cache.aclose())
    await turns(1000)
    assert not closing.done()
    gate.open()
    await closing
    await asyncio.wait([loading])
    await device.aclose()


async def test_closing_does_not_wait_for_ever_for_an_engine_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CpuDevice()
    monkeypatch.setattr(head_module, "MOMENT", 0.05)
    config = settings(device=8, host=16, close_timeout=0.05)
    async with AsyncCache(config, device=device) as cache:
        lease, _ = await held(cache, device)
        lease.release()
    await device.aclose()


async def test_closing_that_is_cancelled_while_it_waits_for_copies_gives_the_streams_back() -> None:
    device = CpuDevice()
    cache = await AsyncCache(settings(device=8, host=16), device=device).__aenter__()
    lease, _ = await held(cache, device)
    await turns()
    lease.release()
    closing = asyncio.create_task(cache.aclose())
    await turns(1000)
    assert cache._closer is not None
    cache._closer.cancel()
    await closing
    with pytest.raises(CacheClosed):
        local(cache).mover._backups.record()
    await device.aclose()


async def test_a_batch_that_is_refused_while_another_is_on_its_way_ends_the_cache() -> None:
    """The worker waits for the first, and could not tell."""
    device = CpuDevice()
    cache = await AsyncCache(settings(device=12, host=64, close_timeout=0.05), device=device).__aenter__()
    for seed in (1, 2):
        await serve(cache, text(3, seed=seed))
        await settled(cache)
    await push_out(cache, 12)
    mover, gate = local(cache).mover, device.gate()
    fence_all(cache, gate)
    one = await cache.lease(text(3, seed=1, extra=1)).__aenter__()
    await turns(100)
    two = await cache.lease(text(3, seed=2, extra=1)).__aenter__()

    def refuse(*_: object) -> None:
        raise ValueError("not this one")

    mover.load = refuse  # type: ignore[assignment]
    with pytest.raises(ValueError, match="not this one"):
        await two.layer(0)
    with pytest.raises(CacheClosed):
        await two.loaded()
    gate.open()
    one.release()
    two.release()
    report = await cache.aclose()
    assert isinstance(report.error, ValueError)
    await device.aclose()
