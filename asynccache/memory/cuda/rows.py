"""What a batch of page copies is to a bus: rows at addresses, and neighbours merged into longer runs.

Pure: nothing here calls a driver. The driver never merges neighbours itself, and each piece costs it about half a
microsecond, so runs are merged here: where rows lie behind each other on both sides they become one span; where only
the distance between them is constant (a host page holds all layers, a device layer holds all pages) they become one
pitched copy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from asynccache.errors import InvariantViolation
from asynccache.memory.copies import Ids, Part
from asynccache.memory.cuda.driver import Pitched, Spans, Towards

TALL = 4
"""From so many rows on a pitched copy is worth a call of its own."""


class Rows(NamedTuple):
    """Row ``i`` of each base goes from ``src + src_ids[i] * src_pitch`` to ``dst + dst_ids[i] * dst_pitch``."""

    towards: Towards
    bases: tuple[tuple[int, int], ...]  # (dst, src), one for each layer
    dst_ids: Ids
    src_ids: Ids
    dst_pitch: int
    src_pitch: int
    width: int

    @property
    def pieces(self) -> int:
        return len(self.bases) * len(self.src_ids)

    @property
    def size(self) -> int:
        return self.pieces * self.width

    def layer(self, i: int) -> Rows:
        """Those of one base."""
        return self._replace(bases=self.bases[i : i + 1])

    def pages(self, start: int, stop: int) -> Rows:
        """Those of some ids."""
        return self._replace(dst_ids=self.dst_ids[start:stop], src_ids=self.src_ids[start:stop])

    def dense(self) -> bool:
        """Whether neighbours lie behind each other without a gap, on both sides."""
        return self.dst_pitch == self.src_pitch == self.width

    def aligned(self) -> bool:
        """Whether all of it can be moved 16 bytes at a time."""
        numbers = (self.dst_pitch, self.src_pitch, self.width, *(n for base in self.bases for n in base))
        return all(n % 16 == 0 for n in numbers)


class Runs(NamedTuple):
    """Where runs of neighbours on both sides begin, and how long they are."""

    starts: Ids
    lengths: Ids

    @classmethod
    def of(cls, rows: Rows) -> Runs:
        src, dst = rows.src_ids, rows.dst_ids
        ends = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
        edges = np.concatenate(([0], ends, [len(src)]))
        return cls(edges[:-1], np.diff(edges))

    def pieces(self, rows: Rows, *, pitched: bool) -> int:
        """How many there are when runs are merged."""
        if rows.dense():
            return len(self.starts) * len(rows.bases)
        tall = self.lengths >= TALL if pitched else np.zeros(len(self.lengths), bool)
        return (int(tall.sum()) + int(self.lengths[~tall].sum())) * len(rows.bases)


class Merged(NamedTuple):
    """The same bytes in as few pieces as they allow."""

    spans: Spans
    pitched: tuple[Pitched, ...]


def out_rows(part: Part) -> Rows:
    """Device pages to the host."""
    device, (host, pitch), width = _device_bases(part), _host(part), _width(part)
    bases = tuple((host + i * width, base) for i, base in enumerate(device))
    return Rows(Towards.OUT, bases, part.dst, part.src, pitch, width, width)


def in_rows(part: Part) -> Rows:
    """Host pages to the device."""
    device, (host, pitch), width = _device_bases(part), _host(part), _width(part)
    bases = tuple((base, host + i * width) for i, base in enumerate(device))
    return Rows(Towards.IN, bases, part.dst, part.src, width, pitch, width)


def within_rows(part: Part) -> Rows:
    """Device pages to other device pages."""
    width = _width(part)
    bases = tuple((base, base) for base in _device_bases(part))
    return Rows(Towards.WITHIN, bases, part.dst, part.src, width, width, width)


def merged(rows: Rows, runs: Runs, *, pitched: bool) -> Merged:
    """Runs of neighbours as one piece each. ``pitched``: also those that lie at a distance from each other."""
    starts, lengths = runs
    if rows.dense():
        return Merged(_spans(rows, starts, lengths * rows.width), ())
    tall = lengths >= TALL if pitched else np.zeros(len(lengths), bool)
    single = np.flatnonzero(~np.repeat(tall, lengths))
    spans = _spans(rows, single, np.full(len(single), rows.width))
    high = list(zip(starts[tall].tolist(), lengths[tall].tolist(), strict=True))
    return Merged(spans, tuple(_pitched(rows, base, *run) for base in rows.bases for run in high))


def _spans(rows: Rows, at: Ids, sizes: Ids) -> Spans:
    dst_base, src_base = np.array(rows.bases, np.uint64).reshape(-1, 2).T
    dst = np.add.outer(dst_base, rows.dst_ids[at].astype(np.uint64) * np.uint64(rows.dst_pitch)).ravel()
    src = np.add.outer(src_base, rows.src_ids[at].astype(np.uint64) * np.uint64(rows.src_pitch)).ravel()
    return Spans(dst, src, np.tile(sizes.astype(np.uint64), len(rows.bases)))


def _pitched(rows: Rows, base: tuple[int, int], start: int, height: int) -> Pitched:
    dst = base[0] + int(rows.dst_ids[start]) * rows.dst_pitch
    src = base[1] + int(rows.src_ids[start]) * rows.src_pitch
    return Pitched(dst, rows.dst_pitch, src, rows.src_pitch, rows.width, height)


def _device_bases(part: Part) -> list[int]:
    return [part.device.layer(i).data_ptr() for i in range(part.device.spec.layers)]


def _width(part: Part) -> int:
    return part.device.spec.bytes_per_page // part.device.spec.layers


def _host(part: Part) -> tuple[int, int]:
    if part.host is None or part.host.tensor is None:
        raise InvariantViolation(f"{part.device!r} has no host pool to copy from or to")
    return part.host.tensor.data_ptr(), part.host.stride
