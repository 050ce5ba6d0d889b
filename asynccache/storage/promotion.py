"""Promotion: pages that were found in a farther store are written to the nearer stores that lack them.

A ``get`` copies the pages into memory that is made for them, and a task of its own writes the copies to the
nearer stores.

What always holds:
* The caller of ``get`` waits until its pages are copied, and for nothing else.
* The copies that exist at a time take ``room`` bytes of memory at most. Pages for which there is no room, or no memory,
  are not promoted.
* One batch is written to a store at a time, so promotions take one place of a store's calls and leave the others to its
  users. The stores do not wait for each other, but a batch keeps its memory until the slowest of them has it.
* A promotion that fails is counted; there is no error and no second try.
* Pages that are being deleted are not promoted. So a page that was deleted from all stores does not come back in one.
"""

from __future__ import annotations

import asyncio
import mmap
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import accumulate, pairwise
from typing import Protocol
from weakref import WeakKeyDictionary

from asynccache.errors import BackendError, Timeout
from asynccache.settle import ThreadPool
from asynccache.storage.contract import PageKey, Result

ROOM_BYTES = 32 << 20


class PromotionTarget(Protocol):
    """A store that pages can be written to: an ``AttachedStore``. One that was detached meanwhile answers FAILED."""

    async def put(self, keys: Sequence[PageKey], payloads: Sequence[memoryview]) -> list[Result]: ...


Lacking = Sequence[tuple[PromotionTarget, Sequence[int]]]
"""Stores, and for each of them the pages that it lacks, as positions in the ``keys`` of ``Promotions.offer``."""


class Promotions:
    """The promotions of one set of stores.

    ``counts`` has two entries. ``promoted``: pages that were written to a nearer store. ``unpromoted``: pages that were
    not, because there was no room or no memory for a copy, because they were being deleted, or because the store did
    not take them. ``room``: how many bytes they may take. ``threads``: how many threads copy; with 0 the loop does.
    """

    def __init__(self, *, room: int = ROOM_BYTES, threads: int = 1) -> None:
        self.counts: Counter[str] = Counter()
        self.held = 0
        """The bytes of memory that all copies take now."""
        self._room = room
        self._threads = ThreadPool(threads, "asynccache-promotion")
        self._batches: dict[asyncio.Task[None], Sequence[PageKey]] = {}
        self._writing: WeakKeyDictionary[PromotionTarget, asyncio.Lock] = WeakKeyDictionary()
        self._pauses = 0
        self.deletions = 0
        """How many deletions are over. Pages that were asked for before the latest of them are not promoted, since they
        may be among those that were deleted."""
        self._closed = False

    def __repr__(self) -> str:
        return f"Promotions({len(self._batches)} batches, {dict(self.counts)})"

    async def offer(
        self, keys: Sequence[PageKey], payloads: Sequence[memoryview], wanted: Lacking, deletions: int
    ) -> None:
        """Copy the first of these pages, as many as there is room for, and have them promoted later.

        ``deletions``: what the attribute was when the stores were asked for the pages. Returns when the pages are
        copied. Cancelling it returns when nobody reads the payloads any more; then none of them is promoted.
        """
        ends = [0, *accumulate(payload.nbytes for payload in payloads)]
        most = (self._room - self.held) // mmap.PAGESIZE * mmap.PAGESIZE  # a mapping takes whole pages of memory
        count = bisect_right(ends, most) - 1 if self._allowed(deletions) else 0
        self.counts["unpromoted"] += len(payloads) - count
        if not count:
            return
        size = -(-ends[count] // mmap.PAGESIZE) * mmap.PAGESIZE
        self.held += size
        begun = False
        try:
            memory = memoryview(mmap.mmap(-1, size))  # aligned, as direct I/O needs it
            copies = [memory[start:end] for start, end in pairwise(ends[: count + 1])]
            await self._threads.spread(_copy, [copy.nbytes for copy in copies], payloads[:count], copies)
            begun = self._allowed(deletions)
        except (OSError, MemoryError):
            pass  # there is no memory for the copies; the caller has its pages all the same
        finally:
            if not begun:
                self.counts["unpromoted"] += count
                self.held -= size
        if begun:
            parts = [(target, [page for page in pages if page < count]) for target, pages in wanted]
            self._begin(keys[:count], copies, parts, size)

    def _allowed(self, deletions: int) -> bool:
        return deletions == self.deletions and not self._pauses and not self._closed

    def _begin(
        self, keys: Sequence[PageKey], copies: Sequence[memoryview], wanted: Lacking, size: int
    ) -> None:
        """Write copied pages to the stores that lack them. All the copies together take ``size`` bytes."""
        promoted: list[int] = []

        async def write(target: PromotionTarget, pages: Sequence[int]) -> None:
            async with self._writing.setdefault(target, asyncio.Lock()):  # after the batches before
                with suppress(BackendError):  # counted in the end, as where the store answers FAILED
                    answers = await target.put([keys[i] for i in pages], [copies[i] for i in pages])
                    promoted.append(answers.count(Result.HIT))

        async def write_all() -> None:
            async with asyncio.TaskGroup() as writing:
                for target, pages in wanted:
                    writing.create_task(write(target, pages))

        def ended(task: asyncio.Task[None]) -> None:  # also called if the task was cancelled before it began
            del self._batches[task]
            self.held -= size
            self.counts["promoted"] += sum(promoted)
            self.counts["unpromoted"] += sum(len(pages) for _, pages in wanted) - sum(promoted)

        task = asyncio.get_running_loop().create_task(write_all(), name="asynccache-promotion")
        self._batches[task] = keys
        task.add_done_callback(ended)

    @asynccontextmanager
    async def paused(self, patience: float, keys: Collection[PageKey] | None = None) -> AsyncIterator[None]:
        """A context in which ``keys`` (None: all pages) can be deleted from the stores.

        A batch with one of these keys is cancelled, and the context begins when the stores have let go of it. In the
        context no page is taken up for promotion. After the context no page is promoted that was asked for before its
        end. Batches without any of these keys are promoted as usual.

        Raises:
            Timeout: a store has not let go after ``patience`` seconds. So what is deleted could come back.
        """
        self._pauses += 1
        try:
            if await self._cancel(None if keys is None else frozenset(keys), patience):
                raise Timeout(f"a page that is being promoted: a store has not let go of it after {patience} s")
            yield
        finally:
            self.deletions += 1
            self._pauses -= 1

    async def _cancel(self, keys: frozenset[PageKey] | None, patience: float | None = None) -> bool:
        """Cancel every batch that has one of ``keys`` (None: every batch), and wait until these have ended, for
        ``patience`` seconds at most. Returns True if one of them has not."""
        ending = [task for task, pages in self._batches.items() if keys is None or not keys.isdisjoint(pages)]
        for task in ending:
            task.cancel()
        if not ending:
            return False
        _, left = await asyncio.wait(ending, timeout=patience)
        return bool(left)

    async def aclose(self) -> None:
        """Cancel the promotions under way, and return when they have ended. Calling it twice is fine. Cancelling it
        only stops the waiting: the promotions end soon, and no thread stays."""
        self._closed = True
        try:
            await self._cancel(None)
        finally:
            self._threads.close()


def _copy(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
    import numpy as np  # imported here because commands that only inspect a store do without NumPy

    for source, target in zip(sources, targets, strict=True):
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
