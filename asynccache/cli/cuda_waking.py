"""What waiting costs: from an event on the device to the coroutine that awaits it, and from a call to its submission.

Law: the loop is idle but for what is measured. When an event happened is told by the device's clock, which is tied to
the host's before each sample; so no thread of ours takes part, and the figure holds the wake-up of the waiter, its hop,
and the loop's turn. It is an upper bound: what may be too much is told beside it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asynccache.cli.cuda_clock import Clock, middle
from asynccache.config import PoolSpec
from asynccache.core.settings import ComponentKind, HitPolicy
from asynccache.memory.cuda.device import CudaDevice
from asynccache.memory.cuda.paths import Chooser, Path
from asynccache.memory.cuda.streams import CudaStream
from asynccache.memory.device import PageCopy
from asynccache.memory.pools import DevicePool, HostPool

IN_FLIGHT = 1000
MERGED = Path.PITCHED  # the pool has several layers: a run of pages is rows at a distance, a call for each layer
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

    def run(self, count: int) -> list[PageCopy]:
        """Neighbours on either side."""
        ids = np.frombuffer(np.arange(count, dtype=np.int32).tobytes(), np.int32)
        return [PageCopy(self.device, self.host, ids, ids)]

    def _drawn(self, count: int) -> npt.NDArray[np.int32]:
        """Read-only, as a plan's moves are."""
        ids = self._random.permutation(self.spec.device_pages)[:count].astype(np.int32)
        return np.frombuffer(ids.tobytes(), np.int32)


async def measure(device: CudaDevice, samples: int) -> Figures:
    """All of it. Cancelling it leaves copies in flight, which end by themselves."""
    pages = Pages(device, PAGES, 16 << 10, 4)
    stream = device.stream("bench")
    rounds = max(5, samples // 50)
    found: Figures = {"wake_up": await wake_up(device, stream, pages, samples),
                      "in_flight": await _in_flight(device, stream, pages),
                      "submitting": [await _submitting(device, stream, "chosen", pages.batch, rounds)]}  # fmt: skip
    for name, path, batch in (("by the kernel", Path.KERNEL, pages.batch), ("in merged runs", MERGED, pages.run)):
        other = _by(device, path)
        found["submitting"].append(await _submitting(other, other.stream("bench"), name, batch, rounds))
        await other.aclose()
    return found


def _by(device: CudaDevice, path: Path) -> CudaDevice:
    """The same GPU, with a path chosen by hand."""
    settings = replace(device.settings, out=path, inward=path)
    return CudaDevice(device.driver, device.name, settings=settings, chooser=Chooser(settings, device.chooser.costs))


async def wake_up(device: CudaDevice, stream: CudaStream, pages: Pages, samples: int) -> Figures:
    """From the event to the coroutine, one at a time. Cancelling it leaves a copy in flight, which ends by itself."""
    taken = [await _woken(device, stream, pages) for _ in range(samples)]
    late = sorted(one.late for one in taken)
    return {"p50_us": _us(late[len(late) // 2]), "p99_us": _us(late[int(len(late) * 0.99)]), "samples": samples,
            "uncertain_us": _us(middle([one.window for one in taken]))}  # fmt: skip


class _Sample(NamedTuple):
    """``late``: seconds from the event to the coroutine, at most; it may be less by up to ``window``."""

    late: float
    window: float


async def _woken(device: CudaDevice, stream: CudaStream, pages: Pages) -> _Sample:
    """The device's clock is tied to the host's just before: at a point of the idle stream between two looks at it."""
    clock, looks = Clock(device.driver, stream), _Looks()
    clock.begin_here(looks.note)
    stream.call(looks.note)
    device.device_to_host(stream, pages.batch(64))
    clock.end()
    await stream.record().wait()
    resumed = time.perf_counter()
    before, after = looks.seen
    late = resumed - (before + clock.seconds())
    clock.close()
    return _Sample(late, after - before)


class _Looks:
    """What the host's clock showed in the submitter."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def note(self) -> None:
        self.seen.append(time.perf_counter())


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


async def _submitting(
    device: CudaDevice, stream: CudaStream, way: str, batch: Callable[[int], list[PageCopy]], rounds: int
) -> Figures:
    """CPU time of submitting many pages, in the caller's thread and in the submitter's. The stream is idle."""
    on, off = [], []
    for _ in range(rounds):
        copies, spent = batch(PAGES), _Spent()
        stream.call(spent.note)
        began = time.thread_time()
        device.device_to_host(stream, copies)
        event = stream.record()
        on.append(time.thread_time() - began)
        stream.call(spent.note)
        await event.wait()
        await asyncio.to_thread(spent.noted.wait)
        off.append(spent.seconds())
    return {"way": way, "pages": PAGES, "on_loop_us": _us(middle(on)), "off_loop_us": _us(middle(off))}


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


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 2)
