"""The backups to storage that wait for the worker or are in its hands, and the limits that they keep to.

Laws:
* No request waits for a store to write. Whatever waits for storage is pinned on the host, so its amount is bounded for
  each component (``Backlog``). Above the bound the backup that has waited longest is dropped. The last one that waits
  is never dropped, or no backup would ever be made where one alone is larger than the bound.
* At most half of the bound is in flight, or a single operation. The other half is for backups that may still be
  dropped.
* Several batches are in flight at a time. An operation is DONE only if every page of it is stored.
* Whatever storage is asked to do, it is late when it takes longer than ``PATIENCE`` seconds (``Lateness``): to write,
  to read, to answer a question, to clear itself. Then the core is told, and from then on no request waits for host
  pages that storage has pinned or that a fetch has taken.
* A batch that takes longer than ``TOO_LATE`` seconds, while others wait and the bound is exceeded, gives up the pages
  that it has not written, between two calls of a store.
* While storage is being cleared no backup begins: all wait until the last clearing is over. A page that is published
  after the tree was forgotten is written after the store was cleared. Written before, it would be cleared with the
  rest, and its node would still say that it is stored.
* A backup that waits when the tree is forgotten is never written: the keys stay the same, so its page would be found
  again. The core starts no more backups of a namespace that is dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import NamedTuple

from asynccache.core.plan import SLOT_BYTES, BackupStorage, Outcome, Status
from asynccache.worker.inbox import Inbox
from asynccache.worker.local import LocalWorker
from asynccache.worker.stats import StageMeter
from asynccache.worker.work import WriteOrder

TASKS = 16
"""The most batches in flight. A batch takes several turns of a busy loop, so with fewer batches the store would be idle
where pages are small."""
BATCH_OPS = 16
BATCH_PAGES = 128
"""The most operations, and the most pages of all components, of a batch. A larger operation is a batch by itself."""
PATIENCE = 0.1
TOO_LATE = 1.0


class StoreCall(Enum):
    """The two kinds of calls of storage that may be late."""

    READ = "a question, or to read"
    WRITE = "to write, or to clear itself"


class Lateness:
    """Whether storage is late. One kind of call makes it late when a call has taken ``PATIENCE`` seconds, by the loop's
    clock, until a call of this kind ends in time while none that is late is still under way. The kinds are told apart
    because a store may be quick to answer and slow to write.

    Reads also make it late no longer once none is under way: then no fetch has pages that anybody could wait for, and
    there may be no further read to show that storage is in time. Where pages wait to be written, a further write comes.

    ``tell``: called with True when storage is late from now on, and with False when it is late no more.
    """

    def __init__(self, tell: Callable[[bool], None]) -> None:
        self._tell = tell
        self._late: set[StoreCall] = set()
        self._overdue = dict.fromkeys(StoreCall, 0)
        self._reads = 0

    def __repr__(self) -> str:
        return f"Lateness({', '.join(kind.name for kind in self._late) or 'in time'})"

    @contextmanager
    def call(self, kind: StoreCall) -> Iterator[None]:
        """A context for one call of storage."""
        overdue = False

        def note() -> None:
            nonlocal overdue
            overdue = True
            self._overdue[kind] += 1
            self._turn(kind, True)

        timer = asyncio.get_running_loop().call_later(PATIENCE, note)
        self._reads += kind is StoreCall.READ
        try:
            yield
        finally:
            timer.cancel()
            self._reads -= kind is StoreCall.READ
            self._overdue[kind] -= overdue
            if not self._overdue[kind] and (not overdue or (kind is StoreCall.READ and not self._reads)):
                self._turn(kind, False)

    def _turn(self, kind: StoreCall, late: bool) -> None:
        before = bool(self._late)
        if late:
            self._late.add(kind)
        else:
            self._late.discard(kind)
        if bool(self._late) is not before:
            self._tell(late)


class QueuedBackup(NamedTuple):
    """A queued backup. ``at``: when it was queued, in seconds of the outbox's clock."""

    effect: BackupStorage
    at: float


