"""Fences: which batches stand before which slots, against a model that keeps every batch of every slot."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from asynccache.runtime import engine_batches
from asynccache.runtime.engine_batches import SWEEP, Fences

FULL, SWA = 0, 1
SLOTS = {FULL: 24, SWA: 8}


class Told:
    """A batch that is over when it is told so."""

    number = 0
    fired = False
    failed = False

    def done(self) -> bool:
        return self.fired

    async def wait(self) -> None:
        """Nobody waits here."""
        await asyncio.Event().wait()

    settled = wait


def table(slots: Sequence[int]) -> bytes:
    return np.array(slots, np.int32).tobytes()


def test_only_the_slots_of_an_event_wait_for_it() -> None:
    fences, one, two = Fences(SLOTS), Told(), Told()
    fences.add(one, {FULL: table([1, 2, -1]), SWA: table([-1, 3])})
    fences.add(two, {FULL: table([2, 5])})
    assert fences.before([(FULL, table([0, 3, 23]))]) == []
    assert fences.before([(FULL, table([1]))]) == [one]
    assert fences.before([(FULL, table([5]))]) == [two]
    assert fences.before([(FULL, table([2]))]) == [one, two]
    assert fences.before([(SWA, table([3]))]) == [one]
    assert fences.before([(SWA, table([2, 5]))]) == []
    one.fired = True
    assert fences.before([(FULL, table([1, 2]))]) == [two]
    two.fired = True
    assert fences.before([(FULL, table(range(24)))]) == []
    assert len(fences) == 0


def test_an_event_that_has_fired_stands_before_nothing() -> None:
    fences, one = Fences(SLOTS), Told()
    one.fired = True
    fences.add(one, {FULL: table([1])})
    assert len(fences) == 0


def test_one_event_for_many_leases_is_one() -> None:
    """All requests of an iteration name the same event, and share pages."""
    fences, one = Fences(SLOTS), Told()
    for own in range(20):
        fences.add(one, {FULL: table([0, 1, 2, own])})
    assert fences.before([(FULL, table(range(24)))]) == [one]
    assert len(fences) <= 20


def test_what_has_fired_is_forgotten() -> None:
    fences = Fences(SLOTS)
    for _ in range(3 * SWEEP):
        event = Told()
        fences.add(event, {FULL: table([0, 1]), SWA: table([2])})
        event.fired = True
    assert len(fences) == 1


def test_behind_one_that_lasts_the_others_are_forgotten() -> None:
    """An event that fires late keeps the sets that it is in, and no others."""
    fences, first = Fences(SLOTS), Told()
    fences.add(first, {FULL: table([0])})
    for _ in range(10 * SWEEP):
        event = Told()
        fences.add(event, {FULL: table([1]), SWA: table([2])})
        event.fired = True
    assert len(fences) <= 2 * SWEEP
    assert fences.before([(FULL, table([0, 1])), (SWA, table([2]))]) == [first]
    first.fired = True
    assert fences.before([(FULL, table([0]))]) == []
    assert len(fences) == 0


def test_behind_one_that_never_ends_a_fence_costs_as_much_after_many_batches_as_after_few() -> None:
    """What a fence costs grows with the numbers from the first set to the last."""
    fences, stuck = Fences(SLOTS), Told()
    fences.add(stuck, {FULL: table([0])})
    spans = []
    for number in range(200 * SWEEP):
        event = Told()
        fences.add(event, {FULL: table([1 + number % 8]), SWA: table([2])})
        event.fired = True
        spans.append(fences._number - next(iter(fences._sets)))
    assert max(spans[len(spans) // 2 :]) <= max(spans[: 20 * SWEEP])
    assert fences.before([(FULL, table(range(9)))]) == [stuck]


@pytest.mark.parametrize("renumbers", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_against_a_model(seed: int, renumbers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if renumbers:
        monkeypatch.setattr(engine_batches, "SWEEP", 2)
        monkeypatch.setattr(engine_batches, "SPARSE", 0)
    rng, fences = Random(seed), Fences(SLOTS)
    model: dict[tuple[int, int], set[Told]] = {(c, s): set() for c, count in SLOTS.items() for s in range(count)}
    events: list[Told] = []

    def drawn(component: int) -> list[int]:
        return [s if rng.random() < 0.8 else -1 for s in rng.sample(range(SLOTS[component]), rng.randrange(6))]

    for _ in range(400):
        if rng.random() < 0.4 and events:
            rng.choice(events).fired = True
        elif rng.random() < 0.7:
            event = rng.choice(events) if events and rng.random() < 0.3 else Told()
            events.append(event)
            slots = {c: drawn(c) for c in rng.sample(list(SLOTS), rng.randrange(1, 3))}
            fences.add(event, {c: table(found) for c, found in slots.items()})
            for c, found in slots.items():
                for slot in found:
                    if slot >= 0:
                        model[c, slot].add(event)
        wanted = {c: drawn(c) for c in SLOTS}
        expected = {e for c, found in wanted.items() for s in found if s >= 0 for e in model[c, s] if not e.fired}
        got = fences.before([(c, table(found)) for c, found in wanted.items()])
        assert len(got) == len(expected)
        assert set(got) == expected
