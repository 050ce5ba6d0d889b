"""The model's thread: one call at a time, which is waited for whatever comes.

Law: who is cancelled waits for the call that runs, so nothing goes back while a model may still touch it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
R = TypeVar("R")


class ModelThread:
    """Calls run in the order in which they were started."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "model")

    def start(self, function: Callable[[A], R], argument: A) -> asyncio.Future[R]:
        """``function(argument)`` in the thread."""
        return asyncio.get_running_loop().run_in_executor(self._thread, _call, function, argument)

    def close(self, wait: bool) -> None:
        """No more calls. ``wait``: blocks until what was started has returned."""
        self._thread.shutdown(wait)


def _call(function: Callable[[A], R], argument: A) -> R:
    try:
        return function(argument)
    except StopIteration as error:  # no future can carry it: who waits would wait for ever
        raise RuntimeError("model: it raised StopIteration") from error


async def returned(future: asyncio.Future[R]) -> asyncio.CancelledError | None:
    """Return when the call has, whatever comes; the cancellation, if one came."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled
