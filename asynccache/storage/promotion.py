"""Promotion: pages that were found in a farther store are written to the nearer stores that lack them.

A ``get`` copies the pages into memory that is made for them, and a task writes the copies to the nearer stores later.

Laws:
* The caller of ``get`` waits until its pages are copied, and for nothing else.
* The copies that exist at a time have ``room`` bytes at most. Pages for which there is no room are not promoted.
* A promotion that fails is counted; there is no error and no second try.
* Pages that are being deleted are not promoted: no page that was deleted from all stores appears in a nearer one.
"""

from __future__ import annotations

import asyncio
import mmap
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol

from asynccache.errors import BackendError
from asynccache.settle import Workers
from asynccache.storage.contract import PageKey, Result

ROOM_BYTES = 32 << 20
INLINE_BYTES = 128 << 10
"""Up to so many bytes are copied on the loop, because handing them to a thread would cost more."""


class PromotionTarget(Protocol):
    """A store that pages can be written to. One that was detached meanwhile answers FAILED."""

    async def put(self, keys: Sequence[PageKey], payloads: Sequence[memoryview]) -> list[Result]: ...


class LackingPages(NamedTuple):
    """The pages that ``target`` lacks: their positions in the call's list of keys."""

    target: PromotionTarget
    pages: Sequence[int]


class PromotionBatch(NamedTuple):
    """Copied pages that wait to be promoted. All their copies together have ``size`` bytes."""

    keys: Sequence[PageKey]
    copies: Sequence[memoryview]
    wanted: Sequence[LackingPages]
    size: int


class Promotions:
    """The promotions of one set of stores.

    ``counts`` has two entries. ``promoted``: pages that were written to a nearer store. ``unpromoted``: pages that were
    not, because there was no memory for a copy, because they were being deleted, or because the store did not take
    them. ``held``: the bytes of all copies that exist now. ``room``: how many these may be. ``threads``: how many
    threads copy; with 0 the loop does.
    """

    def __init__(self, *, room: int = ROOM_BYTES, threads: int = 1) -> None:
        self.counts: Counter[str] = Counter()
        self.held = 0
        self._room = room
        self._workers = Workers(threads, "asynccache-promotion") if threads else None
        self._queue: deque[PromotionBatch] = deque()
        self._task: asyncio.Task[None] | None = None
        self._current: PromotionBatch | None = None
        self._pauses = 0
        self._era = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"Promotions({len(self._queue)} batches wait, {dict(self.counts)})"

    @property
    def era(self) -> int:
        """A number that rises after every deletion. Pages that were asked for in an earlier era are not promoted, since
        they may be among those that were deleted."""
        return self._era

    async def offer(
        self, keys: Sequence[PageKey], payloads: Sequence[memoryview], wanted: Sequence[LackingPages], era: int
    ) -> None:
        """Copy the first of these pages, as many as there is room for, and have them promoted later.

        ``wanted`` says which store lacks which of them. ``era`` is the era in which the stores were asked for them.
        Returns when the pages are copied. Cancelling it returns when nobody reads the payloads any more; then none of
        them is promoted.
        """
        count = self._fitting(payloads) if self._allowed(era) else 0
        self.counts["unpromoted"] += len(payloads) - count
        if not count:
            return
        size = sum(payload.nbytes for payload in payloads[:count])
        self.held += size
        queued = False
        try:
            copies = await self._copied(payloads[:count], size)
            queued = self._allowed(era)
        finally:
            if not queued:
                self.counts["unpromoted"] += count
                self.held -= size
        if queued:
            self._queue.append(PromotionBatch(keys[:count], copies, [_up_to(count, want) for want in wanted], size))
            self._go_on()

    def _allowed(self, era: int) -> bool:
        return era == self._era and not self._pauses and not self._closed

    def _fitting(self, payloads: Sequence[memoryview]) -> int:
        """Return for how many of the payloads, from the first on, there is room."""
        left = self._room - self.held
        for count, payload in enumerate(payloads):
            left -= payload.nbytes
            if left < 0:
                return count
        return len(payloads)

    async def _copied(self, payloads: Sequence[memoryview], size: int) -> list[memoryview]:
        memory, copies, at = memoryview(mmap.mmap(-1, size)), [], 0  # aligned, as direct I/O needs it
        for payload in payloads:
            copies.append(memory[at : at + payload.nbytes])
            at += payload.nbytes
        if self._workers is None or size <= INLINE_BYTES:
            _copy(payloads, copies)
        else:
            await self._workers.run(_copy, payloads, copies)
        return copies

    def _go_on(self, ended: asyncio.Task[None] | None = None) -> None:
        """Start the task that promotes, if there is a batch and no task. It is also called when a task has ended: one
        that was cancelled because of a deletion may have left other batches."""
        if self._queue and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run(), name="asynccache-promotions")
            self._task.add_done_callback(self._go_on)

    async def _run(self) -> None:
        while self._queue:
            self._current = batch = self._queue.popleft()
            try:
                for want in batch.wanted:
                    await self._promote(batch, want)
            finally:
                self._current = None
                self.held -= batch.size

    async def _promote(self, batch: PromotionBatch, want: LackingPages) -> None:
        stored = 0
        try:
            results = await want.target.put([batch.keys[i] for i in want.pages], [batch.copies[i] for i in want.pages])
            stored = results.count(Result.HIT)
        except BackendError:
            pass  # counted below, as where the store answers FAILED
        finally:
            self.counts["promoted"] += stored
            self.counts["unpromoted"] += len(want.pages) - stored

    async def idle(self) -> None:
        """Wait until no page waits to be promoted or is being promoted. Cancelling it only stops the waiting."""
        self._go_on()
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])
            self._go_on()

    @asynccontextmanager
    async def paused(self, keys: Collection[PageKey] | None = None) -> AsyncIterator[None]:
        """A context in which ``keys`` (None: all pages) can be deleted from the stores.

        Batches with one of these keys are dropped. If one of them is being written, its writing is cancelled, and the
        context begins when the store has let go of it. In the context no page is taken up for promotion, and after it
        none that was read before its end. Batches without any of these keys are promoted as usual.
        """
        self._pauses += 1
        try:
            ending = self._drop(None if keys is None else frozenset(keys))
            if ending is not None:
                await asyncio.wait([ending])
            yield
        finally:
            self._era += 1
            self._pauses -= 1

    def _drop(self, keys: frozenset[PageKey] | None) -> asyncio.Task[None] | None:
        """Drop every batch that has one of ``keys`` (None: every batch). If the current one is among them, cancel the
        task that promotes it and return that task, which is still to end; else return None."""
        waiting, self._queue = self._queue, deque()
        for batch in waiting:
            if keys is None or not keys.isdisjoint(batch.keys):
                self.counts["unpromoted"] += len(batch.copies)
                self.held -= batch.size
            else:
                self._queue.append(batch)
        if self._task is None or self._current is None or (keys is not None and keys.isdisjoint(self._current.keys)):
            return None
        self._task.cancel()
        return self._task

    async def aclose(self) -> None:
        """Cancel the promotion under way, drop what waits, and return when that has ended. Calling it twice is fine.
        Cancelling it only stops the waiting."""
        self._closed = True
        self._drop(None)
        await self.idle()
        if self._workers is not None:
            self._workers.close()


def _up_to(count: int, want: LackingPages) -> LackingPages:
    return LackingPages(want.target, [page for page in want.pages if page < count])


def _copy(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
    import numpy as np  # imported here because commands that only inspect a store do without NumPy

    for source, target in zip(sources, targets, strict=True):
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
