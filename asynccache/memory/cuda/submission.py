"""Turns rows into calls of the driver. Runs in a stream's submitter.

A step is a list of calls, so that whoever runs it can stop half-way. Copies of pieces go in groups of at most
``GROUP``: larger ones only make the driver hold its locks for longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from asynccache.memory.copies import Part
from asynccache.memory.cuda.driver import Driver, Launch, Spans, Towards
from asynccache.memory.cuda.paths import Chooser, Path, Shape
from asynccache.memory.cuda.rows import Merged, Rows, Runs, distances, in_rows, merged, out_rows, within_rows
from asynccache.memory.cuda.scratch import STAGING_BYTES, Scratch
from asynccache.memory.cuda.streams import CudaStream, Step
from asynccache.memory.signals import Work

GROUP = 512


class Submission:
    """What the batches of one stream are made with."""

    def __init__(self, stream: CudaStream, scratch: Scratch, chooser: Chooser) -> None:
        self.scratch = scratch
        self._driver = stream.context.driver
        self._stream = stream
        self._chooser = chooser

    def all(self, rows: Rows) -> Iterator[Step]:
        """These rows, in one step."""
        yield self.rows(rows)

    def out(self, parts: Sequence[Part]) -> Iterator[Step]:
        """Device to host, in one step."""
        yield [call for part in parts for call in self.rows(out_rows(part))]

    def within(self, parts: Sequence[Part]) -> Iterator[Step]:
        """Within the device, in one step."""
        yield [call for part in parts for call in self.rows(within_rows(part))]

    def inward(self, parts: Sequence[Part], layers: int) -> Iterator[Step]:
        """Host to device, a step per layer of the model."""
        loads = [(part, _Load(self, in_rows(part))) for part in parts]
        for layer in range(layers):
            yield [
                call
                for part, load in loads
                for i, belongs in enumerate(part.device.spec.model_layers)
                if belongs == layer
                for call in load.layer(i)
            ]

    def rows(self, rows: Rows) -> list[Work]:
        """All of them, by the path that suits them."""
        runs = Runs.of(rows)
        path = self.path(rows, runs)
        if path is Path.STAGED:
            return self.staged(rows)
        if path is Path.KERNEL:
            return self.kernel(rows).all()
        return self.pieces(rows, merged(rows, runs, pitched=path is Path.PITCHED))

    def path(self, rows: Rows, runs: Runs) -> Path:
        """How these rows go."""
        return self._chooser.choose(shape_of(rows, runs))

    def pieces(self, rows: Rows, pieces: Merged) -> list[Work]:
        """By the copy engines, in groups."""
        driver, stream, towards, spans = self._driver, self._stream.handle, rows.towards, pieces.spans
        groups = [spans.part(i, i + GROUP) for i in range(0, len(spans.size), GROUP)]
        return [
            *(partial(driver.copy_pitched, stream, towards, one) for one in pieces.calls(rows)),
            *(partial(driver.copy, stream, towards, group) for group in groups),
        ]

    def staged(self, rows: Rows) -> list[Work]:
        """As many pages at a time as the staging area holds. The stream's order makes its reuse safe."""
        staging, step, count = self.scratch.staging(), pages_at_a_time(rows), len(rows.src_ids)
        out = put_together(rows, staging)
        out = out._replace(src_ids=out.src_ids % step)
        bases = tuple((staging + i * rows.width, src) for i, (_, src) in enumerate(rows.bases))
        gather = self.kernel(rows._replace(towards=Towards.WITHIN, bases=bases, dst_ids=out.src_ids,
                                           dst_pitch=out.width))  # fmt: skip
        pieces = merged(out, Runs.of(out), pitched=True)
        return [
            call
            for start in range(0, count, step)
            for call in (*gather.pages(start, min(start + step, count)),
                         *self.pieces(out, pieces.between(start, start + step)))
        ]  # fmt: skip

    def kernel(self, rows: Rows) -> KernelCalls:
        """By the kernel; what it reads of ids and bases is on its way first."""
        bases = np.array(rows.bases, np.uint64).reshape(-1, 2).T
        tables = (*bases, rows.dst_ids.astype(np.int32, copy=False), rows.src_ids.astype(np.int32, copy=False))
        buffer, offsets = self.scratch.pack(*tables)
        self._stream.lend(partial(self.scratch.give, buffer))
        dst, src, dst_ids, src_ids = (buffer.device + offset for offset in offsets)
        launch = Launch(dst, src, dst_ids, src_ids, len(rows.bases), len(rows.src_ids), rows.width, rows.dst_pitch,
                        rows.src_pitch, self._chooser.settings.blocks)  # fmt: skip
        used = offsets[-1] + tables[-1].nbytes
        span = Spans(*(np.array([n], np.uint64) for n in (buffer.device, buffer.host, used)))
        return KernelCalls(self._driver, self._stream.handle, launch, span)