class Backlog:
    """The numbers of host slots that the backups to storage hold, and may hold.

    ``limits``: slots by component. A backup holds its slots from when it is queued until its outcome. ``dropped``: how
    many operations were dropped, for want of room, before they began.
    """

    def __init__(self, limits: Mapping[int, int]) -> None:
        self.limits = limits
        self.dropped = 0
        self._held = dict.fromkeys(limits, 0)
        self._flying = dict.fromkeys(limits, 0)

    def __repr__(self) -> str:
        held = ", ".join(f"{self._held[c]}/{limit}" for c, limit in self.limits.items())
        return f"Backlog({held} slots, {self.dropped} dropped)"

    @property
    def over(self) -> bool:
        """True if some component's backups hold more slots than its limit."""
        return any(self._held[c] > limit for c, limit in self.limits.items())

    def add(self, effect: BackupStorage) -> None:
        """Note that ``effect`` is queued: it holds its slots from now on."""
        for pages in effect.pages:
            self._held[pages.component] += len(pages.slots) // SLOT_BYTES

    def fly(self, effect: BackupStorage) -> bool:
        """Return True if ``effect`` may begin now, beside all that is in flight. If so it counts as in flight until
        ``land``."""
        flying = self._flying
        sizes = {pages.component: len(pages.slots) // SLOT_BYTES for pages in effect.pages}
        if any(flying.values()) and any(2 * (flying[c] + n) > self.limits[c] for c, n in sizes.items()):
            return False
        for component, size in sizes.items():
            flying[component] += size
        return True

    def land(self, effect: BackupStorage) -> None:
        """Note that the I/O of ``effect``, which was in flight, has let go of its slots."""
        for pages in effect.pages:
            self._flying[pages.component] -= len(pages.slots) // SLOT_BYTES
        self.remove(effect)

    def remove(self, effect: BackupStorage) -> None:
        """Note that ``effect`` holds its slots no more."""
        for pages in effect.pages:
            self._held[pages.component] -= len(pages.slots) // SLOT_BYTES


class Outbox:
    """A queue of ``BackupStorage`` effects. ``TASKS`` tasks run ``run``, and each has one batch in flight.

    ``post``: called with the outcome of every effect. ``clock``: returns seconds, for latencies.
    """

    def __init__(
        self, worker: LocalWorker, post: Callable[[Outcome], None], clock: Callable[[], float], backlog: Backlog,
        lateness: Lateness,
    ) -> None:  # fmt: skip
        self.backlog = backlog
        self._clearings = 0
        self.meter = StageMeter()
        self._worker = worker
        self._post = post
        self._clock = clock
        self._inbox: Inbox[QueuedBackup] = Inbox()
        self._changed = asyncio.Event()
        self._lateness = lateness
        self._flying: dict[int, Sequence[QueuedBackup]] = {}
        self._too_late: set[int] = set()

    def __repr__(self) -> str:
        return f"Outbox({len(self._inbox)} queued, {self.backlog!r}, {self.meter!r})"

    def __len__(self) -> int:
        return len(self._inbox)

    def put(self, effect: BackupStorage) -> None:
        """Queue the effect; its outcome is posted exactly once."""
        self._inbox.put(QueuedBackup(effect, self._clock()))
        self.backlog.add(effect)
        self._inbox.take_while(self._dropped)
        self._changed.set()
        self._make_way()

    @property
    def waiting(self) -> frozenset[int]:
        """The operations that wait in the queue."""
        return frozenset(queued.effect.op for queued in self._inbox)

    @property
    def clearing(self) -> bool:
        """True while storage is being cleared: no backup begins."""
        return self._clearings > 0

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """A context in which storage is cleared: no backup begins. Those that wait for its end wait for storage, so it
        counts as a call."""
        self._clearings += 1
        try:
            with self._lateness.call(StoreCall.WRITE):
                yield
        finally:
            self._clearings -= 1
            self._changed.set()

    def outdate(self, ops: Collection[int] | None = None) -> None:
        """Let the backups ``ops`` (None: all) fail: the tree that they belong to is being forgotten. Those that wait
        fail now. A batch of such backups alone ends after the call of a store that is under way."""
        for queued in self._inbox.take():
            if ops is not None and queued.effect.op not in ops:
                self._inbox.put(queued)
                continue
            self.backlog.remove(queued.effect)
            self._post(Outcome(queued.effect.op, Status.FAILED))
        for first, batch in self._flying.items():
            if ops is None or all(queued.effect.op in ops for queued in batch):
                self._worker.give_up(first)

    async def run(self) -> None:
        """Have the worker store batch after batch, for ever. Cancelling it returns after the stores have let go of the
        pages; the outcomes of that batch are not posted."""
        while True:
            await self._inbox.filled()
            if not self._clearings and (batch := self._take()):
                await self._store_in_time(batch)
                self._changed.set()
            else:
                self._changed.clear()
                await self._changed.wait()

    def _dropped(self, oldest: QueuedBackup) -> bool:
        """Drop the effect that has waited longest, if the bound is exceeded and others wait besides. Returns True if it
        was dropped."""
        if not self.backlog.over or len(self._inbox) == 1:
            return False
        self.backlog.remove(oldest.effect)
        self.backlog.dropped += 1
        self._post(Outcome(oldest.effect.op, Status.FAILED))
        return True

    def _take(self) -> list[QueuedBackup]:
        """Take the backups of the next batch from the queue, and return them; none if too much is in flight."""
        pages = ops = 0

        def wanted(queued: QueuedBackup) -> bool:
            nonlocal pages, ops
            pages, ops = pages + _pages_of(queued.effect), ops + 1
            fits = ops == 1 or (ops <= BATCH_OPS and pages <= BATCH_PAGES)
            return fits and self.backlog.fly(queued.effect)

        return self._inbox.take_while(wanted)

    async def _store_in_time(self, batch: Sequence[QueuedBackup]) -> None:
        first = batch[0].effect.op
        timer = asyncio.get_running_loop().call_later(TOO_LATE, self._note_too_late, first)
        self._flying[first] = batch
        try:
            with self._lateness.call(StoreCall.WRITE):
                stored = await self._worker.store([WriteOrder(*queued.effect) for queued in batch])
            self.meter.count(0, stored.pages, stored.full_pages, stored.bytes)
            for queued in batch:
                self._end(queued, stored.failed)
        finally:
            del self._flying[first]
            timer.cancel()
            self._too_late.discard(first)

    def _note_too_late(self, first: int) -> None:
        self._too_late.add(first)
        self._make_way()

    def _make_way(self) -> None:
        """While the bound is exceeded and something waits, tell the worker to give up the batches that are too late."""
        if self._too_late and len(self._inbox) and self.backlog.over:
            for first in self._too_late:
                self._worker.give_up(first)
            self._too_late.clear()

    def _end(self, queued: QueuedBackup, failed: frozenset[int]) -> None:
        effect, at = queued
        self.meter.took(self._clock() - at)
        self.backlog.land(effect)
        if effect.op in failed:
            self.meter.errors += 1
            self._post(Outcome(effect.op, Status.FAILED))
        else:
            self.meter.count(1, 0, 0, 0)
            self._post(Outcome(effect.op, Status.DONE))


def _pages_of(effect: BackupStorage) -> int:
    """Return how many slots ``effect`` has, over all components."""
    return sum(len(pages.slots) for pages in effect.pages) // SLOT_BYTES
