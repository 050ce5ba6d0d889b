"""When the client has let go of a buffer. It sends straight from host pages, and does not say when it is done.

A future of the client is over when it has its answer, or at once when it is cancelled; the request behind it may hold
the buffers for some time more. What it holds is a reference to the object that it was given, so it is given an array of
its own per buffer, and the array's end is the end of the loan. That comes on a thread of the client.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt


class Loan:
    """Views of buffers, given away once by ``take``; ``over`` is done when the last of them is gone."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrays = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        self._left: dict[int, weakref.ref[Any]] = {}
        for array in self._arrays:
            ref = weakref.ref(array, self._returned)
            self._left[id(ref)] = ref
        self.over: asyncio.Future[None] = self._loop.create_future()

    def take(self) -> list[npt.NDArray[np.uint8]]:
        """The views. Whoever takes them keeps no other reference."""
        arrays, self._arrays = self._arrays, []
        return arrays

    def _returned(self, ref: weakref.ref[Any]) -> None:
        del self._left[id(ref)]
        if not self._left:
            with suppress(RuntimeError):  # the loop is gone, and with it everybody who could wait
                self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)
