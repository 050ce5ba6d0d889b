"""Counts the calls under way, so that closing can wait for them, and refuses calls after that."""

from __future__ import annotations

import asyncio
from types import TracebackType

from asynccache.errors import Unavailable
from asynccache.storage import settled


class OpenCalls:
    """Every call runs in ``with operations:``, which raises Unavailable once the store is closed. ``name`` is what
    errors call the store."""

    def __init__(self, name: str) -> None:
        self.closed = False
        self._name = name
        self._running = 0
        self._drained: asyncio.Future[None] | None = None

    def __enter__(self) -> None:
        if self.closed:
            raise Unavailable(f"{self._name} is closed")
        self._running += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._running -= 1
        if self._drained is not None and not self._running:
            self._drained.set_result(None)

    async def close(self) -> None:
        """Refuse new calls, and wait until none is under way. Cancelling it does not shorten the waiting."""
        self.closed = True
        if self._running:
            self._drained = asyncio.get_running_loop().create_future()
            await settled([self._drained])
