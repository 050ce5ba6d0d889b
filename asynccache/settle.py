"""Waiting that keeps a promise: a cancelled waiter leaves only when the work it waits for has let go of its buffers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from asynccache import checks
from asynccache.errors import ConfigError

_T = TypeVar("_T")


async def settled(futures: Sequence[asyncio.Future[Any]]) -> None:
    """Return when every future is done; their results and errors stay with them.

    Cancelling it waits for all of them first and cancels none of them.

    Raises:
        ConfigError: they are no list or tuple of futures.
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
            del cancelled  # else it and this frame would keep each other, and the caller's buffers


async def completed(work: Coroutine[Any, Any, _T]) -> _T:
    """Run ``work`` to its end. Cancelling it waits for that end, and drops the result or error.

    Raises:
        ConfigError: it is no coroutine.
    """
    work = checks.instance("work", work, Coroutine)
    task = asyncio.get_running_loop().create_task(work)
    try:
        await settled([task])
    except asyncio.CancelledError:
        if not task.cancelled():
            task.exception()
        raise
    try:
        return task.result()
    finally:
        del task  # as above
