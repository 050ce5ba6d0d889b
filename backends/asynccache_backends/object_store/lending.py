"""When the client has let go of a buffer. It sends straight from host pages, and does not say when it is done.

A future of the client is over when it has its answer, or at once when it is cancelled; the request behind it may hold
the buffers for some time more. What it holds is a reference to the object that it was given, so it is given a view of
its own per buffer, and the view's end is the end of the loan. That comes on a thread of the client. It has to be a
``memoryview``: that one lets go of its buffer before it tells of its end, an array of numpy's afterwards.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from contextlib import suppress


class Loan:
    """Views of buffers, given away once by ``take``; ``over`` is done when the last of them is gone."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._loop = asyncio.get_running_loop()
        self._views = [memoryview(buffer) for buffer in buffers]
        returned = self._returned
        self._refs = [weakref.ref(view, returned) for view in self._views]
        self._gone: list[weakref.ref[memoryview]] = []
        self.over: asyncio.Future[None] = self._loop.create_future()

    def take(self) -> list[memoryview]:
        """The views. Whoever takes them keeps no other reference."""
        views, self._views = self._views, []
        return views

    def _returned(self, ref: weakref.ref[memoryview]) -> None:
        self._gone.append(ref)  # one step, whatever thread it is; a count would be two
        if len(self._gone) == len(self._refs):
            with suppress(RuntimeError):  # the loop is gone, and with it everybody who could wait
                self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)
