"""How late the event loop is: a timer compares the time at which it fires with the time at which it was due."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left

from asynccache import checks
from asynccache.worker.stages import BOUNDS_MS, Histogram


class LoopLag:
    """A timer that fires every ``tick`` seconds, from ``start`` to ``stop``, and counts how late it was.

    ``last_ms`` is how late it was the last time, in milliseconds. Times are read from ``time.monotonic``, since the
    clock of uvloop's event loop has a resolution of a millisecond.
    """

    def __init__(self, tick: float = 0.05) -> None:
        self._tick = checks.number("tick", tick, above=0)
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._total = 0.0
        self._counts = [0] * (len(BOUNDS_MS) + 1)
        self.last_ms = 0.0

    def __repr__(self) -> str:
        return f"LoopLag({sum(self._counts)} ticks, last {self.last_ms:.3f} ms)"

    def start(self) -> None:
        """Start the timer on the running event loop. Calling it twice is fine."""
        if self._timer is None:
            self._arm(asyncio.get_running_loop())

    def stop(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def histogram(self) -> Histogram:
        """Return a histogram of how late the timer was, in milliseconds, with one value for each time that it fired."""
        return Histogram(BOUNDS_MS, tuple(self._counts), self._total)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = time.monotonic() + self._tick
        self._timer = loop.call_later(self._tick, self._ticked, loop)

    def _ticked(self, loop: asyncio.AbstractEventLoop) -> None:
        self.last_ms = late = max(0.0, (time.monotonic() - self._due) * 1e3)
        self._total += late
        self._counts[bisect_left(BOUNDS_MS, late)] += 1
        self._arm(loop)
