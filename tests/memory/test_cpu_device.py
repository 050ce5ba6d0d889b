"""The CPU device's threads: any loop, any thread, few hops, and a loop that stays free while bytes move."""

from __future__ import annotations

import asyncio
import linecache
import sys
import threading
import time
import warnings
from collections.abc import Callable
from statistics import median
from types import FrameType
from typing import Any

import numpy as np
import pytest
import uvloop

from asynccache.core.plan import Move
from asynccache.errors import CacheClosed, CopyFailed
from asynccache.memory import host_copies
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.mover import Mover
from asynccache.memory.signals import WorkThread
from tests.memory.small_pools import device_page, filled, host_page, move, pool

NewLoop = Callable[[], asyncio.AbstractEventLoop]
LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


def run(new_loop: NewLoop, main: Callable[[], Any]) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


def big_move(pages: int, seed: int = 0) -> Move:
    rng = np.random.default_rng(seed)
    src, dst = (rng.permutation(pages).astype("<i4").tobytes() for _ in range(2))
    return Move(0, src, dst)


async def lateness() -> float:
    """Seconds by which a timer of a millisecond is late."""
    started = time.perf_counter()
    await asyncio.sleep(0.001)
    return time.perf_counter() - started - 0.001


@LOOPS
def test_the_loop_stays_free_while_256_mib_are_copied(new_loop: NewLoop) -> None:
    async def main() -> None:
        spec = pool(size=64 << 10, layers=4, device_pages=1024, host_pages=1024)
        mover = Mover(CpuDevice(), [spec])
        for array in mover.device_pools["full"].arrays:
            array[:] = 3
        await mover.backup([big_move(1024)]).wait()  # touches the host's pages
        idle = [await lateness() for _ in range(50)]   # what this machine does to a loop that has nothing to do
        events = [mover.backup([big_move(1024, seed)]) for seed in range(4)]
        late = []
        while not events[-1].done():
            late.append(await lateness())
        assert len(late) >= 5
        assert median(late) < 0.005 + 3 * median(idle)
        assert max(late) < 0.25 + 3 * max(idle)
        await mover.device.aclose()

    run(new_loop, main)


@LOOPS
def test_a_burst_of_events_costs_one_hop(new_loop: NewLoop) -> None:
    async def main() -> None:
        loop, device = asyncio.get_running_loop(), CpuDevice()
        gate, stream, other = device.gate(), device.stream("s"), device.stream("other")
        stream.wait_event(gate)
        events = [stream.record() for _ in range(50)]
        waiters = [asyncio.create_task(e.wait()) for e in events]
        await asyncio.sleep(0)
        hops = device._bells.of(loop)
        answered, answer = [], hops._answer

        def count() -> None:
            answered.append(1)
            answer()

        hops._answer = count  # type: ignore[method-assign]
        gate.open()
        other.wait_event(events[-1])
        ended = other.record()
        ended.block()  # the loop is kept from answering until the whole burst has rung
        await asyncio.gather(*waiters)
        assert len(answered) == 1
        await device.aclose()

    run(new_loop, main)


@LOOPS
def test_a_waiter_whose_loop_has_gone_harms_nobody(new_loop: NewLoop) -> None:
    device = CpuDevice()
    gate, stream = device.gate(), device.stream("s")
    stream.wait_event(gate)
    event = stream.record()
    loop = new_loop()
    task = loop.create_task(event.wait())
    loop.run_until_complete(asyncio.sleep(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop.close()

    async def main() -> None:
        gate.open()
        await event.wait()
        await device.aclose()

    run(new_loop, main)
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    assert not task.done()


def test_two_loops_in_two_threads_wait_for_one_event() -> None:
    device = CpuDevice()
    gate, stream = device.gate(), device.stream("s")
    stream.wait_event(gate)
    event, woken = stream.record(), []

    def wait(new_loop: NewLoop) -> None:
        run(new_loop, event.wait)
        woken.append(new_loop)

    threads = [threading.Thread(target=wait, args=(f,)) for f in (asyncio.new_event_loop, uvloop.new_event_loop)]
    for thread in threads:
        thread.start()
    gate.open()
    for thread in threads:
        thread.join(10)
    assert len(woken) == 2
    asyncio.run(device.aclose())


async def test_aclose_ends_the_threads() -> None:
    device = CpuDevice()
    streams = [device.stream(f"gone-{i}") for i in range(3)]
    names = {f"asynccache-{s.name}" for s in streams}
    assert names <= {t.name for t in threading.enumerate()}
    await device.aclose()
    assert not names & {t.name for t in threading.enumerate()}


async def test_an_event_fires_even_if_its_stream_is_released_by_another_thread_while_it_is_recorded(
    cpu: CpuDevice,
) -> None:
    stream = cpu.stream("released")
    release = threading.Thread(target=cpu.release, args=(stream,))

    def trace(frame: FrameType, event: str, _argument: object) -> Callable[..., Any] | None:
        if frame.f_code is not WorkThread.submit.__code__:
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and line == "self._queue.put(work)":
            release.start()
            release.join(0.1)  # the release may have to wait until the event is queued
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        event = stream.record()
    finally:
        sys.settrace(before)
    await asyncio.to_thread(release.join, 10)
    await asyncio.wait_for(event.wait(), 10)
    with pytest.raises(CacheClosed):
        stream.record()


async def test_an_idle_stream_holds_no_buffers(cpu: CpuDevice) -> None:
    stream = cpu.stream("s")
    gone = threading.Event()

    class Buffer:
        def __call__(self) -> None:
            assert not gone.is_set()

        def __del__(self) -> None:
            gone.set()

    stream._thread.submit(Buffer())  # and nothing after it, which would take its place
    assert await asyncio.to_thread(gone.wait, 10)


async def test_a_real_error_in_a_copy_reaches_the_waiter_and_the_thread_lives(
    cpu: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    mover = filled(cpu)

    def broken(src: object, dst: object, row_bytes: int) -> list[host_copies.Piece]:
        raise MemoryError("no room for index lists")

    with monkeypatch.context() as patch:
        patch.setattr(host_copies, "cut", broken)
        with pytest.raises(CopyFailed) as failed:
            await mover.backup([move([1], [1])]).wait()
        for event in mover.load([move([1], [1])]).layers:
            with pytest.raises(CopyFailed):
                await event.wait()
    assert isinstance(failed.value.__cause__, MemoryError)
    await mover.backup([move([2], [2])]).wait()
    assert host_page(mover, "full", 2) == device_page(mover, "full", 2)


async def test_a_cancelled_waiter_leaves_nothing_behind(cpu: CpuDevice) -> None:
    gate = cpu.gate()
    for _ in range(100):
        task = asyncio.create_task(gate.wait())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    assert gate._callbacks == []


async def test_an_event_that_fires_between_check_and_subscription_is_not_lost(cpu: CpuDevice) -> None:
    for _ in range(500):
        stream_event = cpu.gate()
        thread = threading.Thread(target=stream_event.fire)
        thread.start()
        async with asyncio.timeout(60):
            await stream_event.wait()
        thread.join()
