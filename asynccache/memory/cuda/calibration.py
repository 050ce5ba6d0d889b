"""Measures what a piece and a byte cost on each path, on this device, in some tenths of a second.

Each path copies fragments of two sizes between a pinned and a device buffer, scattered so that nothing merges (but for
the pitched path, whose rows are neighbours). Two times give a cost a piece and a cost a byte; the best of some rounds
counts, since everything that disturbs only makes it slower.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from asynccache.memory.cuda.driver import Driver, Towards
from asynccache.memory.cuda.events import Context, CudaEvent
from asynccache.memory.cuda.paths import PUBLISHED, Chooser, Cost, Costs, Path, Settings
from asynccache.memory.cuda.pinned import Pinning, pinned_tensor
from asynccache.memory.cuda.rows import Rows
from asynccache.memory.cuda.scratch import Scratch
from asynccache.memory.cuda.streams import CudaStream
from asynccache.memory.cuda.submission import Submission

SIZE = 32 << 20
SMALL, LARGE = 4 << 10, 1 << 20
LAYERS = 4
ROUNDS = 3


def calibrate(driver: Driver, size: int = SIZE) -> Costs:
    """What each path costs. Blocks; for before a cache opens."""
    with closing(Bench(driver, size)) as bench:
        return {key: bench.cost(*key) for key in PUBLISHED}


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

    def cost(self, towards: Towards, path: Path) -> Cost:
        """From the times of small and large fragments."""
        small, large = self.rows(towards, path, SMALL), self.rows(towards, path, LARGE)
        chooser = forced(towards, path)
        seconds = [min(self.seconds(rows, chooser) for _ in range(ROUNDS)) for rows in (small, large)]
        fixed = PUBLISHED[towards, path].fixed
        piece = max(1e-9, (seconds[0] - seconds[1]) / max(1, small.pieces - large.pieces))
        return Cost(fixed, piece, piece, max(1e-13, (seconds[1] - fixed - large.pieces * piece) / large.size))

    def seconds(self, rows: Rows, chooser: Chooser) -> float:
        """From the first call of the driver until the last byte is there.

        Raises:
            DriverError: the device failed.
        """
        began = time.perf_counter()
        event = self.submit(rows, chooser)
        event.block()
        if event.failure is not None:
            raise event.failure
        return time.perf_counter() - began

    def submit(self, rows: Rows, chooser: Chooser, stream: CudaStream | None = None) -> CudaEvent:
        """Begin to copy these rows; the event is done when they are there."""
        stream = stream or self.stream
        submission = Submission(stream, self._scratch[stream], chooser)
        stream.copy(submission.all(rows), {}, rows)
        return stream.record()

    def rows(self, towards: Towards, path: Path, width: int, count: int | None = None) -> Rows:
        """Layer-first on the device, page-first on the host. Neighbours for the pitched path, else shuffled pages."""
        fragments = max(1, min(count or self.size // width, self.size // width))
        layers = LAYERS if fragments % LAYERS == 0 else 1
        pages = fragments // layers
        ids = np.arange(pages)
        rng = np.random.default_rng(1)
        src, dst = (ids, ids) if path is Path.PITCHED else (rng.permutation(pages), rng.permutation(pages))
        there = _layer_first(self.device[0], layers, pages, width)
        if towards is Towards.WITHIN:
            return Rows(towards, tuple(zip(_layer_first(self.device[1], layers, pages, width), there, strict=True)),
                        dst, src, width, width, width)  # fmt: skip
        here, pitch = [self.host.data_ptr() + i * width for i in range(layers)], layers * width
        if towards is Towards.OUT:
            return Rows(towards, tuple(zip(here, there, strict=True)), dst, src, pitch, width, width)
        return Rows(towards, tuple(zip(there, here, strict=True)), dst, src, width, pitch, width)


def _layer_first(tensor: torch.Tensor, layers: int, pages: int, width: int) -> Sequence[int]:
    return [tensor.data_ptr() + i * pages * width for i in range(layers)]
