"""A fixed number of 64-byte header buffers in one run of memory. Calls borrow them, first come, first served.

A call gets all of its headers at once. If calls could hold some headers while they wait for more, two of them could
wait for each other for ever.
"""

from __future__ import annotations

import asyncio
import mmap
from collections import deque

from asynccache.storage.contract import HEADER_BYTES


class HeaderPool:
    """``count`` header buffers. They are slices of ``memory``, which is page-aligned, so that a backend can register
    it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._map = mmap.mmap(-1, count * HEADER_BYTES)
        self.memory = memoryview(self._map)
        self._made = 0  # views are made when they are first needed: thousands of them would slow down every opening
        self._free: list[memoryview] = []
        self._line: deque[tuple[int, asyncio.Future[list[memoryview]]]] = deque()

    @property
    def free(self) -> int:
        """Headers that are not lent."""
        return len(self._free) + self.count - self._made

    async def take(self, number: int) -> list[memoryview]:
        """Return ``number`` headers as soon as so many are free; ``number`` is at most ``count``. Cancelling it leaves
        the line and takes nothing."""
        if not self._line and number <= self.free:
            return self._pop(number)
        turn: asyncio.Future[list[memoryview]] = asyncio.get_running_loop().create_future()
        self._line.append((number, turn))
        try:
            return await turn
        except asyncio.CancelledError:
            self._leave(turn)
            raise

    def give(self, headers: list[memoryview]) -> None:
        """Return headers that ``take`` gave, and serve those who wait in line for some."""
        self._free.extend(headers)
        while self._line and (self._line[0][1].cancelled() or self._line[0][0] <= self.free):
            number, turn = self._line.popleft()
            if not turn.cancelled():
                turn.set_result(self._pop(number))

    def _pop(self, number: int) -> list[memoryview]:
        while len(self._free) < number:
            at = self._made * HEADER_BYTES
            self._free.append(self.memory[at : at + HEADER_BYTES])
            self._made += 1
        cut = len(self._free) - number
        taken = self._free[cut:]
        del self._free[cut:]
        return taken

    def _leave(self, turn: asyncio.Future[list[memoryview]]) -> None:
        if turn.done() and not turn.cancelled():
            self.give(turn.result())
            return
        self._line = deque(entry for entry in self._line if entry[1] is not turn)
        self.give([])  # the next in line may need fewer headers and find enough of them
