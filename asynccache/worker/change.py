"""Waiting for something to become otherwise."""

from __future__ import annotations

import asyncio


class Change:
    """What several tasks of one loop may wait for, time and again."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Return when it is told the next time. Who waits looks again whether it has what it waits for. Cancelling it
        stops the waiting."""
        await self._event.wait()

    def tell(self) -> None:
        """All who wait now go on; who comes later waits."""
        self._event.set()
        self._event.clear()
