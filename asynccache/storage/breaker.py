"""When to leave a failing backend alone. A pure state machine: the clock is handed in.

    CLOSED     --threshold failures in a row-->  OPEN       every call is refused until the back-off is over
    OPEN       --back-off over, one call-->      HALF_OPEN  that call is the probe, all others are refused
    HALF_OPEN  --probe succeeds-->               CLOSED     the back-off starts small again
    HALF_OPEN  --probe fails-->                  OPEN       the back-off doubles, up to its limit
    HALF_OPEN  --probe abandoned-->              OPEN       the next call may probe at once

Every change of state begins a new era, and a permit is the era it was given in: what a call from an earlier era has to
say is about a backend as it was then, and changes nothing.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NewType

Permit = NewType("Permit", int)
REFUSED = Permit(0)


class BreakerState(IntEnum):
    """Whether calls pass."""

    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2


class Breaker:
    """All of its mutable state is its own; it belongs to one store."""

    def __init__(self, threshold: int = 5, backoff: float = 1.0, max_backoff: float = 60.0) -> None:
        self.state = BreakerState.CLOSED
        self._threshold = threshold
        self._first_backoff = backoff
        self._max_backoff = max_backoff
        self._backoff = backoff
        self._failures = 0
        self._retry_at = 0.0
        self._era = Permit(1)

    def __repr__(self) -> str:
        return f"Breaker({self.state.name}, failures={self._failures}, backoff={self._backoff})"

    def allow(self, now: float) -> Permit:
        """A permit for one call, to be handed to one of success, failure, abandon when it is over; or REFUSED."""
        if self.state is BreakerState.CLOSED:
            return self._era
        if self.state is BreakerState.OPEN and now >= self._retry_at:
            return self._enter(BreakerState.HALF_OPEN)
        return REFUSED

    def success(self, permit: Permit) -> None:
        """The call came back."""
        if permit != self._era:
            return
        self._failures = 0
        self._backoff = self._first_backoff
        if self.state is BreakerState.HALF_OPEN:
            self._enter(BreakerState.CLOSED)

    def failure(self, permit: Permit, now: float) -> None:
        """The call failed as a whole."""
        if permit != self._era:
            return
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN:
            self._backoff = min(self._backoff * 2, self._max_backoff)
            self._open(now + self._backoff)
        elif self._failures >= self._threshold:
            self._open(now + self._backoff)

    def abandon(self, permit: Permit) -> None:
        """The call was cancelled: nothing was learnt."""
        if permit == self._era and self.state is BreakerState.HALF_OPEN:
            self._open(self._retry_at)

    def _open(self, retry_at: float) -> None:
        self._enter(BreakerState.OPEN)
        self._retry_at = retry_at

    def _enter(self, state: BreakerState) -> Permit:
        self.state = state
        self._era = Permit(self._era + 1)
        return self._era
