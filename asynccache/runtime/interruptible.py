"""An opening that others may end: it is cancelled in the task that opens, which hears ``CacheClosed`` instead of the
cancellation, as it hears ``TimeoutError`` from ``asyncio.timeout``. A cancellation of the task's own stays one.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from asynccache.errors import CacheClosed


class Interruptible:
    """A context of the task that makes it. Its body leaves nothing behind when it is cancelled."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._interrupted = False

    async def interrupt(self) -> None:
        """Return when the body has ended, which is told to end now. Cancelling it stops the waiting only.

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
