"""Copying pages that a farther store had into nearer ones: later, from copies, and only as far as that costs little.

Laws: whoever read the pages waits for their copy and for nothing else. There is a fixed run of memory for copies, and
what does not fit in it is dropped. A promotion that fails is counted and nothing more. What is being forgotten is not
promoted: nobody finds in a nearer store what was deleted from all.
"""

from __future__ import annotations

import asyncio
import mmap
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol

from asynccache.errors import BackendError
from asynccache.settle import settled
from asynccache.storage.contract import PageKey, Result
from asynccache.storage.workers import Workers

PROMOTION_POOL = "#promotions"
ROOM_BYTES = 32 << 20
INLINE_BYTES = 128 << 10


class Target(Protocol):
    """A store that pages may be put into, or that is gone."""

    async def put(self, keys: Sequence[PageKey], payloads: Sequence[memoryview]) -> list[Result]: ...


class Wanted(NamedTuple):
    """The pages, by their place in the call, that ``target`` lacks."""

    target: Target
    pages: Sequence[int]


class Span:
    """A run of a ring's memory that is taken until it is ``free``."""

    __slots__ = ("end", "free", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self.free = False


class Ring:
    """Memory that is given back about in the order in which it was taken; nothing in it ever moves."""

    def __init__(self, size: int) -> None:
        self.memory = memoryview(mmap.mmap(-1, size))
        self._spans: deque[Span] = deque()

    def __repr__(self) -> str:
        return f"Ring({self.memory.nbytes} bytes, {len(self._spans)} spans)"

    def room(self) -> tuple[int, int]:
        """The longest run that is free: where it begins and ends."""
        if not self._spans:
            return 0, self.memory.nbytes
        head, tail = self._spans[-1].end, self._spans[0].start
        if head <= tail:
            return head, tail
        return max((head, self.memory.nbytes), (0, tail), key=lambda run: run[1] - run[0])

    def take(self, size: int) -> Span:
        """The first ``size`` bytes of that run."""
        start, end = self.room()
        assert 0 < size <= end - start
        span = Span(start, start + size)
        self._spans.append(span)
        return span

    def give(self, span: Span) -> None:
        """Nobody reads ``span`` any more."""
        span.free = True
        while self._spans and self._spans[0].free:
            self._spans.popleft()


class Batch(NamedTuple):
    keys: Sequence[PageKey]
    copies: Sequence[memoryview]
    wanted: Sequence[Wanted]
    span: Span


class Promotions:
    """The promotions of one set of stores. ``counts``: pages ``promoted``, and ``unpromoted`` because there was no
    memory for them, they were being forgotten, or the store did not take them. ``threads`` 0: copies on the loop."""

    def __init__(self, *, room: int = ROOM_BYTES, threads: int = 1) -> None:
        self.counts: Counter[str] = Counter()
        self.ring = Ring(room)
        self._workers = Workers(threads, "asynccache-promotion") if threads else None
        self._queue: deque[Batch] = deque()
        self._task: asyncio.Task[None] | None = None
        self._now: Batch | None = None
        self._forgetting = 0
        self._era = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"Promotions({len(self._queue)} batches wait, {dict(self.counts)})"

    @property
    def era(self) -> int:
        """Rises whenever something was forgotten: what was read before is not promoted after."""
        return self._era

    async def offer(
        self, keys: Sequence[PageKey], payloads: Sequence[memoryview], wanted: Sequence[Wanted], era: int
    ) -> None:
        """Copy these pages, as far as there is memory for copies, and promote them later. ``era``: when it was asked
        for them. Cancelling it returns when nobody reads the payloads any more; they are not promoted then."""
        count = self._fitting(payloads) if self._may(era) else 0
        self.counts["unpromoted"] += len(payloads) - count
        if not count:
            return
        span = self.ring.take(sum(payload.nbytes for payload in payloads[:count]))
        queued = False
        try:
            copies = await self._copied(payloads[:count], span)
            queued = self._may(era)
        finally:
            if not queued:
                self.counts["unpromoted"] += count
                self.ring.give(span)
        if queued:
            self._queue.append(Batch(keys[:count], copies, [_up_to(count, want) for want in wanted], span))
            self._go_on()

    def _may(self, era: int) -> bool:
        return era == self._era and not self._forgetting and not self._closed

    def _fitting(self, payloads: Sequence[memoryview]) -> int:
        """How many of the first ones there is memory for."""
        start, end = self.ring.room()
        for count, payload in enumerate(payloads):
            start += payload.nbytes
            if start > end:
                return count
        return len(payloads)

    async def _copied(self, payloads: Sequence[memoryview], span: Span) -> list[memoryview]:
        copies, at = [], span.start
        for payload in payloads:
            copies.append(self.ring.memory[at : at + payload.nbytes])
            at += payload.nbytes
        if self._workers is None or at - span.start <= INLINE_BYTES:
            _copy(payloads, copies)
        else:
            copying = self._workers.call(_copy, payloads, copies)
            await settled([copying])
            copying.result()
        return copies

    def _go_on(self, ended: asyncio.Task[None] | None = None) -> None:
        """Have a task, if there is anything to do: also after one that was ended for what is forgotten by now."""
        if self._queue and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run(), name="asynccache-promotions")
            self._task.add_done_callback(self._go_on)

    async def _run(self) -> None:
        while self._queue:
            self._now = batch = self._queue.popleft()
            try:
                for want in batch.wanted:
                    await self._promote(batch, want)
            finally:
                self._now = None
                self.ring.give(batch.span)

    async def _promote(self, batch: Batch, want: Wanted) -> None:
        stored = 0
        try:
            results = await want.target.put([batch.keys[i] for i in want.pages], [batch.copies[i] for i in want.pages])
            stored = results.count(Result.HIT)
        except BackendError:
            pass  # as if the store had answered FAILED
        finally:
            self.counts["promoted"] += stored
            self.counts["unpromoted"] += len(want.pages) - stored

    async def idle(self) -> None:
        """Return when nothing waits to be promoted and nothing is being promoted. Cancelling it stops the waiting."""
        self._go_on()
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])
            self._go_on()

    @asynccontextmanager
    async def forgetting(self, keys: Collection[PageKey] | None = None) -> AsyncIterator[None]:
        """None of ``keys`` (None: nothing at all) is promoted meanwhile, nor later from what was read before its end;
        other pages that wait are. It begins when the store that one of them was being put into has let go."""
        self._forgetting += 1
        try:
            ending = self._drop(None if keys is None else frozenset(keys))
            if ending is not None:
                await asyncio.wait([ending])
            yield
        finally:
            self._era += 1
            self._forgetting -= 1

    def _drop(self, keys: frozenset[PageKey] | None) -> asyncio.Task[None] | None:
        """Leave out every batch that has one of ``keys``; the task that ends, if it was about one."""
        waiting, self._queue = self._queue, deque()
        for batch in waiting:
            if keys is None or not keys.isdisjoint(batch.keys):
                self.counts["unpromoted"] += len(batch.copies)
                self.ring.give(batch.span)
            else:
                self._queue.append(batch)
        if self._task is None or self._now is None or not (keys is None or not keys.isdisjoint(self._now.keys)):
            return None
        self._task.cancel()
        return self._task

    async def aclose(self) -> None:
        """End what is under way, drop what waits. Twice is fine. Cancelling it stops the waiting."""
        self._closed = True
        self._drop(None)
        await self.idle()
        if self._workers is not None:
            self._workers.close()


def _up_to(count: int, want: Wanted) -> Wanted:
    return Wanted(want.target, [page for page in want.pages if page < count])


def _copy(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
    import numpy as np  # here, so that whoever only looks at a store need not load it

    for source, target in zip(sources, targets, strict=True):
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
