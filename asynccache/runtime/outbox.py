"""Backups to storage on their way to the worker. Several batches in flight; an operation is DONE only if every page of
it is stored.

Law: no request waits for what storage has not written yet. What waits and what is in flight keep to the backlog's
limits together: the oldest that waits is dropped for the newest. A batch that takes longer than ``PATIENCE`` is late,
and the core is told (``late``): then nobody waits for host pages that storage has pinned. One that takes longer than
``TOO_LATE`` while others wait, and too much is held, gives up what it has not written, between two calls of a store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from asynccache.core.plan import BackupStorage, Outcome, Status
from asynccache.runtime.backlog import Backlog, pages_of
from asynccache.worker.contract import Stored
from asynccache.worker.inbox import Inbox
from asynccache.worker.stats import Meter

WORKERS = 16  # a batch takes several turns of a busy loop, so few in flight leave the store idle where pages are small
BATCH_OPS = 16
BATCH_PAGES = 128
PATIENCE = 0.1
TOO_LATE = 1.0


class Writer(Protocol):
    """The part of ``Worker`` that is used here."""

    async def store(self, batch: Sequence[BackupStorage]) -> Stored: ...
    def give_up(self, op: int) -> None: ...


class Queued(NamedTuple):
    effect: BackupStorage
    at: float


class Outbox:
    """A queue of ``BackupStorage`` effects, and the tasks that see batches of them through.

    ``clock``: for latencies; what is late is told by the loop's.
    """

    def __init__(
        self, worker: Writer, post: Callable[[Outcome], None], clock: Callable[[], float], backlog: Backlog,
        late: Callable[[bool], None],
    ) -> None:  # fmt: skip
        self.backlog = backlog
        self.meter = Meter()
        self._worker = worker
        self._post = post
        self._clock = clock
        self._inbox: Inbox[Queued] = Inbox()
        self._changed = asyncio.Event()
        self._late = late
        self._is_late = False
        self._overdue: set[int] = set()
        self._too_late: set[int] = set()

    def __repr__(self) -> str:
        return f"Outbox({len(self._inbox)} queued, {self.backlog!r}, {self.meter!r})"

    def __len__(self) -> int:
        return len(self._inbox)

    def put(self, effect: BackupStorage) -> None:
        """Queue the effect; its outcome is posted exactly once."""
        self._inbox.put(Queued(effect, self._clock()))
        self.backlog.add(effect)
        self._inbox.take_while(self._dropped)
        self._changed.set()
        self._make_way()

    async def run(self) -> None:
        """See batch after batch through, for ever. Cancelling it returns after the stores have let go of the pages;
        their outcomes are abandoned."""
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
        timers = (
            loop.call_later(PATIENCE, self._note_late, first), loop.call_later(TOO_LATE, self._note_too_late, first),
        )  # fmt: skip
        try:
            stored = await self._worker.store([queued.effect for queued in batch])
            self.meter.count(0, stored.pages, stored.full_pages, stored.bytes)
            for queued in batch:
                self._end(queued, stored.failed)
        finally:
            for timer in timers:
                timer.cancel()
            self._too_late.discard(first)
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

    def _note_too_late(self, first: int) -> None:
        self._too_late.add(first)
        self._make_way()

    def _make_way(self) -> None:
        """If too much is held and something waits, have given up what has had its time."""
        if self._too_late and len(self._inbox) and self.backlog.over:
            for first in self._too_late:
                self._worker.give_up(first)
            self._too_late.clear()

    def _end(self, queued: Queued, failed: frozenset[int]) -> None:
        effect, at = queued
        self.meter.took(self._clock() - at)
        self.backlog.land(effect)
        if effect.op in failed:
            self.meter.errors += 1
            self._post(Outcome(effect.op, Status.FAILED))
        else:
            self.meter.count(1, 0, 0, 0)
            self._post(Outcome(effect.op, Status.DONE))
