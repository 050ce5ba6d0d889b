"""SlotPool against a plain list: the same multiset of slots whatever is taken and given, and none twice."""

from __future__ import annotations

from random import Random

import pytest

from asynccache.core.ledger import SlotPool
from asynccache.errors import InvariantViolation


def numbers(slots: bytes) -> list[int]:
    return list(memoryview(slots).cast("i"))


@pytest.mark.parametrize("capacity", [0, 1, 255, 256, 257, 1000])
def test_every_slot_is_either_free_or_taken_once(capacity: int) -> None:
    random, pool = Random(capacity), SlotPool(capacity)
    held: list[bytes] = []
    for _ in range(400):
        if held and random.random() < 0.5:
            run = held.pop(random.randrange(len(held)))
            at = 4 * random.randrange(len(run) // 4 + 1)
            pool.give(run[:at])
            pool.give(run[at:])
        else:
            held.append(pool.take(random.randrange(min(pool.left, 300) + 1)))
        taken = [slot for run in held for slot in numbers(run)]
        assert sorted(taken + list(pool.free())) == list(range(capacity))
        assert pool.left == capacity - len(taken)


def test_what_was_given_back_last_is_taken_first_and_in_order() -> None:
    pool = SlotPool(600)
    first, second = pool.take(40), pool.take(40)
    pool.give(first)
    pool.give(second)
    assert pool.take(40) == second
    assert pool.take(40) == first


def test_single_slots_that_come_back_do_not_pile_up_as_single_runs() -> None:
    pool = SlotPool(4096)
    slots = numbers(pool.take(4096))
    Random(1).shuffle(slots)
    for slot in slots:
        pool.give(slot.to_bytes(4, "little"))
    assert len(pool._runs) <= 4096 // 8


def test_more_than_there_are_is_a_bug_and_takes_nothing() -> None:
    pool = SlotPool(10)
    with pytest.raises(InvariantViolation, match="took 11 slots, 10 are free"):
        pool.take(11)
    assert pool.left == 10
