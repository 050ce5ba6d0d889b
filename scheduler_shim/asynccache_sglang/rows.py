"""Memory for the pages of a pool that are copied on their way. It is lent to calls row by row.

When a call is given up at its deadline, its rows are not free before the store has let go of them. So a store that
hangs may hold all rows. Then a call gets no row, and its pages are misses.
"""

from __future__ import annotations

from threading import Condition
from time import monotonic

import numpy as np
import numpy.typing as npt


class StagingRows:
    """``count`` rows of ``page_bytes`` bytes each; ``count`` is 0 for a pool whose pages are not copied. Rows may be
    taken and given back in any thread."""

    def __init__(self, page_bytes: int, count: int) -> None:
        self.memory: npt.NDArray[np.uint8] = np.empty((count, page_bytes), np.uint8)
        self._free = list(range(count))
        self._changed = Condition()

    def take(self, most: int, until: float) -> list[int]:
        """Take between one and ``most`` rows, waiting until one is free. Returns none if none is free by ``until``, a
        time of ``time.monotonic``."""
        with self._changed:
            self._changed.wait_for(lambda: self._free, max(0.0, until - monotonic()))
            taken, self._free = self._free[:most], self._free[most:]
            return taken

    def give_back(self, rows: list[int]) -> None:
        """Make ``rows`` free again."""
        with self._changed:
            self._free += rows
            self._changed.notify_all()
