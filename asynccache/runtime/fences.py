"""Which batches of the engine stand before which device slots: until they are over, the engine may still read or write
there, and nothing may be copied into them.

Law: slot by slot, so that a copy into pages that nobody uses runs beside the engine's work. A slot carries the number
of a set of batches; sets are made as batches are added, and forgotten when all of theirs are over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from asynccache.worker.contract import Batch

Stamps = npt.NDArray[np.int64]

SWEEP = 64
"""Sets beyond twice as many as were alive, before those behind one that lasts are looked through."""


class Fences:
    """``slots``: of each component, on the device."""

    def __init__(self, slots: Mapping[int, int]) -> None:
        self._stamps = {component: np.zeros(count, np.int64) for component, count in slots.items()}
        self._sets: dict[int, list[Batch]] = {}  # by rising number
        self._number = 0
        self._sweep_at = SWEEP

    def __repr__(self) -> str:
        return f"Fences({len(self._sets)} sets)"

    def __len__(self) -> int:
        return len(self._sets)

    def add(self, batch: Batch, slots: Mapping[int, bytes]) -> None:
        """``slots``: int32 of each component, -1 where there is none."""
        if batch.done():
            return
        self._forget()
        made: dict[int, int] = {}
        for component, table in slots.items():
            self._stamp(self._stamps[component], _slots(table), batch, made)

    def before(self, wanted: Iterable[tuple[int, bytes]]) -> list[Batch]:
        """The batches that stand before any of these slots, each once, and are not over."""
        self._forget()
        numbers = {number for component, table in wanted for number in self._alive(self._stamps[component], table)}
        found: dict[int, Batch] = {}
        for number in sorted(numbers):
            found |= {id(batch): batch for batch in not_over(*self._sets.get(number, ()))}
        return list(found.values())

    def _stamp(self, stamps: Stamps, slots: npt.NDArray[np.int32], batch: Batch, made: dict[int, int]) -> None:
        """``made``: the sets that this batch has joined, by what they were before. No sorting: tables are long, and an
        iteration of an engine names batches for a hundred of them."""
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

    def _join(self, old: int, batch: Batch) -> int:
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
        """All sets that are alive have numbers beyond the first of these; by how much, of each slot's (0: it is in no
        such set), and which of that there is."""
        base = next(iter(self._sets), self._number + 1) - 1
        at = np.maximum(stamps[slots] - base, 0)
        return base, at, np.flatnonzero(np.bincount(at)).tolist()

    def _forget(self) -> None:
        """Sets whose batches are all over: the oldest; now and then those behind one that lasts, too."""
        while self._sets and not not_over(*self._sets[oldest := next(iter(self._sets))]):
            del self._sets[oldest]
        if len(self._sets) >= self._sweep_at:
            self._sets = {number: alive for number, batches in self._sets.items() if (alive := not_over(*batches))}
            self._sweep_at = 2 * len(self._sets) + SWEEP


def not_over(*batches: Batch | None) -> list[Batch]:
    """Those of ``batches`` that there are and that are not over."""
    return [batch for batch in batches if batch is not None and not batch.done()]


def _slots(table: bytes) -> npt.NDArray[np.int32]:
    slots = np.frombuffer(table, np.int32)
    return slots[slots >= 0]
