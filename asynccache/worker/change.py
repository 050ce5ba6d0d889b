"""A signal for tasks that wait until some state has changed."""

from __future__ import annotations

import asyncio


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
