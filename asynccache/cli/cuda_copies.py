"""Measurements of a CUDA device, for ``bench cuda`` and ``doctor``: the speed of copies, and of waking a coroutine.

Copies are measured for every width of pieces, in both directions, by both paths (the copy engines and the kernel),
beside one large pinned copy. Laws:

* A figure is the best of some rounds, since a disturbance can only make a copy slower.
* Pages are scattered, so nothing is merged that a real cache could not merge.
* The time begins with the call and ends when a thread knows of the last byte: planning, submission and wake-up are in
  it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from msgspec.structs import replace

from asynccache.cli.meter import spread
from asynccache.cli.text import size as spelled
from asynccache.config import PoolSpec
from asynccache.core.settings import ComponentKind, HitPolicy
from asynccache.memory.cuda.device import CudaDevice
from asynccache.memory.device import CopyDirection, PageCopy
from asynccache.memory.pools import DevicePool, HostPool

WIDTHS = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
LAYERS = 4
PATHS = {"dma": 0, "kernel": 1 << 62}
"""For each path the ``kernel_below``, in bytes, that forces it."""
NAMES = {"dma": "the copy engines", "kernel": "the kernel"}
DIRECTIONS = (CopyDirection.OUT, CopyDirection.IN)
MARGIN = 0.9
"""The kernel is used where the copy engines reach less than this share of its rate. The kernel has to be so much faster
because it takes multiprocessors from the engine."""

Figures = dict[str, Any]
DevicesByPath = Mapping[str, CudaDevice]


@asynccontextmanager
async def by_path(device: CudaDevice) -> AsyncIterator[DevicesByPath]:
    """Open the GPU of ``device`` once for each path, and yield these devices by the path's name. They are closed at the
    end of the ``async with``, also if it is cancelled."""
    devices = {
        path: CudaDevice(device.driver, device.name, settings=replace(device.settings, kernel_below=below))
        for path, below in PATHS.items()
    }
    try:
        yield devices
    finally:
        for forced in devices.values():
            await forced.aclose()


class CopyPools:
    """A pool on device and host, of ``size`` bytes on each. Its pages have ``width`` bytes in each layer. With
    ``scattered`` a copy has the pages of either side in random order."""

    def __init__(
        self, device: CudaDevice, size: int, width: int, layers: int = LAYERS, *, scattered: bool = True
    ) -> None:
        count = max(1, size // (width * layers))
        self.spec = PoolSpec(name="bench", component=ComponentKind.FULL, bytes_per_page=width * layers, layers=layers,
                             device_pages=count, host_pages=count, hit_policy=HitPolicy.ALL_PAGES)  # fmt: skip
        self.device, self.host = DevicePool.allocate(self.spec, device), HostPool.allocate(self.spec, device)
        ids = np.arange(count, dtype=np.int32)
        random = np.random.default_rng(1)
        source, target = (random.permutation(ids) if scattered else ids.copy() for _ in range(2))
        source.flags.writeable = target.flags.writeable = False  # as those of a plan's moves, which need no copy
        self._copies = [PageCopy(self.device, self.host, source, target)]

    def rate(self, device: CudaDevice, towards: CopyDirection, rounds: int) -> float:
        """Return the rate at which all pages are copied, in GB/s: that of the best of ``rounds`` rounds, after one that
        warms up. Blocking.

        Raises:
            Exception: a copy failed.
        """
        stream, taken = device.stream("rate"), list[float]()
        for _ in range(rounds + 1):
            began = time.perf_counter()
            if towards is CopyDirection.OUT:
                device.copy(stream, CopyDirection.OUT, self._copies)
            else:
                device.load(stream, self._copies, self.spec.layers)
            event = stream.record()
            event.block()
            if event.failure is not None:
                raise event.failure
            taken.append(time.perf_counter() - began)
        device.release(stream)
        return round(self.spec.device_pages * self.spec.bytes_per_page / min(taken[1:]) / 1e9, 2)


def measure(device: CudaDevice, devices: DevicesByPath, size: int, rounds: int) -> Figures:
    """Measure one large copy and copies of pieces, each direction by itself, with pools of ``size`` bytes. Returns
    rates in GB/s: ``large_gb_s`` by direction, and in ``pieces`` a row for each width and direction, with the path that
    the settings choose."""
    whole = CopyPools(device, size, 1 << 20, layers=1, scattered=False)
    large = {towards.value: whole.rate(device, towards, rounds) for towards in DIRECTIONS}
    rows = []
    for width in WIDTHS:
        pages = CopyPools(device, size, width)
        for towards in DIRECTIONS:
            rates = {f"{path}_gb_s": pages.rate(forced, towards, rounds) for path, forced in devices.items()}
            path = "kernel" if width < device.settings.kernel_below else "dma"
            rows.append({"direction": towards.value, "width": width, "path": path, **rates})
    return {"large_gb_s": large, "bytes": size, "pieces": rows,
            "kernel_below": {"set": device.settings.kernel_below, "measured": crossover(rows)}}  # fmt: skip


def crossover(rows: Sequence[Figures]) -> int:
    """Return the ``kernel_below`` that fits these rows best: the least width, in bytes, from which on the copy engines
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
    yield threshold(copies)
    yield "The kernel is used only where it is a tenth faster, since it takes multiprocessors from the engine."


def threshold(copies: Figures) -> str:
    """Return the sentence about the width of pieces from which on the copy engines are used."""
    return "kernel_below is {set}: shorter pieces go by the kernel; these figures speak for {measured}.".format(
        **copies["kernel_below"])  # fmt: skip
