"""What waits for the engine's batches: copies into pages that a batch may still use, and pages that are given back.

While a batch of the engine is not over, the engine may read or write the pages that its leases named.

* ``Fences`` knows for each device slot which batches stand before it: nothing may be copied into the slot until they
  are over. It goes by slot, so that a copy into pages that no batch uses runs beside the engine's work. Each slot has
  the number of a set of batches. A set is made when a batch is added, and forgotten when all of its batches are over.
* ``RetireStage`` keeps slots that were given back from being taken again before the batches are over.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from asynccache.core.plan import Outcome, Status
from asynccache.worker.contract import BatchInFlight

Stamps = npt.NDArray[np.int64]

SWEEP = 64
"""How many sets there may be, beyond twice those that were left the last time, before all of them are looked at."""


class Fences:
    """``slots``: how many device slots there are, by component."""

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
        """``batch`` stands before ``slots`` from now on. ``slots``: int32 numbers by component; -1 is no slot."""
        if batch.done():
            return
        self._forget()
        made: dict[int, int] = {}
        for component, table in slots.items():
            self._stamp(self._stamps[component], _slots(table), batch, made)

    def before(self, wanted: Iterable[tuple[int, bytes]]) -> list[BatchInFlight]:
        """The batches that stand before any of the slots in ``wanted`` and are not over, each once. ``wanted``: pairs
        of a component and its slots, as in ``add``."""
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
        """Three things: a number that is below those of all sets; by how much the set of each slot is above it, 0 for a
        slot without a set; which of these differences occur."""
        base = next(iter(self._sets), self._number + 1) - 1
        at = np.maximum(stamps[slots] - base, 0)
        return base, at, np.flatnonzero(np.bincount(at)).tolist()

    def _forget(self) -> None:
        """Forget the oldest sets whose batches are all over. Once there are ``_sweep_at`` sets, look at all of them: an
        old set that lasts may hide many that are over."""
        while self._sets and not not_over(*self._sets[oldest := next(iter(self._sets))]):
            del self._sets[oldest]
        if len(self._sets) >= self._sweep_at:
            self._sets = {number: alive for number, batches in self._sets.items() if (alive := not_over(*batches))}
            self._sweep_at = 2 * len(self._sets) + SWEEP


class RetireStage:
    """Posts the outcome of RETIRE operations when the batches that may use their slots are over.

    ``spawn`` makes a task for operations that have to wait.
    """

    def __init__(
        self, post: Callable[[Outcome], None], spawn: Callable[[Coroutine[Any, Any, None], str], object]
    ) -> None:
        self._post = post
        self._spawn = spawn

    def put(self, ops: Sequence[int], batches: Sequence[BatchInFlight]) -> None:
        """Post ``ops`` as DONE when all ``batches`` are over; at once, if there are none."""
        if batches and ops:
            self._spawn(self._when_over(tuple(ops), tuple(batches)), "asynccache-retire")
        else:
            self._done(ops)

    async def _when_over(self, ops: Sequence[int], batches: Sequence[BatchInFlight]) -> None:
        for batch in batches:
            await batch.wait()
        self._done(ops)

    def _done(self, ops: Sequence[int]) -> None:
        for op in ops:
            self._post(Outcome(op, Status.DONE))


def not_over(*batches: BatchInFlight | None) -> list[BatchInFlight]:
    """Those of ``batches`` that are not over, without the None among them."""
    return [batch for batch in batches if batch is not None and not batch.done()]


def _slots(table: bytes) -> npt.NDArray[np.int32]:
    slots = np.frombuffer(table, np.int32)
    return slots[slots >= 0]
