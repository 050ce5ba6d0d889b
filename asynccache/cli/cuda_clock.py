"""Time as the device's own clock has it: between two points of a stream, with nothing of Python in it.

Law: whoever reads a clock has waited for its second point. A ``plug`` keeps the stream busy while a batch behind it is
planned and submitted, so that the clock sees what the device takes and not how long it was kept waiting for work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from asynccache.memory.cuda.calibration import Bench
from asynccache.memory.cuda.driver import Driver, Spans, Towards
from asynccache.memory.cuda.events import CudaEvent
from asynccache.memory.cuda.streams import CudaStream
from asynccache.memory.signals import Work


class Clock:
    """Two points of a stream."""

    def __init__(self, driver: Driver, stream: CudaStream) -> None:
        self._driver = driver
        self._stream = stream
        self._begin, self._end = driver.event_create(timed=True), driver.event_create(timed=True)

    def begin(self) -> None:
        """The first point: after all that was submitted so far."""
        self._record(self._begin)

    def end(self) -> None:
        """The second point."""
        self._record(self._end)

    def begin_here(self, note: Work) -> None:
        """The first point, and ``note`` called in the submitter just before: the stream is idle then, so it tells what
        the host's clock shows there."""
        self._stream.call(partial(self._anchor, note))

    def seconds(self) -> float:
        """Between the two."""
        return self._driver.elapsed(self._begin, self._end)

    def close(self) -> None:
        """Both have happened."""
        self._driver.event_destroy(self._begin)
        self._driver.event_destroy(self._end)

    def _record(self, event: int) -> None:
        self._stream.call(partial(self._driver.event_record, event, self._stream.handle))

    def _anchor(self, note: Work) -> None:
        note()
        self._driver.event_record(self._begin, self._stream.handle)
        self._driver.event_synchronize(self._begin)


@contextmanager
def clock(bench: Bench) -> Iterator[Clock]:
    """One on the stream of ``bench``."""
    made = Clock(bench.driver, bench.stream)
    yield made
    made.close()


def ended(event: CudaEvent) -> None:
    """Wait for it.

    Raises:
        DriverError: what it stands for failed.
    """
    event.block()
    if event.failure is not None:
        raise event.failure


def one_copy(bench: Bench, towards: Towards, size: int) -> Work:
    """The call of the driver that copies so many bytes in one piece."""
    host, device = bench.host.data_ptr(), bench.device[0].data_ptr()
    dst, src = (host, device) if towards is Towards.OUT else (device, host)
    spans = Spans(*(np.array([n], np.uint64) for n in (dst, src, size)))
    return partial(bench.driver.copy, bench.stream.handle, towards, spans)


def device_seconds(bench: Bench, submit: Callable[[], CudaEvent], plug: Work | None = None) -> float:
    """What the device takes for what ``submit`` submits, behind a ``plug``."""
    with clock(bench) as own:
        if plug is not None:
            bench.stream.call(plug)
        own.begin()
        event = submit()
        own.end()
        ended(event)
        ended(bench.stream.record())
        return own.seconds()


def middle(values: Sequence[float]) -> float:
    """The median; of an even number the larger."""
    return sorted(values)[len(values) // 2]


def best(measure: Callable[[], float], rounds: int, budget: float = 1.0) -> float:
    """The least of some rounds; of fewer where they take longer than ``budget`` seconds together."""
    found: list[float] = []
    while len(found) < rounds and sum(found) < budget:
        found.append(measure())
    return min(found)
