"""Saving: backups to storage, from the core's decision to the store's answer, and the calls that save all there is.

The way of a page from a commit to the disk: the plan of ``lease.commit`` has a ``BackupHost``, which ``EngineBatches``
hands to the worker's stage. When its ack is applied, the core decides a ``BackupStorage``; ``Driver.perform`` queues it
here (``Backups.put``), and one of the tasks that run ``Backups.run`` has the worker store it.

**No request waits for a store to write.** Whatever waits for storage is pinned on the host, so its amount is bounded
for each component (``limits``). Above the bound the backup that has waited longest is dropped; but never the last one,
or no backup would ever be made where one alone is larger than the bound. At most half of the bound is in flight, or a
single operation, so that the other half may still be dropped.

**Late stores.** Whatever storage is asked to do (write, read, answer a question, clear itself), it is late when it
takes longer than ``PATIENCE`` seconds (``Lateness``). The core is told, and from then on no request waits for host
pages that storage has pinned or that a fetch has taken. A batch that takes longer than ``TOO_LATE`` seconds, while
others wait and the bound is exceeded, gives up the pages that it has not written, between two calls of a store.

**Batches.** Several are in flight at a time. An operation is DONE only if every page of it is stored.

**Forgetting.** While storage is being cleared no backup begins: all wait until the last clearing is over. So a page
that is published after the tree was forgotten is written after the store was cleared; written before, it would be
cleared with the rest, and its node would still say that it is stored. A backup that waits when the tree is forgotten is
never written: the keys stay the same, so its page would be found again. The core starts no more backups of a namespace
that is dead.

What goes over the whole tree (``drain``, ``unsaved``) goes in slices, and holds the tree lock for one at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from asynccache.core.cache import Unsaved
from asynccache.core.plan import SLOT_BYTES, BackupStorage, Outcome, Status
from asynccache.runtime.core_calls import all_ended, in_turns
from asynccache.worker.stages import Inbox, StageMeter
from asynccache.worker.work import WriteOrder

if TYPE_CHECKING:
    from asynccache.runtime.announcer import StartSpan
    from asynccache.runtime.driver import Driver
    from asynccache.worker.local import LocalWorker

TASKS = 16
"""The most batches in flight. A batch takes several turns of a busy loop, so with fewer batches the store would be idle
where pages are small."""
BATCH_OPS = 16
BATCH_PAGES = 128
"""The most operations, and the most pages of all components, of a batch. A larger operation is a batch by itself."""
PATIENCE = 0.1
TOO_LATE = 1.0
HOPELESS_ROUNDS = 3
"""After so many rounds in a row in which no backup was DONE, ``drain`` tries nothing more."""


class StoreCall(Enum):
    """The two kinds of calls of storage that may be late."""

    READ = "a question, or to read"
    WRITE = "to write, or to clear itself"


class Lateness:
    """Whether storage is late.

    A call makes storage late when it has taken ``PATIENCE`` seconds, by the loop's clock. Reads and writes are told
    apart, because a store may be quick to answer and slow to write. Storage is late no more when a call of the same
    kind ends in time and none that is late is still under way. Reads are forgiven once none is under way: then no fetch
    has pages that anybody could wait for, and there may be no further read to prove the store well. Writes are not,
    because where pages wait to be written a further write comes.

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
    """A queued backup."""

    effect: BackupStorage
    at: float
    """When it was queued, by ``time.perf_counter``: uvloop's own clock counts milliseconds."""

    def sizes(self) -> dict[int, int]:
        """Return how many host slots it holds, by component."""
        return {pages.component: len(pages.slots) // SLOT_BYTES for pages in self.effect.pages}


class Backups:
    """The backups to storage that wait for the worker or are in its hands. ``TASKS`` tasks run ``run``, and each has
    one batch in flight. A backup holds its host slots from when it is queued until its outcome is posted, exactly once.
    """

    def __init__(self, worker: LocalWorker, driver: Driver, limits: Mapping[int, int], span: StartSpan) -> None:
        self.limits = limits
        """How many slots backups may hold, by component."""
        self.dropped = 0
        """How many operations were dropped, for want of room, before they began."""
        self.meter = StageMeter()
        self.lateness = Lateness(driver.note_late_storage)
        self._worker = worker
        self._driver = driver
        self._span = span
        self._held = dict.fromkeys(limits, 0)
        self._in_flight = dict.fromkeys(limits, 0)
        self._clearings = 0
        self._inbox: Inbox[QueuedBackup] = Inbox()
        self._changed = asyncio.Event()
        self._batches: dict[int, Sequence[QueuedBackup]] = {}  # those in flight, by their first operation
        self._too_late: set[int] = set()

    def __repr__(self) -> str:
        held = ", ".join(f"{self._held[c]}/{limit}" for c, limit in self.limits.items())
        return f"Backups({len(self._inbox)} queued, {held} slots, {self.dropped} dropped, {self.meter!r})"

    def __len__(self) -> int:
        return len(self._inbox)

    @property
    def waiting(self) -> frozenset[int]:
        """The operations that wait in the queue."""
        return frozenset(queued.effect.op for queued in self._inbox)

    @property
    def clearing(self) -> bool:
        """True while storage is being cleared: no backup begins."""
        return self._clearings > 0

    def put(self, effect: BackupStorage) -> None:
        """Queue the effect."""
        queued = QueuedBackup(effect, time.perf_counter())
        self._inbox.put(queued)
        for component, size in queued.sizes().items():
            self._held[component] += size
        self._inbox.take_while(self._drops)
        self._changed.set()
        self._make_way()

    def _drops(self, oldest: QueuedBackup) -> bool:
        """Drop the backup that has waited longest, if the bound is exceeded and others wait besides. Returns True if
        it was dropped."""
        if not self._over() or len(self._inbox) == 1:
            return False
        self._end(oldest, Status.FAILED)
        self.dropped += 1
        return True

    async def run(self) -> None:
        """Have the worker store batch after batch, for ever. Cancelling it returns after the stores have let go of the
        pages; the outcomes of that batch are not posted."""
        while True:
            await self._inbox.filled()
            if not self._clearings and (batch := self._take()):
                await self._store(batch)
                self._changed.set()
            else:
                self._changed.clear()
                await self._changed.wait()

    def _take(self) -> list[QueuedBackup]:
        """Take the backups of the next batch from the queue, and return them; none if too much is in flight."""
        pages = ops = 0

        def wanted(queued: QueuedBackup) -> bool:
            nonlocal pages, ops
            sizes, flying = queued.sizes(), self._in_flight
            pages, ops = pages + sum(sizes.values()), ops + 1
            if ops > 1 and (ops > BATCH_OPS or pages > BATCH_PAGES):
                return False
            if any(flying.values()) and any(2 * (flying[c] + size) > self.limits[c] for c, size in sizes.items()):
                return False
            for component, size in sizes.items():
                flying[component] += size
            return True

        return self._inbox.take_while(wanted)

    async def _store(self, batch: Sequence[QueuedBackup]) -> None:
        first = batch[0].effect.op
        timer = asyncio.get_running_loop().call_later(TOO_LATE, self._note_too_late, first)
        self._batches[first] = batch
        try:
            with self.lateness.call(StoreCall.WRITE), self._span(
                "asynccache.backup_storage", attributes={"asynccache.operations": len(batch)}
            ):  # fmt: skip
                stored = await self._worker.store([WriteOrder(*queued.effect) for queued in batch])
            self.meter.count(0, stored.pages, stored.full_pages, stored.bytes)
            for queued in batch:
                self.meter.took(time.perf_counter() - queued.at)
                for component, size in queued.sizes().items():
                    self._in_flight[component] -= size
                failed = queued.effect.op in stored.failed
                self.meter.errors += failed
                self.meter.count(not failed, 0, 0, 0)
                self._end(queued, Status.FAILED if failed else Status.DONE)
        finally:
            del self._batches[first]
            timer.cancel()
            self._too_late.discard(first)

    def _end(self, queued: QueuedBackup, status: Status) -> None:
        for component, size in queued.sizes().items():
            self._held[component] -= size
        self._driver.post(Outcome(queued.effect.op, status))

    def _over(self) -> bool:
        """Return True if some component's backups hold more slots than its limit."""
        return any(self._held[c] > limit for c, limit in self.limits.items())

    def _note_too_late(self, first: int) -> None:
        self._too_late.add(first)
        self._make_way()

    def _make_way(self) -> None:
        """While the bound is exceeded and something waits, tell the worker to give up the batches that are too late."""
        if self._too_late and len(self._inbox) and self._over():
            for first in self._too_late:
                self._worker.give_up(first)
            self._too_late.clear()

    # when the tree is forgotten

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """A context in which storage is cleared: no backup begins. Those that wait for its end wait for storage, so it
        counts as a call."""
        self._clearings += 1
        try:
            with self.lateness.call(StoreCall.WRITE):
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
            else:
                self._end(queued, Status.FAILED)
        for first, batch in self._batches.items():
            if ops is None or all(queued.effect.op in ops for queued in batch):
                self._worker.give_up(first)


async def drain(driver: Driver) -> Unsaved:
    """Back everything up to host and storage. Returns what could not be saved, for want of room or because every
    attempt of ``HOPELESS_ROUNDS`` rounds failed.

    Cancelling it stops the waiting; backups that began go on.
    """
    failures, core = 0, driver.core
    while failures < HOPELESS_ROUNDS:
        await in_turns(driver, lambda: partial(core.drain, core.walk()))
        if not driver.saving:
            break
        statuses = await all_ended(driver.ops, tuple(driver.saving))
        failures = 0 if Status.DONE in statuses else failures + 1
    return await unsaved(driver)


async def unsaved(driver: Driver) -> Unsaved:
    """Return how many pages a close would lose now, if it saved nothing. Works on a closed cache, too."""
    return await in_turns(driver, lambda: driver.core.survey().unsaved, reads=True)
