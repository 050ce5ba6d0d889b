"""backup_storage: host to storage. Several batches in flight; an operation is DONE only if every page of it is stored.

Auxiliary components and sidecars go before FULL (``PoolMap.written``): an order that helps a reader who looks at FULL
alone, never a proof. Of an operation that has failed, nothing more is written.

Law: no request waits for what storage has not written yet. What waits and what is in flight keep to the backlog's
limits together: the oldest that waits is dropped for the newest. A batch that takes longer than ``PATIENCE`` is late,
and the core is told (``late``): then nobody waits for host pages that storage has pinned. One that takes longer than
``TOO_LATE`` while others wait, and too much is held, gives up what it has not written, between two calls of the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from asynccache.config import PoolSpec
from asynccache.core.plan import BackupStorage, Outcome, Status
from asynccache.runtime.poolmap import SLOT_BYTES, PoolMap
from asynccache.runtime.stages.backlog import Backlog, pages_of
from asynccache.runtime.stages.queue import Inbox
from asynccache.runtime.stats import Meter
from asynccache.storage import PageKey, Result

WORKERS = 4
BATCH_OPS = 16
BATCH_PAGES = 128
PATIENCE = 0.1
TOO_LATE = 1.0


class Store(Protocol):
    """The part of ``CheckedStore`` that this stage uses."""

    async def put(self, keys: Sequence[PageKey], payloads: Sequence[memoryview]) -> list[Result]: ...


class Queued(NamedTuple):
    effect: BackupStorage
    at: float


class Page(NamedTuple):
    """One page on its way: which operation it belongs to, its key and its bytes."""

    op: int
    key: PageKey
    payload: memoryview


class BackupStorageStage:
    """A queue of ``BackupStorage`` effects and its workers."""

    def __init__(
        self, store: Store, pools: PoolMap, post: Callable[[Outcome], None], clock: Callable[[], float],
        backlog: Backlog, late: Callable[[bool], None],
    ) -> None:  # fmt: skip
        self.backlog = backlog
        self.meter = Meter()
        self._store = store
        self._pools = pools
        self._post = post
        self._clock = clock
        self._inbox: Inbox[Queued] = Inbox()
        self._changed = asyncio.Event()
        self._late = late
        self._is_late = False
        self._overdue: set[int] = set()

    def __repr__(self) -> str:
        return f"BackupStorageStage({len(self._inbox)} queued, {self.backlog!r}, {self.meter!r})"

    def __len__(self) -> int:
        return len(self._inbox)

    def put(self, effect: BackupStorage) -> None:
        """Queue the effect; its outcome is posted exactly once."""
        self._inbox.put(Queued(effect, self._clock()))
        self.backlog.add(effect)
        self._inbox.take_while(self._dropped)
        self._changed.set()

    async def run(self) -> None:
        """Store batch after batch, for ever. Cancelling it returns after the store has let go of the pages; their
        outcomes are abandoned."""
        while True:
            await self._inbox.filled()
            if batch := self._take():
                await self._store_in_time(batch)
                self._changed.set()
            else:
                self._changed.clear()
                await self._changed.wait()

    def _dropped(self, oldest: Queued) -> bool:
        """Drop what waits longest, if more waits than may, and something else waits."""
        if not self.backlog.over or len(self._inbox) == 1:
            return False
        self.backlog.drop(oldest.effect)
        self._post(Outcome(oldest.effect.op, Status.FAILED))
        return True

    def _take(self) -> list[Queued]:
        """Operations that are a batch together; none, if too much is in flight."""
        pages = ops = 0

        def wanted(queued: Queued) -> bool:
            nonlocal pages, ops
            pages, ops = pages + pages_of(queued.effect), ops + 1
            fits = ops == 1 or (ops <= BATCH_OPS and pages <= BATCH_PAGES)
            return fits and self.backlog.fly(queued.effect)

        return self._inbox.take_while(wanted)

    async def _store_in_time(self, batch: Sequence[Queued]) -> None:
        loop, first = asyncio.get_running_loop(), batch[0].effect.op
        timer = loop.call_later(PATIENCE, self._note_late, first)
        try:
            await self._store_batch(batch, loop.time())
        finally:
            timer.cancel()
            if first in self._overdue:
                self._overdue.remove(first)
            elif self._is_late and not self._overdue:
                self._is_late = False
                self._late(False)

    def _note_late(self, first: int) -> None:
        self._overdue.add(first)
        if not self._is_late:
            self._is_late = True
            self._late(True)

    async def _store_batch(self, batch: Sequence[Queued], began: float) -> None:
        left = {effect.op: self._weight(effect) for effect, _ in batch}
        failed: set[int] = set()
        for pools in self._pools.written:
            pages = self._pages(batch, failed, pools)
            while part := list(islice(pages, BATCH_PAGES)):
                await self._put(part, left, failed)
                if self._is_in_the_way(began):
                    failed.update(op for op, pages_left in left.items() if pages_left)
        for queued in batch:
            self._end(queued, failed)

    def _is_in_the_way(self, began: float) -> bool:
        waits = len(self._inbox) > 0 and self.backlog.over
        return waits and asyncio.get_running_loop().time() - began > TOO_LATE

    def _end(self, queued: Queued, failed: set[int]) -> None:
        effect, at = queued
        self.meter.took(self._clock() - at)
        self.backlog.land(effect)
        if effect.op in failed:
            self.meter.errors += 1
            self._post(Outcome(effect.op, Status.FAILED))
        else:
            self.meter.count(1, 0, 0, 0)
            self._post(Outcome(effect.op, Status.DONE))

    async def _put(self, part: Sequence[Page], left: dict[int, int], failed: set[int]) -> None:
        results = await self._store.put([page.key for page in part], [page.payload for page in part])
        for page, result in zip(part, results, strict=True):
            if result is Result.HIT:
                left[page.op] -= 1
                self.meter.count(0, 1, int(self._pools.counts(page.key.pool)), page.payload.nbytes)
            else:
                failed.add(page.op)

    def _weight(self, effect: BackupStorage) -> int:
        """How many pages storing it writes, in all pools."""
        return sum(
            len(pages.slots) // SLOT_BYTES * len(pools.get(pages.component, ()))
            for pools in self._pools.written
            for pages in effect.pages
        )

    def _pages(
        self, batch: Sequence[Queued], failed: set[int], pools: Mapping[int, Sequence[PoolSpec]]
    ) -> Iterator[Page]:
        """The pages of ``pools``, by component; of operations that have not failed yet."""
        for effect, _ in batch:
            for component, hashes, slots in effect.pages:
                for spec in pools.get(component, ()):
                    for key, payload in self._pools.entries(spec.name, hashes, slots):
                        if effect.op in failed:
                            break
                        yield Page(effect.op, key, payload)
