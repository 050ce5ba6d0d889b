"""The engine's batches as the head knows them: which ones are not over, and what waits for them.

While a batch is not over, the engine may read or write the pages that its leases named. Copies into these pages wait
for the batch, and pages that are given back are not taken again before it is over. ``EngineBatches`` names the batches,
hands each copy to the worker with the batches that it has to wait for, and holds back slots.

``Fences`` knows for each device slot which batches stand before it. It goes by slot, so that a copy into pages that no
batch uses runs beside the engine's work. Each slot has the number of a set of batches. A set is made when a batch is
added, and forgotten when all of its batches are over.

* A copy into a page waits, on the device, for the batches that some lease named while it had that page, and for no
  other. They are looked up when the copy is asked for: a batch that is named later does not hold the copy up, since the
  engine may wait for that very copy.
* No backup reads a committed page before the batch that the page's commit named is over. The core may start a backup
  long after the commit, so every backup waits, on the device, for all batches that commits have named.
* What a batch did not compute is not there. The core hears that a commit's batches ran or, as soon as it is known, that
  one failed (``watch``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from asynccache.config import PoolSpec
from asynccache.core.cache import CacheCore, CoreLease
from asynccache.core.plan import BackupHost, Clone, Copy, Failing, LoadBack, Outcome, Status
from asynccache.core.settings import ComponentKind
from asynccache.errors import ConfigError
from asynccache.worker.local import LocalWorker
from asynccache.worker.work import BatchInFlight, CopyKind, Work

if TYPE_CHECKING:
    from asynccache.runtime.driver import Driver
    from asynccache.runtime.supervisor import Supervisor

Stamps = npt.NDArray[np.int64]

SWEEP = 64
"""A sweep looks at all batches that commits named (or at all sets of batches), and forgets those that are over. The
next sweep is made once there are ``2 * kept + SWEEP`` of them, where ``kept`` is how many the last sweep has kept."""
SPARSE = 8
"""After a sweep, sets are numbered anew if their numbers span more than ``SPARSE`` times the sets that the next sweep
waits for. So that is rare: it takes time for each slot of the device."""


class EngineBatches:
    """The engine's batches, and what waits for them. Mutable state: the fences; the batches that commits named
    (``after``) and that may not be over; and the commits whose batches may still fail."""

    def __init__(
        self, worker: LocalWorker, core: CacheCore, pools: Sequence[PoolSpec], driver: Driver, supervisor: Supervisor
    ) -> None:
        slots: dict[int, int] = {}
        for spec in pools:
            slots[int(spec.component)] = max(spec.device_pages, slots.get(int(spec.component), 0))
        self.fences = Fences(slots)
        self._driver = driver
        self._supervisor = supervisor
        self._worker = worker
        self._core = core
        kinds = {component.kind for component in core.config.components}
        self._tables = sorted(int(kind) for kind in kinds if kind is not ComponentKind.MAMBA)
        self._has_states = ComponentKind.MAMBA in kinds
        self._ready: dict[int, BatchInFlight] = {}
        self._sweep_at = SWEEP
        self._computing: dict[int, tuple[BatchInFlight, list[int]]] = {}  # a batch, and the operations that it is for
        self._unsettled: dict[int, int] = {}  # by operation: how many of its batches are not over
        self._failing: set[int] = set()  # operations of which a batch has failed, and not all are over

    def __repr__(self) -> str:
        return f"EngineBatches({self.fences!r}, {len(self._ready)} batches that commits named)"

    def event(self, name: str, event: object | None) -> object | None:
        """Return the engine's ``event`` as it is now, in the form that ``batch`` takes; None if ``event`` is None.
        ``name``: of the argument whose value it is, for the error's text. From any thread.

        Raises:
            ConfigError: copies cannot wait for the event.
        """
        if event is None:
            return None
        try:
            return self._worker.engine_event(event)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error

    def batch(self, name: str, event: object | None) -> BatchInFlight | None:
        """Return the batch that ends with the engine's ``event``; None if ``event`` is None. ``name`` and errors are as
        for the method ``event``."""
        taken = self.event(name, event)
        return None if taken is None else self._worker.batch(taken)

    def fence(self, lease: CoreLease, *batches: BatchInFlight) -> None:
        """Note that the engine may use the lease's pages until ``batches`` are over. Any copy into these pages that is
        asked for later waits for that, on the device."""
        pending = not_over(*batches)
        if pending:
            slots: dict[int, bytes] = {kind: self._core.pages(lease, kind) for kind in self._tables}
            if self._has_states:
                slots[int(ComponentKind.MAMBA)] = lease.states
            for batch in pending:
                self.fences.add(batch, slots)

    def expect(self, ready: BatchInFlight) -> None:
        """Note that a commit is about to publish pages that the batch ``ready`` writes."""
        if not ready.done():
            self._ready[ready.number] = ready
            if len(self._ready) >= self._sweep_at:  # without a host tier nothing else forgets those that are over
                self._sweep_at = 2 * len(self.pending()) + SWEEP

    def watch(self, op: int, batches: Sequence[BatchInFlight]) -> None:
        """Post the outcome of ``op``, a COMPUTE of the core, when all of ``batches`` are over; and as soon as one of
        them has failed, post that."""
        self._unsettled[op] = len(batches)
        for batch in batches:
            self.expect(batch)
            if batch.number not in self._computing:
                self._computing[batch.number] = batch, []
                self._supervisor.spawn(self._settle(batch), "asynccache-computing")
            self._computing[batch.number][1].append(op)

    async def _settle(self, batch: BatchInFlight) -> None:
        await batch.settled()
        self.note_failures()
        await batch.wait()
        self.note_failures()
        for op in self._computing.pop(batch.number)[1]:
            self._unsettled[op] -= 1
            if not self._unsettled[op]:
                del self._unsettled[op]
                self._driver.post(Outcome(op, Status.FAILED if op in self._failing else Status.DONE))
                self._failing.discard(op)

    def note_failures(self) -> None:
        """Post what fails by what is known now. Whoever is about to decide something calls this: who has heard that a
        batch failed finds nothing of it any more, even if the task that waits for the batch has not run yet."""
        for batch, ops in self._computing.values():
            if batch.failed:
                for op in ops:
                    if op not in self._failing:
                        self._failing.add(op)
                        self._driver.post(Failing(op))

    def pending(self) -> list[BatchInFlight]:
        """Return the batches that commits named and that are not over, each once. The others are forgotten."""
        alive = not_over(*self._ready.values())
        self._ready = {batch.number: batch for batch in alive}
        return alive

    def retire(self, ops: Sequence[int], batches: Sequence[BatchInFlight]) -> None:
        """Post the RETIRE operations ``ops`` as DONE when all ``batches`` are over; at once, if there are none."""
        if batches and ops:
            self._supervisor.spawn(self._retire_later(tuple(ops), tuple(batches)), "asynccache-retire")
        else:
            for op in ops:
                self._driver.post(Outcome(op, Status.DONE))

    async def _retire_later(self, ops: Sequence[int], batches: Sequence[BatchInFlight]) -> None:
        for batch in batches:
            await batch.wait()
        self.retire(ops, ())

    def begin(self, effects: Sequence[Copy]) -> None:
        """Hand the copies of a plan to the worker, with the batches that each has to wait for."""
        works = []
        for effect in effects:
            after = tuple([batch.number for batch in self._before(effect)])
            if isinstance(effect, BackupHost):
                works.append(Work(CopyKind.BACKUP, effect.ops, effect.moves, 0, after))
            elif isinstance(effect, Clone):
                works.append(Work(CopyKind.CLONE, (effect.op,), effect.moves, effect.after, after))
            else:
                works.append(Work(CopyKind.LOAD, (effect.op,), effect.moves, 0, after))
        self._worker.perform(works)

    def _before(self, effect: Copy) -> Sequence[BatchInFlight]:
        if isinstance(effect, BackupHost):
            return self.pending()
        if not len(self.fences):
            return ()
        if isinstance(effect, LoadBack):
            return self.fences.before((move.component, move.dst) for move in effect.moves)
        return self.fences.before((move.component, slots) for move in effect.moves for slots in (move.src, move.dst))


class Fences:
    """The batches that stand before each device slot. ``slots``: how many device slots there are, by component."""

    def __init__(self, slots: Mapping[int, int]) -> None:
        self._stamps = {component: np.zeros(count, np.int64) for component, count in slots.items()}
        self._sets: dict[int, list[BatchInFlight]] = {}  # by rising number
        self._number = 0
        self._sweep_at = SWEEP

    def __repr__(self) -> str:
        return f"Fences({len(self._sets)} sets)"

    def __len__(self) -> int:
        return len(self._sets)

    def add(self, batch: BatchInFlight, slots: Mapping[int, bytes]) -> None:
        """Note that ``batch`` stands before ``slots`` from now on. ``slots``: int32 numbers by component; -1 is no
        slot."""
        if batch.done():
            return
        self._forget()
        made: dict[int, int] = {}
        for component, table in slots.items():
            self._stamp(self._stamps[component], _slots(table), batch, made)

    def before(self, wanted: Iterable[tuple[int, bytes]]) -> list[BatchInFlight]:
        """Return the batches that stand before any of the slots in ``wanted`` and are not over, each once. ``wanted``:
        pairs of a component and its slots, as in ``add``."""
        self._forget()
        numbers = {number for component, table in wanted for number in self._alive(self._stamps[component], table)}
        found: dict[int, BatchInFlight] = {}
        for number in sorted(numbers):
            found |= {id(batch): batch for batch in not_over(*self._sets.get(number, ()))}
        return list(found.values())

    def _stamp(self, stamps: Stamps, slots: npt.NDArray[np.int32], batch: BatchInFlight, made: dict[int, int]) -> None:
        """Put ``batch`` into the sets of ``slots``. ``made``: the new number of each set that the batch has joined, by
        the number before. Nothing is sorted: tables are long, and one iteration of an engine adds a hundred of them."""
        base, at, found = self._places(stamps, slots)
        if not found:
            return
        becomes = np.zeros(found[-1] + 1, np.int64)
        for place in found:
            old = place + base if place else 0
            if old not in made:
                made[old] = self._join(old, batch)
            becomes[place] = made[old]
        if any(becomes[place] != place + base for place in found):
            stamps[slots] = becomes[at]

    def _join(self, old: int, batch: BatchInFlight) -> int:
        alive = not_over(*self._sets.get(old, ()))
        if any(batch is one for one in alive):
            return old
        self._number += 1
        self._sets[self._number] = [*alive, batch]
        return self._number

    def _alive(self, stamps: Stamps, table: bytes) -> list[int]:
        if not self._sets:
            return []
        base, _, found = self._places(stamps, _slots(table))
        return [place + base for place in found if place]

    def _places(self, stamps: Stamps, slots: npt.NDArray[np.int32]) -> tuple[int, Stamps, list[int]]:
        """Return three things: a number below those of all sets; for each slot by how much its set's number is above
        that one (0: the slot has no set); and which of these differences occur."""
        base = next(iter(self._sets), self._number + 1) - 1
        at = np.maximum(stamps[slots] - base, 0)
        return base, at, np.flatnonzero(np.bincount(at)).tolist()

    def _forget(self) -> None:
        """Forget the oldest sets whose batches are all over. An old set that lasts may hide many that are over, so once
        there are ``_sweep_at`` sets all of them are looked at. If the numbers of the sets that are left lie far apart,
        they are numbered anew: ``_places`` takes time for each number from the first to the last."""
        while self._sets and not not_over(*self._sets[oldest := next(iter(self._sets))]):
            del self._sets[oldest]
        if len(self._sets) >= self._sweep_at:
            self._sets = {number: alive for number, batches in self._sets.items() if (alive := not_over(*batches))}
            self._sweep_at = 2 * len(self._sets) + SWEEP
            if self._number - next(iter(self._sets), self._number) > SPARSE * self._sweep_at:
                base = next(iter(self._sets)) - 1
                becomes = np.zeros(self._number - base + 1, np.int64)
                for number, old in enumerate(self._sets, 1):
                    becomes[old - base] = number
                for stamps in self._stamps.values():
                    stamps[:] = becomes[np.maximum(stamps - base, 0)]
                self._sets = dict(enumerate(self._sets.values(), 1))
                self._number = len(self._sets)


def not_over(*batches: BatchInFlight | None) -> list[BatchInFlight]:
    """Return those of ``batches`` that are not over, without the None among them."""
    return [batch for batch in batches if batch is not None and not batch.done()]


def _slots(table: bytes) -> npt.NDArray[np.int32]:
    slots = np.frombuffer(table, np.int32)
    return slots[slots >= 0]
