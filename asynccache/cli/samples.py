"""Samples of a run's counters over time, a few hundred at most.

A sample holds the counters' values and not their increases, so every other sample can be dropped without losing
anything but detail. That is done, and the time between samples is doubled, whenever there are too many. Taking a sample
costs the loop a fraction of a millisecond.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asynccache.cli.meter import Meter, Samples
from asynccache.cli.tally import Tally

if TYPE_CHECKING:
    from asynccache.runtime.cache import AsyncCache

EVERY = 0.25
LIMIT = 480


class Sample(NamedTuple):
    """Counters since the start of the run, at second ``t_s``. Three fields differ: ``l1`` and ``l2`` are the shares of
    FULL's pages in use at that moment, and ``lag_s`` is the worst lateness of the loop since the sample before."""

    t_s: float
    tokens: int
    device: int
    host: int
    storage: int
    l1: float
    l2: float
    l3_bytes: int
    evicted_device: int
    evicted_host: int
    moved: tuple[int, ...]
    lag_s: float


class Sampler:
    """Samples one run. To be used in the loop's thread only."""

    def __init__(self, cache: AsyncCache, tally: Tally, meter: Meter) -> None:
        self._cache = cache
        self._tally = tally
        self._meter = meter
        self._every = EVERY
        self._samples: list[Sample] = []
        self._stages: tuple[str, ...] = tuple(cache.statistics().stages)

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            self.take()
            await asyncio.sleep(self._every)

    def take(self) -> None:
        """Take one sample now."""
        self._samples.append(self._look())
        if len(self._samples) > LIMIT:
            self._samples = thinned(self._samples)
            self._every *= 2

    def report(self) -> dict[str, Any]:
        """The samples as plain values, see ``columns``."""
        return columns(self._samples, self._stages)

    def _look(self) -> Sample:
        statistics, tally = self._cache.statistics(), self._tally
        shares = [1 - shelf.free / shelf.capacity if shelf.capacity else 0.0
                  for shelf in (statistics.device["full"], statistics.host["full"])]
        return Sample(
            round(self._meter.elapsed(), 3), tally.tokens, tally.device, tally.host, tally.storage,
            round(shares[0], 4), round(shares[1], 4), int(statistics.storage.get("bytes", 0)),
            statistics.core.evicted_device, statistics.core.evicted_host,
            tuple(stage.bytes for stage in statistics.stages.values()), self._meter.worst_lag(),
        )


def thinned(samples: Sequence[Sample]) -> list[Sample]:
    """Every other sample, beginning with the first. Each one that is kept takes over the lateness of the dropped sample
    before it if that is worse."""
    left_out = [0.0, *(sample.lag_s for sample in samples[1::2])]
    return [sample._replace(lag_s=max(sample.lag_s, lag)) for sample, lag in zip(samples[::2], left_out, strict=False)]


def columns(samples: Sequence[Sample], stages: Sequence[str]) -> dict[str, Any]:
    """One list for each column; ``lag_max_ms`` is the worst lateness since the sample before, in milliseconds."""
    plain = [name for name in Sample._fields if name not in ("moved", "lag_s")]
    return {
        **{name: [getattr(sample, name) for sample in samples] for name in plain},
        "moved_bytes": {name: [sample.moved[i] for sample in samples] for i, name in enumerate(stages)},
        "lag_max_ms": [round(sample.lag_s * 1e3, 3) for sample in samples],
    }


def percentiles(samples: Sequence[float] | Samples, scale: float) -> list[float]:
    """The 0th to the 100th percentile of ``samples``, each times ``scale``; an empty list if there are no samples."""
    if not samples:
        return []
    ordered = np.percentile(np.fromiter(samples, np.float64) * scale, range(101))
    return [round(float(value), 3) for value in ordered]


def memcpy_rate(size: int = 64 << 20, rounds: int = 3) -> float:
    """Bytes per second that one thread of this machine can copy now: the best of ``rounds`` copies of ``size``
    bytes."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - began)
    return size / best
