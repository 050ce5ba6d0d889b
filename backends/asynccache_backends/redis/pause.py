"""For how long to leave something alone that has just failed. Pure: the clock is handed in."""

from __future__ import annotations

FIRST, LAST = 0.1, 1.0


class Pause:
    """Doubles from failure to failure, from ``FIRST`` to ``LAST`` seconds, until something went well."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._until = float("-inf")

    def lasts(self, now: float) -> bool:
        """Whether it is to be left alone."""
        return now < self._until

    def failed(self, now: float) -> None:
        """It failed; what fails while it is being left alone was begun before, and is no news."""
        if not self.lasts(now):
            self._seconds = min(max(FIRST, self._seconds * 2), LAST)
            self._until = now + self._seconds

    def ended(self) -> None:
        """It went well."""
        self._seconds = 0.0
