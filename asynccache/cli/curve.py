"""The hit ratio of an LRU cache of every size, from one pass over the requests.

Mattson et al., "Evaluation techniques for storage hierarchies" (IBM Systems Journal 9/2, 1970): LRU is a stack
algorithm, so a cache of C blocks holds the C blocks that were touched last. Order the blocks by their last touch. A
block is a hit in every cache that has at least as many blocks as its place in that order; its place is 1 plus the
number of blocks that were touched after it.

A request looks up its whole path first and then touches it, leaf first, as the radix tree does. So no block stays
longer than the block before it, and what is found is always a prefix. The result is exact for LRU over whole blocks
when requests are served one at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BlockPath = Sequence[int]
"""The blocks of one request. There is a key for each block, root first; it stands for the block and all blocks before
it."""

_CHUNK = 4096


class HitCurve(NamedTuple):
    """``hits[c]``: how many lookups a cache of c blocks answers; the last entry holds for every larger cache as well.
    ``lookups``: how many there are in all. ``blocks``: how many different blocks the requests have."""

    hits: npt.NDArray[np.int64]
    lookups: int
    blocks: int

    def found(self, capacity: float) -> int:
        """The number of lookups that a cache of ``capacity`` blocks answers."""
        return int(self.hits[min(len(self.hits) - 1, max(0, int(capacity)))])


class Stack:
    """The blocks in the order of their last touch: each block is a mark at the moment when it was touched.

    The place of a block is the number of marks from its own to the latest: the marks of its own chunk are counted one
    by one, and the marks of the chunks after it are added up from the chunks' sums.
    """

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        self._marks = np.zeros(_CHUNK, dtype=np.bool_)
        self._sums = np.zeros(1, dtype=np.int64)
        self._now = 0

    def __len__(self) -> int:
        return len(self._last)

    def places(self, path: BlockPath) -> Iterator[int]:
        """The place of each block of ``path`` that was touched before, in the path's order; 1 is the latest."""
        before, place = -1, 0
        for key in path:
            time = self._last.get(key, -1)
            if time < 0:
                continue
            place = place + 1 if time == before - 1 else self._from(time)
            before = time
            yield place

    def touch(self, path: BlockPath) -> None:
        """Touch the blocks of ``path``, the leaf first, so that the root is the latest."""
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


def curve(paths: Iterable[BlockPath]) -> HitCurve:
    """The curve of requests with these paths, from one pass over them."""
    stack, places, lookups = Stack(), array("q"), 0
    for path in paths:
        places.extend(stack.places(path))
        stack.touch(path)
        lookups += len(path)
    return HitCurve(np.bincount(np.asarray(places, dtype=np.int64), minlength=1).cumsum(), lookups, len(stack))
