"""One batch of pages of one or several pools, to the stores or back, within a time.

Laws:
* The calls of all pools are begun before any is waited for.
* A batch ends at its deadline, and what is not known to have been moved by then was not. Pages that are copied have
  rows of their own, so nobody waits for a store that does not let go of them. A store that has pages of a pool itself
  (``Direct``) is waited for even then: it may still be writing into them.
* Rows are taken in the order of the pools' names, so batches do not wait for each other in a ring.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, TimeoutError
from enum import Enum
from time import monotonic
from typing import NamedTuple

from asynccache.errors import Unavailable
from asynccache.storage import Pages, Result
from asynccache_sglang.pools import Copied, Direct
from asynccache_sglang.rows import StagingRows

logger = logging.getLogger(__name__)

GRACE = 0.25
"""Seconds that a call which was called off has to say what it came to. Who waits for it waits no longer."""


class Way(Enum):
    """``OUT``: to the stores. ``IN``: back."""

    OUT = "out"
    IN = "in"


class Pool(NamedTuple):
    """A pool that the stores know. ``behind``: the suffix of its keys. ``rows``: for the pages that are copied.
    ``sharded``: each rank of a tensor parallel group has pages of its own."""

    name: str
    source: Direct | Copied
    behind: bytes
    rows: StagingRows
    sharded: bool


class Move:
    """Pages of one pool; ``source``: another one than the pool's, with pages that look the same. ``results``: of each
    page, HIT if it was moved; FAILED also where no call was made. ``at`` is where the next call begins."""

    def __init__(self, pool: Pool, keys: list[bytes], indices: list[int], source: Copied | None = None) -> None:
        self.pool = pool
        self.keys = keys
        self.indices = indices
        self.source = pool.source if source is None else source
        self.results = [Result.FAILED] * len(keys)
        self.at = 0
        self._slots: list[int] = []
        self._future: Future[list[Result]] | None = None

    @property
    def done(self) -> list[bool]:
        """Of each page, whether it was moved."""
        return [result is Result.HIT for result in self.results]

    @property
    def failed(self) -> int:
        """Pages that were not moved for a store's sake, or for lack of time."""
        return self.results.count(Result.FAILED)

    def begin(self, pages: Pages, way: Way, until: float) -> None:
        """Begin the next call. None is begun if there is no row, no time or no store for it."""
        source, rows = self.source, self.pool.rows
        if isinstance(source, Direct):
            self._slots = [index // source.page_size for index in self.indices]
            self._call(pages, way, until)
            return
        self._slots = rows.take(len(self.keys) - self.at, until)
        try:
            if way is Way.OUT:
                for index, row in zip(self.indices[self.at :], self._slots, strict=False):
                    source.load(index, rows.memory[row])
            self._call(pages, way, until)
        finally:
            if self._future is None:
                rows.give_back(self._slots)

    def end(self, way: Way, until: float) -> bool:
        """Wait for the call, if one was begun. Returns whether there is more to do."""
        future, slots, rows, source = self._future, self._slots, self.pool.rows, self.source
        self._future = None
        if future is None:
            return False
        if isinstance(source, Direct):
            self._take_over(future.result())
            return False
        try:
            results = future.result(max(0.0, until - monotonic()) + GRACE)
        except TimeoutError:
            future.add_done_callback(lambda _: rows.give_back(slots))
            return False
        if way is Way.IN:
            results = [
                self._saved(source, row, index) if result is Result.HIT else result
                for index, row, result in zip(self.indices[self.at :], slots, results, strict=False)
            ]
        rows.give_back(slots)
        self._take_over(results)
        return self.at < len(self.keys)

    def _call(self, pages: Pages, way: Way, until: float) -> None:
        seconds = until - monotonic()
        if not self._slots or seconds <= 0:
            return
        call = pages.put if way is Way.OUT else pages.get
        try:
            self._future = call(
                self.keys[self.at : self.at + len(self._slots)], self._slots, pool=self.pool.name, timeout=seconds
            )
        except Unavailable as error:
            logger.warning("asynccache: pages of %s are not moved: %s", self.pool.name, error)

    def _saved(self, source: Copied, row: int, index: int) -> Result:
        try:
            source.save(self.pool.rows.memory[row], index)
        except Exception:
            logger.exception("asynccache: SGLang's pool %s did not take a page", self.pool.name)
            return Result.FAILED
        return Result.HIT

    def _take_over(self, results: list[Result]) -> None:
        self.results[self.at : self.at + len(results)] = results
        self.at += len(results)


def move(pages: Pages, way: Way, moves: list[Move], seconds: float) -> None:
    """Move them all, or as many as can be within ``seconds``; each says itself what became of it."""
    until = monotonic() + seconds
    left = sorted((one for one in moves if one.keys), key=lambda one: one.pool.name)
    while left:
        try:
            for one in left:
                one.begin(pages, way, until)
        finally:
            left = [one for one in left if one.end(way, until)]
