"""Work that another thread hands to the cache's loop. The thread gets a ``concurrent.futures.Future`` for the outcome.

Law: every such future is answered, whatever happens: with the result, the error, or ``CacheClosed``. A thread that
cancels the future before the work has begun stops the work; after that it has no effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from asynccache.errors import CacheClosed

T = TypeVar("T")

Work = Callable[[], Coroutine[Any, Any, T]]
Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None] | None]


def hand_over(loop: asyncio.AbstractEventLoop, spawn: Spawn, work: Work[T]) -> Future[T]:
    """Have ``work`` run soon on ``loop``, in a task that ``spawn`` makes, after what was handed over before. For any
    thread. Returns the future of its outcome."""
    future: Future[T] = Future()
    loop.call_soon_threadsafe(_spawn, spawn, work, future)
    return future


def _spawn(spawn: Spawn, work: Work[T], future: Future[T]) -> None:
    task = spawn(_deliver(work, future), "asynccache-handoff")
    if task is None:
        _closed(future)
    else:
        task.add_done_callback(lambda _: _closed(future))  # a task may be cancelled before it begins


async def _deliver(work: Work[T], future: Future[T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = await work()
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def _closed(future: Future[T]) -> None:
    if not future.done():
        with suppress(InvalidStateError):  # its thread gave up just now
            future.set_exception(CacheClosed("the cache was closed before the work was done"))
