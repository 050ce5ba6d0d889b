"""The model's thread, which runs one call at a time. A task that waits for a call waits until the call has returned.

Law: a task that is cancelled while it waits still waits for the call to return. So no page is given back while a model
may still read or write it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
R = TypeVar("R")


class ModelThread:
    """A thread that runs calls in the order in which they were started."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "model")

    def start(self, function: Callable[[A], R], argument: A) -> asyncio.Future[R]:
        """Queue ``function(argument)`` for the thread; returns a future of its result."""
        return asyncio.get_running_loop().run_in_executor(self._thread, _call, function, argument)

    def close(self, wait: bool) -> None:
        """End the thread when the calls that were started have returned. With ``wait``, block until then."""
        self._thread.shutdown(wait)


def _call(function: Callable[[A], R], argument: A) -> R:
    try:
        return function(argument)
    except StopIteration as error:  # a future cannot hold StopIteration: its waiter would wait for ever
        raise RuntimeError("model: it raised StopIteration") from error


async def returned(future: asyncio.Future[R]) -> asyncio.CancelledError | None:
    """Wait until ``future`` is done, also if this task is cancelled meanwhile. Returns the cancellation that came, for
    the caller to raise; None if none came."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled
