"""The hit ratio of an LRU cache of every size, from one pass over the requests.

Mattson et al., "Evaluation techniques for storage hierarchies" (IBM Systems Journal 9/2, 1970): LRU is a stack
algorithm, so a cache of C pages holds the C pages that were touched last. Order the pages by their last touch. A page
is a hit in every cache that has at least as many pages as its place in that order; its place is 1 plus the number of
pages that were touched after it.

A request looks up its whole path first and then touches it, leaf first, as the radix tree does. So no page stays longer
than the page before it, and what is found is always a prefix. The result is exact for LRU over whole pages when
requests are served one at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asynccache.cli.trace import TraceRequest, paths_of

_CHUNK = 4096


class HitCurve(NamedTuple):
    """``hits[c]``: how many lookups a cache of c pages answers; the last entry holds for every larger cache as well.
    ``lookups``: how many there are in all. ``pages``: how many different pages the requests have."""

    hits: npt.NDArray[np.int64]
    lookups: int
    pages: int

    def found(self, capacity: float) -> int:
        """The number of lookups that a cache of ``capacity`` pages answers."""
        return int(self.hits[min(len(self.hits) - 1, max(0, int(capacity)))])


class PagePath(NamedTuple):
    """The pages of one request. ``keys``: one for each page, root first; a key stands for the page and all pages before
    it. The first ``looked_up`` pages are looked up, and all pages are touched."""

    keys: Sequence[int]
    looked_up: int


class Stack:
    """The pages in the order of their last touch: each page is a mark at the moment when it was touched.

    The place of a page is the number of marks from its own to the latest: those of its own chunk are counted one by
    one, and those of the chunks after it are added up from the chunks' sums.
    """

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        self._marks = np.zeros(_CHUNK, dtype=np.bool_)
        self._sums = np.zeros(1, dtype=np.int64)
        self._now = 0

    def __len__(self) -> int:
        return len(self._last)

    def places(self, path: Sequence[int]) -> Iterator[int]:
        """The place of each page of ``path`` that was touched before, in the path's order; 1 is the latest."""
        before, place = -1, 0
        for key in path:
            time = self._last.get(key, -1)
            if time < 0:
                continue
            place = place + 1 if time == before - 1 else self._from(time)
            before = time
            yield place

    def touch(self, path: Sequence[int]) -> None:
        """Touch the pages of ``path``, the leaf first, so that the root is the latest."""
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


def curve(requests: Iterable[PagePath]) -> HitCurve:
    """The curve of ``requests``, from one pass over them."""
    stack, places, lookups = Stack(), array("q"), 0
    for path, looked_up in requests:
        places.extend(stack.places(path[:looked_up]))
        stack.touch(path)
        lookups += looked_up
    return HitCurve(np.bincount(np.asarray(places, dtype=np.int64), minlength=1).cumsum(), lookups, len(stack))


def blocks(trace: Sequence[TraceRequest]) -> Iterator[PagePath]:
    """The full blocks of each prompt of a trace, all of them looked up."""
    return (PagePath(path, len(path)) for path in paths_of(trace))


def points(found: HitCurve, count: int = 60) -> list[int]:
    """At most ``count`` capacities at which to show a curve: evenly spaced on a logarithmic scale, up to the smallest
    that answers as many lookups as any larger one."""
    last = max(1, len(found.hits) - 1)
    return sorted({round(last ** (i / (count - 1))) for i in range(count)})
