"""Promotion: pages that were found in a farther store are written to the nearer stores that lack them.

A ``get`` copies the pages into memory that is made for them, and a task of its own writes the copies to the
nearer stores.

Laws:
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
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from asynccache.errors import BackendError, Timeout
from asynccache.settle import ThreadPool
from asynccache.storage.contract import PageKey, Result

ROOM_BYTES = 32 << 20


class PromotionTarget(Protocol):
    """A store that pages can be written to. One that was detached meanwhile answers FAILED."""

    async def put(self, keys: Sequence[PageKey], payloads: Sequence[memoryview]) -> list[Result]: ...


class LackingPages(NamedTuple):
    """The pages that ``target`` lacks, as positions in the ``keys`` of ``Promotions.offer`` or of the batch."""

    target: PromotionTarget
    pages: Sequence[int]


class PromotionBatch(NamedTuple):
    """Copied pages that are being promoted. All their copies together take ``size`` bytes. ``promoted`` has for each
    store that has answered how many of them it took."""

    keys: Sequence[PageKey]
    copies: Sequence[memoryview]
    wanted: Sequence[LackingPages]
    size: int
    promoted: list[int]


class Promotions:
    """The promotions of one set of stores.

    ``counts`` has two entries. ``promoted``: pages that were written to a nearer store. ``unpromoted``: pages that were
    not, because there was no room or no memory for a copy, because they were being deleted, or because the store did
    not take them. ``held``: the bytes of memory that all copies take now. ``room``: how many bytes they may take.
    ``threads``: how many threads copy; with 0 the loop does.
    """

    def __init__(self, *, room: int = ROOM_BYTES, threads: int = 1) -> None:
        self.counts: Counter[str] = Counter()
        self.held = 0
        self._room = room
        self._threads = ThreadPool(threads, "asynccache-promotion")
        self._batches: dict[asyncio.Task[None], PromotionBatch] = {}
        self._writing: WeakKeyDictionary[PromotionTarget, asyncio.Lock] = WeakKeyDictionary()
        self._pauses = 0
        self._deletions = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"Promotions({len(self._batches)} batches, {dict(self.counts)})"

    @property
    def deletions(self) -> int:
        """The number of deletions that are over. Pages that were asked for before the latest of them are not promoted,
        since they may be among those that were deleted."""
        return self._deletions

    async def offer(
        self, keys: Sequence[PageKey], payloads: Sequence[memoryview], wanted: Sequence[LackingPages], deletions: int
    ) -> None:
        """Copy the first of these pages, as many as there is room for, and have them promoted later.

        ``wanted`` says which store lacks which of them. ``deletions`` is the property's value at the time when the
        stores were asked for them.
        Returns when the pages are copied. Cancelling it returns when nobody reads the payloads any more; then none of
        them is promoted.
        """
        count = self._fitting(payloads) if self._allowed(deletions) else 0
        self.counts["unpromoted"] += len(payloads) - count
        if not count:
            return
        size = _taken(sum(payload.nbytes for payload in payloads[:count]))
        self.held += size
        begun = False
        try:
            copies = await self._copied(payloads[:count], size)
            begun = self._allowed(deletions)
        except (OSError, MemoryError):
            pass  # there is no memory for the copies; the caller has its pages all the same
        finally:
            if not begun:
                self.counts["unpromoted"] += count
                self.held -= size
        if begun:
            batch = PromotionBatch(keys[:count], copies, [_up_to(count, want) for want in wanted], size, [])
            task = asyncio.get_running_loop().create_task(self._promote(batch), name="asynccache-promotion")
            self._batches[task] = batch
            task.add_done_callback(self._ended)

    def _allowed(self, deletions: int) -> bool:
        return deletions == self._deletions and not self._pauses and not self._closed

    def _fitting(self, payloads: Sequence[memoryview]) -> int:
        """Return for how many of the payloads, from the first on, there is room."""
        size, room = 0, self._room - self.held
        for count, payload in enumerate(payloads):
            size += payload.nbytes
            if _taken(size) > room:
                return count
        return len(payloads)

    async def _copied(self, payloads: Sequence[memoryview], size: int) -> list[memoryview]:
        memory, copies, at = memoryview(mmap.mmap(-1, size)), [], 0  # aligned, as direct I/O needs it
        for payload in payloads:
            copies.append(memory[at : at + payload.nbytes])
            at += payload.nbytes
        await self._threads.spread(_copy, [payload.nbytes for payload in payloads], payloads, copies)
        return copies

    async def _promote(self, batch: PromotionBatch) -> None:
        async with asyncio.TaskGroup() as writing:
            for want in batch.wanted:
                writing.create_task(self._write(batch, want))

    async def _write(self, batch: PromotionBatch, want: LackingPages) -> None:
        """Write to one store the pages of a batch that it lacks, after the batches before."""
        keys, copies = [batch.keys[i] for i in want.pages], [batch.copies[i] for i in want.pages]
        async with self._writing.setdefault(want.target, asyncio.Lock()):
            with suppress(BackendError):  # counted in the end, as where the store answers FAILED
                batch.promoted.append((await want.target.put(keys, copies)).count(Result.HIT))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Count what became of a batch, and free its memory. Called when its task has ended, even if that was cancelled
        before it began."""
        batch = self._batches.pop(task)
        self.held -= batch.size
        promoted = sum(batch.promoted)
        self.counts["promoted"] += promoted
        self.counts["unpromoted"] += sum(len(want.pages) for want in batch.wanted) - promoted

    async def idle(self) -> None:
        """Wait until no page is being promoted. Cancelling it only stops the waiting."""
        while self._batches:
            await asyncio.wait(self._batches)

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
            self._deletions += 1
            self._pauses -= 1

    async def _cancel(self, keys: frozenset[PageKey] | None, patience: float | None = None) -> bool:
        """Cancel every batch that has one of ``keys`` (None: every batch), and wait until these have ended, for
        ``patience`` seconds at most. Returns True if one of them has not."""
        ending = [task for task, batch in self._batches.items() if keys is None or not keys.isdisjoint(batch.keys)]
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


def _taken(size: int) -> int:
    """Return how many bytes of memory a mapping of ``size`` bytes takes: whole pages of the machine's memory."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _up_to(count: int, want: LackingPages) -> LackingPages:
    return LackingPages(want.target, [page for page in want.pages if page < count])


def _copy(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
    import numpy as np  # imported here because commands that only inspect a store do without NumPy

    for source, target in zip(sources, targets, strict=True):
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
