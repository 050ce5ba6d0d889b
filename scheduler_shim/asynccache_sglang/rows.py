"""Memory of our own for the pages of a pool on their way, lent to calls row by row.

A row whose call is given up is not free until the store has let go of it. So a store that hangs can hold all of them,
and then a call gets none: its pages are misses.
"""

from __future__ import annotations

from threading import Condition
from time import monotonic

import numpy as np
import numpy.typing as npt


class StagingRows:
    """``count`` rows of ``page_bytes`` bytes; 0 for a pool of which nothing is copied. Any thread may take and give
    back."""

    def __init__(self, page_bytes: int, count: int) -> None:
        self.memory: npt.NDArray[np.uint8] = np.empty((count, page_bytes), np.uint8)
        self._free = list(range(count))
        self._changed = Condition()

    def take(self, most: int, until: float) -> list[int]:
        """Between one and ``most`` rows; none if none is free by ``until`` (``time.monotonic``)."""
        with self._changed:
            self._changed.wait_for(lambda: self._free, max(0.0, until - monotonic()))
            taken, self._free = self._free[:most], self._free[most:]
            return taken

    def give_back(self, rows: list[int]) -> None:
        """They are free."""
        with self._changed:
            self._free += rows
            self._changed.notify_all()
