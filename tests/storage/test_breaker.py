"""The breaker, step by step, with a clock of its own."""

from __future__ import annotations

from itertools import permutations

import pytest

from asynccache.storage import REFUSED, Breaker, BreakerState, Permit
from asynccache.storage.call_guard import best_off


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(threshold=3, backoff=2.0, max_backoff=5.0)
    for _ in range(3):
        breaker.failure(given(breaker, now), now)
    return breaker


def given(breaker: Breaker, now: float) -> Permit:
    """A permit that must be had."""
    permit = breaker.allow(now)
    assert permit != REFUSED
    return permit


def assert_state(breaker: Breaker, state: BreakerState) -> None:
    assert breaker.state is state


def test_it_opens_after_that_many_failures_in_a_row() -> None:
    breaker = Breaker(threshold=3)
    for good in (False, False, True, False, False):
        permit = given(breaker, 0.0)
        breaker.success(permit, 0.0) if good else breaker.failure(permit, 0.0)
        assert_state(breaker, BreakerState.CLOSED)
    breaker.failure(given(breaker, 0.0), 0.0)
    assert_state(breaker, BreakerState.OPEN)


def test_it_refuses_until_the_backoff_is_over_and_then_lets_one_probe_through() -> None:
    breaker = opened()
    assert breaker.allow(1.9) == REFUSED
    given(breaker, 2.0)
    assert_state(breaker, BreakerState.HALF_OPEN)
    assert breaker.allow(2.0) == REFUSED


def test_a_good_probe_closes_it() -> None:
    breaker = opened()
    breaker.success(given(breaker, 2.0), 2.0)
    assert_state(breaker, BreakerState.CLOSED)
    given(breaker, 2.0)


def test_bad_probes_double_the_backoff_up_to_its_limit() -> None:
    breaker, now = opened(), 2.0
    for backoff in (4.0, 5.0, 5.0):
        breaker.failure(given(breaker, now), now)
        assert breaker.allow(now + backoff - 0.01) == REFUSED
        now += backoff


def recovered() -> Breaker:
    """Opened by reads twice in a row; a probe has just closed it."""
    breaker = Breaker(threshold=3, backoff=2.0, max_backoff=50.0)
    for _ in range(3):
        breaker.failure(given(breaker, 0.0), 0.0, "read")
    breaker.failure(given(breaker, 2.0), 2.0, "ask")
    breaker.success(given(breaker, 6.0), 6.0, "ask")
    assert_state(breaker, BreakerState.CLOSED)
    return breaker


def test_after_a_recovery_the_backoff_starts_small_again() -> None:
    breaker = recovered()
    breaker.success(given(breaker, 7.0), 7.0, "read")
    for _ in range(3):
        assert_state(breaker, BreakerState.CLOSED)
        breaker.failure(given(breaker, 10.0), 10.0, "read")
    assert breaker.allow(11.9) == REFUSED
    given(breaker, 12.0)


def test_on_probation_one_more_failure_of_that_kind_opens_it_for_longer() -> None:
    breaker = recovered()
    breaker.success(given(breaker, 7.0), 7.0, "ask")  # of another kind: proves nothing
    breaker.failure(given(breaker, 10.0), 10.0, "read")
    assert_state(breaker, BreakerState.OPEN)
    assert breaker.allow(17.9) == REFUSED
    given(breaker, 18.0)


def test_on_probation_failures_of_other_kinds_count_as_ever() -> None:
    breaker = recovered()
    for _ in range(2):
        breaker.failure(given(breaker, 7.0), 7.0, "write")
        assert_state(breaker, BreakerState.CLOSED)
    breaker.failure(given(breaker, 7.0), 7.0, "write")
    assert breaker.allow(8.9) == REFUSED
    given(breaker, 9.0)


def test_questions_that_are_answered_do_not_hide_reads_that_fail() -> None:
    breaker = Breaker(threshold=3)
    for _ in range(3):
        assert_state(breaker, BreakerState.CLOSED)
        breaker.success(given(breaker, 0.0), 0.0, "ask")
        breaker.failure(given(breaker, 0.0), 0.0, "read")
    assert_state(breaker, BreakerState.OPEN)


