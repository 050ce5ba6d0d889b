"""An event loop in a thread, for callers that are not asynchronous."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asynccache import CacheClosed

R = TypeVar("R")


class LoopThread:
    """Runs until ``close``. A daemon: a program that forgets to close it ends all the same."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._door = threading.Lock()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<LoopThread {self._thread.name!r}, {'alive' if self.alive else 'closed'}>"

    @property
    def alive(self) -> bool:
        """True if the loop takes calls."""
        return not self._ending

    def call(self, work: Coroutine[Any, Any, R]) -> R:
        """Return what ``work`` returns, or raise what it raises. Blocks the thread of whoever calls; when that is
        interrupted, ``work`` is cancelled and waited for.

        Raises:
            CacheClosed: the loop has ended.
        """
        with self._door:
            if self._ending:
                work.close()
                raise CacheClosed("the cache is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise CacheClosed("the cache is closed") from None
        except KeyboardInterrupt:
            future.cancel()
            raise

    def soon(self, callback: Callable[..., None], *args: Any) -> None:
        """Call ``callback`` in the loop's thread, soon. Does not wait.

        Raises:
            CacheClosed: the loop has ended.
        """
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            raise CacheClosed("the cache is closed") from None

    def close(self) -> None:
        """End the loop, and cancel what still runs in it; return when the thread has ended. Twice is once."""
        with self._door:
            first, self._ending = not self._ending, True
            if first:
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            if left := asyncio.all_tasks(self._loop):
                for task in left:
                    task.cancel()
                self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
