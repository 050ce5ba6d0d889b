"""What is not saved yet is saved when a cache ends, for so many seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from asynccache.errors import CacheClosed, RankFailure
from asynccache.runtime.saving import drain

if TYPE_CHECKING:
    from asynccache.runtime.claims import Claims
    from asynccache.runtime.driver import Driver
    from asynccache.runtime.prefetching import Prefetching


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

    async def keep(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """``work()``, within the limit. Cancelling it cancels the work.

        Raises:
            TimeoutError: the limit came first, and the work is cancelled.
        """
        async with asyncio.timeout_at(self._end) as self._timeout:
            try:
                await work()
            finally:
                self._timeout = None


class Saving:
    """What closing does before it stops the workers."""

    def __init__(self, driver: Driver, prefetching: Prefetching, claims: Claims) -> None:
        self._driver = driver
        self._prefetching = prefetching
        self._claims = claims

    async def save(self, limit: SavingLimit) -> None:
        """As much as can be in that time. Cancelling it stops the waiting; backups that began go on."""
        try:
            await limit.keep(self._settle_down)
        except TimeoutError:
            pass  # the report says what that leaves
        except (CacheClosed, RankFailure):
            pass  # a worker died meanwhile, or a rank; the report says of what

    async def _settle_down(self) -> None:
        handles = tuple(self._prefetching.handles)
        self._prefetching.cancel()
        for handle in handles:
            await handle
        self._claims.drop_all()
        await drain(self._driver)