def test_failures_of_several_kinds_add_up() -> None:
    breaker = Breaker(threshold=3)
    for kind in ("ask", "read", "write"):
        assert_state(breaker, BreakerState.CLOSED)
        breaker.failure(given(breaker, 0.0), 0.0, kind)
    assert_state(breaker, BreakerState.OPEN)


def test_backoffs_are_spread_by_the_jitter_that_is_handed_in() -> None:
    factors = iter((1.5, 0.5))
    breaker = Breaker(threshold=1, backoff=2.0, jitter=lambda: next(factors))
    breaker.failure(given(breaker, 0.0), 0.0)
    assert breaker.allow(2.9) == REFUSED
    breaker.failure(given(breaker, 3.0), 3.0)
    assert breaker.allow(4.9) == REFUSED
    given(breaker, 5.0)


def test_it_knows_how_often_and_how_long_it_was_not_closed() -> None:
    breaker = opened(now=10.0)
    assert (breaker.opened, breaker.shut_for(11.0)) == (1, 1.0)
    breaker.failure(given(breaker, 12.0), 12.0)
    breaker.success(given(breaker, 17.0), 17.0)
    assert (breaker.opened, breaker.shut_for(30.0)) == (1, 7.0)
    breaker.failure(given(breaker, 40.0), 40.0)
    assert (breaker.opened, breaker.shut_for(41.0)) == (2, 8.0)


def test_an_abandoned_probe_leaves_room_for_the_next() -> None:
    breaker = opened()
    breaker.abandon(given(breaker, 2.0))
    assert_state(breaker, BreakerState.OPEN)
    given(breaker, 2.0)


def tell(breaker: Breaker, outcome: str, permit: Permit) -> None:
    if outcome == "success":
        breaker.success(permit, 100.0)
    elif outcome == "failure":
        breaker.failure(permit, 100.0)
    else:
        breaker.abandon(permit)


@pytest.mark.parametrize("late", ["success", "failure", "abandon"])
def test_a_call_from_before_it_opened_changes_nothing_ever_after(late: str) -> None:
    breaker = Breaker(threshold=1, backoff=2.0)
    early = [given(breaker, 0.0) for _ in range(4)]
    breaker.failure(early.pop(), 0.0)
    tell(breaker, late, early.pop())
    assert_state(breaker, BreakerState.OPEN)
    probe = given(breaker, 2.0)
    tell(breaker, late, early.pop())
    assert_state(breaker, BreakerState.HALF_OPEN)
    assert breaker.allow(2.0) == REFUSED
    breaker.success(probe, 2.0)
    tell(breaker, late, early.pop())
    assert_state(breaker, BreakerState.CLOSED)


@pytest.mark.parametrize("late", ["success", "failure", "abandon"])
def test_a_call_that_was_made_in_spite_of_a_refusal_changes_nothing(late: str) -> None:
    breaker = opened()
    tell(breaker, late, REFUSED)
    assert_state(breaker, BreakerState.OPEN)
    assert breaker.allow(1.9) == REFUSED
    probe = given(breaker, 2.0)
    tell(breaker, late, REFUSED)
    assert_state(breaker, BreakerState.HALF_OPEN)
    breaker.success(probe, 2.0)
    assert_state(breaker, BreakerState.CLOSED)


def test_a_late_abandoned_probe_is_not_the_next_probe() -> None:
    breaker = opened()
    first = given(breaker, 2.0)
    breaker.abandon(first)
    second = given(breaker, 2.0)
    breaker.success(first, 2.0)
    assert_state(breaker, BreakerState.HALF_OPEN)
    breaker.success(second, 2.0)
    assert_state(breaker, BreakerState.CLOSED)


@pytest.mark.parametrize("states", list(permutations(BreakerState)))
def test_of_several_the_one_that_lets_most_through(states: tuple[BreakerState, ...]) -> None:
    assert best_off(states) is BreakerState.CLOSED
    assert best_off(map(int, states)) is BreakerState.CLOSED
    assert best_off(state for state in states if state) is BreakerState.HALF_OPEN
    assert best_off([BreakerState.OPEN]) is BreakerState.OPEN
