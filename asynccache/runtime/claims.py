"""Claims: the pages that a prefetch that has ended keeps on the host for its request, and until when.

Law: a claim ends when the lease that was given the handle is granted, when the handle is cancelled, when nobody refers
to the handle any more, and after ``HELD_FOR`` seconds in which no lease with the handle was in line. The core may end
it earlier, for want of room.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asynccache.runtime.driver import Driver

HELD_FOR = 30.0


class HandleClaims:
    """The claims of one cache, by the ticket of their handle. All methods but ``abandon`` are for the cache's
    thread."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._loop = asyncio.get_running_loop()
        self._timers: dict[int, asyncio.TimerHandle | None] = {}

    def __repr__(self) -> str:
        return f"HandleClaims({len(self._timers)} held)"

    def take(self, ticket: int, space: bytes, key: bytes, leases: int) -> None:
        """Claim the pages of ``key`` that the host has. ``leases``: how many leases are in line with the handle."""
        if self._driver.closed is None:
            self._driver.perform(self._driver.give_back(self._driver.core.claim, ticket, space, key))
            self.note(ticket, leases)

    def note(self, ticket: int, leases: int) -> None:
        """A claim was taken, or the number of ``leases`` in line with its handle has changed: start or stop its
        clock."""
        self._stop(ticket)
        if not self._driver.broken:
            self._driver.unlocked(self._driver.core.confirm_claim, ticket, leases > 0)
        self._timers[ticket] = None if leases else self._loop.call_later(HELD_FOR, self.drop, ticket)

    def holds(self, ticket: int) -> bool:
        """Return True if the handle has a claim that was not dropped. The core may have ended it all the same."""
        return ticket in self._timers

    def drop(self, ticket: int) -> None:
        """Give up the claim. Idempotent."""
        if ticket in self._timers:
            self._stop(ticket)
            del self._timers[ticket]
            self._driver.perform(self._driver.give_back(self._driver.core.drop_claim, ticket))

    def abandon(self, ticket: int) -> None:
        """Have the cache's loop ``drop`` it soon. For any thread: the garbage collector calls this."""
        if ticket in self._timers:
            with suppress(RuntimeError):  # the loop is closed, and the cache with it
                self._loop.call_soon_threadsafe(self.drop, ticket)

    def drop_all(self) -> None:
        """Give up every claim: the cache closes."""
        for ticket in tuple(self._timers):
            self.drop(ticket)

    def _stop(self, ticket: int) -> None:
        timer = self._timers.get(ticket)
        if timer is not None:
            timer.cancel()
