"""What waiting and submitting cost: from a call to the coroutine that goes on, and CPU time of either thread.

Law: the loop is idle but for what is measured. Nothing is copied where waking is timed, so all of it is ours: the way
to the submitter, the event, the wake-up of the waiter, its hop, and the loop's turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from asynccache.cli.cuda_compute import middle
from asynccache.cli.cuda_copies import Pages
from asynccache.memory.cuda.device import CudaDevice
from asynccache.memory.device import PageCopy

IN_FLIGHT = 1000
PAGES, WIDTH = 8192, 4 << 10

Figures = dict[str, Any]


async def measure(device: CudaDevice, samples: int) -> Figures:
    """All of it. Cancelling it leaves copies in flight, which end by themselves."""
    scattered, dense = Pages(device, PAGES * 4 * WIDTH, WIDTH), Pages(device, PAGES * WIDTH, WIDTH, layers=1)
    rounds = max(5, samples // 50)
    return {"wake_up": await wake_up(device, samples), "in_flight": await _in_flight(device, scattered),
            "submitting": [await _submitting(device, "scattered", scattered.scattered(), rounds),
                           await _submitting(device, "in merged runs", dense.neighbours(), rounds)]}  # fmt: skip


async def wake_up(device: CudaDevice, samples: int) -> Figures:
    """From the call for an event, on an idle stream, to the coroutine that awaited it. Cancelling it leaves nothing."""
    stream, taken = device.stream("wake-up"), list[float]()
    for _ in range(samples):
        began = time.perf_counter()
        await stream.record().wait()
        taken.append(time.perf_counter() - began)
    device.release(stream)
    late = sorted(taken)
    return {"p50_us": _us(late[len(late) // 2]), "p99_us": _us(late[int(len(late) * 0.99)]), "samples": samples}


async def _in_flight(device: CudaDevice, pages: Pages) -> Figures:
    """CPU time of the loop's thread for each of many transfers that end."""
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
    """CPU time of submitting many pages, in the caller's thread and in the submitter's. The stream is idle."""
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
    return {"way": way, "pages": len(copies[0].src), "on_loop_us": _us(middle(on)), "off_loop_us": _us(middle(off))}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 2)
