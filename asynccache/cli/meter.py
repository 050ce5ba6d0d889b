"""How the process is doing while it runs: lateness of the loop, the wait for a core, CPU time, memory.

Lateness is that of a timer of 5 ms, taken with the clock, not with ``loop.time()``, which uvloop rounds to the
millisecond. The run-queue delay of the loop's thread stands beside it: time in which the thread could have run and the
kernel ran something else. A late timer without it is this program's fault.
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from array import array
from collections.abc import Sequence
from typing import NamedTuple

TICK = 0.005


class Spread(NamedTuple):
    """Percentiles of something."""

    p50: float
    p99: float
    p999: float
    max: float


def spread(samples: Sequence[float], scale: float = 1.0) -> Spread:
    """Percentiles of ``samples`` times ``scale``; zeros where there is nothing."""
    if not samples:
        return Spread(0.0, 0.0, 0.0, 0.0)
    ordered = sorted(samples)
    last = len(ordered) - 1
    at = [ordered[min(last, int(len(ordered) * share))] * scale for share in (0.5, 0.99, 0.999)]
    return Spread(at[0], at[1], at[2], ordered[-1] * scale)


class Meter:
    """Ticks on the running loop from ``start`` to ``stop``. Belongs to the loop's thread."""

    def __init__(self) -> None:
        self._lag = array("d")
        self._queued = array("d")
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._waited = 0
        self._schedstat = _open_schedstat()
        self._began = self._ended = 0.0
        self._cpu = self._cpu_end = 0.0

    def start(self) -> None:
        """Begin to tick. To be called on the loop."""
        self._began, self._cpu = time.monotonic(), time.process_time()
        self._waited = self._run_delay()
        self._arm()

    def stop(self) -> None:
        """Tick no more. Calling it twice is fine."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        self._ended, self._cpu_end = time.monotonic(), time.process_time()
        if self._schedstat is not None:
            os.close(self._schedstat)
            self._schedstat = None

    def lag_ms(self) -> Spread:
        """Lateness of the timer."""
        return spread(self._lag, 1e3)

    def lags(self) -> Sequence[float]:
        """Lateness of every tick so far, in seconds."""
        return self._lag

    def recent(self) -> Sequence[float]:
        """Lateness during the last second or so, in seconds."""
        return self._lag[-200:]

    def run_queue_ms(self) -> Spread:
        """How long the loop's thread waited for a core, per tick."""
        return spread(self._queued, 1e3)

    def elapsed(self) -> float:
        """Seconds from start to stop, or until now."""
        return (self._ended if self._timer is None else time.monotonic()) - self._began

    def cpu(self) -> float:
        """CPU seconds of the process, all threads, from start to stop, or until now."""
        return (self._cpu_end if self._timer is None else time.process_time()) - self._cpu

    def _arm(self) -> None:
        self._due = time.monotonic() + TICK
        self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)

    def _tick(self) -> None:
        self._lag.append(max(0.0, time.monotonic() - self._due))
        waited = self._run_delay()
        self._queued.append((waited - self._waited) * 1e-9)
        self._waited = waited
        self._arm()

    def _run_delay(self) -> int:
        if self._schedstat is None:
            return 0
        return int(os.pread(self._schedstat, 128, 0).split()[1])


def _open_schedstat() -> int | None:
    try:
        return os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def peak_rss() -> int:
    """The largest resident size of the process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
