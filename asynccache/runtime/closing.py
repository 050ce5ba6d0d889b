"""The end of a cache: what is saved, and until when; and what is left behind if a store does not let go.

Law: a cache that is closed frees no buffer that a store or a device still uses. So what a store uses that hangs is left
behind: tasks go on, and close the rest if it lets go after all. Neither the loop nor the process waits for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from asynccache.errors import CacheClosed, RankFailure
from asynccache.runtime.saving_and_forgetting import drain

if TYPE_CHECKING:
    from asynccache.runtime.cache_parts import CacheParts


class SavingLimit:
    """The moment at which saving ends: ``seconds`` from now on (below 0: now), or earlier if ``shorten`` is called."""

    def __init__(self, seconds: float) -> None:
        self._clock = asyncio.get_running_loop().time
        self._end = self._clock() + max(0.0, float(seconds))
        self._beyond = 0.0
        self._timeout: asyncio.Timeout | None = None

    def left(self) -> float:
        """Return how many seconds are left; a negative number once the moment has passed."""
        return self._end - self._clock()

    def shorten(self, seconds: float) -> None:
        """Move the end to ``seconds`` from now on, if that is earlier."""
        self._end = min(self._end, self._clock() + max(0.0, float(seconds)))
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(self._end + self._beyond)

    async def keep(self, work: Callable[[], Coroutine[Any, Any, object]], beyond: float = 0.0) -> None:
        """Run ``work()``, but no longer than until ``beyond`` seconds after the limit. Cancelling it cancels the work.

        Raises:
            TimeoutError: that time came first, and the work is cancelled.
        """
        self._beyond = beyond
        async with asyncio.timeout_at(self._end + beyond) as self._timeout:
            try:
                await work()
            finally:
                self._timeout = None


_LEFT: set[asyncio.Task[Any]] = set()
_SERVE_STORES = ("asynccache.storage", "asynccache_backends")


def leave_behind() -> None:
    """Take the tasks that serve stores off the list of tasks that the loop's owner waits for: ``asyncio.run`` cancels
    all tasks and waits until they have ended, and a call of a store that hangs never does. Tasks of other caches of
    this loop are taken off, too, which nobody notices as long as they are closed."""
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        frame = getattr(task.get_coro(), "cr_frame", None)
        module = "" if frame is None else str(frame.f_globals.get("__name__"))
        if task.get_name().startswith("asynccache-") or module.startswith(_SERVE_STORES):
            _LEFT.add(task)  # else the collector would end it, and with it the call
            task.add_done_callback(_LEFT.discard)
            asyncio.tasks._unregister_task(task)


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
