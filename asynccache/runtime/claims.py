"""What a prefetch that has ended keeps on the host for its request, and until when.

Law: a claim ends when the lease that takes the handle is granted, when the handle is cancelled or nobody has it any
more, and after ``HELD_FOR`` seconds in which no lease stands in line with it. The core may take it away earlier.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asynccache.runtime.driver import Driver

HELD_FOR = 30.0


class Claims:
    """The claims of one cache, by the ticket of their handle. Belongs to the cache's loop, but for ``abandon``."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._loop = asyncio.get_running_loop()
        self._timers: dict[int, asyncio.TimerHandle | None] = {}

    def __repr__(self) -> str:
        return f"Claims({len(self._timers)} held)"

    def take(self, ticket: int, space: bytes, key: bytes, leases: int) -> None:
        """Claim what the host has of ``key``."""
        if self._driver.closed is None:
            self._driver.perform(self._driver.give_back(self._driver.core.claim, ticket, space, key))
            self.note(ticket, leases)

    def note(self, ticket: int, leases: int) -> None:
        """A claim was taken, or the number of ``leases`` that stand in line with its handle has changed."""
        self._stop(ticket)
        if not self._driver.broken:
            self._driver.unlocked(self._driver.core.confirm_claim, ticket, leases > 0)
        self._timers[ticket] = None if leases else self._loop.call_later(HELD_FOR, self.drop, ticket)

    def holds(self, ticket: int) -> bool:
        """Whether it was claimed and not dropped; the core may have taken it away."""
        return ticket in self._timers

    def drop(self, ticket: int) -> None:
        """Give it up. Idempotent."""
        if ticket in self._timers:
            self._stop(ticket)
            del self._timers[ticket]
            self._driver.perform(self._driver.give_back(self._driver.core.drop_claim, ticket))

    def abandon(self, ticket: int) -> None:
        """``drop`` soon, from any thread: the handle is garbage."""
        if ticket in self._timers:
            with suppress(RuntimeError):  # the loop is closed, and the cache with it
                self._loop.call_soon_threadsafe(self.drop, ticket)

    def drop_all(self) -> None:
        """Nobody will come for them."""
        for ticket in tuple(self._timers):
            self.drop(ticket)

    def _stop(self, ticket: int) -> None:
        timer = self._timers.get(ticket)
        if timer is not None:
            timer.cancel()