class KernelCalls:
    """The launches that move some rows, all at once, base by base or by ids."""

    def __init__(self, driver: Driver, stream: int, launch: Launch, upload: Spans) -> None:
        self._driver = driver
        self._stream = stream
        self._launch = launch
        self._upload: list[Work] = [partial(driver.copy, stream, Towards.IN, upload)]

    def all(self) -> list[Work]:
        """One launch."""
        return self._calls(self._launch)

    def layer(self, i: int) -> list[Work]:
        """One launch for one base."""
        one, at = self._launch, i * np.dtype(np.uint64).itemsize
        return self._calls(one._replace(dst_bases=one.dst_bases + at, src_bases=one.src_bases + at, layers=1))

    def pages(self, start: int, stop: int) -> list[Work]:
        """One launch for some ids."""
        one, at = self._launch, start * np.dtype(np.int32).itemsize
        return self._calls(one._replace(dst_ids=one.dst_ids + at, src_ids=one.src_ids + at, pages=stop - start))

    def _calls(self, launch: Launch) -> list[Work]:
        """What the kernel reads comes before the first launch."""
        uploads, self._upload = self._upload, []
        return [*uploads, partial(self._driver.launch, self._stream, launch)]


class _Load:
    """A part on its way to the device, layer by layer: what all layers share is worked out once."""

    def __init__(self, submission: Submission, rows: Rows) -> None:
        self._submission = submission
        self._rows = rows
        runs = Runs.of(rows)
        path = submission.path(rows.layer(0), runs)
        self._kernel = submission.kernel(rows) if path is Path.KERNEL else None
        self._distances = distances(rows, runs, pitched=path is Path.PITCHED) if path is not Path.KERNEL else None

    def layer(self, i: int) -> list[Work]:
        if self._kernel is not None:
            return self._kernel.layer(i)
        assert self._distances is not None
        return self._submission.pieces(self._rows, self._distances.moved(self._rows.bases[i : i + 1]))


def shape_of(rows: Rows, runs: Runs) -> Shape:
    """What a path is chosen by."""
    staged = 0
    if rows.towards is Towards.OUT and pages_at_a_time(rows):
        pages = put_together(rows, 0)
        staged = Runs.of(pages).pieces(pages, pitched=True)
    return Shape(rows.towards, rows.pieces, rows.size, rows.aligned(), runs.pieces(rows, pitched=False),
                 runs.pieces(rows, pitched=True), staged)  # fmt: skip


def put_together(rows: Rows, staging: int) -> Rows:
    """Whole pages of the host, from where the kernel puts their layers together, one page behind the other."""
    page = len(rows.bases) * rows.width
    places = np.arange(len(rows.src_ids), dtype=rows.src_ids.dtype)
    return rows._replace(bases=((rows.bases[0][0], staging),), src_ids=places, src_pitch=page, width=page)


def pages_at_a_time(rows: Rows) -> int:
    """How many pages of the host the staging area holds."""
    return STAGING_BYTES // (len(rows.bases) * rows.width)
