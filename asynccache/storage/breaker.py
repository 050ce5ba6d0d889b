"""The breaker: it says when to stop calling a backend that fails, and when to try it again. A pure state machine:
callers pass the time in.

    CLOSED     --threshold failures, see below-->  OPEN       every call is refused until the back-off is over
    OPEN       --back-off over, one call-->        HALF_OPEN  that call is the probe, all others are refused
    HALF_OPEN  --probe succeeds-->                 CLOSED     on probation
    HALF_OPEN  --probe fails-->                    OPEN       the back-off doubles, up to its limit
    HALF_OPEN  --probe abandoned-->                OPEN       the next call may probe at once

Calls are of several *kinds* (a read, a write, a question). Failures are counted by kind, and a success sets only the
count of its own kind back to zero: a store that still answers questions and serves no pages is found out. The breaker
opens when the counts of all kinds together reach the threshold.

After a successful probe the breaker is on probation for the kind whose failure had opened it. The next failure of that
kind opens it again, with the back-off doubled. The next success of that kind ends the probation, and the back-off is
short again.

Every change of state begins a new *era*. A permit is the number of the era in which it was given. The outcome of a call
with a permit of an earlier era tells how the backend was then, not how it is now, so it changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import NewType

from asynccache import checks

Permit = NewType("Permit", int)
REFUSED = Permit(0)


class BreakerState(IntEnum):
    """The state of a breaker, which says what calls are let through: all of them, none of them, or one as a probe."""

    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2


BEST_FIRST = (BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN)


def best_off(states: Iterable[float]) -> BreakerState:
    """The best state among those of several stores, by ``BEST_FIRST``: HALF_OPEN is better than OPEN. The numbers of
    ``BreakerState`` are in no such order."""
    return min(map(BreakerState, map(int, states)), key=BEST_FIRST.index)


class Breaker:
    """The breaker of one store.

    Args:
        threshold: failures after which it opens.
        backoff: seconds for which it stays open the first time. Each further time in a row takes twice as long.
        max_backoff: seconds that a back-off takes at most.
        jitter: returns a factor for each back-off, so that the users of a shared store do not all come back at once.

    ``opened`` counts how often it went from CLOSED to OPEN. ``changed`` is called without arguments after every change
    of ``state``; it must return soon, and may be replaced by the owner.

    In the methods ``now`` is a time in seconds by a clock that never goes back, ``permit`` is what ``allow`` returned,
    and ``kind`` is any text. Any other value raises ``ConfigError`` and changes nothing.
    """

    def __init__(
        self,
        threshold: int = 5,
        backoff: float = 1.0,
        max_backoff: float = 15.0,
        jitter: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.state = BreakerState.CLOSED
        self.opened = 0
        self.changed: Callable[[], object] = _nobody
        self._threshold = checks.integer("threshold", threshold, 1)
        self._first_backoff = backoff = checks.number("backoff", backoff, above=0)
        self._max_backoff = checks.number("max_backoff", max_backoff, above=0)
        self._jitter = checks.function("jitter", jitter)
        self._backoff = backoff
        self._failures: Counter[str] = Counter()
        self._blamed: str | None = None
        self._retry_at = 0.0
        self._shut_at = 0.0
        self._probed_at = 0.0
        self._shut_for = 0.0
        self._era = Permit(1)

    def __repr__(self) -> str:
        return f"Breaker({self.state.name}, failures={dict(self._failures)}, backoff={self._backoff})"

    def allow(self, now: float) -> Permit:
        """Return a permit for one call, or REFUSED. When the call has ended, its permit is to be passed to ``success``,
        ``failure`` or ``abandon``."""
        now = checks.number("now", now)
        if self.state is BreakerState.CLOSED:
            return self._era
        if self.state is BreakerState.OPEN and now >= self._retry_at:
            self._probed_at = now
            return self._enter(BreakerState.HALF_OPEN)
        return REFUSED

    def success(self, permit: Permit, now: float | None = None, kind: str = "") -> None:
        """Note that the call succeeded. ``now`` is used only for the sum that ``shut_for`` returns; without it the
        time since the probe began is not added."""
        permit, now = _permit(permit), None if now is None else checks.number("now", now)
        kind = checks.text("kind", kind)
        if permit != self._era:
            return
        if self.state is BreakerState.HALF_OPEN:
            self._enter(BreakerState.CLOSED)
            self._shut_for += (self._probed_at if now is None else now) - self._shut_at
            return
        self._failures[kind] = 0
        if kind == self._blamed:
            self._blamed = None
            self._backoff = self._first_backoff

    def failure(self, permit: Permit, now: float, kind: str = "") -> None:
        """Note that the call failed as a whole, or took too long."""
        permit, now, kind = _permit(permit), checks.number("now", now), checks.text("kind", kind)
        if permit != self._era:
            return
        if self.state is BreakerState.HALF_OPEN:
            self._open_longer(now)
            return
        self._failures[kind] += 1
        if kind == self._blamed:
            self._shut(now)
            self._open_longer(now)
        elif self._failures.total() >= self._threshold:
            self._blamed = kind
            self._backoff = self._first_backoff
            self._shut(now)
            self._open(now + self._backoff * self._jitter())

    def abandon(self, permit: Permit) -> None:
        """Note that the call was cancelled, so that it says nothing about the backend. If it was the probe, the next
        call may probe at once."""
        if _permit(permit) == self._era and self.state is BreakerState.HALF_OPEN:
            self._open(self._retry_at)

    def shut_for(self, now: float) -> float:
        """Return for how many seconds, all in all, the breaker has not been CLOSED."""
        now = checks.number("now", now)
        return self._shut_for + (0.0 if self.state is BreakerState.CLOSED else now - self._shut_at)

    def _shut(self, now: float) -> None:
        self.opened += 1
        self._shut_at = now
        self._failures.clear()

    def _open_longer(self, now: float) -> None:
        self._backoff = min(self._backoff * 2, self._max_backoff)
        self._open(now + self._backoff * self._jitter())

    def _open(self, retry_at: float) -> None:
        self._enter(BreakerState.OPEN)
        self._retry_at = retry_at

    def _enter(self, state: BreakerState) -> Permit:
        self.state = state
        self._era = Permit(self._era + 1)
        self.changed()
        return self._era


def _nobody() -> None:
    pass


def _permit(permit: Permit) -> Permit:
    return Permit(checks.integer("permit", permit, 0))


class CallReport:
    """Reports the outcome of one permitted call to the breaker. Only the first report counts: a call that was reported
    as too slow may still succeed, and that changes nothing."""

    __slots__ = ("_breaker", "_kind", "_permit")

    def __init__(self, breaker: Breaker, permit: Permit, kind: str) -> None:
        self._breaker = breaker
        self._permit = permit
        self._kind = kind

    def success(self, now: float) -> None:
        """The call succeeded in time."""
        self._breaker.success(self._take_permit(), now, self._kind)

    def failure(self, now: float) -> None:
        """The call failed, or has taken too long by now."""
        self._breaker.failure(self._take_permit(), now, self._kind)

    def abandon(self) -> None:
        """The call was cancelled."""
        self._breaker.abandon(self._take_permit())

    def _take_permit(self) -> Permit:
        permit, self._permit = self._permit, REFUSED
        return permit
