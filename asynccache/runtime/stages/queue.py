"""What a transfer stage waits at: a queue without bound whose worker takes everything at once."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Items in order, for one or several workers. ``put`` never blocks and never fails."""

    def __init__(self) -> None:
        self._items: list[T] = []
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

    def take(self, limit: int | None = None) -> list[T]:
        """The first ``limit`` items, or all."""
        if limit is None or limit >= len(self._items):
            taken, self._items = self._items, []
        else:
            taken, self._items = self._items[:limit], self._items[limit:]
        return taken
