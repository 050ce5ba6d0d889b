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
from asynccache.memory.cuda.rows import Rows, Runs, in_rows, merged, out_rows, within_rows
from asynccache.memory.cuda.scratch import STAGING_BYTES, Scratch, pack
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
        path = self.path(rows, runs, stages=rows.towards is Towards.OUT)
        if path is Path.STAGED:
            return self.staged(rows)
        if path is Path.KERNEL:
            return self.kernel(rows).all()
        return self.pieces(rows, runs, pitched=path is Path.PITCHED)

    def path(self, rows: Rows, runs: Runs, *, stages: bool) -> Path:
        """How these rows go."""
        return self._chooser.choose(shape_of(rows, runs, stages=stages))

    def pieces(self, rows: Rows, runs: Runs, *, pitched: bool) -> list[Work]:
        """By the copy engines, in groups."""
        driver, stream, towards = self._driver, self._stream.handle, rows.towards
        spans, tall = merged(rows, runs, pitched=pitched)
        groups = [spans.part(i, i + GROUP) for i in range(0, len(spans.size), GROUP)]
        return [
            *(partial(driver.copy_pitched, stream, towards, one) for one in tall),
            *(partial(driver.copy, stream, towards, group) for group in groups),
        ]

    def staged(self, rows: Rows) -> list[Work]:
        """As many pages at a time as the staging area holds. The stream's order makes its reuse safe."""
        page = len(rows.bases) * rows.width
        step, staging = STAGING_BYTES // page, self.scratch.staging()
        calls: list[Work] = []
        for start in range(0, len(rows.src_ids), step):
            pages = rows.pages(start, start + step)
            local = np.arange(len(pages.src_ids))
            bases = tuple((staging + i * rows.width, src) for i, (_, src) in enumerate(rows.bases))
            gather = pages._replace(towards=Towards.WITHIN, bases=bases, dst_ids=local, dst_pitch=page)
            out = pages._replace(bases=((rows.bases[0][0], staging),), src_ids=local, src_pitch=page, width=page)
            calls += self.kernel(gather).all()
            calls += self.pieces(out, Runs.of(out), pitched=True)
        return calls

    def kernel(self, rows: Rows) -> KernelCalls:
        """By the kernel; what it reads of ids and bases is on its way first."""
        bases = np.array(rows.bases, np.uint64).reshape(-1, 2).T
        packed, offsets = pack(*bases, rows.dst_ids.astype(np.int32), rows.src_ids.astype(np.int32))
        buffer = self.scratch.take(len(packed))
        self._stream.lend(partial(self.scratch.give, buffer))
        buffer.host.numpy()[: len(packed)] = packed
        dst, src, dst_ids, src_ids = (buffer.device + offset for offset in offsets)
        launch = Launch(dst, src, dst_ids, src_ids, len(rows.bases), len(rows.src_ids), rows.width, rows.dst_pitch,
                        rows.src_pitch, self._chooser.settings.blocks)  # fmt: skip
        span = Spans(*(np.array([n], np.uint64) for n in (buffer.device, buffer.host.data_ptr(), len(packed))))
        return KernelCalls(self._driver, self._stream.handle, launch, span)


class KernelCalls:
    """The launches that move some rows, all at once or base by base."""

    def __init__(self, driver: Driver, stream: int, launch: Launch, upload: Spans) -> None:
        self._driver = driver
        self._stream = stream
        self._launch = launch
        self._upload: list[Work] = [partial(driver.copy, stream, Towards.IN, upload)]

    def all(self) -> list[Work]:
        """One launch."""
        return [*self._uploads(), partial(self._driver.launch, self._stream, self._launch)]

    def layer(self, i: int) -> list[Work]:
        """One launch for one base."""
        one = self._launch
        at = i * np.dtype(np.uint64).itemsize
        launch = one._replace(dst_bases=one.dst_bases + at, src_bases=one.src_bases + at, layers=1)
        return [*self._uploads(), partial(self._driver.launch, self._stream, launch)]

    def _uploads(self) -> list[Work]:
        """Once, before the first launch."""
        uploads, self._upload = self._upload, []
        return uploads


class _Load:
    """A part on its way to the device, layer by layer: what all layers share is worked out once."""

    def __init__(self, submission: Submission, rows: Rows) -> None:
        self._submission = submission
        self._rows = rows
        self._runs = Runs.of(rows)
        self._path = submission.path(rows.layer(0), self._runs, stages=False)
        self._kernel = submission.kernel(rows) if self._path is Path.KERNEL else None

    def layer(self, i: int) -> list[Work]:
        if self._kernel is not None:
            return self._kernel.layer(i)
        return self._submission.pieces(self._rows.layer(i), self._runs, pitched=self._path is Path.PITCHED)


def shape_of(rows: Rows, runs: Runs, *, stages: bool) -> Shape:
    """What a path is chosen by."""
    spans = runs.pieces(rows, pitched=False)
    page = len(rows.bases) * rows.width
    return Shape(
        rows.towards, rows.pieces, spans, runs.pieces(rows, pitched=True), rows.size, rows.aligned(),
        stages and page <= STAGING_BYTES,
    )
