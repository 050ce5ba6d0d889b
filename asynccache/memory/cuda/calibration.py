"""Measures what a batch, a descriptor, a row and a byte cost on each path, on this device, in some tenths of a second.

Each path copies a few layouts between a pinned and a device buffer, each with much of something else: one fragment,
large ones, and small ones with few and with many descriptors. What a batch of nothing takes (a thread that wakes up,
most of all) is on every path and in no cost. The best of some rounds counts, since whatever disturbs only makes it
slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import combinations
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from asynccache.memory.cuda.driver import Driver, Towards
from asynccache.memory.cuda.events import Context, CudaEvent
from asynccache.memory.cuda.paths import PUBLISHED, Chooser, Cost, Costs, Path, Settings
from asynccache.memory.cuda.pinned import Pinning, pinned_tensor
from asynccache.memory.cuda.rows import TALL, Rows, Runs
from asynccache.memory.cuda.scratch import Scratch
from asynccache.memory.cuda.streams import CudaStream
from asynccache.memory.cuda.submission import Submission, shape_of

Numbers = npt.NDArray[np.float64]

SIZE = 32 << 20
TINY = 1e-6  # a shorter time is noise: one that came out as nothing would pull every cost to nothing
SMALL, LARGE = 4 << 10, 1 << 20
LAYERS = 4
ROUNDS, FEW = 3, 8


class Layout(NamedTuple):
    """So many ``fragments``, or as many as there is room for, of pages that lie in runs of ``run``."""

    width: int
    layers: int
    run: int = 1
    fragments: int | None = None


def layouts(path: Path) -> tuple[Layout, ...]:
    """What tells the costs of this path apart."""
    if path is Path.PITCHED:
        return (Layout(SMALL, 2, TALL, 2 * TALL), Layout(LARGE, LAYERS, 2 * TALL), Layout(SMALL, LAYERS, 1 << 30),
                Layout(SMALL, LAYERS, TALL))  # fmt: skip
    return Layout(SMALL, 1, fragments=1), Layout(LARGE, LAYERS), Layout(SMALL, 8 * LAYERS), Layout(SMALL, 1)


def calibrate(driver: Driver, blocks: int = Settings().blocks, size: int = SIZE) -> Costs:
    """What each path costs, with kernels of so many blocks. Blocks; for before a cache opens."""
    with closing(Bench(driver, size)) as bench:
        return {key: bench.cost(*key, blocks) for key in PUBLISHED}


def fit(counts: Sequence[tuple[int, ...]], seconds: Sequence[float]) -> Cost:
    """The costs, none of them negative, that come closest to these times, by what they are off in relation to each.
    ``counts``: descriptors, rows and bytes of each."""
    table = np.array([(1, *count) for count in counts]) / np.array(seconds)[:, None]
    used = np.flatnonzero(table.any(axis=0)).tolist()
    tried = (_solved(table, columns) for n in range(len(used)) for columns in combinations(used, n + 1))
    return Cost(*min(tried, key=lambda costs: _off(table, costs)).tolist())


def _solved(table: Numbers, columns: Sequence[int]) -> Numbers:
    """The best there is with these costs alone."""
    scale = np.linalg.norm(table[:, columns], axis=0)
    costs = np.zeros(table.shape[1])
    costs[list(columns)] = np.linalg.lstsq(table[:, columns] / scale, np.ones(len(table)), rcond=None)[0] / scale
    return costs


def _off(table: Numbers, costs: Numbers) -> float:
    return float(((table @ costs - 1) ** 2).sum()) if costs.min() >= 0 else math.inf


def forced(towards: Towards, path: Path, blocks: int = Settings().blocks) -> Chooser:
    """Always this path, where it is possible."""
    ways = {Towards.OUT: "out", Towards.IN: "inward", Towards.WITHIN: "within"}
    changes: dict[str, Any] = {ways[towards]: path}
    return Chooser(replace(Settings(blocks=blocks), **changes))


class Bench:
    """Buffers of ``size`` bytes on either side, and streams to copy between them."""

    def __init__(self, driver: Driver, size: int) -> None:
        self.size = size
        self.driver = driver
        self.context = Context(driver)
        self.host = pinned_tensor(driver, (size,), Pinning())
        self.device = [driver.device_tensor((size,)) for _ in range(2)]
        self._scratch: dict[CudaStream, Scratch] = {}
        self.stream = self.another()

    def another(self) -> CudaStream:
        """One more stream."""
        stream = CudaStream(f"bench-{len(self._scratch)}", self.context)
        self._scratch[stream] = Scratch(self.driver)
        return stream

    def close(self) -> None:
        """Free all of it."""
        for stream in self._scratch:
            stream.close()
        for stream in self._scratch:
            stream.join()
        if self.context.failure is not None:
            return  # nothing can be given back to a context that is gone
        for stream, scratch in self._scratch.items():
            scratch.close()
            self.driver.stream_destroy(stream.handle)
        self.context.events.close()

    def cost(self, towards: Towards, path: Path, blocks: int) -> Cost:
        """From the times of some layouts. Those that are the same to this path are measured once."""
        found = {}
        for layout in layouts(path):
            rows = self.laid_out(towards, layout)
            found[shape_of(rows, Runs.of(rows)).counts(path)] = rows
        nothing = self.best(self.laid_out(towards, Layout(SMALL, 1, fragments=0)), forced(towards, Path.DMA))
        chooser = forced(towards, path, blocks)
        return fit([*found], [max(TINY, self.best(rows, chooser) - nothing) for rows in found.values()])

    def best(self, rows: Rows, chooser: Chooser) -> float:
        """Seconds, of some rounds; of more where waking up is most of it."""
        rounds = ROUNDS if rows.pieces > FEW else 10 * ROUNDS
        return min(self.seconds(rows, chooser) for _ in range(rounds))

    def seconds(self, rows: Rows, chooser: Chooser) -> float:
        """From the first call of the driver until the last byte is there.

        Raises:
            DriverError: the device failed.
        """
        began = perf_counter()
        event = self.submit(rows, chooser)
        event.block()
        if event.failure is not None:
            raise event.failure
        return perf_counter() - began

    def submit(self, rows: Rows, chooser: Chooser, stream: CudaStream | None = None) -> CudaEvent:
        """Begin to copy these rows; the event is done when they are there."""
        stream = stream or self.stream
        submission = Submission(stream, self._scratch[stream], chooser)
        stream.copy(submission.all(rows), {}, rows)
        return stream.record()

    def rows(self, towards: Towards, path: Path, width: int, count: int | None = None) -> Rows:
        """Neighbours for the pitched path, else shuffled pages; of some layers, if the count allows it."""
        fragments = max(1, min(count or self.size // width, self.size // width))
        layers = LAYERS if fragments % LAYERS == 0 else 1
        return self.laid_out(towards, Layout(width, layers, 1 << 30 if path is Path.PITCHED else 1, fragments))

    def laid_out(self, towards: Towards, layout: Layout) -> Rows:
        """Layer-first on the device, page-first on the host."""
        width, layers, run, fragments = layout
        room = self.size // width
        layers = min(layers, room)
        pages = min(room if fragments is None else fragments, room) // layers
        rng = np.random.default_rng(1)
        dst, src = _shuffled(rng, pages, run), _shuffled(rng, pages, run)
        there = _layer_first(self.device[0], layers, pages, width)
        if towards is Towards.WITHIN:
            return Rows(towards, tuple(zip(_layer_first(self.device[1], layers, pages, width), there, strict=True)),
                        dst, src, width, width, width)  # fmt: skip
        here, pitch = [self.host.data_ptr() + i * width for i in range(layers)], layers * width
        if towards is Towards.OUT:
            return Rows(towards, tuple(zip(here, there, strict=True)), dst, src, pitch, width, width)
        return Rows(towards, tuple(zip(there, here, strict=True)), dst, src, width, pitch, width)


def _shuffled(rng: np.random.Generator, pages: int, run: int) -> npt.NDArray[np.intp]:
    """All ids, in runs of so many."""
    places = rng.permutation(-(-pages // run))[np.arange(pages) // run]
    return np.argsort(places, kind="stable")


def _layer_first(tensor: torch.Tensor, layers: int, pages: int, width: int) -> Sequence[int]:
    return [tensor.data_ptr() + i * pages * width for i in range(layers)]
