"""The tree lock: like ``asyncio.Lock``, but it can be taken without an await while it is free.

Nothing in this module waits; ``driving`` has the coroutines that do.

Laws:
* First come, first served. ``release`` hands the lock to whoever has waited longest, and the lock is never free in
  between. So nobody overtakes, not even by ``take``.
* A waiter that is cancelled takes nothing. If it had been handed the lock by then, it passes it on.
"""

from __future__ import annotations

import asyncio
from collections import deque


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
        """Take the lock if it is free. Returns True if the caller holds it now; it then has to ``release`` it."""
        if self._held:
            return False
        self._held = True
        return True

    def wait(self) -> asyncio.Future[None]:
        """Stand behind those who came before. Returns a future, which is done when its owner holds the lock. An owner
        that does not want the lock any more has to ``withdraw``."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def withdraw(self, waiter: asyncio.Future[None]) -> None:
        """The owner of ``waiter`` waits no longer. If the lock was handed over to it by then, it is passed on."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        else:
            self.release()

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
