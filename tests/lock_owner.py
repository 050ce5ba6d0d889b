"""Who holds a tree lock. ``Driver.call_locked`` itself sees only that somebody does; what it would cost to know who,
each request would pay. Here each core call that may split nodes is checked: the task that makes it holds the lock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from asynccache.errors import InvariantViolation
from asynccache.runtime import driver as module
from asynccache.runtime.driver import Driver, TreeLock

Owner = asyncio.Task[Any] | None


class OwnedLock(TreeLock):
    """A tree lock that knows the task that holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.owner: Owner = None
        self._wanted: dict[asyncio.Future[None], Owner] = {}

    def take(self) -> bool:
        taken = super().take()
        if taken:
            self.owner = asyncio.current_task()
        return taken

    def wait(self) -> asyncio.Future[None]:
        waiter = super().wait()
        self._wanted[waiter] = asyncio.current_task()
        return waiter

    def release(self) -> None:
        super().release()
        self.owner = None
        for waiter in self._wanted.keys() - set(self._waiters):  # it was handed over to this one, or there is none
            self.owner = self._wanted.pop(waiter)

    def withdraw(self, waiter: asyncio.Future[None]) -> None:
        if waiter in self._waiters:
            del self._wanted[waiter]
        super().withdraw(waiter)


def disown(lock: TreeLock) -> None:
    """Let any task make calls under ``lock``, for a test that takes the lock in one task and goes on in another."""
    if isinstance(lock, OwnedLock):
        lock.owner = None


@contextmanager
def owners_checked() -> Iterator[None]:
    """Meanwhile each tree lock that is made is an ``OwnedLock``, and each call under it is checked. The core must not
    be the compiled one."""
    locked = Driver.call_locked

    def checked(driver: Driver, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if isinstance(driver.lock, OwnedLock) and driver.lock.locked():
            owner, caller = driver.lock.owner, asyncio.current_task()
            if owner is not None and owner is not caller:
                raise InvariantViolation(f"{call!r} is made by {caller!r}, and {owner!r} holds the tree lock")
        return locked(driver, call, *args, **kwargs)

    with patch.object(module, "TreeLock", OwnedLock), patch.object(Driver, "call_locked", checked):
        yield
