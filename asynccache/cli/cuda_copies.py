"""Measurements of a CUDA device, for ``bench cuda`` and ``doctor``: the speed of copies, and of waking a coroutine.

Copies are measured for every width of pieces, both ways, by each path, as a share of one large pinned copy. Laws:

* The large copy is measured in the same run, before and after the others.
* A figure is the best of some rounds, since a disturbance can only make a copy slower.
* Pages are scattered, so nothing is merged that a real cache could not merge.
* The time begins with the call and ends when a thread knows of the last byte: planning, submission and wake-up are in
  it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from asynccache.cli.meter import spread
from asynccache.cli.text import size as spelled
from asynccache.config import PoolSpec
from asynccache.core.settings import ComponentKind, HitPolicy
from asynccache.memory.cuda.device import CudaDevice
from asynccache.memory.cuda.events import CudaEvent
from asynccache.memory.cuda.streams import CudaStream
from asynccache.memory.device import CopyDirection, PageCopy
from asynccache.memory.pools import DevicePool, HostPool

WIDTHS = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
LAYERS = 4
PATHS = {"dma": 0, "kernel": 1 << 62}
"""For each path the ``kernel_below``, in bytes, that forces it."""
NAMES = {"dma": "the copy engines", "kernel": "the kernel"}
MARGIN = 0.9
"""The kernel is used where the copy engines reach less than this share of its rate: it has to be that much faster,
since it takes multiprocessors from whoever computes."""

Figures = dict[str, Any]
Ways = Mapping[str, CudaDevice]


@asynccontextmanager
async def by_path(device: CudaDevice) -> AsyncIterator[Ways]:
    """Open the GPU of ``device`` once for each path, and give these devices by the path's name. They are closed at the
    end of the ``async with``, also if it is cancelled."""
    ways = {
        path: CudaDevice(device.driver, device.name, settings=replace(device.settings, kernel_below=below))
        for path, below in PATHS.items()
    }
    try:
        yield ways
    finally:
        for way in ways.values():
            await way.aclose()


class CopyPools:
    """A pool on device and host, of ``size`` bytes on each. Its pages have ``width`` bytes in each layer."""

    def __init__(self, device: CudaDevice, size: int, width: int, layers: int = LAYERS) -> None:
        count = max(1, size // (width * layers))
        self.spec = PoolSpec(name="bench", component=ComponentKind.FULL, bytes_per_page=width * layers, layers=layers,
                             device_pages=count, host_pages=count, hit_policy=HitPolicy.ALL_PAGES)  # fmt: skip
        self.device, self.host = DevicePool.allocate(self.spec, device), HostPool.allocate(self.spec, device)
        self._random = np.random.default_rng(1)

    def scattered(self) -> list[PageCopy]:
        """Return a copy of all pages, in random order on either side."""
        drawn = (self._random.permutation(self.spec.device_pages).astype(np.int32) for _ in range(2))
        return [PageCopy(self.device, self.host, *map(_kept, drawn))]

    def neighbours(self) -> list[PageCopy]:
        """Return a copy of all pages, in their order on either side."""
        ids = _kept(np.arange(self.spec.device_pages, dtype=np.int32))
        return [PageCopy(self.device, self.host, ids, ids)]

    def submit(
        self, device: CudaDevice, stream: CudaStream, towards: CopyDirection, copies: Sequence[PageCopy]
    ) -> CudaEvent:
        """Begin to copy, and return an event that fires when all is there."""
        if towards is CopyDirection.OUT:
            device.copy(stream, CopyDirection.OUT, copies)
        else:
            device.load(stream, copies, self.spec.layers)
        return stream.record()


def _kept(ids: Any) -> Any:
    """Make ``ids`` read-only, as the ids of a plan's moves are, so that the device need not copy them."""
    ids.flags.writeable = False
    return ids


def ended(event: CudaEvent) -> None:
    """Block until ``event`` has fired.

    Raises:
        Exception: the copy that the event stands for failed.
    """
    event.block()
    if event.failure is not None:
        raise event.failure


