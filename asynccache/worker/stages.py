"""The transfer stages between a device and its host: ``backup_host`` (device to host) and ``load_back`` (host to
device, and the private copies on the device); what their tasks wait at (``Inbox``), and what all stages count
(``StageMeter``). The other two stages write to the stores and read from them: ``LocalWorker.store`` and ``read``.

The stages here have queues, and tasks that serve them. Queues have no bound, because the core bounds the operations in
flight.

* Whenever its task wakes up, ``backup_host`` copies all backups that wait, as one copy, whose event decides every
  operation in it.
* ``load_back`` submits all loads that wait as one copy, layer by layer, and the private copies behind it. If the copy
  fails, every load in it fails: an engine whose work was ordered behind its layers may have read them. Private copies
  run on a stream of their own, and each waits for the load that it needs.
* To submit is a plain function: ``wait_layers`` needs the event of a layer at once, so it submits what is queued and
  does not wait for the stage's task.
* The counters of ``load_back`` are about loads alone: a private copy brings nothing from the host.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from time import perf_counter
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from asynccache.core.plan import Move, Status
from asynccache.errors import CopyFailed
from asynccache.memory.device import Event
from asynccache.worker.pool_layout import PoolMap
from asynccache.worker.work import CopyKind, Reports, Work

if TYPE_CHECKING:
    from asynccache.memory.mover import Mover

T = TypeVar("T")

# where tasks wait, and what they count


class Inbox(Generic[T]):
    """Items in order, for one or several tasks that read them. ``put`` never blocks and never fails."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._filled = asyncio.Event()

    def __repr__(self) -> str:
        return f"Inbox({len(self._items)})"

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def put(self, item: T) -> None:
        """Add ``item`` and wake the readers."""
        self._items.append(item)
        self._filled.set()

    async def filled(self) -> None:
        """Return when there is something to take. Cancelling it takes nothing."""
        while not self._items:
            self._filled.clear()
            await self._filled.wait()

    def take(self) -> list[T]:
        """Take and return all items."""
        taken, self._items = list(self._items), deque()
        return taken

    def take_while(self, wanted: Callable[[T], bool]) -> list[T]:
        """Take and return items from the front, as long as ``wanted`` returns True for the next one. ``wanted`` is
        called once for each item that is taken, and once for the first that is not."""
        taken = []
        while self._items and wanted(self._items[0]):
            taken.append(self._items.popleft())
        return taken


class ChangeSignal:
    """A signal that several tasks of one loop may wait for, any number of times."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Return at the next ``tell``. The caller then has to look whether the state is what it waits for."""
        await self._event.wait()

    def tell(self) -> None:
        """Wake all tasks that wait now. A task that comes later waits for the next ``tell``."""
        self._event.set()
        self._event.clear()


RESERVOIR = 1024


class Latency(NamedTuple):
    """Latencies in milliseconds. The percentiles are of the last ``RESERVOIR`` samples; ``max`` and ``samples`` (a
    count) are of all."""

    samples: int
    p50: float
    p99: float
    max: float


class StageStats(NamedTuple):
    """Counters of one transfer stage."""

    ops: int
    pages: int
    """Pages, counted in each pool. In a cache without ``workers`` copies between device and host count once per
    component."""
    full_pages: int
    """Pages of FULL, each of which stands for ``page_size`` tokens."""
    bytes: int
    errors: int
    """Operations that failed (prefetch: pages)."""
    latency_ms: Latency


BOUNDS_MS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 10_000.0)


class Histogram(NamedTuple):
    """A histogram of the latencies of operations. ``counts[i]``: those that took at most ``bounds_ms[i]`` and longer
    than the bound before; the last count: those that took longer than every bound.
    """

    bounds_ms: tuple[float, ...]
    counts: tuple[int, ...]
    total_ms: float
    """The sum of all latencies."""


