"""How late the event loop is: a timer that looks at the clock when it fires."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left

from asynccache import checks
from asynccache.worker.stats import BOUNDS_MS, Histogram


class LoopLag:
    """Ticks every ``tick`` seconds from ``start`` to ``stop``, on the loop that started it. The clock is
    ``time.monotonic``: uvloop's own counts milliseconds."""

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
        """Begin, on the running loop. Twice is fine."""
        if self._timer is None:
            self._arm(asyncio.get_running_loop())

    def stop(self) -> None:
        """Tick no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def histogram(self) -> Histogram:
        """Lateness of all ticks so far."""
        return Histogram(BOUNDS_MS, tuple(self._counts), self._total)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = time.monotonic() + self._tick
        self._timer = loop.call_later(self._tick, self._ticked, loop)

    def _ticked(self, loop: asyncio.AbstractEventLoop) -> None:
        self.last_ms = late = max(0.0, (time.monotonic() - self._due) * 1e3)
        self._total += late
        self._counts[bisect_left(BOUNDS_MS, late)] += 1
        self._arm(loop)
