"""What waiting and submitting cost: the time from a call until the coroutine goes on, and CPU time of both threads.

The loop does nothing else while that is measured. Nothing is copied where waking is timed, so all of that time is
ours: the way to the thread that submits, the event, the wake-up of the thread that waits, its call to the loop, and the
loop's turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from asynccache.cli.cuda_copies import Pages
from asynccache.cli.meter import spread
from asynccache.memory.cuda.device import CudaDevice
from asynccache.memory.device import PageCopy

IN_FLIGHT = 1000
PAGES, WIDTH = 8192, 4 << 10

Figures = dict[str, Any]


async def measure(device: CudaDevice, samples: int) -> Figures:
    """Return all figures of this module. Cancelling leaves copies in flight, which end by themselves."""
    scattered, dense = Pages(device, PAGES * 4 * WIDTH, WIDTH), Pages(device, PAGES * WIDTH, WIDTH, layers=1)
    rounds = max(5, samples // 50)
    return {"wake_up": await wake_up(device, samples), "in_flight": await _in_flight(device, scattered),
            "submitting": [await _submitting(device, "scattered", scattered.scattered(), rounds),
                           await _submitting(device, "in merged runs", dense.neighbours(), rounds)]}  # fmt: skip


async def wake_up(device: CudaDevice, samples: int) -> Figures:
    """Return percentiles of the microseconds from the call for an event on an idle stream until the coroutine that
    awaits it goes on. Cancelling leaves nothing in flight."""
    stream, taken = device.stream("wake-up"), list[float]()
    for _ in range(samples):
        began = time.perf_counter()
        await stream.record().wait()
        taken.append(time.perf_counter() - began)
    device.release(stream)
    late = spread(taken, 1e6)
    return {"p50_us": round(late.p50, 2), "p99_us": round(late.p99, 2), "samples": samples}


async def _in_flight(device: CudaDevice, pages: Pages) -> Figures:
    """Return the CPU time of the loop's thread for each of many transfers that end, in microseconds."""
    gate, stream = device.gate(), device.stream("in flight")
    stream.wait_event(gate)
    waiters = []
    for _ in range(IN_FLIGHT):
        device.device_to_host(stream, pages.scattered(4))
        waiters.append(asyncio.create_task(stream.record().wait()))
    await asyncio.sleep(0)
    began = time.thread_time()
    gate.open()
    await asyncio.gather(*waiters)
    return {"transfers": IN_FLIGHT, "loop_us_each": _us((time.thread_time() - began) / IN_FLIGHT)}


async def _submitting(device: CudaDevice, way: str, copies: Sequence[PageCopy], rounds: int) -> Figures:
    """Return the CPU time of submitting many pages on an idle stream, in microseconds: that of the caller's thread and
    that of the thread that submits."""
    stream, on, off = device.stream("submitting"), list[float](), list[float]()
    for _ in range(rounds):
        notes: list[float] = []
        stream.call(lambda to=notes: to.append(time.thread_time()))  # type: ignore[misc]
        began = time.thread_time()
        device.device_to_host(stream, copies)
        on.append(time.thread_time() - began)
        stream.call(lambda to=notes: to.append(time.thread_time()))  # type: ignore[misc]
        await stream.record().wait()
        off.append(notes[1] - notes[0])
    device.release(stream)
    return {"way": way, "pages": len(copies[0].src), "on_loop_us": _us(median(on)), "off_loop_us": _us(median(off))}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 2)