class StageMeter:
    """One stage's counters."""

    def __init__(self) -> None:
        self.ops = 0
        self.pages = 0
        self.full_pages = 0
        self.bytes = 0
        self.errors = 0
        self._samples: deque[float] = deque(maxlen=RESERVOIR)
        self._count = 0
        self._max = self._total = 0.0
        self._buckets = [0] * (len(BOUNDS_MS) + 1)

    def __repr__(self) -> str:
        return f"StageMeter({self.ops} ops, {self.pages} pages, {self.bytes} bytes, {self.errors} errors)"

    def count(self, ops: int, pages: int, full_pages: int, size: int) -> None:
        """Count ``ops`` operations that moved ``pages`` pages, ``size`` bytes in all; ``full_pages`` of them are
        FULL's."""
        self.ops += ops
        self.pages += pages
        self.full_pages += full_pages
        self.bytes += size

    def ended(self, ops: int, status: Status, size: tuple[int, int, int]) -> None:
        """Count ``ops`` operations that have ended with ``status``. ``size``: what they moved if they are DONE: pages,
        FULL's pages and bytes."""
        if status is Status.DONE:
            self.count(ops, *size)
        else:
            self.errors += ops

    def took(self, seconds: float, ops: int = 1) -> None:
        """Note that ``ops`` operations took ``seconds`` each, from being queued to their outcome."""
        milliseconds = seconds * 1e3
        self._samples.extend(repeat(milliseconds, ops))
        self._count += ops
        self._total += milliseconds * ops
        self._buckets[bisect_left(BOUNDS_MS, milliseconds)] += ops
        if milliseconds > self._max:
            self._max = milliseconds

    def histogram(self) -> Histogram:
        """Return the histogram of all latencies so far."""
        return Histogram(BOUNDS_MS, tuple(self._buckets), self._total)

    def read(self) -> StageStats:
        """Return the counters as they are now."""
        ordered = sorted(self._samples)
        latency = Latency(self._count, _at(ordered, 0.5), _at(ordered, 0.99), self._max)
        return StageStats(self.ops, self.pages, self.full_pages, self.bytes, self.errors, latency)


def _at(ordered: Sequence[float], quantile: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * quantile))] if ordered else 0.0


# copies


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
        self._ended = reports.ended
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
                self._ended(status, queued.work.ops)


class Copying(NamedTuple):
    """A work that is on the device. ``layers[i]``: fires when layer i of it is there; empty for a private copy."""

    work: Work
    layers: Sequence[Event]
    done: Event
    """Fires when all is there."""
    needs: Event | None
    """Fires when the load that a private copy is made of is there; None: it has ended, or there is none."""
    at: float
    """When it was queued, in seconds of ``perf_counter``."""

    def layer(self, i: int) -> Event:
        """Return the event of layer ``i``. A private copy arrives as a whole."""
        return self.layers[i] if self.layers else self.done


class _Line(Inbox[QueuedWork]):
    """The works that wait to be submitted to one stream, and the copies that are on it (``flying``), both in order."""

    def __init__(self) -> None:
        super().__init__()
        self.flying: deque[Copying] = deque()

    def __repr__(self) -> str:
        return f"{len(self)} queued, {len(self.flying)} on the device"

    async def filled(self) -> None:
        """Return when there is something to submit or to await. Cancelling it takes nothing."""
        while not (self._items or self.flying):
            self._filled.clear()
            await self._filled.wait()


class LoadBackStage:
    """The queues of loads and of private copies, and the tasks that await what is on the device. The two have a stream
    each, so that private copies, which are short, wait for the loads that they need and for no others."""

    def __init__(self, mover: Mover, pools: PoolMap, reports: Reports) -> None:
        self._mover = mover
        self._pools = pools
        self._ended, self._failed = reports.ended, reports.failed
        self._loads = _Line()
        self._clones = _Line()
        self._by_op: dict[int, Copying] = {}
        self.meter = StageMeter()

    def __repr__(self) -> str:
        return f"LoadBackStage(loads {self._loads!r}; clones {self._clones!r}; {self.meter!r})"

    def __len__(self) -> int:
        return sum(len(queued.work.ops) for queued in (*self._loads, *self._clones))

    def put(self, work: Work, after: Sequence[Event]) -> None:
        """Queue ``work``; its outcome is reported exactly once."""
        line = self._clones if work.kind is CopyKind.CLONE else self._loads
        line.put(QueuedWork(work, after, perf_counter()))

    def copying(self, op: int) -> Copying | None:
        """Submit what is queued, and return the copy that ``op`` is part of; None once ``op`` has ended."""
        self.submit()
        return self._by_op.get(op)

    def submit(self) -> None:
        """Hand all that is queued to the device: the loads as one copy, then the private copies. If the device refuses
        a copy, its loads are lost, and that is the end of the cache. The head is told before anybody can ask for these
        loads and take them for loads that have ended."""
        try:
            loads = self._loads.take()
            if loads:
                moves, after = _joined(loads)
                events = self._mover.load(moves, after)
                for work, _, at in loads:
                    self._fly(self._loads, Copying(work, events.layers, events.done, None, at))
            for work, waits, at in self._clones.take():
                source = self._by_op.get(work.source)
                needs = source.done if source is not None else None
                event = self._mover.clone(work.moves, waits if needs is None else (*waits, needs))
                self._fly(self._clones, Copying(work, (), event, needs, at))
        except BaseException as error:
            self._failed(error)
            raise

    def _fly(self, line: _Line, copying: Copying) -> None:
        line.flying.append(copying)
        line._filled.set()
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
            await line.filled()  # ``copying`` may have submitted what was queued
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
            self._ended(status, work.ops)
