"""Measures what a piece and a byte cost on each path, on this device, in some tenths of a second.

Each path copies fragments of two sizes between a pinned and a device buffer, scattered so that nothing merges (but for
the pitched path, whose rows are neighbours). Two times give a cost a piece and a cost a byte; the best of some rounds
counts, since everything that disturbs only makes it slower.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import torch

from asynccache.memory.cuda.driver import Driver, Towards
from asynccache.memory.cuda.events import Context
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
    with ExitStack() as stack:
        bench = Bench(driver, size)
        stack.callback(bench.close)
        return {key: bench.cost(*key) for key in PUBLISHED}


class Bench:
    """Two buffers of ``size`` bytes on either side, and a stream to copy between them."""

    def __init__(self, driver: Driver, size: int, settings: Settings | None = None) -> None:
        self.size = size
        self.settings = settings or Settings()
        self._driver = driver
        self._context = Context(driver)
        self._stream = CudaStream("calibration", self._context)
        self._scratch = Scratch(driver)
        self.host = pinned_tensor(driver, (size,), Pinning())
        self.device = [driver.device_tensor((size,)) for _ in range(2)]

    def close(self) -> None:
        """Free all of it."""
        self._stream.close()
        self._stream.join()
        if self._context.failure is not None:
            return  # nothing can be given back to a context that is gone
        self._scratch.close()
        self._context.events.close()
        self._driver.stream_destroy(self._stream.handle)

    def cost(self, towards: Towards, path: Path) -> Cost:
        """From the times of small and large fragments."""
        small = min(self.seconds(towards, path, SMALL) for _ in range(ROUNDS))
        large = min(self.seconds(towards, path, LARGE) for _ in range(ROUNDS))
        fixed = PUBLISHED[towards, path].fixed
        pieces = self.size // SMALL, max(1, self.size // LARGE)
        piece = max(1e-9, (small - large) / (pieces[0] - pieces[1]))
        return Cost(fixed, piece, max(1e-13, (large - fixed - pieces[1] * piece) / self.size))

    def seconds(self, towards: Towards, path: Path, width: int, count: int | None = None) -> float:
        """From the first call of the driver until the last byte is there."""
        rows = self.rows(towards, path, width, count)
        chosen = Settings(out=path, blocks=self.settings.blocks) if towards is Towards.OUT else (
            Settings(inward=path, blocks=self.settings.blocks) if towards is Towards.IN else
            Settings(within=path, blocks=self.settings.blocks))  # fmt: skip
        submission = Submission(self._stream, self._scratch, Chooser(chosen))
        began = time.perf_counter()
        self._stream.copy(iter([submission.rows(rows)]), {}, rows)
        event = self._stream.record()
        event.block()
        if event.failure is not None:
            raise event.failure
        return time.perf_counter() - began

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
