"""The hit ratio of an LRU cache of every size, from one pass over the requests.

Mattson et al., "Evaluation techniques for storage hierarchies" (IBM Systems Journal 9/2, 1970): LRU is a stack
algorithm, so a cache of C pages holds the C that were touched last, and a page is a hit in every cache at least as
large as its place in that stack. A page's place is one more than the number of pages touched since it was.

A request looks its whole path up first and then touches it, leaf first, as the radix tree does: no page outlives the
one before it, so what is found is always a prefix. Exact for LRU over whole pages, served one request at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asynccache.cli.request import BLOCK_TOKENS
from asynccache.cli.trace import TraceRequest

_CHUNK = 4096


class Curve(NamedTuple):
    """``hits[c]``: lookups that a cache of c pages answers, of ``lookups`` in all. The last entry holds for every
    larger cache, too. ``pages``: how many different ones there are."""

    hits: npt.NDArray[np.int64]
    lookups: int
    pages: int

    def found(self, capacity: float) -> int:
        """Lookups that ``capacity`` pages answer."""
        return int(self.hits[min(len(self.hits) - 1, max(0, int(capacity)))])


class Request(NamedTuple):
    """``path``: a key for each page, root first, that stands for all up to it. The first ``looked_up`` are looked
    up; all are touched."""

    path: Sequence[int]
    looked_up: int


class Stack:
    """The pages in the order in which they were touched last, as marks on a line of time.

    Whoever asks for a place counts the marks behind its own: whole chunks by their sums, one chunk by its marks.
    """

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        self._marks = np.zeros(_CHUNK, dtype=np.bool_)
        self._sums = np.zeros(1, dtype=np.int64)
        self._now = 0

    def __len__(self) -> int:
        return len(self._last)

    def places(self, path: Sequence[int]) -> Iterator[int]:
        """For each page that was touched before: its place, from 1 on."""
        before, place = -1, 0
        for key in path:
            time = self._last.get(key, -1)
            if time < 0:
                continue
            place = place + 1 if time == before - 1 else self._from(time)
            before = time
            yield place

    def touch(self, path: Sequence[int]) -> None:
        """The leaf first, so that the root is on top."""
        self._grow(self._now + len(path))
        old = np.array([self._last[key] for key in path if key in self._last], dtype=np.int64)
        new = np.arange(self._now, self._now + len(path))
        self._mark(old, False)
        self._mark(new, True)
        self._now += len(path)
        self._last.update(zip(path, range(self._now - 1, self._now - len(path) - 1, -1), strict=True))

    def _from(self, time: int) -> int:
        chunk = time // _CHUNK
        within = np.count_nonzero(self._marks[time : (chunk + 1) * _CHUNK])
        return int(within + self._sums[chunk + 1 :].sum())

    def _mark(self, times: npt.NDArray[np.int64], there: bool) -> None:
        self._marks[times] = there
        np.add.at(self._sums, times // _CHUNK, 1 if there else -1)

    def _grow(self, wanted: int) -> None:
        if wanted > len(self._marks):
            more = -(-max(wanted, 2 * len(self._marks)) // _CHUNK) * _CHUNK - len(self._marks)
            self._marks = np.concatenate([self._marks, np.zeros(more, dtype=np.bool_)])
            self._sums = np.concatenate([self._sums, np.zeros(more // _CHUNK, dtype=np.int64)])


def curve(requests: Iterable[Request]) -> Curve:
    """One pass."""
    stack, places, lookups = Stack(), array("q"), 0
    for path, looked_up in requests:
        places.extend(stack.places(path[:looked_up]))
        stack.touch(path)
        lookups += looked_up
    return Curve(np.bincount(np.asarray(places, dtype=np.int64), minlength=1).cumsum(), lookups, len(stack))


def blocks(trace: Sequence[TraceRequest]) -> Iterator[Request]:
    """The full blocks of every prompt of a trace. A block's key is a number for it and all before it."""
    known: dict[tuple[int, int], int] = {}
    for request in trace:
        path, parent = [], -1
        for block in request.blocks[: request.input_length // BLOCK_TOKENS]:
            parent = known.setdefault((parent, block), len(known))
            path.append(parent)
        yield Request(path, len(path))


def points(found: Curve, count: int = 60) -> list[int]:
    """Capacities at which to show a curve: evenly spaced on a logarithmic scale, up to the first that has it all."""
    last = max(1, len(found.hits) - 1)
    return sorted({round(last ** (i / (count - 1))) for i in range(count)})
