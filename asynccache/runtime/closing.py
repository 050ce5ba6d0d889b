"""How a cache ends: what is saved, until when, and how an opening is ended by the ``aclose`` of another task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any

from asynccache.errors import CacheClosed, RankFailure
from asynccache.runtime.saving_and_forgetting import drain

if TYPE_CHECKING:
    from asynccache.runtime.driver import Driver
    from asynccache.runtime.prefetch import HandleClaims
    from asynccache.runtime.prefetching import Prefetching


class SavingLimit:
    """The moment at which saving ends: ``seconds`` from now on, or earlier if ``shorten`` is called."""

    def __init__(self, seconds: float) -> None:
        self._clock = asyncio.get_running_loop().time
        self._end = self._clock() + seconds
        self._timeout: asyncio.Timeout | None = None

    def left(self) -> float:
        """How many seconds are left; negative, if the moment has passed."""
        return self._end - self._clock()

    def shorten(self, seconds: float) -> None:
        """Move the end to ``seconds`` from now on, if that is earlier."""
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
    """The saving of pages by a closing cache before it stops its tasks: prefetches are cancelled, pages are backed
    up."""

    def __init__(self, driver: Driver, prefetching: Prefetching, claims: HandleClaims) -> None:
        self._driver = driver
        self._prefetching = prefetching
        self._claims = claims

    async def save(self, limit: SavingLimit) -> None:
        """Save as much as ``limit`` leaves time for. Cancelling it stops the waiting; backups that began go on."""
        try:
            await limit.keep(self._end_and_drain)
        except TimeoutError:
            pass  # what is left unsaved stands in the report of the caller
        except (CacheClosed, RankFailure):
            pass  # a task or a rank died meanwhile; the caller's report names the reason

    async def _end_and_drain(self) -> None:
        handles = tuple(self._prefetching.handles)
        self._prefetching.cancel()
        for handle in handles:
            await handle
        self._claims.drop_all()
        await drain(self._driver)


class Interruptible:
    """A context in which a cache is opened, and that another task may interrupt.

    ``interrupt`` cancels the task that opens. That task hears ``CacheClosed`` instead of the cancellation, as it would
    hear ``TimeoutError`` from ``asyncio.timeout``; a cancellation that somebody else asked for stays one. The body of
    the context has to leave nothing behind when it is cancelled.
    """

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._interrupted = False

    async def interrupt(self) -> None:
        """Cancel the body, and return when it has ended. Cancelling this call stops the waiting only.

        Raises:
            RuntimeError: it runs on another loop.
        """
        if asyncio.get_running_loop() is not self._task.get_loop():
            raise RuntimeError("the cache is being opened on another loop, and belongs to that one's thread")
        if not self._interrupted:
            self._interrupted = True
            self._task.cancel()
        await asyncio.wait([self._over])

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set_result(None)
        if not self._interrupted:
            return
        mine = self._task.uncancel() <= self._cancelling
        if mine and isinstance(error, asyncio.CancelledError):
            raise CacheClosed("the cache was closed while it was being opened") from error
