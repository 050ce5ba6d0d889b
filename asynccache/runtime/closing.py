"""What is not saved yet is saved when a cache ends, for so many seconds.

Law: several ranks stop saving at one step, the first for which one of them has waited long enough: its deadline goes
through the vector, as everything does that a clock says. Only a rank that finds the others not stepping leaves alone,
``GRACE`` seconds later, and tells them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from asynccache.errors import CacheClosed, RankDivergence, RankFailure
from asynccache.runtime.lockstep import Lockstep
from asynccache.runtime.saving import drain

if TYPE_CHECKING:
    from asynccache.runtime.claims import Claims
    from asynccache.runtime.driver import Driver
    from asynccache.runtime.prefetching import Prefetching

GRACE = 2.0


class SavingLimit:
    """Until when saving may take, ``seconds`` from now on; it may be told to end earlier."""

    def __init__(self, seconds: float) -> None:
        self._clock = asyncio.get_running_loop().time
        self._end = self._clock() + seconds
        self._timeout: asyncio.Timeout | None = None

    def left(self) -> float:
        """Seconds that are left; negative, if it is over."""
        return self._end - self._clock()

    def shorten(self, seconds: float) -> None:
        """To so many seconds from now on, if that is earlier."""
        self._end = min(self._end, self._clock() + seconds)
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(self._end)

    async def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """``work``, within the limit. Cancelling it cancels the work.

        Raises:
            TimeoutError: the limit came first, and the work is cancelled.
        """
        async with asyncio.timeout_at(self._end) as self._timeout:
            try:
                await work
            finally:
                self._timeout = None


class Saving:
    """What closing does before it stops the workers."""

    def __init__(self, driver: Driver, prefetching: Prefetching, claims: Claims) -> None:
        self._driver = driver
        self._prefetching = prefetching
        self._claims = claims

    async def save(self, limit: SavingLimit) -> None:
        """As much as can be in that time. Cancelling it leaves a group of ranks unusable."""
        seconds, lockstep = limit.left(), self._driver.agreement
        try:
            if not isinstance(lockstep, Lockstep):
                await limit.keep(self._settle_down())
            elif seconds > 0:
                await self._save_together(lockstep, seconds)
            elif lockstep.busy:
                lockstep.resign()
        except TimeoutError:
            pass  # the report says what that leaves
        except (CacheClosed, RankFailure, RankDivergence):
            pass  # a worker died meanwhile, or a rank; the report says of what

    async def _save_together(self, lockstep: Lockstep, seconds: float) -> None:
        driver = self._driver
        async with asyncio.timeout(seconds + GRACE):
            await driver.step_last("the other ranks took no steps while this one was closing")
            await driver.transact(driver.core.drain)
            if lockstep.busy:  # or nobody need step
                driver.at_step = _Deadline(lockstep, seconds).look
            with suppress(_Enough):
                await self._settle_down()
            await lockstep.steps.reports_in()

    async def _settle_down(self) -> None:
        handles = tuple(self._prefetching.handles)
        self._prefetching.cancel()
        for handle in handles:
            while self._driver.lockstep and not handle.done():
                await self._driver.step()
            await handle
        self._claims.drop_all()
        await drain(self._driver)


class _Enough(Exception):
    """All ranks know, as of this step, that one has waited long enough."""


class _Deadline:
    """A vote that nobody casts."""

    def __init__(self, lockstep: Lockstep, seconds: float) -> None:
        self._passed = False
        vote = lockstep.vote(self._pass)
        asyncio.get_running_loop().call_later(seconds, vote.withdraw)

    def _pass(self) -> None:
        self._passed = True

    async def look(self) -> None:
        """At the end of a step."""
        if self._passed:
            raise _Enough
