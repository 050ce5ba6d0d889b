"""Bandwidth of page copies: every width of pieces, both ways, by each path, as a share of one large pinned copy.

Law: the large copy is measured in the same run, before and after; a figure is the best of some rounds, since whatever
disturbs only makes it slower; pages are scattered, so nothing is merged that a real cache could not merge. What is
timed begins with the call and ends when a thread knows of the last byte: planning, submission and wake-up are in it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from asynccache.cli.text import size as spelled
from asynccache.config import PoolSpec
from asynccache.core.settings import ComponentKind, HitPolicy
from asynccache.memory.cuda.device import CudaDevice
from asynccache.memory.cuda.driver import Towards
from asynccache.memory.cuda.events import CudaEvent
from asynccache.memory.cuda.streams import CudaStream
from asynccache.memory.device import PageCopy
from asynccache.memory.pools import DevicePool, HostPool

WIDTHS = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
LAYERS = 4
PATHS = {"dma": 0, "kernel": 1 << 62}
"""Each path by the ``kernel_below`` that forces it."""
NAMES = {"dma": "the copy engines", "kernel": "the kernel"}
MARGIN = 0.9
"""A kernel takes multiprocessors from whoever computes: it is worth that where copy engines reach less than this share
of what it does."""

Figures = dict[str, Any]
Ways = Mapping[str, CudaDevice]


@asynccontextmanager
async def by_path(device: CudaDevice) -> AsyncIterator[Ways]:
    """The same GPU, once for each path by name. Cancelling it closes them."""
    ways = {
        path: CudaDevice(device.driver, device.name, settings=replace(device.settings, kernel_below=below))
        for path, below in PATHS.items()
    }
    try:
        yield ways
    finally:
        for way in ways.values():
            await way.aclose()


class Pages:
    """A pool of ``size`` bytes on either tier, whose pages have ``width`` bytes in each layer."""

    def __init__(self, device: CudaDevice, size: int, width: int, layers: int = LAYERS) -> None:
        count = max(1, size // (width * layers))
        self.spec = PoolSpec(name="bench", component=ComponentKind.FULL, bytes_per_page=width * layers, layers=layers,
                             device_pages=count, host_pages=count, hit_policy=HitPolicy.ALL_PAGES)  # fmt: skip
        self.device, self.host = DevicePool.allocate(self.spec, device), HostPool.allocate(self.spec, device)
        self._random = np.random.default_rng(1)

    def scattered(self, count: int | None = None) -> list[PageCopy]:
        """So many pages, or all, of which no two are neighbours but by chance."""
        drawn = (self._random.permutation(self.spec.device_pages)[:count].astype(np.int32) for _ in range(2))
        return [PageCopy(self.device, self.host, *map(_kept, drawn))]

    def neighbours(self) -> list[PageCopy]:
        """All pages, in their order on either side."""
        ids = _kept(np.arange(self.spec.device_pages, dtype=np.int32))
        return [PageCopy(self.device, self.host, ids, ids)]

    def submit(self, device: CudaDevice, stream: CudaStream, towards: Towards, copies: Sequence[PageCopy]) -> CudaEvent:
        """Begin to copy; the event is done when all is there."""
        if towards is Towards.OUT:
            device.device_to_host(stream, copies)
        else:
            device.host_to_device(stream, copies, self.spec.layers)
        return stream.record()


def _kept(ids: Any) -> Any:
    """Read-only, as the ids of a plan's moves are: the device need not copy them."""
    ids.flags.writeable = False
    return ids


def ended(event: CudaEvent) -> None:
    """Wait for it.

    Raises:
        Exception: what it stands for failed.
    """
    event.block()
    if event.failure is not None:
        raise event.failure


def rate(device: CudaDevice, pages: Pages, towards: Towards, copies: Sequence[PageCopy], rounds: int) -> float:
    """Bytes a second, the best of so many rounds after one that warms up."""
    stream, taken = device.stream("rate"), list[float]()
    for _ in range(rounds + 1):
        began = time.perf_counter()
        ended(pages.submit(device, stream, towards, copies))
        taken.append(time.perf_counter() - began)
    device.release(stream)
    return len(copies[0].src) * pages.spec.bytes_per_page / min(taken[1:])


def large(device: CudaDevice, size: int, rounds: int) -> dict[Towards, float]:
    """Bytes a second of one large copy each way."""
    pages = Pages(device, size, 1 << 20, layers=1)
    return {way: rate(device, pages, way, pages.neighbours(), rounds) for way in (Towards.OUT, Towards.IN)}


def measure(device: CudaDevice, ways: Ways, size: int, rounds: int) -> Figures:
    """Each way by itself, with pools of ``size`` bytes."""
    before = large(device, size, rounds)
    rows = list(table(device, ways, size, rounds))
    after = large(device, size, rounds)
    best = {way: max(before[way], after[way]) for way in before}
    for row in rows:
        row["share"] = round(row[f"{row['path']}_gb_s"] * 1e9 / best[Towards(row["direction"])], 3)
    return {"large_gb_s": {way.value: _gb(one) for way, one in best.items()}, "bytes": size, "pieces": rows,
            "kernel_below": {"set": device.settings.kernel_below, "measured": crossover(rows)}}  # fmt: skip


def table(device: CudaDevice, ways: Ways, size: int, rounds: int) -> Iterator[Figures]:
    """A row for each way and width: what each path makes of it, and by which one the settings have it go."""
    for width in WIDTHS:
        pages = Pages(device, size, width)
        for towards in (Towards.OUT, Towards.IN):
            copies = pages.scattered()
            rates = {f"{path}_gb_s": _gb(rate(way, pages, towards, copies, rounds)) for path, way in ways.items()}
            path = "kernel" if width < device.settings.kernel_below else "dma"
            yield {"direction": towards.value, "width": width, "path": path, **rates}


def crossover(rows: Sequence[Figures]) -> int:
    """The ``kernel_below`` that these rows speak for: the least width from which the copy engines suffice."""
    slow = [row["width"] for row in rows if row["dma_gb_s"] < MARGIN * row["kernel_gb_s"]]
    return min((width for width in WIDTHS if width > max(slow, default=0)), default=2 * WIDTHS[-1])


def both(device: CudaDevice, size: int, width: int, rounds: int) -> Figures:
    """A stream each way, at the same time, in pools of their own, of ``size`` bytes together."""
    ways = [(way, Pages(device, size // 2, width), device.stream(way.value)) for way in (Towards.OUT, Towards.IN)]
    taken = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        for event in [pages.submit(device, stream, way, pages.scattered()) for way, pages, stream in ways]:
            ended(event)
        taken.append(time.perf_counter() - began)
    for _, _, stream in ways:
        device.release(stream)
    return {"width": width, "gb_s": _gb(size / min(taken[1:]))}


def told(copies: Figures) -> Iterator[str]:
    """What ``measure`` found, for a person."""
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
