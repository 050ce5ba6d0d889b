"""Prefetches that have read their pages, on their way into the tree: one queue, and one task that commits them.

Laws:
* A fetch that has read what it wanted puts its commit into the queue and waits for a future of its own. The queue has
  no bound: putting never waits, and the core bounds the prefetches in flight.
* The committing task takes the tree lock once and commits everything that waits by then.
* A commit that must wait for another operation (a backup of the same pages) is put into the queue again when that
  operation has ended. Nothing waits behind it meanwhile.
* A fetch that is cancelled takes its commit back: the committing task passes over it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from asynccache.runtime.driver import Driver
from asynccache.runtime.driving import holding

Commit = Callable[[], Sequence[int]]
"""Called under the tree lock. Commits, and returns an empty sequence; or changes nothing, and returns the operations of
which one must end first."""


class PrefetchCommit(NamedTuple):
    """One fetch that has read its pages. ``committed``: done when they are in the tree."""

    commit: Commit
    committed: asyncio.Future[None]


class PrefetchCommits:
    """The queue of one cache: fetches that have read their pages, each with its commit."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._queue: asyncio.Queue[PrefetchCommit] = asyncio.Queue()

    def __repr__(self) -> str:
        return f"PrefetchCommits({len(self)} wait)"

    def __len__(self) -> int:
        return self._queue.qsize()

    async def committed(self, commit: Commit) -> None:
        """Have ``commit`` called, and return when it has succeeded. Cancelling it takes the commit back, unless it has
        been made already."""
        completion = PrefetchCommit(commit, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(completion)
        await completion.committed

    async def run(self) -> None:
        """Make the commits as they come, for ever.

        Raises:
            CacheClosed: the cache is closed.
        """
        while True:
            await self._commit_all(await self._queue.get())

    async def _commit_all(self, first: PrefetchCommit) -> None:
        """Commit ``first`` and all that wait. In a frame of its own: a reference that ``run`` kept would keep the
        handles of prefetches alive that nobody has any more."""
        async with holding(self._driver.lock):
            self._driver.apply_outcomes()
            for completion in (first, *self._take()):
                self._commit(completion)

    def _take(self) -> list[PrefetchCommit]:
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]

    def _commit(self, completion: PrefetchCommit) -> None:
        if completion.committed.done():  # its fetch was cancelled
            return
        blockers = completion.commit()
        if blockers:
            self._driver.ops.call_when_any(blockers, partial(self._queue.put_nowait, completion))
        else:
            completion.committed.set_result(None)