def rate(
    device: CudaDevice, pages: CopyPools, towards: CopyDirection, copies: Sequence[PageCopy], rounds: int
) -> float:
    """Return bytes per second: of the best of ``rounds`` rounds, after one that warms up."""
    stream, taken = device.stream("rate"), list[float]()
    for _ in range(rounds + 1):
        began = time.perf_counter()
        ended(pages.submit(device, stream, towards, copies))
        taken.append(time.perf_counter() - began)
    device.release(stream)
    return len(copies[0].src) * pages.spec.bytes_per_page / min(taken[1:])


def large(device: CudaDevice, size: int, rounds: int) -> dict[CopyDirection, float]:
    """Return bytes per second of one copy of ``size`` bytes, each way by itself."""
    pages = CopyPools(device, size, 1 << 20, layers=1)
    return {way: rate(device, pages, way, pages.neighbours(), rounds) for way in (CopyDirection.OUT, CopyDirection.IN)}


def measure(device: CudaDevice, ways: Ways, size: int, rounds: int) -> Figures:
    """Measure each way by itself, with pools of ``size`` bytes, and return the figures. Rates are in GB/s, ``share`` is
    of the large copy's rate."""
    before = large(device, size, rounds)
    rows = list(table(device, ways, size, rounds))
    after = large(device, size, rounds)
    best = {way: max(before[way], after[way]) for way in before}
    for row in rows:
        row["share"] = round(row[f"{row['path']}_gb_s"] * 1e9 / best[CopyDirection(row["direction"])], 3)
    return {"large_gb_s": {way.value: _gb(one) for way, one in best.items()}, "bytes": size, "pieces": rows,
            "kernel_below": {"set": device.settings.kernel_below, "measured": crossover(rows)}}  # fmt: skip


def table(device: CudaDevice, ways: Ways, size: int, rounds: int) -> Iterator[Figures]:
    """Yield a row for each width and direction: each path's rate in GB/s, and the path that the settings choose."""
    for width in WIDTHS:
        pages = CopyPools(device, size, width)
        for towards in (CopyDirection.OUT, CopyDirection.IN):
            copies = pages.scattered()
            rates = {f"{path}_gb_s": _gb(rate(way, pages, towards, copies, rounds)) for path, way in ways.items()}
            path = "kernel" if width < device.settings.kernel_below else "dma"
            yield {"direction": towards.value, "width": width, "path": path, **rates}


def crossover(rows: Sequence[Figures]) -> int:
    """Return the ``kernel_below`` that these rows speak for: the least width, in bytes, from which on the copy engines
    suffice."""
    slow = [row["width"] for row in rows if row["dma_gb_s"] < MARGIN * row["kernel_gb_s"]]
    return min((width for width in WIDTHS if width > max(slow, default=0)), default=2 * WIDTHS[-1])


async def wake_up(device: CudaDevice, samples: int) -> Figures:
    """Return percentiles of the microseconds from the call for an event on an idle stream until the coroutine that
    awaits it goes on. Nothing is copied, and the loop does nothing else. Cancelling leaves nothing in flight."""
    stream, taken = device.stream("wake-up"), list[float]()
    for _ in range(samples):
        began = time.perf_counter()
        await stream.record().wait()
        taken.append(time.perf_counter() - began)
    device.release(stream)
    late = spread(taken, 1e6)
    return {"p50_us": round(late.p50, 2), "p99_us": round(late.p99, 2), "samples": samples}


def told(copies: Figures) -> Iterator[str]:
    """Yield the sentences that tell a person what ``measure`` found."""
    for direction, rate in copies["large_gb_s"].items():
        yield f"{direction}: {rate} GB/s for one large copy"
    for row in copies["pieces"]:
        yield (f"{row['direction']}, pieces of {spelled(row['width'])}: {row['dma_gb_s']} GB/s by the copy engines, "
               f"{row['kernel_gb_s']} by the kernel; {NAMES[row['path']]} will be used")  # fmt: skip
    yield "kernel_below is {set}: shorter pieces go by the kernel; these figures speak for {measured}.".format(
        **copies["kernel_below"])  # fmt: skip
    yield "The kernel has to win by a tenth, since it takes multiprocessors from whoever computes."


def _gb(rate: float) -> float:
    return round(rate / 1e9, 2)
