"""Copies by each way that a GPU has, for ``python -m benchmarks.cuda``: the rates of one large copy, of scattered
pieces, and of pages as 2-D copies.

Here the driver is called directly, as a stream's submitter calls it, without pools and threads of the cache. Laws:

* A figure is the best of some rounds, since a disturbance can only make a copy slower.
* Pieces are scattered, so nothing is merged that a real cache could not merge.
* Time runs from the first call until this thread knows of the last byte. There are as many calls as a load has layers,
  unless that is more than ``MOST`` bytes.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from asynccache.cli.output import Tell
from asynccache.cli.output import size as spelled
from asynccache.memory.cuda import choosing_paths, kernels
from asynccache.memory.cuda.cupy_driver import CupyDriver
from asynccache.memory.cuda.libcuda import DriverError, Spans
from asynccache.memory.cuda.pinned import pinned_tensor
from asynccache.memory.cuda.settings import CudaSettings
from asynccache.memory.device import CopyDirection

Figures = dict[str, Any]

IN, OUT, WITHIN = CopyDirection.IN, CopyDirection.OUT, CopyDirection.WITHIN
SIZE, MOST = 1 << 30, 128 << 20
"""Bytes on each side; and those of one measured run, at most (but one call at least)."""
WIDTHS = tuple(kib << 10 for kib in (1, 4, 8, 16, 24, 32, 64, 128, 512, 2048))
COUNTS = (8, 16, 32, 64, 512)
"""Pieces in one call: what a layer of a short and of a long prompt has."""
BLOCKS = (2, 4, 8)
WITHIN_BLOCKS = (8, 64)
LAYERS, ROUNDS, SECONDS = 32, 5, 0.05
"""``SECONDS``: a figure takes no further round once its rounds took so long."""
ROWS, PAGES = (2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10), 64
OTHERS = ("no flag", "any")
"""Ways that the cache does not go. A driver may refuse them."""
MARGIN = 0.9
"""The kernel is worth its multiprocessors, and more blocks are worth having, where the other way reaches less than this
share of the rate."""


class RawCalls(NamedTuple):
    """Calls that the cache does not make, and that may be better. ``batch(stream, spans, order, flags)`` is
    ``cuMemcpyBatchAsync``; ``copy_2d`` has the arguments of ``cudaMemcpy2DAsync``."""

    batch: Callable[[int, Spans, int, int], None] | None
    copy_2d: Callable[[int, int, int, int, int, int, int, int], None]


def raw_calls(driver: Any) -> RawCalls:
    """Return these calls of the real driver; ``batch`` is None where the driver has none."""
    from asynccache.memory.cuda.libcuda import LibCuda, _Attributes

    library = LibCuda()

    def batch(stream: int, spans: Spans, order: int, flags: int) -> None:
        attributes, first, failed = _Attributes(order=order, flags=flags), ctypes.c_size_t(0), ctypes.c_size_t(0)
        answer = library._batch(*(array.ctypes.data for array in spans), len(spans.size), ctypes.addressof(attributes),
                                ctypes.addressof(first), 1, ctypes.addressof(failed), stream)  # fmt: skip
        if answer:
            raise DriverError(f"cuMemcpyBatchAsync, order {order}, flags {flags}: error {answer}", answer)

    return RawCalls(batch if library.batches else None, driver.runtime.memcpy2DAsync)


class Memory:
    """A stream of its own, and ``SIZE`` bytes: pinned on the host, and twice on the device. ``pointer``: the stream's
    ``cudaStream_t``."""

    def __init__(self, driver: CupyDriver) -> None:
        driver.use_device()
        self.driver, self.stream = driver, driver.stream_create()
        self.pointer: int = getattr(self.stream, "ptr", self.stream)
        self._host = pinned_tensor(driver, (SIZE,))
        self._device, self._other = driver.device_tensor((SIZE,)), driver.device_tensor((SIZE,))
        self.random = np.random.default_rng(1)

    def bases(self, towards: CopyDirection) -> tuple[int, int]:
        """Return the addresses of destination and source."""
        host, device, other = (tensor.data_ptr() for tensor in (self._host, self._device, self._other))
        return {IN: (device, host), OUT: (host, device), WITHIN: (other, device)}[towards]

    def by_engines(self, towards: CopyDirection, spans: Spans) -> int:
        """Copy these pieces as the cache does: many in one call, if the driver can. Return the entries of the queue
        that the cache counts for it."""
        group = choosing_paths.GROUP
        parts = [spans.part(i, i + group) for i in range(0, len(spans.size), group)]
        return sum(self.driver.copy(self.stream, towards, part) for part in parts)

    def close(self) -> None:
        """Wait for everything that is queued, and give the stream back."""
        self.driver.stream_synchronize(self.stream)
        self.driver.stream_destroy(self.stream)


class Pieces:
    """``count`` scattered pieces of ``width`` bytes (fewer, if ``SIZE`` has no more), and the ways to copy them."""

    def __init__(self, memory: Memory, towards: CopyDirection, width: int, count: int) -> None:
        self._memory, self._towards, self._width = memory, towards, width
        slots, bases = SIZE // width, memory.bases(towards)
        self._ids = [memory.random.permutation(slots)[:count].astype(np.uint64) for _ in bases]
        self.count = len(self._ids[0])
        self.bytes = width * self.count
        self._bases = [np.array([base], np.uint64) for base in bases]
        dst, src = (ids * np.uint64(width) + base for ids, base in zip(self._ids, self._bases, strict=True))
        self._spans = Spans(dst, src, np.full(self.count, width, np.uint64))

    def by_engines(self) -> int:
        return self._memory.by_engines(self._towards, self._spans)

    def one_by_one(self) -> None:
        for i in range(self.count):
            self._memory.driver.copy(self._memory.stream, self._towards, self._spans.part(i, i + 1))

    def by_kernel(self, blocks: int) -> int:
        """Copy them by the kernel on so many blocks. Return the entries that the cache counts for it."""
        (to, of), (dst, src), width, entries = self._ids, self._bases, self._width, 0
        for i in range(0, len(to), kernels.PAGES):
            rows = slice(i, i + kernels.PAGES)
            table = kernels.table(dst, src, to[rows], of[rows], width=width, dst_pitch=width, src_pitch=width)
            entries += self._memory.driver.launch(self._memory.stream, table, blocks)
        return entries

    def by_batch(self, batch: Callable[[int, Spans, int, int], None], order: int, flags: int) -> None:
        batch(self._memory.pointer, self._spans, order, flags)

    def ways(self, raw: RawCalls | None) -> dict[str, Callable[[], object]]:
        """Return the ways to copy these pieces, by name. ``engines`` and ``kernel N`` (on N blocks) are the cache's
        own; ``no flag`` (no overlap with computing) and ``any`` (sources are read in any
        order) are batches with other attributes."""
        ways: dict[str, Callable[[], object]] = {"engines": self.by_engines}
        blocks = WITHIN_BLOCKS if self._towards is WITHIN else BLOCKS
        ways |= {f"kernel {n}": partial(self.by_kernel, n) for n in blocks}
        if self.count <= 64:
            ways["single"] = self.one_by_one
        if raw is not None and raw.batch is not None:
            ways["no flag"] = partial(self.by_batch, raw.batch, 1, 0)
            if self._towards is IN:  # from pinned memory that nobody writes: a backup may not be read like that
                ways["any"] = partial(self.by_batch, raw.batch, 3, 0)
        return ways


def timed(memory: Memory, call: Callable[[], object], size: int) -> tuple[float, float]:
    """Return the rate of ``call``, which copies ``size`` bytes, in GB/s; and the microseconds that the call itself
    takes."""
    calls = max(1, min(LAYERS, MOST // size))
    best, least, spent = math.inf, math.inf, 0.0
    for number in range(ROUNDS + 1):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        called = time.perf_counter() - began
        memory.driver.stream_synchronize(memory.stream)
        took = time.perf_counter() - began
        spent += took
        if number:  # the first one warms up
            best, least = min(best, took), min(least, called)
            if spent > SECONDS:
                break
    return round(size * calls / best / 1e9, 3), round(least / calls * 1e6, 1)


def measure_pieces(memory: Memory, raw: RawCalls | None, tell: Tell) -> list[Figures]:
    """Return a row for each direction, width and number of pieces: ``gb_s`` and ``call_us`` by way. A way of ``OTHERS``
    that the driver refuses has no figure."""
    rows = []
    for towards in (OUT, IN, WITHIN):
        for width in WIDTHS:
            tell(f"pieces of {spelled(width)}, {towards.value}")
            for count in COUNTS:
                if width * count > SIZE // 2:
                    continue
                pieces = Pieces(memory, towards, width, count)
                found = dict[str, tuple[float, float]]()
                for way, call in pieces.ways(raw).items():
                    try:
                        found[way] = timed(memory, call, pieces.bytes)
                    except DriverError as error:
                        if error.sticky or way not in OTHERS:
                            raise
                rows.append({"direction": towards.value, "width": width, "pieces": count,
                             "gb_s": {way: rate for way, (rate, _) in found.items()},
                             "call_us": {way: us for way, (_, us) in found.items()}})  # fmt: skip
    return rows


def measure_large(memory: Memory) -> Figures:
    """Return the rate of one large pinned copy in GB/s, by direction: what all other rates are compared with."""
    found = {}
    for towards in (OUT, IN):
        (dst, src), size = memory.bases(towards), min(SIZE, MOST)
        one = Spans(*(np.array([number], np.uint64) for number in (dst, src, size)))
        found[towards.value] = timed(memory, partial(memory.driver.copy, memory.stream, towards, one), size)[0]
    return found


class Pages:
    """Scattered pages with rows of ``width`` bytes in 32 layers, which lie behind each other on the host; on the device
    a layer has all its rows in one run."""

    def __init__(self, memory: Memory, raw: RawCalls, towards: CopyDirection, width: int) -> None:
        self._memory, self._raw, self._towards, self._width = memory, raw, towards, width
        slots = SIZE // (LAYERS * width)
        self.count = min(PAGES, slots)
        self.bytes = self.count * LAYERS * width
        self._pitch = slots * width
        host, device = memory.bases(towards)[:: 1 if towards is OUT else -1]
        there, here = (memory.random.permutation(slots)[: self.count].astype(np.uint64) for _ in range(2))
        self._there = there * np.uint64(LAYERS * width) + np.uint64(host)
        self._here = here * np.uint64(width) + np.uint64(device)

    def in_2d(self) -> None:
        """Make a 2-D copy for each page."""
        width, pitch, stream = self._width, self._pitch, self._memory.pointer
        for there, here in zip(self._there.tolist(), self._here.tolist(), strict=True):
            if self._towards is OUT:
                self._raw.copy_2d(there, width, here, pitch, width, LAYERS, 2, stream)
            else:
                self._raw.copy_2d(here, pitch, there, width, width, LAYERS, 1, stream)

    def in_rows(self) -> None:
        """Make the copies that the cache makes: batches of rows, layer by layer."""
        layer = np.arange(LAYERS, dtype=np.uint64)
        there = np.add.outer(layer * np.uint64(self._width), self._there).ravel()
        here = np.add.outer(layer * np.uint64(self._pitch), self._here).ravel()
        ends = (there, here) if self._towards is OUT else (here, there)
        self._memory.by_engines(self._towards, Spans(*ends, np.full(len(there), self._width, np.uint64)))


def measure_pages(memory: Memory, raw: RawCalls) -> list[Figures]:
    """Return for rows of different lengths the rates in GB/s of pages with 32 layers, as one 2-D copy each and as
    batches of all their rows; and the microseconds that the calls for one page take."""
    rows = []
    for width in ROWS:
        for towards in (OUT, IN):
            pages = Pages(memory, raw, towards, width)
            found: Figures = {"direction": towards.value, "row": width, "pages": pages.count}
            for name, call in (("2d", pages.in_2d), ("rows", pages.in_rows)):
                rate, us = timed(memory, call, pages.bytes)
                found |= {f"{name}_gb_s": rate, f"{name}_call_us": round(us / pages.count, 2)}
            rows.append(found)
    return rows


# what follows from the figures


def suggested(rows: Sequence[Figures], towards: CopyDirection, settings: CudaSettings) -> Figures:
    """Return what the figures of one direction speak for. ``kernel_below``: the least width from which on the copy
    engines suffice, with many pieces. ``few``: the least number of pieces from which on the kernel is faster, for all
    widths below that together; None if it never is. ``blocks``: the least number that is nearly as fast as the best,
    with short pieces."""
    mine = [row for row in rows if row["direction"] == towards.value]
    many = [row for row in mine if row["pieces"] == max(row["pieces"] for row in mine)]
    widths = sorted({row["width"] for row in mine})
    way = f"kernel {min(BLOCKS, key=lambda blocks: abs(blocks - settings.blocks))}"
    slow = [row["width"] for row in many if row["gb_s"]["engines"] < MARGIN * row["gb_s"][way]]
    below = 0 if not slow else min((width for width in widths if width > max(slow)), default=2 * widths[-1])
    counts = sorted({row["pieces"] for row in mine})

    def seconds(some: str, count: int) -> float:
        short = [row for row in mine if row["width"] < below and row["pieces"] == count]
        return sum(row["width"] / row["gb_s"][some] for row in short)

    pays = [MARGIN * seconds("engines", count) > seconds(way, count) for count in counts]
    few = next((count for i, count in enumerate(counts) if all(pays[i:])), None)
    rates = {blocks: sum(row["gb_s"][f"kernel {blocks}"] for row in many if row["width"] <= 32 << 10)
             for blocks in BLOCKS}  # fmt: skip
    blocks = min(blocks for blocks, rate in rates.items() if rate >= MARGIN * max(rates.values()))
    return {"direction": towards.value,
            "kernel_below": {"set": choosing_paths.kernel_below(settings, towards), "measured": below},
            "few": {"set": choosing_paths.FEW, "measured": few},
            "blocks": {"set": settings.blocks, "measured": blocks}}  # fmt: skip


def sentences(rows: Sequence[Figures]) -> Iterator[str]:
    """Yield what the figures say of ways that the cache does not go."""
    for direction, other, what in ((IN, "any", "sources read in any order"), (IN, "no flag", "without the "
                                   "overlap flag"), (OUT, "no flag", "without the overlap flag")):  # fmt: skip
        both = [(row["width"], row["gb_s"][other] / row["gb_s"]["engines"]) for row in rows
                if row["direction"] == direction.value and other in row["gb_s"]]  # fmt: skip
        if both:
            width, ratio = max(both, key=lambda pair: pair[1])
            yield (f"{direction.value}, batches {what}: at most {ratio:.2f} times as fast as the cache's (pieces of "
                   f"{spelled(width)})")  # fmt: skip
