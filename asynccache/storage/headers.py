"""A fixed number of 64-byte header buffers in one run of memory, lent in FIFO order.

All of a call's headers are lent at once, so that calls never wait for each other while holding some.
"""

from __future__ import annotations

import asyncio
import mmap
from collections import deque

from asynccache.storage.contract import HEADER_BYTES


class HeaderPool:
    """``memory`` is page-aligned and can be registered; ``count`` headers exist."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._map = mmap.mmap(-1, count * HEADER_BYTES)
        self.memory = memoryview(self._map)
        self._made = 0                                 # a store is opened sooner than thousands of views are made
        self._free: list[memoryview] = []
        self._line: deque[tuple[int, asyncio.Future[list[memoryview]]]] = deque()

    @property
    def free(self) -> int:
        """Headers that are not lent."""
        return len(self._free) + self.count - self._made

    async def take(self, number: int) -> list[memoryview]:
        """Lend ``number`` headers, at most ``count``. Cancelling it leaves the line, holding nothing."""
        if not self._line and number <= self.free:
            return self._pop(number)
        place: asyncio.Future[list[memoryview]] = asyncio.get_running_loop().create_future()
        self._line.append((number, place))
        try:
            return await place
        except asyncio.CancelledError:
            self._leave(number, place)
            raise

    def give(self, headers: list[memoryview]) -> None:
        """Take headers back and serve the line."""
        self._free.extend(headers)
        while self._line and (self._line[0][1].cancelled() or self._line[0][0] <= self.free):
            number, place = self._line.popleft()
            if not place.cancelled():
                place.set_result(self._pop(number))

    def _pop(self, number: int) -> list[memoryview]:
        while len(self._free) < number:
            at = self._made * HEADER_BYTES
            self._free.append(self.memory[at : at + HEADER_BYTES])
            self._made += 1
        cut = len(self._free) - number
        taken = self._free[cut:]
        del self._free[cut:]
        return taken

    def _leave(self, number: int, place: asyncio.Future[list[memoryview]]) -> None:
        if place.done() and not place.cancelled():
            self.give(place.result())
            return
        self._line = deque(entry for entry in self._line if entry[1] is not place)
        self.give([])
