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
from asynccache.runtime.prefetch import Wish
from asynccache.runtime.saving import drain

if TYPE_CHECKING:
    from asynccache.runtime.machine import Machine

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


async def save(machine: Machine, limit: SavingLimit) -> None:
    """As much as can be in that time. Cancelling it leaves a group of ranks unusable."""
    seconds = limit.left()
    try:
        if machine.lockstep is None:
            await limit.keep(_settle_down(machine))
        elif seconds > 0:
            await _save_together(machine, machine.lockstep, seconds)
        elif machine.lockstep.busy:
            machine.lockstep.resign()
    except TimeoutError:
        pass  # the report says what that leaves
    except (CacheClosed, RankFailure, RankDivergence):
        pass  # a worker died meanwhile, or a rank; the report says of what


async def _save_together(machine: Machine, lockstep: Lockstep, seconds: float) -> None:
    driver = machine.driver
    async with asyncio.timeout(seconds + GRACE):
        await driver.step_last("the other ranks took no steps while this one was closing")
        await driver.transact(machine.core.drain)
        if lockstep.busy:  # or nobody need step
            machine.driver.at_step = _Deadline(lockstep, seconds).look
        with suppress(_Enough):
            await _settle_down(machine)
        await lockstep.steps.reports_in()


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


async def _settle_down(machine: Machine) -> None:
    handles = tuple(machine.prefetching.handles) if machine.prefetching is not None else ()
    for handle in handles:
        handle.tell(Wish.CANCEL)
    for handle in handles:
        while machine.lockstep is not None and not handle.done():
            await machine.driver.step()
        await handle
    machine.claims.drop_all()
    await drain(machine)
