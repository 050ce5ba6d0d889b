"""Turns page copies into calls of the driver. Runs in a stream's submitter, and only lists the calls: the stream makes
them, one by one.

A page copy is rows: row ``i`` of each layer. Rows that lie behind each other in both source and destination are joined
into one piece, since the driver never merges them. There are two paths. Long pieces go by the copy engines, which take
no multiprocessors from the engine. Pieces that are shorter than the setting for their direction go by the copy kernel,
straight from or to pinned memory, if there are enough of them for a launch to pay.

A step is a list of calls, so that the stream that runs it can stop half-way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from asynccache.errors import InvariantViolation
from asynccache.memory.cuda.cupy_driver import CupyDriver
from asynccache.memory.cuda.kernels import LAYERS, PAGES, table
from asynccache.memory.cuda.libcuda import Addresses, Spans
from asynccache.memory.cuda.pinned import chunk_of
from asynccache.memory.cuda.settings import CudaSettings
from asynccache.memory.cuda.streams import Step
from asynccache.memory.device import CopyDirection
from asynccache.memory.host_copies import CheckedCopy, Ids
from asynccache.memory.signals import Callback

GROUP, GROUP_OF_SINGLES = 2048, 512
"""The most copies in one step of a stream: if the driver takes many in a call, and if each is a call of its own. The
driver would take any number in a call; so many fill two thirds of the queue that a stream may have
(``streams.CAP``)."""
FEW = 32
"""If a step has fewer short pieces than these, they go by the copy engines, too: a launch takes as long as some
descriptors. On an H100 others found the two equal at 16 to 64 pieces, on an A30 at 32 to 64."""
BLOCKS_WITHIN = 64
"""Blocks of the kernel for copies within the device, where memory is faster than 8 multiprocessors."""
ALL = slice(None)


class RowSide(NamedTuple):
    """The place of rows in memory: row ``i`` of a layer is at ``base + ids[i] * pitch``."""

    bases: Addresses
    """An address for each layer."""
    ids: Ids
    pitch: int
    """Bytes from one row to the next."""
    chunk: int = 0
    """How many pages are pinned together; no copy may reach from one such run into the next. 0: all pages are one
    run."""


class RowCopies(NamedTuple):
    """Copies of rows: ``width`` bytes of row ``i`` of ``src`` go to row ``i`` of ``dst``, in every layer."""

    towards: CopyDirection
    dst: RowSide
    src: RowSide
    width: int

    def runs(self) -> tuple[Ids, Ids]:
        """Return the pieces of one layer: the row that each begins with, and how many rows it has."""
        count = len(self.src.ids)
        if not self.dst.pitch == self.src.pitch == self.width:
            return np.arange(count), np.ones(count, np.intp)
        breaks = (np.diff(self.src.ids) != 1) | (np.diff(self.dst.ids) != 1)
        for side in (self.dst, self.src):
            if side.chunk:
                breaks |= side.ids[1:] % side.chunk == 0
        starts = np.flatnonzero(np.r_[True, breaks])
        return starts, np.diff(starts, append=count)

    def aligned(self) -> bool:
        """Return True if all of it can be moved 16 bytes at a time."""
        numbers = (self.width, self.dst.pitch, self.src.pitch, *self.dst.bases.tolist(), *self.src.bases.tolist())
        return all(number % 16 == 0 for number in numbers)


def rows_of(towards: CopyDirection, part: CheckedCopy) -> RowCopies:
    """Return the rows that the copied pages of one pool are made of."""
    spec = part.device.spec
    width = spec.bytes_per_page // spec.layers
    layers = np.array([part.device.layer(i).data_ptr() for i in range(spec.layers)], np.uint64)
    if towards is CopyDirection.WITHIN:
        return RowCopies(towards, RowSide(layers, part.dst, width), RowSide(layers, part.src, width), width)
    if part.host is None or part.host.tensor is None:
        raise InvariantViolation(f"{part.device!r} has no host pool to copy from or to")
    pages, stride = part.host.tensor.shape
    places = np.uint64(part.host.tensor.data_ptr()) + np.arange(spec.layers, dtype=np.uint64) * np.uint64(width)
    chunk = chunk_of(stride) // stride
    host = partial(RowSide, places, pitch=stride, chunk=chunk if chunk < pages else 0)
    if towards is CopyDirection.OUT:
        return RowCopies(towards, host(ids=part.dst), RowSide(layers, part.src, width), width)
    return RowCopies(towards, RowSide(layers, part.dst, width), host(ids=part.src), width)


def kernel_below(settings: CudaSettings, towards: CopyDirection) -> int:
    """Return the threshold, in bytes, below which pieces in this direction go by the kernel."""
    return settings.kernel_backups_below if towards is CopyDirection.OUT else settings.kernel_loads_below


class RowPaths:
    """The rows of a copy by the path that they go, the same for all layers. ``together``: how many layers go in one
    step.
    """

    def __init__(self, rows: RowCopies, settings: CudaSettings, together: int) -> None:
        self._rows = rows
        self._blocks = BLOCKS_WITHIN if rows.towards is CopyDirection.WITHIN else settings.blocks
        starts, lengths = rows.runs()
        short = lengths * rows.width < kernel_below(settings, rows.towards)
        if int(short.sum()) * together < FEW or not rows.aligned():
            short[:] = False
        self.scattered = np.flatnonzero(np.repeat(short, lengths))
        """The numbers of the rows that go by the kernel."""
        first, sizes = starts[~short], (lengths[~short] * rows.width).astype(np.uint64)
        self.spans = Spans(_distances(rows.dst, first), _distances(rows.src, first), sizes)
        """The pieces for the copy engines, as distances in bytes from a layer's bases."""

    def calls(self, driver: CupyDriver, stream: int, layers: slice = ALL) -> Iterator[Callback]:
        """Yield the calls that move these layers."""
        towards, dst, src, _ = self._rows
        to, of = dst.bases[layers], src.bases[layers]
        spans = Spans(np.add.outer(to, self.spans.dst).ravel(), np.add.outer(of, self.spans.src).ravel(),
                      np.tile(self.spans.size, len(of)))  # fmt: skip
        group = GROUP if driver.batches else GROUP_OF_SINGLES
        for i in range(0, len(spans.size), group):
            yield partial(driver.copy, stream, towards, spans.part(i, i + group))
        for i in range(0, len(of), LAYERS):
            for j in range(0, len(self.scattered), PAGES):
                some, rows = slice(i, i + LAYERS), self.scattered[j : j + PAGES]
                yield partial(self._launch, driver, stream, to[some], of[some], rows)

    def _launch(self, driver: CupyDriver, stream: int, to: Addresses, of: Addresses, rows: Ids) -> int:
        _, dst, src, width = self._rows
        one = table(to, of, dst.ids[rows], src.ids[rows], width=width, dst_pitch=dst.pitch, src_pitch=src.pitch)
        return driver.launch(stream, one, self._blocks)


def _distances(side: RowSide, rows: Ids) -> Addresses:
    return side.ids[rows].astype(np.uint64) * np.uint64(side.pitch)


def at_once(
    driver: CupyDriver, stream: int, settings: CudaSettings, towards: CopyDirection, parts: Sequence[CheckedCopy]
) -> Iterator[Step]:
    """Yield one step with all layers."""
    plans = [RowPaths(rows_of(towards, part), settings, part.device.spec.layers) for part in parts]
    yield [call for plan in plans for call in plan.calls(driver, stream)]


def by_layer(
    driver: CupyDriver, stream: int, settings: CudaSettings, parts: Sequence[CheckedCopy], layers: int
) -> Iterator[Step]:
    """Yield a step for each layer of the model, host to device."""
    loads = [(part.device.spec, RowPaths(rows_of(CopyDirection.IN, part), settings, 1)) for part in parts]
    for layer in range(layers):
        yield [
            call
            for spec, plan in loads
            for i, belongs in enumerate(spec.model_layers)
            if belongs == layer
            for call in plan.calls(driver, stream, slice(i, i + 1))
        ]
