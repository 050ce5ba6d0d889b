"""The end of a cache: what is saved, and until when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from asynccache.errors import CacheClosed, RankFailure
from asynccache.runtime.saving_and_forgetting import drain

if TYPE_CHECKING:
    from asynccache.runtime.cache_parts import CacheParts


class SavingLimit:
    """The moment at which saving ends: ``seconds`` from now on, or earlier if ``shorten`` is called."""

    def __init__(self, seconds: float) -> None:
        self._clock = asyncio.get_running_loop().time
        self._end = self._clock() + seconds
        self._timeout: asyncio.Timeout | None = None

    def left(self) -> float:
        """Return how many seconds are left; a negative number once the moment has passed."""
        return self._end - self._clock()

    def shorten(self, seconds: float) -> None:
        """Move the end to ``seconds`` from now on, if that is earlier."""
        self._end = min(self._end, self._clock() + seconds)
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(self._end)

    async def keep(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``work()`` within the limit. Cancelling it cancels the work.

        Raises:
            TimeoutError: the limit came first, and the work is cancelled.
        """
        async with asyncio.timeout_at(self._end) as self._timeout:
            try:
                await work()
            finally:
                self._timeout = None


async def save(parts: CacheParts, limit: SavingLimit) -> None:
    """Cancel all prefetches, and save as many pages as ``limit`` leaves time for. Cancelling it stops the waiting;
    backups that began go on."""

    async def end_and_drain() -> None:
        handles = tuple(parts.prefetching.handles)
        parts.prefetching.cancel()
        for handle in handles:
            await handle
        parts.claims.drop_all()
        await drain(parts.driver)

    try:
        await limit.keep(end_and_drain)
    except TimeoutError:
        pass  # the report of the caller says what is left unsaved
    except (CacheClosed, RankFailure):
        pass  # a task or a rank died meanwhile; the caller's report names the reason
