"""What a batch of page copies is to a bus: rows at addresses, and neighbours merged into longer runs.

Pure: nothing here calls a driver. The driver never merges neighbours itself, and each piece costs it about half a
microsecond, so runs are merged here: where rows lie behind each other on both sides they become one span; where only
the distance between them is constant (a host page holds all layers, a device layer holds all pages) they become one
pitched copy. No piece lies in two registrations of a host pool: the driver refuses that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asynccache.errors import InvariantViolation
from asynccache.memory.copies import Ids, Part
from asynccache.memory.cuda.driver import Pitched, Spans, Towards
from asynccache.memory.cuda.pinned import chunk_of

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
    chunk_pages: int = 0  # so many pages of the host are pinned as one, and no copy goes beyond; 0: all of them

    @property
    def host_ids(self) -> Ids:
        """Pages of the host, where the host is a side."""
        return self.dst_ids if self.towards is Towards.OUT else self.src_ids

    @property
    def pieces(self) -> int:
        return len(self.bases) * len(self.src_ids)

    @property
    def size(self) -> int:
        return self.pieces * self.width

    def layer(self, i: int) -> Rows:
        """Those of one base."""
        return self._replace(bases=self.bases[i : i + 1])

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
        if not len(src):
            return cls(src, src)
        breaks = (src[1:] - src[:-1] != 1) | (dst[1:] - dst[:-1] != 1)
        if rows.chunk_pages:
            breaks |= rows.host_ids[1:] % rows.chunk_pages == 0
        return cls.broken(breaks)

    @classmethod
    def broken(cls, breaks: npt.NDArray[np.bool_]) -> Runs:
        """Those that end where a row is followed by one that is no neighbour."""
        ends = np.flatnonzero(breaks)
        edges = np.empty(len(ends) + 2, np.intp)
        edges[0], edges[1:-1], edges[-1] = 0, ends + 1, len(breaks) + 1
        return cls(edges[:-1], edges[1:] - edges[:-1])

    def pieces(self, rows: Rows, *, pitched: bool) -> int:
        """How many there are when runs are merged."""
        if rows.dense():
            return len(self.starts) * len(rows.bases)
        tall = self.lengths >= TALL
        calls = int(np.count_nonzero(tall)) if pitched else 0
        saved = int(self.lengths[tall].sum()) - calls if calls else 0
        return rows.pieces - saved * len(rows.bases)


class Merged(NamedTuple):
    """Some rows in as few pieces as they allow. ``at``: the row that each piece begins with, in ascending order. Where
    addresses are distances, ``moved`` puts them at bases."""

    spans: Spans
    at: Ids
    pitched: Spans      # of so many rows instead of bytes
    pitched_at: Ids

    def moved(self, bases: Sequence[tuple[int, int]]) -> Merged:
        """The same from and to each of these bases (dst, src)."""
        return self._replace(spans=_moved(self.spans, bases), pitched=_moved(self.pitched, bases))

    def between(self, start: int, stop: int) -> Merged:
        """Those that begin with these rows. Only for one base."""
        a, b = np.searchsorted(self.at, (start, stop)).tolist()
        c, d = np.searchsorted(self.pitched_at, (start, stop)).tolist()
        return Merged(self.spans.part(a, b), self.at[a:b], self.pitched.part(c, d), self.pitched_at[c:d])

    def calls(self, rows: Rows) -> list[Pitched]:
        """What is pitched, one by one."""
        return [
            Pitched(dst, rows.dst_pitch, src, rows.src_pitch, rows.width, height)
            for dst, src, height in zip(*(array.tolist() for array in self.pitched), strict=True)
        ]


def merged(rows: Rows, runs: Runs, *, pitched: bool) -> Merged:
    """Runs of neighbours as one piece each. ``pitched``: also those that lie at a distance from each other."""
    return distances(rows, runs, pitched=pitched).moved(rows.bases)


def distances(rows: Rows, runs: Runs, *, pitched: bool) -> Merged:
    """``merged`` for whatever base: what all layers share is worked out once."""
    starts, lengths = runs
    if rows.dense():
        return Merged(_spans(rows, starts, lengths * rows.width), starts, *_NONE)
    if not pitched or not (tall := lengths >= TALL).any():
        return Merged(_spans(rows, slice(None), rows.width), np.arange(len(rows.src_ids)), *_NONE)
    single = np.flatnonzero(~np.repeat(tall, lengths))
    high = starts[tall]
    return Merged(_spans(rows, single, rows.width), single, _spans(rows, high, lengths[tall]), high)


_NONE = Spans(*(np.zeros(0, np.uint64) for _ in range(3))), np.zeros(0, np.intp)


def _spans(rows: Rows, at: Ids | slice, sizes: Ids | int) -> Spans:
    dst = rows.dst_ids[at].astype(np.uint64) * np.uint64(rows.dst_pitch)
    src = rows.src_ids[at].astype(np.uint64) * np.uint64(rows.src_pitch)
    return Spans(dst, src, np.broadcast_to(np.asarray(sizes, np.uint64), dst.shape))


def _moved(spans: Spans, bases: Sequence[tuple[int, int]]) -> Spans:
    dst, src = np.array(bases, np.uint64).reshape(-1, 2).T
    sizes = spans.size if len(bases) == 1 else np.tile(spans.size, len(bases))
    return Spans(np.add.outer(dst, spans.dst).ravel(), np.add.outer(src, spans.src).ravel(), sizes)


def out_rows(part: Part) -> Rows:
    """Device pages to the host."""
    device, (host, pitch, chunk), width = _device_bases(part), _host(part), _width(part)
    bases = tuple((host + i * width, base) for i, base in enumerate(device))
    return Rows(Towards.OUT, bases, part.dst, part.src, pitch, width, width, chunk)


def in_rows(part: Part) -> Rows:
    """Host pages to the device."""
    device, (host, pitch, chunk), width = _device_bases(part), _host(part), _width(part)
    bases = tuple((base, host + i * width) for i, base in enumerate(device))
    return Rows(Towards.IN, bases, part.dst, part.src, width, pitch, width, chunk)


def within_rows(part: Part) -> Rows:
    """Device pages to other device pages."""
    width = _width(part)
    bases = tuple((base, base) for base in _device_bases(part))
    return Rows(Towards.WITHIN, bases, part.dst, part.src, width, width, width)


def _device_bases(part: Part) -> list[int]:
    return [part.device.layer(i).data_ptr() for i in range(part.device.spec.layers)]


def _width(part: Part) -> int:
    return part.device.spec.bytes_per_page // part.device.spec.layers


def _host(part: Part) -> tuple[int, int, int]:
    """Where it begins, from page to page, and how many pages are pinned as one, or 0 for all."""
    if part.host is None or part.host.tensor is None:
        raise InvariantViolation(f"{part.device!r} has no host pool to copy from or to")
    pages, stride = part.host.tensor.shape
    together = chunk_of(stride) // stride
    return part.host.tensor.data_ptr(), stride, together if together < pages else 0
