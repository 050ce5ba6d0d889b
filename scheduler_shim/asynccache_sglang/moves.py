"""Moves one batch of pages of one or several pools to the stores or back, with a deadline.

What always holds:
* The calls of all pools are begun before any of them is waited for.
* A batch ends ``GRACE`` seconds after its deadline at the latest, with one exception: a store that uses the memory of
  SGLang's pool (``DirectPages``) is waited for, because it may still be writing to that memory. Pages that are copied
  are in rows of our own, so a store that hangs is not waited for.
* Pages that are not known to have been moved when the batch ends count as not moved.
* Rows are taken in the order of the pools' names, so two batches cannot wait for each other's rows.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, TimeoutError
from enum import Enum
from threading import Condition
from time import monotonic
from typing import NamedTuple

import numpy as np

from asynccache.errors import Unavailable
from asynccache.storage import Pages, Result
from asynccache_sglang.pools import Bytes, CopiedPages, DirectPages

logger = logging.getLogger(__name__)

GRACE = 0.25
"""Seconds after its deadline for which the result of a call is still waited for."""


class StagingRows:
    """``count`` rows of ``page_bytes`` bytes each; ``count`` is 0 for a pool whose pages are not copied. Rows may be
    taken and given back in any thread.

    When a call is given up at its deadline, its rows are not free before the store has let go of them. So a store that
    hangs may hold all rows. Then a call gets no row, and its pages are misses."""

    def __init__(self, page_bytes: int, count: int) -> None:
        self.memory: Bytes = np.empty((count, page_bytes), np.uint8)
        self._free = list(range(count))
        self._changed = Condition()

    def take(self, most: int, until: float) -> list[int]:
        """Take between one and ``most`` rows, waiting until one is free. Returns none if none is free by ``until``, a
        time of ``time.monotonic``."""
        with self._changed:
            self._changed.wait_for(lambda: self._free, max(0.0, until - monotonic()))
            taken, self._free = self._free[:most], self._free[most:]
            return taken

    def give_back(self, rows: list[int]) -> None:
        """Make ``rows`` free again."""
        with self._changed:
            self._free += rows
            self._changed.notify_all()


class MoveDirection(Enum):
    """The direction of a move. ``OUT``: to the stores. ``IN``: back from the stores."""

    OUT = "out"
    IN = "in"


class OpenedPool(NamedTuple):
    """A pool that the stores were opened for. ``source``: where its pages lie. ``behind``: the suffix of its keys.
    ``rows``: memory for pages that are copied. ``sharded``: each rank of a tensor parallel group has pages of its
    own."""

    name: str
    source: DirectPages | CopiedPages
    behind: bytes
    rows: StagingRows
    sharded: bool


class PoolMove:
    """Pages of one pool that are to be moved. It may take several calls, if there are fewer rows than pages.

    keys, indices, results: of each page its key, its first host index, and its result: HIT if it was moved; FAILED also
        if no call was made for it.
    at: the number of the page that the next call begins with.
    """

    def __init__(self, pool: OpenedPool, keys: list[bytes], indices: list[int]) -> None:
        self.pool = pool
        self.keys = keys
        self.indices = indices
        self.results = [Result.FAILED] * len(keys)
        self.at = 0
        self._slots: list[int] = []
        self._future: Future[list[Result]] | None = None

    @property
    def done(self) -> list[bool]:
        """For each page whether it was moved."""
        return [result is Result.HIT for result in self.results]

    @property
    def failed(self) -> int:
        """The number of pages that were not moved because a store failed or the time was over."""
        return self.results.count(Result.FAILED)

    def begin(self, pages: Pages, way: MoveDirection, until: float) -> None:
        """Begin the next call. None is begun if there is no free row, no time left, or the stores are closed."""
        source, rows = self.pool.source, self.pool.rows
        if isinstance(source, DirectPages):
            self._slots = [index // source.page_size for index in self.indices]
            self._call(pages, way, until)
            return
        self._slots = rows.take(len(self.keys) - self.at, until)
        try:
            if way is MoveDirection.IN or self._loaded(source):
                self._call(pages, way, until)
        finally:
            if self._future is None:
                rows.give_back(self._slots)

    def end(self, way: MoveDirection, until: float) -> bool:
        """Wait for the call, if one was begun. Returns whether another call is to be begun."""
        future, slots, rows, source = self._future, self._slots, self.pool.rows, self.pool.source
        self._future = None
        if future is None:
            return False
        if isinstance(source, DirectPages):
            self._take_over(future.result())
            return False
        try:
            results = future.result(max(0.0, until - monotonic()) + GRACE)
        except TimeoutError:
            future.add_done_callback(lambda _: rows.give_back(slots))
            return False
        if way is MoveDirection.IN:
            results = [
                self._saved(source, row, index) if result is Result.HIT else result
                for index, row, result in zip(self.indices[self.at :], slots, results, strict=False)
            ]
        rows.give_back(slots)
        self._take_over(results)
        return self.at < len(self.keys)

    def _call(self, pages: Pages, way: MoveDirection, until: float) -> None:
        seconds = until - monotonic()
        if not self._slots or seconds <= 0:
            return
        call = pages.put if way is MoveDirection.OUT else pages.get
        try:
            self._future = call(
                self.keys[self.at : self.at + len(self._slots)], self._slots, pool=self.pool.name, timeout=seconds
            )
        except Unavailable as error:
            logger.warning("asynccache: pages of %s are not moved: %s", self.pool.name, error)

    def _loaded(self, source: CopiedPages) -> bool:
        """Copy the pages of the next call into their rows. Returns False if SGLang's pool raised an error; then none of
        them is moved, nor any page after them."""
        try:
            for index, row in zip(self.indices[self.at :], self._slots, strict=False):
                source.load(index, self.pool.rows.memory[row])
        except Exception:
            logger.exception("asynccache: SGLang's pool %s did not give its pages", self.pool.name)
            return False
        return True

    def _saved(self, source: CopiedPages, row: int, index: int) -> Result:
        try:
            source.save(self.pool.rows.memory[row], index)
        except Exception:
            logger.exception("asynccache: SGLang's pool %s did not take a page", self.pool.name)
            return Result.FAILED
        return Result.HIT

    def _take_over(self, results: list[Result]) -> None:
        self.results[self.at : self.at + len(results)] = results
        self.at += len(results)


def move(pages: Pages, way: MoveDirection, moves: list[PoolMove], seconds: float) -> None:
    """Move as many pages of ``moves`` as can be moved within ``seconds``. The results are in each ``PoolMove``."""
    until = monotonic() + seconds
    left = sorted((one for one in moves if one.keys), key=lambda one: one.pool.name)
    while left:
        try:
            for one in left:
                one.begin(pages, way, until)
        finally:
            left = [one for one in left if one.end(way, until)]
