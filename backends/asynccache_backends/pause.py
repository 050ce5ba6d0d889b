"""When to leave something alone that has just failed. Pure: the clock is handed in.

    WELL     --failure-->  RESTING  nobody may try, for 0.1 s at first and twice as long after each further failure
    RESTING  --over-->     TRIED    one may try, all others are refused
    TRIED    --success-->  WELL     --failure-->  RESTING     --given up-->  RESTING, and over at once
"""

from __future__ import annotations

from enum import IntEnum

FIRST, LAST = 0.1, 1.0


class Health(IntEnum):
    """Whether it may be tried."""

    WELL = 0
    RESTING = 1
    TRIED = 2


class Pause:
    """Who may try says afterwards how it went, by one of ``ended``, ``failed`` and ``given_up``."""

    def __init__(self) -> None:
        self.health = Health.WELL
        self._seconds = 0.0
        self._until = 0.0

    def allows(self, now: float) -> bool:
        """Whether the caller may try."""
        if self.health is Health.RESTING and now >= self._until:
            self.health = Health.TRIED
            return True
        return self.health is Health.WELL

    def failed(self, now: float) -> None:
        """It failed. What was begun before the rest that is under way is no news."""
        if self.health is not Health.RESTING:
            self.health = Health.RESTING
            self._seconds = min(max(FIRST, self._seconds * 2), LAST)
            self._until = now + self._seconds

    def ended(self) -> None:
        """It went well."""
        self.health = Health.WELL
        self._seconds = 0.0

    def given_up(self) -> None:
        """Nothing was learnt."""
        if self.health is Health.TRIED:
            self.health = Health.RESTING
