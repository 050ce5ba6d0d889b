"""Samples of a run's counters over time, a few hundred at most.

A sample holds the counters' values and not their increases, so every other sample can be dropped without losing
anything but detail. Whenever there are too many samples, every other one is dropped and the time between samples is
doubled. Taking a sample costs the loop a fraction of a millisecond.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from asynccache.cli.meter import Meter, Samples
from asynccache.cli.tally import Tally

if TYPE_CHECKING:
    from asynccache.runtime.cache import AsyncCache

EVERY = 0.25
LIMIT = 480


class Sampler:
    """Samples one run. To be used in the loop's thread only.

    The figures of a sample are counts since the start of the run, at second ``t_s``. Three differ: ``l1`` and ``l2``
    are the shares of FULL's pages in use at that moment, and ``lag_max_ms`` is the worst lateness of the loop since the
    sample before.
    """

    def __init__(self, cache: AsyncCache, tally: Tally, meter: Meter) -> None:
        self._cache = cache
        self._tally = tally
        self._meter = meter
        self._every = EVERY
        self._taken: list[dict[str, Any]] = []

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            self.take()
            await asyncio.sleep(self._every)

    def take(self) -> None:
        """Take one sample now."""
        self._taken.append(self._look())
        if len(self._taken) > LIMIT:
            self._taken = thinned(self._taken)
            self._every *= 2

    def report(self) -> dict[str, Any]:
        """The samples as a list for each column; those of ``moved_bytes`` are by stage."""
        columns = {name: [one[name] for one in self._taken] for name in self._taken[0]}
        moved = columns["moved_bytes"]
        return columns | {"moved_bytes": {stage: [one[stage] for one in moved] for stage in moved[0]}}

    def _look(self) -> dict[str, Any]:
        statistics, tally = self._cache.statistics(), self._tally
        l1, l2 = (round(1 - shelf.free / shelf.capacity, 4) if shelf.capacity else 0.0
                  for shelf in (statistics.device["full"], statistics.host["full"]))
        return {
            "t_s": round(self._meter.elapsed(), 3), "tokens": tally.tokens, "device": tally.device, "host": tally.host,
            "storage": tally.storage, "l1": l1, "l2": l2, "l3_bytes": int(statistics.storage.get("bytes", 0)),
            "evicted_device": statistics.core.evicted_device, "evicted_host": statistics.core.evicted_host,
            "moved_bytes": {name: stage.bytes for name, stage in statistics.stages.items()},
            "lag_max_ms": round(self._meter.worst_lag() * 1e3, 3),
        }


def thinned(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every other sample, beginning with the first. Each one that is kept takes over the lateness of the dropped sample
    before it if that is worse."""
    left_out = [0.0, *(one["lag_max_ms"] for one in samples[1::2])]
    return [one | {"lag_max_ms": max(one["lag_max_ms"], lag)} for one, lag in zip(samples[::2], left_out, strict=False)]


def percentiles(samples: Sequence[float] | Samples, scale: float) -> list[float]:
    """The 0th to the 100th percentile of ``samples``, each times ``scale``; an empty list if there are no samples."""
    if not samples:
        return []
    ordered = np.percentile(np.fromiter(samples, np.float64) * scale, range(101))
    return [round(float(value), 3) for value in ordered]

