"""The two things that tasks wait at: a queue without a bound, from which all items are taken at once, or the first few;
and a signal that some state has changed. The head and workers use both."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Items in order, for one or several tasks that read them. ``put`` never blocks and never fails."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._filled = asyncio.Event()

    def __repr__(self) -> str:
        return f"Inbox({len(self._items)})"

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def put(self, item: T) -> None:
        """Add ``item`` and wake the readers."""
        self._items.append(item)
        self._filled.set()

    async def filled(self) -> None:
        """Return when there is something to take. Cancelling it takes nothing."""
        while not self._items:
            self._filled.clear()
            await self._filled.wait()

    def take(self) -> list[T]:
        """Take and return all items."""
        taken, self._items = list(self._items), deque()
        return taken

    def take_while(self, wanted: Callable[[T], bool]) -> list[T]:
        """Take and return items from the front, as long as ``wanted`` returns True for the next one. ``wanted`` is
        called once for each item that is taken, and once for the first that is not."""
        taken = []
        while self._items and wanted(self._items[0]):
            taken.append(self._items.popleft())
        return taken


class ChangeSignal:
    """A signal that several tasks of one loop may wait for, any number of times."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Return at the next ``tell``. The caller then has to look whether the state is what it waits for. Cancelling
        it stops the waiting."""
        await self._event.wait()

    def tell(self) -> None:
        """Wake all tasks that wait now. A task that comes later waits for the next ``tell``."""
        self._event.set()
        self._event.clear()
