"""The breaker, step by step, with a clock of its own."""

from __future__ import annotations

import pytest

from asynccache.storage import REFUSED, Breaker, BreakerState, Permit


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
        breaker.success(permit) if good else breaker.failure(permit, 0.0)
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
    breaker.success(given(breaker, 2.0))
    assert_state(breaker, BreakerState.CLOSED)
    given(breaker, 2.0)


def test_bad_probes_double_the_backoff_up_to_its_limit() -> None:
    breaker, now = opened(), 2.0
    for backoff in (4.0, 5.0, 5.0):
        breaker.failure(given(breaker, now), now)
        assert breaker.allow(now + backoff - 0.01) == REFUSED
        now += backoff


def test_after_a_recovery_the_backoff_starts_small_again() -> None:
    breaker = opened()
    breaker.failure(given(breaker, 2.0), 2.0)
    breaker.success(given(breaker, 6.0))
    for _ in range(3):
        breaker.failure(given(breaker, 10.0), 10.0)
    given(breaker, 12.0)


def test_an_abandoned_probe_leaves_room_for_the_next() -> None:
    breaker = opened()
    breaker.abandon(given(breaker, 2.0))
    assert_state(breaker, BreakerState.OPEN)
    given(breaker, 2.0)


def tell(breaker: Breaker, outcome: str, permit: Permit) -> None:
    if outcome == "success":
        breaker.success(permit)
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
    breaker.success(probe)
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
    breaker.success(probe)
    assert_state(breaker, BreakerState.CLOSED)


def test_a_late_abandoned_probe_is_not_the_next_probe() -> None:
    breaker = opened()
    first = given(breaker, 2.0)
    breaker.abandon(first)
    second = given(breaker, 2.0)
    breaker.success(first)
    assert_state(breaker, BreakerState.HALF_OPEN)
    breaker.success(second)
    assert_state(breaker, BreakerState.CLOSED)
