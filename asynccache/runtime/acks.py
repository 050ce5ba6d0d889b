"""The ack task: the one that applies outcomes when nobody else comes by.

Law: it waits for the queue of outcomes, takes the lock once and drains everything that waits. An acquisition for each
outcome would starve behind calls in slices. Whoever takes the lock first applies what this task has in its hands, too.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from asynccache.runtime.driver import Driver

FREEZE_EVERY = 2048


async def run_acks(driver: Driver, freezer: Freezer | None = None) -> None:
    """Apply outcomes as they come, for ever. Cancelling it leaves what waits to the next who takes the lock."""
    while True:
        await driver.ack()
        if freezer is not None:
            freezer.look()


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
