"""The breaker, step by step, with a clock of its own."""

from __future__ import annotations

import pytest

from asynccache.storage import Breaker, BreakerState


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(threshold=3, backoff=2.0, max_backoff=5.0)
    for _ in range(3):
        assert breaker.allow(now)
        breaker.failure(now)
    return breaker


def test_it_opens_after_that_many_failures_in_a_row() -> None:
    breaker = Breaker(threshold=3)
    for outcome in (breaker.failure, breaker.failure, lambda now: breaker.success(), breaker.failure, breaker.failure):
        outcome(0.0)
        assert breaker.state is BreakerState.CLOSED
    breaker.failure(0.0)
    assert breaker.state is BreakerState.OPEN


def test_it_refuses_until_the_backoff_is_over_and_then_lets_one_probe_through() -> None:
    breaker = opened()
    assert not breaker.allow(1.9)
    assert breaker.allow(2.0)
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.allow(2.0)


def test_a_good_probe_closes_it() -> None:
    breaker = opened()
    assert breaker.allow(2.0)
    breaker.success()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.allow(2.0)


def test_bad_probes_double_the_backoff_up_to_its_limit() -> None:
    breaker, now = opened(), 2.0
    for backoff in (4.0, 5.0, 5.0):
        assert breaker.allow(now)
        breaker.failure(now)
        assert not breaker.allow(now + backoff - 0.01)
        now += backoff


def test_after_a_recovery_the_backoff_starts_small_again() -> None:
    breaker = opened()
    assert breaker.allow(2.0)
    breaker.failure(2.0)
    assert breaker.allow(6.0)
    breaker.success()
    for _ in range(3):
        breaker.failure(10.0)
    assert breaker.allow(12.0)


def test_an_abandoned_probe_leaves_room_for_the_next() -> None:
    breaker = opened()
    assert breaker.allow(2.0)
    breaker.abandon()
    assert breaker.state is BreakerState.OPEN
    assert breaker.allow(2.0)


@pytest.mark.parametrize("late", ["success", "failure"])
def test_calls_from_before_it_opened_change_nothing(late: str) -> None:
    breaker = opened()
    breaker.success() if late == "success" else breaker.failure(100.0)
    assert breaker.state is BreakerState.OPEN
    assert breaker.allow(2.0)
