"""A lease that waits where several ranks must grant it at one step.

Law: it joins the line in the call that makes the lease, which every rank makes; only ``Door.serve_line``, in a step,
tries to grant it; a task that awaits it, or is cancelled while it does, changes nothing. It leaves by its grant, by
``CacheFull``, or by ``Lease.abort``, which every rank calls.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from asynccache.core.cache import Ask, Grant
from asynccache.core.settings import PrefetchPolicy
from asynccache.errors import AsyncCacheError, CacheFull
from asynccache.runtime.entry import GRACE, Entry, Granted, Terms, Turn
from asynccache.runtime.prefetch import Prefetch

if TYPE_CHECKING:
    from asynccache.runtime.door import Door


class WaitingEntry(Entry):
    """``entered``: done when it is granted, or will not be. ``over``: it is."""

    def __init__(self, door: Door, ask: Ask, terms: Terms, granted: Granted) -> None:
        door.driver.core.check_possible(ask)
        super().__init__(door, ask, terms)
        self.over = False
        self._until: float | None = None
        self.entered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._grant = granted
        if self._own_handle and self.handle is not None and self.handle.done():
            self.handle.claim()
        door.waiting[self.ticket] = self

    async def attempt(self) -> bool:
        """In a step: try. Whether the next one may try."""
        policy = self._door.prefetching.policy
        if self.handle is not None and not self.handle.done() and policy is not PrefetchPolicy.BEST_EFFORT:
            return True
        async with self._door.driver.lock:
            turn = await self._turn(self._enter)
            if turn is Turn.STOPPING and self.handle is not None:
                self._give_up_in_time(self.handle)
            if turn is Turn.NOT_YET and self._door.idle():
                self._end(CacheFull("the pages cannot be had: nothing is in flight that could free them"))
            elif turn is not Turn.GRANTED:
                self._join()
        return self.over

    def _give_up_in_time(self, handle: Prefetch) -> None:
        """As ``Entry._stopped``, in the time that steps make."""
        turns = self._door.driver.turns
        if self._until is None:
            self._until = turns.patience(GRACE)
        elif turns.patience(0) >= self._until:
            self._gave_up = True
            handle.give_up()

    def abort(self) -> None:
        """It is not to be granted any more."""
        if not self.over:
            del self._door.waiting[self.ticket]
            self.over = True
            self.entered.cancel()
            self._leave()

    def fail(self, error: AsyncCacheError) -> None:
        """The cache is closed: it is not to be granted any more."""
        self._end(error)

    def _end(self, error: AsyncCacheError | None) -> None:
        self.over = True
        self._granted = error is None
        self._leave()
        if self.entered.done():
            return
        if error is None:
            self.entered.set_result(None)
        else:
            self.entered.set_exception(error)
            self.entered.exception()  # whoever awaits it hears; nobody need

    def _enter(self, grant: Grant) -> None:
        self._grant(grant)
        self._end(None)
