"""A short pause after a failure, before the same thing is tried again. Pure: callers pass the time in.

    WELL     --failure-->          RESTING  nobody may try; for 0.1 s at first, and twice as long after each failure
    RESTING  --the rest is over--> TRIED    one caller may try, all others are refused
    TRIED    --success-->          WELL
    TRIED    --failure-->          RESTING
    TRIED    --given up-->         RESTING  and the next caller may try at once
"""

from __future__ import annotations

from enum import IntEnum

FIRST, LAST = 0.1, 1.0


class Health(IntEnum):
    """The health of a thing that may fail, which says whether callers may try."""

    WELL = 0
    RESTING = 1
    TRIED = 2


class Pause:
    """The state of one thing that may fail. Whoever was allowed to try calls ``ended``, ``failed`` or ``given_up``
    afterwards. ``now`` is a time in seconds by a clock that never goes back."""

    def __init__(self) -> None:
        self.health = Health.WELL
        self._seconds = 0.0
        self._until = 0.0

    def allows(self, now: float) -> bool:
        """Return True if the caller may try."""
        if self.health is Health.RESTING and now >= self._until:
            self.health = Health.TRIED
            return True
        return self.health is Health.WELL

    def failed(self, now: float) -> None:
        """Note a failure. During a rest it changes nothing: that attempt was begun before the rest."""
        if self.health is not Health.RESTING:
            self.health = Health.RESTING
            self._seconds = min(max(FIRST, self._seconds * 2), LAST)
            self._until = now + self._seconds

    def ended(self) -> None:
        """Note that the attempt ended well."""
        self.health = Health.WELL
        self._seconds = 0.0

    def given_up(self) -> None:
        """Note that the attempt was cancelled, so that it says nothing."""
        if self.health is Health.TRIED:
            self.health = Health.RESTING
