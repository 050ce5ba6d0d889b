"""What the garbage collector is told of the tree: that it need not look at it."""

from __future__ import annotations

import gc
from collections.abc import Callable

FREEZE_EVERY = 2048


class Freezer:
    """Moves the tree out of the garbage collector's sight every few thousand commits (a commit makes a node or two).

    The core makes no reference cycles, so nothing that is frozen would ever have been collected; without this, one full
    collection takes seconds at a million nodes.
    """

    def __init__(self, commits: Callable[[], int]) -> None:
        self._commits = commits
        self._frozen_at = 0

    def look(self) -> None:
        """Freeze if enough has been published since the last time."""
        commits = self._commits()
        if commits - self._frozen_at >= FREEZE_EVERY:
            self._frozen_at = commits
            gc.freeze()
