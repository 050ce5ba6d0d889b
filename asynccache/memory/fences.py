"""Which of an engine's events stand before which device slots: until they have fired, the engine may still read or
write there, and nothing may be copied into them.

Law: slot by slot, so that a copy into pages that nobody uses runs beside the engine's work. A slot carries the number
of a set of events; sets are made as events are added, and forgotten when all of theirs have fired.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from asynccache.memory.device import Event

Stamps = npt.NDArray[np.int64]

SWEEP = 64
"""Sets beyond twice as many as were alive, before those behind one that lasts are looked through."""


class Fences:
    """``slots``: of each component, on the device."""

    def __init__(self, slots: Mapping[int, int]) -> None:
        self._stamps = {component: np.zeros(count, np.int64) for component, count in slots.items()}
        self._sets: dict[int, list[Event]] = {}  # by rising number
        self._everywhere: list[Event] = []
        self._number = 0
        self._sweep_at = SWEEP

    def __repr__(self) -> str:
        return f"Fences({len(self._sets)} sets, {len(self._everywhere)} everywhere)"

    def __len__(self) -> int:
        return len(self._sets) + len(self._everywhere)

    def add(self, event: Event, slots: Mapping[int, bytes] | None) -> None:
        """``slots``: int32 of each component, -1 where there is none; None: all there are."""
        if event.done():
            return
        self._forget()
        if slots is None:
            self._everywhere = [*unfired(*self._everywhere), event]
            return
        made: dict[int, int] = {}
        for component, table in slots.items():
            self._stamp(self._stamps[component], _slots(table), event, made)

    def before(self, wanted: Iterable[tuple[int, bytes]]) -> list[Event]:
        """The events that stand before any of these slots, each once, and have not fired."""
        self._forget()
        numbers = {number for component, table in wanted for number in self._alive(self._stamps[component], table)}
        found = {id(event): event for event in unfired(*self._everywhere)}
        for number in sorted(numbers):
            found |= {id(event): event for event in unfired(*self._sets.get(number, ()))}
        return list(found.values())

    def _stamp(self, stamps: Stamps, slots: npt.NDArray[np.int32], event: Event, made: dict[int, int]) -> None:
        """``made``: the sets that this event has joined, by what they were before. No sorting: tables are long, and an
        iteration of an engine names events for a hundred of them."""
        base, at, found = self._places(stamps, slots)
        if not found:
            return
        becomes = np.zeros(found[-1] + 1, np.int64)
        for place in found:
            old = place + base if place else 0
            if old not in made:
                made[old] = self._join(old, event)
            becomes[place] = made[old]
        if any(becomes[place] != place + base for place in found):
            stamps[slots] = becomes[at]

    def _join(self, old: int, event: Event) -> int:
        alive = unfired(*self._sets.get(old, ()))
        if any(event is one for one in alive):
            return old
        self._number += 1
        self._sets[self._number] = [*alive, event]
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
        """Sets whose events have all fired: the oldest; now and then those behind one that lasts, too."""
        while self._sets and not unfired(*self._sets[oldest := next(iter(self._sets))]):
            del self._sets[oldest]
        if len(self._sets) >= self._sweep_at:
            self._sets = {number: alive for number, events in self._sets.items() if (alive := unfired(*events))}
            self._sweep_at = 2 * len(self._sets) + SWEEP


def unfired(*events: Event | None) -> list[Event]:
    """Those of ``events`` that there are and that have not fired."""
    return [event for event in events if event is not None and not event.done()]


def _slots(table: bytes) -> npt.NDArray[np.int32]:
    slots = np.frombuffer(table, np.int32)
    return slots[slots >= 0]
