"""What a transfer stage waits at: a queue without bound whose worker takes everything at once, or what it may."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Items in order, for one or several workers. ``put`` never blocks and never fails."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._filled = asyncio.Event()

    def __repr__(self) -> str:
        return f"Inbox({len(self._items)})"

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        """Add ``item`` and wake a worker."""
        self._items.append(item)
        self._filled.set()

    async def filled(self) -> None:
        """Return when there is something to take. Cancelling it takes nothing."""
        while not self._items:
            self._filled.clear()
            await self._filled.wait()

    def take(self) -> list[T]:
        """All items."""
        taken, self._items = list(self._items), deque()
        return taken

    def take_while(self, wanted: Callable[[T], bool]) -> list[T]:
        """The first items, as long as ``wanted``, which is asked of each of them once."""
        taken = []
        while self._items and wanted(self._items[0]):
            taken.append(self._items.popleft())
        return taken
