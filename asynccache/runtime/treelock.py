"""The tree lock: an ``asyncio.Lock`` that can also be taken without an await while it is free.

Laws:
* First come, first served. ``release`` hands the lock to whoever has waited longest, and the lock is never free in
  between. So nobody overtakes, not even by ``take``.
* A waiter that is cancelled takes nothing. If it had been handed the lock by then, it passes it on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType


class TreeLock:
    """Orders the core calls that may split nodes. Belongs to one loop."""

    __slots__ = ("_held", "_waiters")

    def __init__(self) -> None:
        self._held = False
        self._waiters: deque[asyncio.Future[None]] = deque()

    def __repr__(self) -> str:
        return f"TreeLock({'held' if self._held else 'free'}, {len(self._waiters)} waiting)"

    def locked(self) -> bool:
        """True while somebody holds it."""
        return self._held

    def take(self) -> bool:
        """Take the lock if it is free. Returns whether the caller holds it now, and then has to ``release`` it."""
        if self._held:
            return False
        self._held = True
        return True

    async def acquire(self) -> None:
        """Take the lock, after those who came before. Cancelling it takes nothing."""
        if self.take():
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except BaseException:  # a cancellation, or the coroutine is closed
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            else:  # the lock was handed over before the cancellation came
                self.release()
            raise

    def release(self) -> None:
        """Hand the lock to the next waiter, or leave it free.

        Raises:
            RuntimeError: nobody holds it.
        """
        if not self._held:
            raise RuntimeError("the tree lock is released by somebody who does not hold it")
        for _ in range(len(self._waiters)):
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
            self._waiters.append(waiter)  # it was cancelled, and removes itself when it runs
        self._held = False

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
