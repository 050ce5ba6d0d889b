"""The transfer stages of a worker: ``backup_host`` (device to host), ``load_back`` (host to device, and the private
copies on the device), ``backup_storage`` (writing to the stores) and ``prefetch`` (reading from them).

The first two have queues, and tasks that serve them. Queues have no bound, because the core bounds the operations in
flight. Laws:

* Whenever its task wakes up, ``backup_host`` copies all backups that wait, as one copy. The event of this copy decides
  every operation in it.
* A submission of ``load_back`` is one copy for all loads that wait, layer by layer, and the private copies behind it.
  Private copies run on a stream of their own, and each waits for the load that it needs.
* A submission is a plain function: ``wait_layers`` needs the event of a layer at once, so it submits what is queued and
  does not wait for the stage's task.
* The counters of ``load_back`` are about loads alone: a private copy brings nothing from the host.
* If the copy for several loads fails, every load in it fails: an engine whose work was ordered behind its layers may
  have read them.
* Of pages that several workers hold alike, one worker writes to the stores that they share; to a store of its own each
  worker writes.
* Auxiliary components and sidecars are written before FULL (``PoolMap.written``), so that a reader who finds FULL
  mostly finds the rest; the order is no proof of that. Of an operation that has failed, nothing more is written. The
  head decides which backups are written as one batch, and when a batch is given up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from asynccache.core.keys import HASH_BYTES
from asynccache.core.plan import SLOT_BYTES, Move, Status
from asynccache.errors import CopyFailed
from asynccache.memory.device import Event
from asynccache.storage import PageKey, Result
from asynccache.storage.tiers import TieredStore
from asynccache.worker.inbox import Inbox
from asynccache.worker.pool_layout import PoolMap
from asynccache.worker.stats import StageMeter
from asynccache.worker.work import CopyKind, ReadOrder, StoredBatch, StoreQuestion, Work, WriteOrder

if TYPE_CHECKING:
    from asynccache.memory.pools import Mover
    from asynccache.worker.local import Reports

BATCH_PAGES = 128
"""The most pages of one call of a store, and of one step of the loop. A store that knows its index, or has its pages in
memory, answers without suspending, so these stages give the loop a turn after each call."""


class QueuedWork(NamedTuple):
    """A work, the events that it waits for on the device, and when it was queued, in seconds of ``perf_counter``
    (uvloop's clock counts milliseconds)."""

    work: Work
    after: Sequence[Event]
    at: float


def _joined(batch: Sequence[QueuedWork]) -> tuple[list[Move], list[Event]]:
    """Return the moves of all works of ``batch``, and the events that they wait for, each once."""
    moves = [move for queued in batch for move in queued.work.moves]
    return moves, list(dict.fromkeys(event for queued in batch for event in queued.after))


async def _copied(*events: Event | None) -> Status:
    """Return when all of these events have fired: FAILED if one of them failed, else DONE. So a private copy of a load
    that failed has failed, too."""
    try:
        for event in events:
            if event is not None:
                await event.wait()
    except CopyFailed:
        return Status.FAILED
    return Status.DONE


class BackupHostStage:
    """A queue of backups and the task that performs them."""

    def __init__(self, mover: Mover, pools: PoolMap, reports: Reports) -> None:
        self._mover = mover
        self._pools = pools
        self._post = reports.ended
        self._inbox: Inbox[QueuedWork] = Inbox()
        self.meter = StageMeter()

    def __repr__(self) -> str:
        return f"BackupHostStage({len(self)} queued, {self.meter!r})"

    def __len__(self) -> int:
        return sum(len(queued.work.ops) for queued in self._inbox)

    def put(self, work: Work, after: Sequence[Event]) -> None:
        """Queue ``work``; its outcome is reported exactly once."""
        self._inbox.put(QueuedWork(work, after, perf_counter()))

    async def run(self) -> None:
        """Copy batch after batch, for ever. Cancelling it abandons the outcome, never a buffer in use: the device
        finishes what was submitted."""
        while True:
            await self._inbox.filled()
            batch = self._inbox.take()
            moves, after = _joined(batch)
            status = await _copied(self._mover.backup(moves, after))
            self.meter.ended(sum(len(queued.work.ops) for queued in batch), status, self._pools.size_of(moves))
            now = perf_counter()
            for queued in batch:
                self.meter.took(now - queued.at, len(queued.work.ops))
                self._post(status, queued.work.ops)


class Copying(NamedTuple):
    """A work that is on the device. ``layers[i]``: fires when layer i of it is there; empty for a private copy.
    ``done``: fires when all is there. ``needs``: fires when the load that a private copy is made of is there; None: it
    has ended, or there is none. ``at``: when it was queued, in seconds of ``perf_counter``."""

    work: Work
    layers: Sequence[Event]
    done: Event
    needs: Event | None
    at: float

    def layer(self, i: int) -> Event:
        """Return the event of layer ``i``. A private copy arrives as a whole."""
        return self.layers[i] if self.layers else self.done


class _Line:
    """The works that wait to be submitted to one stream, and the copies that are on it, both in order."""

    def __init__(self) -> None:
        self.inbox: Inbox[QueuedWork] = Inbox()
        self.flying: deque[Copying] = deque()
        self.filled = asyncio.Event()

    def __repr__(self) -> str:
        return f"{len(self)} queued, {sum(len(copying.work.ops) for copying in self.flying)} on the device"

    def __len__(self) -> int:
        return sum(len(queued.work.ops) for queued in self.inbox)


class LoadBackStage:
    """The queues of loads and of private copies, and the tasks that await what is on the device. The two have a stream
    each, so that private copies, which are short, wait for the loads that they need and for no others."""

    def __init__(self, mover: Mover, pools: PoolMap, reports: Reports) -> None:
        self._mover = mover
        self._pools = pools
        self._post, self._fail = reports.ended, reports.failed
        self._loads = _Line()
        self._clones = _Line()
        self._by_op: dict[int, Copying] = {}
        self.meter = StageMeter()

    def __repr__(self) -> str:
        return f"LoadBackStage(loads {self._loads!r}; clones {self._clones!r}; {self.meter!r})"

    def __len__(self) -> int:
        return len(self._loads) + len(self._clones)

    def put(self, work: Work, after: Sequence[Event]) -> None:
        """Queue ``work``; its outcome is reported exactly once."""
        line = self._clones if work.kind is CopyKind.CLONE else self._loads
        line.inbox.put(QueuedWork(work, after, perf_counter()))
        line.filled.set()

    def copying(self, op: int) -> Copying | None:
        """Submit what is queued, and return the copy that ``op`` is part of; None once ``op`` has ended."""
        self.submit()
        return self._by_op.get(op)

    def submit(self) -> None:
        """Hand all that is queued to the device: the loads as one copy, then the private copies. If the device refuses
        a copy, its loads are lost, and that is the end of the cache. The head is told before anybody can ask for these
        loads and take them for loads that have ended."""
        try:
            loads = self._loads.inbox.take()
            if loads:
                moves, after = _joined(loads)
                events = self._mover.load(moves, after)
                for work, _, at in loads:
                    self._fly(self._loads, Copying(work, events.layers, events.done, None, at))
            for work, waits, at in self._clones.inbox.take():
                source = self._by_op.get(work.source)
                needs = source.done if source is not None else None
                event = self._mover.clone(work.moves, waits if needs is None else (*waits, needs))
                self._fly(self._clones, Copying(work, (), event, needs, at))
        except BaseException as error:
            self._fail(error)
            raise

    def _fly(self, line: _Line, copying: Copying) -> None:
        line.flying.append(copying)
        line.filled.set()
        self._by_op.update(dict.fromkeys(copying.work.ops, copying))

    async def run(self) -> None:
        """Submit loads and await them, for ever. Cancelling it abandons outcomes, never a buffer in use: the device
        finishes what was submitted."""
        await self._serve(self._loads)

    async def run_clones(self) -> None:
        """The same as ``run``, for the private copies."""
        await self._serve(self._clones)

    async def _serve(self, line: _Line) -> None:
        while True:
            while not line.flying and not len(line.inbox):  # ``copying`` may have submitted what was queued
                line.filled.clear()
                await line.filled.wait()
            self.submit()
            copying = line.flying[0]
            work, count = copying.work, len(copying.work.ops)
            status = await _copied(copying.done, copying.needs)
            line.flying.popleft()
            for op in work.ops:
                del self._by_op[op]
            if work.kind is CopyKind.LOAD:
                self.meter.took(perf_counter() - copying.at, count)
                self.meter.ended(count, status, self._pools.size_of(work.moves))
            self._post(status, work.ops)


class WriteRun(NamedTuple):
    """Neighbouring pages of one operation in one pool, which are written together. ``ours``: True if this worker writes
    them to the stores that workers share. ``full``: True if they count as pages of FULL."""

    op: int
    ours: bool
    keys: list[PageKey]
    payloads: list[memoryview]
    full: bool


class WritingStage:
    """Writes batches. Mutable state: the batches that were given up while they were written, by first operation."""

    def __init__(self, store: TieredStore, pools: PoolMap) -> None:
        self._store = store
        self._pools = pools
        self._given_up: set[int] = set()

    def __repr__(self) -> str:
        return f"WritingStage({self._pools!r})"

    def give_up(self, op: int) -> None:
        """Write nothing more of the batch that begins with ``op``, after the call of the store that is under way. To
        be called before or while ``store`` writes this batch, and not later."""
        self._given_up.add(op)

    async def store(self, batch: Sequence[WriteOrder]) -> StoredBatch:
        """Write the batch, and return what was stored. Cancelling it returns after the store has let go of the
        pages."""
        first, writing = batch[0].op, _Batch(self._store, self._pools, batch)
        try:
            for step in range(len(self._pools.written)):
                for part in writing.parts(step):
                    await writing.put(part)
                    await asyncio.sleep(0)
                    if first in self._given_up:
                        writing.failed.update(op for op, left in writing.left.items() if left)
        finally:
            self._given_up.discard(first)
        return StoredBatch(frozenset(writing.failed), writing.pages, writing.full_pages, writing.bytes)


class _Batch:
    """One batch while it is written. ``left``: for each operation, how many pages are not stored yet. ``failed``: the
    operations of which a page could not be stored. ``pages``, ``full_pages``, ``bytes``: as in ``StoredBatch``."""

    def __init__(self, store: TieredStore, pools: PoolMap, batch: Sequence[WriteOrder]) -> None:
        self._store = store
        self._pools = pools
        self._batch = batch
        self.left = {
            op: sum(len(slots) // SLOT_BYTES * len(pools.of.get(component, ())) for component, _, slots in pages)
            for op, pages in batch
        }
        self.failed: set[int] = set()
        self.pages = self.full_pages = self.bytes = 0

    def parts(self, step: int) -> Iterator[list[WriteRun]]:
        """Yield the pages of the pools of one step (``PoolMap.written``), at most ``BATCH_PAGES`` at a time, without
        those of operations that have failed by then."""
        pools, written = self._pools, self._pools.written[step]
        part: list[WriteRun] = []
        room = BATCH_PAGES
        for op, lists in self._batch:
            for component, hashes, slots in lists:
                for spec in written.get(component, ()):
                    begin, count = 0, len(slots) // SLOT_BYTES
                    while begin < count and op not in self.failed:
                        end = min(count, begin + room)
                        keys = pools.keys(spec.name, hashes[begin * HASH_BYTES : end * HASH_BYTES])
                        payloads = pools.payloads(spec.name, slots[begin * SLOT_BYTES : end * SLOT_BYTES])
                        part.append(WriteRun(op, spec.writes, keys, payloads, pools.counts(spec.name)))
                        room -= end - begin
                        begin = end
                        if not room:
                            yield part
                            part, room = [], BATCH_PAGES
        if part:
            yield part

    async def put(self, part: Sequence[WriteRun]) -> None:
        """Write ``part``: to the shared stores what is ours, and all of it to stores of our own."""
        ours, theirs = [run for run in part if run.ours], [run for run in part if not run.ours]
        if ours:
            await self._put_in(ours, shared=True)
        if not theirs:
            return
        if self._store.writers(shared=False) or not self._store.writers():
            await self._put_in(theirs, shared=False)
        else:  # all stores are shared: another worker writes them
            for run in theirs:
                self.left[run.op] -= len(run.keys)

    async def _put_in(self, part: Sequence[WriteRun], *, shared: bool) -> None:
        keys = [key for run in part for key in run.keys]
        payloads = [payload for run in part for payload in run.payloads]
        results = await self._store.put(keys, payloads, shared=shared)
        begin = 0
        for run in part:
            count = len(run.keys)
            hits = results[begin : begin + count].count(Result.HIT)
            begin += count
            self.left[run.op] -= hits
            self.pages += hits
            self.full_pages += hits * run.full
            self.bytes += hits * run.payloads[0].nbytes
            if hits < count:
                self.failed.add(run.op)


class ReadingStage:
    """Looks up and reads pages, at most ``BATCH_PAGES`` pages of a pool in one call of the store."""

    def __init__(self, store: TieredStore, pools: PoolMap) -> None:
        self._store = store
        self._pools = pools

    def __repr__(self) -> str:
        return f"ReadingStage({self._pools!r})"

    async def ask(self, asked: Sequence[StoreQuestion]) -> list[bytes]:
        """See ``LocalWorker.ask``."""
        return [await self._answer(pool, hashes) for pool, hashes in asked]

    async def read(self, reads: Sequence[ReadOrder], run: bool) -> list[bytes]:
        """See ``LocalWorker.read``."""
        answers: list[bytes] = []
        for pool, hashes, slots in reads:
            pages = _run(answers[-1]) if run and answers else len(hashes) // HASH_BYTES
            answers.append(await self._answer(pool, hashes[: pages * HASH_BYTES], slots))
        return answers

    async def _answer(self, pool: str, hashes: bytes, slots: bytes | None = None) -> bytes:
        """Return a result for each page. With ``slots`` the pages are read, and else only looked up."""
        if not self._pools.has(pool):
            return _nothing_lacks(hashes)
        answers = bytearray()
        for at in range(0, len(hashes) // HASH_BYTES, BATCH_PAGES):
            keys = self._pools.keys(pool, hashes[at * HASH_BYTES : (at + BATCH_PAGES) * HASH_BYTES])
            if slots is None:
                answers += bytes(await self._store.exists(keys))
            else:
                own = slots[at * SLOT_BYTES : (at + len(keys)) * SLOT_BYTES]
                answers += bytes(await self._store.get(keys, self._pools.payloads(pool, own)))
            await asyncio.sleep(0)
        return bytes(answers)


def _nothing_lacks(hashes: bytes) -> bytes:
    """Return the answer for a pool of which this worker has no bytes: a HIT for each page, since other workers' answers
    decide."""
    return bytes([Result.HIT]) * (len(hashes) // HASH_BYTES)


def _run(answer: bytes) -> int:
    """Return how many pages of ``answer`` come before the first that is not a HIT."""
    return len(answer) - len(answer.lstrip(bytes([Result.HIT])))
