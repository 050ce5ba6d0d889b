"""Measures the process while it runs: how late the event loop is, how long it waits for a core, CPU time and memory.

Numbers that come again and again go into ``Samples``, so a run of days needs no more memory than one of minutes.

The loop's lateness ("lag") is that of a timer that is due every 5 ms. It is taken from the clock and not from
``loop.time()``, which uvloop rounds to the millisecond. Beside it stands the run-queue delay of the loop's thread: the
time in which the thread could have run but the kernel ran something else. If the timer is late and the thread did not
wait for a core, then this program held up the loop.
"""

from __future__ import annotations

import asyncio
import resource
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

TICK = 0.005
_RECENT = 200


class Spread(NamedTuple):
    """Percentiles and the maximum of some numbers."""

    p50: float
    p99: float
    p999: float
    max: float


def spread(samples: Sequence[float], scale: float = 1.0) -> Spread:
    """The spread of ``samples``, each times ``scale``; zeros if there are no samples."""
    if not samples:
        return Spread(0.0, 0.0, 0.0, 0.0)
    ordered = sorted(samples)
    last = len(ordered) - 1
    at = [ordered[min(last, int(len(ordered) * share))] * scale for share in (0.5, 0.99, 0.999)]
    return Spread(at[0], at[1], at[2], ordered[-1] * scale)


class Samples:
    """Numbers in the order in which they came, at most ``LIMIT`` of them.

    When there are more, every other number is dropped, and from then on only every second new number is kept; the next
    time only every fourth, and so on. ``count``, ``mean`` and the maximum of ``spread`` are of all numbers. Percentiles
    and iteration are of those that are kept, which are at least half of ``LIMIT`` once there were that many.
    """

    LIMIT = 1 << 16

    def __init__(self, numbers: Iterable[float] = ()) -> None:
        self.count = 0
        self._kept = array("d")
        self._every = 1
        self._sum = 0.0
        self._most = 0.0
        for number in numbers:
            self.append(number)

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[float]:
        return iter(self._kept)

    def append(self, number: float) -> None:
        """Add one number."""
        if self.count % self._every == 0:
            self._kept.append(number)
            if len(self._kept) > self.LIMIT:
                del self._kept[1::2]
                self._every *= 2
        self._most = max(self._most, number) if self.count else number
        self._sum += number
        self.count += 1

    def mean(self) -> float:
        """The average of all numbers; 0 if there are none."""
        return self._sum / self.count if self.count else 0.0

    def spread(self, scale: float = 1.0) -> Spread:
        """The spread of the numbers, each times ``scale``; zeros if there are none."""
        return spread(self._kept, scale)._replace(max=self._most * scale)


class Meter:
    """Measures the running loop and the process from ``start`` to ``stop``. To be used in the loop's thread only."""

    def __init__(self) -> None:
        self.lag = Samples()
        """How late the timer was, in seconds."""
        self.queued = Samples()
        """How long the loop's thread waited for a core between two ticks, in seconds."""
        self.recent: deque[float] = deque(maxlen=_RECENT)
        """The lateness of the latest 200 ticks, about the last second."""
        self._worst = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._due = self._waited = 0.0
        self._began = self._ended = (0.0, 0.0)

    def start(self) -> None:
        """Begin to measure. To be called while the loop runs."""
        self._began, self._waited = (time.monotonic(), time.process_time()), run_delay()
        self._arm()

    def stop(self) -> None:
        """End measuring. A second call does nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._ended = None, (time.monotonic(), time.process_time())

    def worst_lag(self) -> float:
        """The largest lateness since the last call, in seconds; 0 if there was no tick since."""
        worst, self._worst = self._worst, 0.0
        return worst

    def elapsed(self) -> float:
        """Seconds from ``start`` to ``stop``, or until now."""
        return (self._ended[0] if self._timer is None else time.monotonic()) - self._began[0]

    def cpu(self) -> float:
        """CPU seconds of all threads of the process from ``start`` to ``stop``, or until now."""
        return (self._ended[1] if self._timer is None else time.process_time()) - self._began[1]

    def _arm(self) -> None:
        self._due = time.monotonic() + TICK
        self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)

    def _tick(self) -> None:
        late = max(0.0, time.monotonic() - self._due)
        self.lag.append(late)
        self.recent.append(late)
        self._worst = max(self._worst, late)
        before, self._waited = self._waited, run_delay()
        self.queued.append(self._waited - before)
        self._arm()


def run_delay() -> float:
    """Seconds that the calling thread has waited for a core since it began; 0 if the kernel does not count them."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1]) * 1e-9
    except OSError:
        return 0.0


def peak_rss() -> int:
    """The largest resident size of the process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
