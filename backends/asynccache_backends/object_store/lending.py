"""Finds out when the client has let go of the buffers of a request.

The client sends directly from host pages and does not say when it needs them no more. Its future is done when there is
an answer, or at once when it is cancelled; the request may still use the buffers for some time. But for so long it has
references to the objects that it was given. So it is given a view of its own for each buffer, and the loan is over when
these views are gone. They have to be memoryviews: a memoryview releases its buffer before weak references to it are
called, an array of NumPy afterwards.

After an answer the views are usually gone, and it is enough to look. Callbacks are set only for views that are not:
they run in a thread of the client, where a call into Python costs 10 µs.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from contextlib import suppress

from asynccache.storage import settled


class BufferLoan:
    """A loan of buffers to one request of the client."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._views = [memoryview(buffer) for buffer in buffers]
        self._refs = [weakref.ref(view) for view in self._views]
        self._told: list[weakref.ref[memoryview]] = []
        self._gone: list[weakref.ref[memoryview]] = []

    def take(self) -> list[memoryview]:
        """Return a view of each buffer, for the request; only once. The caller must keep no reference to them."""
        views, self._views = self._views, []
        return views

    async def over(self) -> None:
        """Wait until all views are gone. Cancelling it does not shorten the waiting."""
        if all(ref() is None for ref in self._refs):
            return
        loop = asyncio.get_running_loop()
        end: asyncio.Future[None] = loop.create_future()

        def gone(ref: weakref.ref[memoryview]) -> None:
            self._gone.append(ref)  # a list, since appending is atomic and this may run in any thread
            if len(self._gone) == len(self._refs):
                with suppress(RuntimeError):  # the loop was closed, so nobody waits any more
                    loop.call_soon_threadsafe(_set, end)

        for ref in self._refs:
            view = ref()
            if view is None:
                gone(ref)
            else:
                self._told.append(weakref.ref(view, gone))
            del view  # if this is the last reference, the view ends here
        await settled([end])


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
