"""When to leave a failing backend alone. A pure state machine: the clock is handed in.

    CLOSED     --threshold failures in a row-->  OPEN       every call is refused until the back-off is over
    OPEN       --back-off over, one call-->      HALF_OPEN  that call is the probe, all others are refused
    HALF_OPEN  --probe succeeds-->               CLOSED     the back-off starts small again
    HALF_OPEN  --probe fails-->                  OPEN       the back-off doubles, up to its limit
    HALF_OPEN  --probe abandoned-->              OPEN       the next call may probe at once
"""

from __future__ import annotations

from enum import IntEnum


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

    def __repr__(self) -> str:
        return f"Breaker({self.state.name}, failures={self._failures}, backoff={self._backoff})"

    def allow(self, now: float) -> bool:
        """Whether a call may be made. After True exactly one of success, failure, abandon must follow."""
        if self.state is BreakerState.CLOSED:
            return True
        if self.state is BreakerState.OPEN and now >= self._retry_at:
            self.state = BreakerState.HALF_OPEN
            return True
        return False

    def success(self) -> None:
        """A call came back. One that was made before the breaker opened does not close it."""
        if self.state is BreakerState.OPEN:
            return
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._backoff = self._first_backoff

    def failure(self, now: float) -> None:
        """A call failed as a whole. One that was made before the breaker opened changes nothing."""
        if self.state is BreakerState.OPEN:
            return
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN:
            self._backoff = min(self._backoff * 2, self._max_backoff)
            self._open(now + self._backoff)
        elif self._failures >= self._threshold:
            self._open(now + self._backoff)

    def abandon(self) -> None:
        """A call was cancelled: nothing was learnt."""
        if self.state is BreakerState.HALF_OPEN:
            self._open(self._retry_at)

    def _open(self, retry_at: float) -> None:
        self.state = BreakerState.OPEN
        self._retry_at = retry_at
