"""Faults that a device has on request: late, torn and failing copies, drawn from one seed.

Fates are drawn when a batch is submitted, so the same calls in the same order meet the same faults, however the
threads behind them run.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from asynccache.errors import ConfigError
from asynccache.memory.host_copies import Hitch


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The faults of a device, and how often they occur. ``delayed``, ``failing``: shares of all batches, 0 to 1. A
    delayed batch pauses in the middle of one step, for a time drawn from the range ``delay`` (seconds): half of every
    page is there before the pause, and half comes after it. A failing batch stops in the middle of a step. ``fail_at``:
    numbers of batches that fail, too, counted from 0 in the order in which they were submitted to the device."""

    seed: int = 0
    delayed: float = 0.0
    failing: float = 0.0
    delay: tuple[float, float] = (0.001, 0.050)
    fail_at: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for name in ("delayed", "failing"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"faults: {name}={getattr(self, name)!r} must lie between 0 and 1")
        if not 0 <= self.delay[0] <= self.delay[1]:
            raise ConfigError(f"faults: delay={self.delay!r} must be a range of seconds")


class Fates:
    """Draws what happens to each batch. Thread-safe: batches may be submitted from any thread."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._random = Random(faults.seed)
        self._lock = threading.Lock()
        self._count = 0

    def draw(self, steps: int) -> Mapping[int, Hitch]:
        """Return what goes wrong in the next batch of ``steps`` steps: mostly nothing, or a hitch, by the number of its
        step."""
        faults = self._faults
        with self._lock:
            number, self._count = self._count, self._count + 1
            delayed = self._random.random() < faults.delayed
            fails = self._random.random() < faults.failing or number in faults.fail_at
            if not (delayed or fails):
                return {}
            pause = self._random.uniform(*faults.delay) if delayed else 0.0
            return {self._random.randrange(steps): Hitch(0.0, pause, fails)}
