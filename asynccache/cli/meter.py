"""How the process is doing while it runs: lateness of the loop, the wait for a core, CPU time, memory.

What is measured again and again goes into ``Samples``, so that a run of days needs as much memory as one of minutes.

Lateness is that of a timer of 5 ms, taken with the clock, not with ``loop.time()``, which uvloop rounds to the
millisecond. The run-queue delay of the loop's thread stands beside it: time in which the thread could have run and the
kernel ran something else. A late timer without it is this program's fault.
"""

from __future__ import annotations

import asyncio
import resource
import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

TICK = 0.005
LAGS_MS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_RECENT = 200


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


class Samples:
    """Numbers in the order in which they came. All of them are kept until they are ``LIMIT``; then every other one is
    left out, and from there on only every second one is kept, and so on. ``count``, ``mean`` and the maximum of
    ``spread`` are of all numbers; percentiles are of those that are kept, which are at least half of ``LIMIT``."""

    LIMIT = 1 << 16

    def __init__(self, numbers: Iterable[float] = ()) -> None:
        self.count = 0
        self._kept = array("d")
        self._every = 1
        self._sum = 0.0
        self._most = 0.0
        for number in numbers:
            self.append(number)

    def __repr__(self) -> str:
        return f"Samples({len(self._kept)} of {self.count})"

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[float]:
        return iter(self._kept)

    def append(self, number: float) -> None:
        """One more."""
        if self.count % self._every == 0:
            self._kept.append(number)
            if len(self._kept) > self.LIMIT:
                del self._kept[1::2]
                self._every *= 2
        self._most = max(self._most, number) if self.count else number
        self._sum += number
        self.count += 1

    def mean(self) -> float:
        """The average; 0 of nothing."""
        return self._sum / self.count if self.count else 0.0

    def spread(self, scale: float = 1.0) -> Spread:
        """Percentiles times ``scale``; zeros where there is nothing."""
        return spread(self._kept, scale)._replace(max=self._most * scale)


class Meter:
    """Ticks on the running loop from ``start`` to ``stop``. Belongs to the loop's thread."""

    def __init__(self) -> None:
        self._lag = Samples()
        self._queued = Samples()
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._counts = [0] * (len(LAGS_MS) + 1)
        self._worst = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._waited = 0.0
        self._began = self._ended = 0.0
        self._cpu = self._cpu_end = 0.0

    def start(self) -> None:
        """Begin to tick. To be called on the loop."""
        self._began, self._cpu = time.monotonic(), time.process_time()
        self._waited = run_delay()
        self._arm()

    def stop(self) -> None:
        """Tick no more. Calling it twice is fine."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        self._ended, self._cpu_end = time.monotonic(), time.process_time()

    def lag_ms(self) -> Spread:
        """Lateness of the timer."""
        return self._lag.spread(1e3)

    def lag_histogram(self) -> list[int]:
        """How many ticks were late by up to each of ``LAGS_MS`` and more than by the one before; the last: by more."""
        return list(self._counts)

    def worst_lag(self) -> float:
        """The largest lateness since this was asked last, in seconds; 0 if there was no tick."""
        worst, self._worst = self._worst, 0.0
        return worst

    def recent(self) -> Sequence[float]:
        """Lateness during the last second or so, in seconds."""
        return self._recent

    def run_queue_ms(self) -> Spread:
        """How long the loop's thread waited for a core, per tick."""
        return self._queued.spread(1e3)

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
        late = max(0.0, time.monotonic() - self._due)
        self._lag.append(late)
        self._recent.append(late)
        self._worst = max(self._worst, late)
        self._counts[bisect_left(LAGS_MS, late * 1e3)] += 1
        waited = run_delay()
        self._queued.append(waited - self._waited)
        self._waited = waited
        self._arm()


def run_delay() -> float:
    """Seconds that the thread which asks has waited for a core so far; 0 where the kernel does not count it."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1]) * 1e-9
    except OSError:
        return 0.0


def peak_rss() -> int:
    """The largest resident size of the process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
