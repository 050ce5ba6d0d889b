"""Waiting for work that uses the caller's buffers: even a waiter that is cancelled returns only when the work has
ended.

A future is *settled* here when it is done: with a result, with an error, or cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from asynccache import checks
from asynccache.errors import ConfigError

_T = TypeVar("_T")


async def settled(futures: Sequence[asyncio.Future[Any]]) -> None:
    """Wait until every future is done. Their results and errors are left in them.

    If it is cancelled it cancels none of the futures, waits until all of them are done, and then raises CancelledError.

    Raises:
        ConfigError: ``futures`` is not a list or tuple of futures.
    """
    for future in checks.instance("futures", futures, (list, tuple)):
        if not asyncio.isfuture(future):
            raise ConfigError(f"futures: {checks.shown(future)} is none")
    cancelled: asyncio.CancelledError | None = None
    while waiting := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(waiting)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        try:
            raise cancelled
        finally:
            del cancelled  # else it and this frame would keep each other and the caller's buffers alive


async def completed(work: Coroutine[Any, Any, _T]) -> _T:
    """Run the coroutine ``work`` to its end, and return what it returns or raise what it raises.

    If this is cancelled, ``work`` is not: it is waited for, its result or error is dropped, and then CancelledError is
    raised.

    Raises:
        ConfigError: ``work`` is not a coroutine.
    """
    work = checks.instance("work", work, Coroutine)
    task = asyncio.get_running_loop().create_task(work)
    try:
        await settled([task])
    except asyncio.CancelledError:
        if not task.cancelled():
            task.exception()  # else asyncio would log that nobody has read it
        raise
    try:
        return task.result()
    finally:
        del task  # for the same reason as in ``settled``
