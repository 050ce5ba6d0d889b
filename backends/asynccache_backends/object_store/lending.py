"""When the client has let go of a buffer. It sends straight from host pages, and does not say when it is done.

A future of the client is over when it has its answer, or at once when it is cancelled; the request behind it may hold
the buffers for some time more. What it holds is a reference to the object that it was given, so it is given a view of
its own per buffer, and the view's end is the end of the loan. It has to be a ``memoryview``: that one lets go of its
buffer before it tells of its end, an array of numpy's afterwards.

After an answer the views are gone, as a rule, and looking is enough. Only for those that are not is somebody told: on a
thread of the client, where a call into Python costs 10 µs.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from contextlib import suppress

from asynccache.storage import settled


class Loan:
    """Views of buffers, given away once by ``take``."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._views = [memoryview(buffer) for buffer in buffers]
        self._refs = [weakref.ref(view) for view in self._views]
        self._told: list[weakref.ref[memoryview]] = []
        self._gone: list[weakref.ref[memoryview]] = []

    def take(self) -> list[memoryview]:
        """The views. Whoever takes them keeps no other reference."""
        views, self._views = self._views, []
        return views

    async def over(self) -> None:
        """Return when nobody has a view any more. Cancelling it waits for that first."""
        if all(ref() is None for ref in self._refs):
            return
        loop = asyncio.get_running_loop()
        end: asyncio.Future[None] = loop.create_future()

        def gone(ref: weakref.ref[memoryview]) -> None:
            self._gone.append(ref)  # one step, whatever thread it is; a count would be two
            if len(self._gone) == len(self._refs):
                with suppress(RuntimeError):  # the loop is gone, and with it everybody who could wait
                    loop.call_soon_threadsafe(_set, end)

        for ref in self._refs:
            view = ref()
            if view is None:
                gone(ref)
            else:
                self._told.append(weakref.ref(view, gone))
            del view  # if it was the last, it ends here and now
        await settled([end])


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
