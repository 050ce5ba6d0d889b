"""Waiting that keeps a promise: a cancelled waiter leaves only when the work it waits for has let go of its buffers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any


async def settled(futures: Sequence[asyncio.Future[Any]]) -> None:
    """Return when every future is done; their results and errors stay with them.

    Cancelling it waits for all of them first and cancels none of them.
    """
    cancelled: asyncio.CancelledError | None = None
    while waiting := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(waiting)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
