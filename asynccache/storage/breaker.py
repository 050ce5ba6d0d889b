"""When to leave a failing backend alone. A pure state machine: the clock is handed in, and so is the jitter.

    CLOSED     --threshold failures, see below-->  OPEN       every call is refused until the back-off is over
    OPEN       --back-off over, one call-->        HALF_OPEN  that call is the probe, all others are refused
    HALF_OPEN  --probe succeeds-->                 CLOSED     on probation
    HALF_OPEN  --probe fails-->                    OPEN       the back-off doubles, up to its limit
    HALF_OPEN  --probe abandoned-->                OPEN       the next call may probe at once

Failures count until a call of the same *kind* (a read, a write, a question) succeeds, so that questions which a store
still answers do not hide that it serves no pages. On probation one failure of the kind that opened it opens it again,
with the back-off doubled; one success of that kind ends the probation, and the back-off starts small again.

Every change of state begins a new era, and a permit is the era it was given in: what a call from an earlier era has to
say is about a backend as it was then, and changes nothing.
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
    """Whether calls pass."""

    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2


BEST_FIRST = (BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN)


def best_off(states: Iterable[float]) -> BreakerState:
    """Of several stores' states that which lets most through: one that is being tried is nearer to serving than one
    that is left alone. The numbers are names, and no order."""
    return min(map(BreakerState, map(int, states)), key=BEST_FIRST.index)


class Breaker:
    """All of its mutable state is its own; it belongs to one store.

    ``jitter``: a factor for each back-off, so that those who share a store do not come back all at once. ``changed``:
    called after every change of ``state``; it must be quick, and may be replaced.

    In its methods ``now`` is in seconds, of one clock that never goes back; ``permit`` is what ``allow`` returned;
    ``kind`` is any text. What is none of that is refused with ``ConfigError``, and nothing has changed.
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
        """A permit for one call, to be handed to one of success, failure, abandon when it is over; or REFUSED."""
        now = checks.number("now", now)
        if self.state is BreakerState.CLOSED:
            return self._era
        if self.state is BreakerState.OPEN and now >= self._retry_at:
            self._probed_at = now
            return self._enter(BreakerState.HALF_OPEN)
        return REFUSED

    def success(self, permit: Permit, now: float | None = None, kind: str = "") -> None:
        """The call came back. ``now`` is for ``shut_for`` only; not given, the probe took no time."""
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
        """The call failed as a whole, or took too long."""
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
        """The call was cancelled: nothing was learnt."""
        if _permit(permit) == self._era and self.state is BreakerState.HALF_OPEN:
            self._open(self._retry_at)

    def shut_for(self, now: float) -> float:
        """Seconds that it was not closed, in all."""
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


class Hearing:
    """What one permitted call has to say to the breaker: the first thing it says is heard, and nothing after it."""

    __slots__ = ("_breaker", "_kind", "_permit")

    def __init__(self, breaker: Breaker, permit: Permit, kind: str) -> None:
        self._breaker = breaker
        self._permit = permit
        self._kind = kind

    def success(self, now: float) -> None:
        """It came back in time."""
        self._breaker.success(self._said(), now, self._kind)

    def failure(self, now: float) -> None:
        """It failed, or takes too long."""
        self._breaker.failure(self._said(), now, self._kind)

    def abandon(self) -> None:
        """It was cancelled."""
        self._breaker.abandon(self._said())

    def _said(self) -> Permit:
        permit, self._permit = self._permit, REFUSED
        return permit
