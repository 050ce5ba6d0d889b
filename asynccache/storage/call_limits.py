"""Limits how many calls one backend has at a time. Each call needs a place; those without one wait in line.

Laws: reads and writes wait in lines of their own, each first come, first served, and a free place goes to a read first.
Writes never take the last quarter of the places (at least one), so a request's read finds one however slow the writes
are. Where there are eight places or more, reads never take the last eighth, so writes go on however much is read. Where
there is a single place, both may take it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from enum import IntEnum


class PlacePurpose(IntEnum):
    """What a place is wanted for, and so in which line a call waits."""

    READ = 0
    WRITE = 1


READ, WRITE = PlacePurpose


class CallPlaces:
    """``count`` places. Mutable state: how many are taken for each purpose, and who waits."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._most = (count - count // 8, max(1, count - max(1, count // 4)))
        self._taken = [0, 0]
        self._lines: tuple[deque[asyncio.Future[None]], deque[asyncio.Future[None]]] = (deque(), deque())

    def __repr__(self) -> str:
        return f"CallPlaces({self.taken}/{self.count} taken, {self.waiting} wait)"

    @property
    def taken(self) -> int:
        """How many calls have a place."""
        return sum(self._taken)

    @property
    def waiting(self) -> int:
        """How many calls wait for a place."""
        return sum(map(len, self._lines))

    def take_now(self, purpose: PlacePurpose) -> bool:
        """Take a place if one is free and nobody waits in line for it. Returns whether it was taken."""
        if self._lines[purpose] or not self._is_free(purpose):
            return False
        self._taken[purpose] += 1
        return True

    async def take(self, purpose: PlacePurpose) -> None:
        """Wait in line for a place and take it. Cancelling it leaves the line and takes nothing."""
        if self.take_now(purpose):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines[purpose].append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(purpose)
            elif turn in self._lines[purpose]:
                self._lines[purpose].remove(turn)
            raise

    def give(self, purpose: PlacePurpose) -> None:
        """Give back a place that was taken for ``purpose``. The next call in line takes it before this returns."""
        self._taken[purpose] -= 1
        for purpose in PlacePurpose:
            line = self._lines[purpose]
            while line and self._is_free(purpose):
                turn = line.popleft()
                if not turn.cancelled():
                    self._taken[purpose] += 1
                    turn.set_result(None)

    def _is_free(self, purpose: PlacePurpose) -> bool:
        return self._taken[0] + self._taken[1] < self.count and self._taken[purpose] < self._most[purpose]
