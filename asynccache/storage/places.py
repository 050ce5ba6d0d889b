"""At most so many calls to one backend at a time: the others wait for a place, in the order in which they came.

Law: reads go before writes, and never stand behind them. Writes leave a quarter of the places free (one at least), so a
request's read finds one however slow the writes are; of eight places and more, reads leave an eighth to the writes, so
that backups get on whatever is read. With a single place the next read goes before the next write.
"""

from __future__ import annotations

import asyncio
from collections import deque
from enum import IntEnum


class Lane(IntEnum):
    """Which line a call stands in."""

    READ = 0
    WRITE = 1


READ, WRITE = Lane


class Places:
    """``count`` places. Mutable state: how many are taken by lane, and who waits."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._most = (count - count // 8, max(1, count - max(1, count // 4)))
        self._taken = [0, 0]
        self._lines: tuple[deque[asyncio.Future[None]], deque[asyncio.Future[None]]] = (deque(), deque())

    def __repr__(self) -> str:
        return f"Places({self.taken}/{self.count} taken, {self.waiting} wait)"

    @property
    def taken(self) -> int:
        """Calls that have a place."""
        return sum(self._taken)

    @property
    def waiting(self) -> int:
        """Calls that wait for one."""
        return sum(map(len, self._lines))

    def take_now(self, lane: Lane) -> bool:
        """Take a place if one is free and nobody waits for it."""
        if self._lines[lane] or not self._is_free(lane):
            return False
        self._taken[lane] += 1
        return True

    async def take(self, lane: Lane) -> None:
        """Wait for a place, in line. Cancelling it leaves the line and takes nothing."""
        if self.take_now(lane):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines[lane].append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(lane)
            elif turn in self._lines[lane]:
                self._lines[lane].remove(turn)
            raise

    def give(self, lane: Lane) -> None:
        """Give a place back; whoever is next has it at once."""
        self._taken[lane] -= 1
        for lane in Lane:
            line = self._lines[lane]
            while line and self._is_free(lane):
                turn = line.popleft()
                if not turn.cancelled():
                    self._taken[lane] += 1
                    turn.set_result(None)

    def _is_free(self, lane: Lane) -> bool:
        return self._taken[0] + self._taken[1] < self.count and self._taken[lane] < self._most[lane]
