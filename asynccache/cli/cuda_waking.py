"""What waiting costs: from an event on the device to the coroutine that awaits it, and from a call to its submission.

Law: the loop is idle but for what is measured. When an event happened is told by a thread that spins on an event of its
own, recorded just before; so the figure holds the wake-up of the waiter, its hop, and the loop's turn.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from asynccache.config import PoolSpec
from asynccache.core.settings import ComponentKind, HitPolicy
from asynccache.memory.cuda.device import CudaDevice
from asynccache.memory.cuda.streams import CudaStream
from asynccache.memory.device import PageCopy
from asynccache.memory.pools import DevicePool, HostPool

GOALS = {"p50_us": 80.0, "p99_us": 300.0, "loop_us_each": 5.0, "off_loop_us": 1000.0, "on_loop_us": 50.0}
IN_FLIGHT = 1000
PAGES = 8192

Figures = dict[str, Any]


class Pages:
    """A pool on either tier, and batches of scattered pages of it."""

    def __init__(self, device: CudaDevice, pages: int, size: int, layers: int) -> None:
        spec = PoolSpec(
            name="bench", component=ComponentKind.FULL, bytes_per_page=size, layers=layers, device_pages=pages,
            host_pages=pages, hit_policy=HitPolicy.ALL_PAGES, indices_from=None,
        )  # fmt: skip
        self.device = DevicePool.allocate(spec, device)
        self.host = HostPool.allocate(spec, device)
        self.spec = spec
        self._random = np.random.default_rng(1)

    def batch(self, count: int) -> list[PageCopy]:
        return [PageCopy(self.device, self.host, self._drawn(count), self._drawn(count))]

    def _drawn(self, count: int) -> npt.NDArray[np.int32]:
        """Read-only, as a plan's moves are."""
        ids = self._random.permutation(self.spec.device_pages)[:count].astype(np.int32)
        return np.frombuffer(ids.tobytes(), np.int32)


async def measure(device: CudaDevice, samples: int) -> Figures:
    """All of it. Cancelling it leaves copies in flight, which end by themselves."""
    pages = Pages(device, PAGES, 16 << 10, 4)
    stream = device.stream("bench")
    return {
        "wake_up": await wake_up(device, stream, pages, samples),
        "in_flight": await _in_flight(device, stream, pages),
        "submitting": await _submitting(device, stream, pages, max(5, samples // 50)),
        "goals": GOALS,
    }


async def wake_up(device: CudaDevice, stream: CudaStream, pages: Pages, samples: int) -> Figures:
    """From the event to the coroutine, one at a time. Cancelling it leaves a copy in flight, which ends by itself."""
    late = [await _woken(device, stream, pages) for _ in range(samples)]
    late.sort()
    return {"p50_us": _us(late[len(late) // 2]), "p99_us": _us(late[int(len(late) * 0.99)]), "samples": samples}


async def _woken(device: CudaDevice, stream: CudaStream, pages: Pages) -> float:
    """Seconds from the event to the coroutine."""
    clock = _Clock(device, stream)
    device.device_to_host(stream, pages.batch(16))
    stream.call(clock.start)
    await stream.record().wait()
    resumed = time.perf_counter()
    return max(0.0, resumed - await asyncio.to_thread(clock.read))


class _Clock:
    """Tells when the stream got here. Its thread spins in the driver, without the GIL."""

    def __init__(self, device: CudaDevice, stream: CudaStream) -> None:
        self._driver = device.driver
        self._stream = stream
        self._event = device.driver.event_create(timed=True)
        self._recorded, self._read = threading.Event(), threading.Event()
        self._at = 0.0
        threading.Thread(target=self._spin, daemon=True).start()

    def start(self) -> None:
        """In the submitter."""
        self._driver.event_record(self._event, self._stream.handle)
        self._recorded.set()

    def _spin(self) -> None:
        self._driver.use_device()
        self._recorded.wait()
        self._driver.event_synchronize(self._event)
        self._at = time.perf_counter()
        self._read.set()

    def read(self) -> float:
        self._read.wait()
        self._driver.event_destroy(self._event)
        return self._at


async def _in_flight(device: CudaDevice, stream: CudaStream, pages: Pages) -> Figures:
    """CPU time of the loop's thread for each of many transfers that end."""
    gate = device.gate()
    stream.wait_event(gate)
    waiters = []
    for _ in range(IN_FLIGHT):
        device.device_to_host(stream, pages.batch(4))
        waiters.append(asyncio.create_task(stream.record().wait()))
    await asyncio.sleep(0)
    began = time.thread_time()
    gate.open()
    await asyncio.gather(*waiters)
    return {"transfers": IN_FLIGHT, "loop_us_each": _us((time.thread_time() - began) / IN_FLIGHT)}


async def _submitting(device: CudaDevice, stream: CudaStream, pages: Pages, rounds: int) -> Figures:
    """CPU time of submitting many pages, in the caller's thread and in the submitter's. The stream is idle."""
    on, off = [], []
    for _ in range(rounds):
        copies, spent = pages.batch(PAGES), _Spent()
        stream.call(spent.note)
        began = time.thread_time()
        device.device_to_host(stream, copies)
        event = stream.record()
        on.append(time.thread_time() - began)
        stream.call(spent.note)
        await event.wait()
        await asyncio.to_thread(spent.noted.wait)
        off.append(spent.seconds())
    return {"pages": PAGES, "on_loop_us": _us(_middle(on)), "off_loop_us": _us(_middle(off))}


class _Spent:
    """CPU time of the submitter between two notes."""

    def __init__(self) -> None:
        self._notes: list[float] = []
        self.noted = threading.Event()

    def note(self) -> None:
        self._notes.append(time.thread_time())
        if len(self._notes) == 2:
            self.noted.set()

    def seconds(self) -> float:
        return self._notes[1] - self._notes[0]


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 2)
