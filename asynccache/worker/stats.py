"""Counters and latencies of the transfer stages. Frozen values come out; nothing here decides anything."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

RESERVOIR = 1024


class Latency(NamedTuple):
    """Milliseconds, over the last ``RESERVOIR`` samples (``max`` and ``samples``: over all)."""

    samples: int
    p50: float
    p99: float
    max: float


class StageStats(NamedTuple):
    """What a transfer stage did so far. ``pages``: in all pools; ``full_pages``: in FULL's own, so they count tokens.
    ``errors``: operations that failed (prefetch: pages)."""

    ops: int
    pages: int
    full_pages: int
    bytes: int
    errors: int
    latency_ms: Latency


BOUNDS_MS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 10_000.0)


class Histogram(NamedTuple):
    """How often something took how long. ``counts[i]``: up to ``bounds_ms[i]`` and longer than the one before; the last
    one of them: longer than all."""

    bounds_ms: tuple[float, ...]
    counts: tuple[int, ...]
    total_ms: float


class Meter:
    """One stage's counters."""

    def __init__(self) -> None:
        self.ops = 0
        self.pages = 0
        self.full_pages = 0
        self.bytes = 0
        self.errors = 0
        self._samples = array("d")
        self._count = 0
        self._max = self._total = 0.0
        self._buckets = [0] * (len(BOUNDS_MS) + 1)

    def __repr__(self) -> str:
        return f"Meter({self.ops} ops, {self.pages} pages, {self.bytes} bytes, {self.errors} errors)"

    def count(self, ops: int, pages: int, full_pages: int, size: int) -> None:
        """``ops`` operations moved ``pages`` pages of ``size`` bytes in all, ``full_pages`` of them FULL's own."""
        self.ops += ops
        self.pages += pages
        self.full_pages += full_pages
        self.bytes += size

    def took(self, seconds: float) -> None:
        """One operation took this long, from its place in the queue to its outcome."""
        milliseconds = seconds * 1e3
        if len(self._samples) < RESERVOIR:
            self._samples.append(milliseconds)
        else:
            self._samples[self._count % RESERVOIR] = milliseconds
        self._count += 1
        self._total += milliseconds
        self._buckets[bisect_left(BOUNDS_MS, milliseconds)] += 1
        if milliseconds > self._max:
            self._max = milliseconds

    def histogram(self) -> Histogram:
        """All latencies so far."""
        return Histogram(BOUNDS_MS, tuple(self._buckets), self._total)

    def read(self) -> StageStats:
        """The counters as they are now."""
        ordered = sorted(self._samples)
        latency = Latency(self._count, _at(ordered, 0.5), _at(ordered, 0.99), self._max)
        return StageStats(self.ops, self.pages, self.full_pages, self.bytes, self.errors, latency)


def _at(ordered: Sequence[float], quantile: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * quantile))] if ordered else 0.0
