"""Counters and latencies of the transfer stages. Frozen values come out; nothing here decides anything."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

from asynccache.core.plan import Status

RESERVOIR = 1024


class Latency(NamedTuple):
    """Latencies in milliseconds. The percentiles are of the last ``RESERVOIR`` samples; ``max`` and ``samples`` (a
    count) are of all."""

    samples: int
    p50: float
    p99: float
    max: float


class StageStats(NamedTuple):
    """Counters of one transfer stage. ``pages``: of all pools, but for copies between device and host in a cache
    without ``workers`` of all components; ``full_pages``: of FULL, so that each stands for ``page_size``
    tokens. ``errors``: operations that failed (prefetch: pages)."""

    ops: int
    pages: int
    full_pages: int
    bytes: int
    errors: int
    latency_ms: Latency


BOUNDS_MS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 10_000.0)


class Histogram(NamedTuple):
    """A histogram of the latencies of operations. ``counts[i]``: those that took at most ``bounds_ms[i]`` and longer
    than the bound before; the last count: those that took longer than every bound. ``total_ms``: the sum of all
    latencies."""

    bounds_ms: tuple[float, ...]
    counts: tuple[int, ...]
    total_ms: float


class StageMeter:
    """One stage's counters."""

    def __init__(self) -> None:
        self.ops = 0
        self.pages = 0
        self.full_pages = 0
        self.bytes = 0
        self.errors = 0
        self._samples: deque[float] = deque(maxlen=RESERVOIR)
        self._count = 0
        self._max = self._total = 0.0
        self._buckets = [0] * (len(BOUNDS_MS) + 1)

    def __repr__(self) -> str:
        return f"StageMeter({self.ops} ops, {self.pages} pages, {self.bytes} bytes, {self.errors} errors)"

    def count(self, ops: int, pages: int, full_pages: int, size: int) -> None:
        """Count ``ops`` operations that moved ``pages`` pages, ``size`` bytes in all; ``full_pages`` of them are
        FULL's."""
        self.ops += ops
        self.pages += pages
        self.full_pages += full_pages
        self.bytes += size

    def ended(self, ops: int, status: Status, size: tuple[int, int, int]) -> None:
        """Count ``ops`` operations that have ended with ``status``. ``size``: what they moved if they are DONE: pages,
        FULL's pages and bytes."""
        if status is Status.DONE:
            self.count(ops, *size)
        else:
            self.errors += ops

    def took(self, seconds: float, ops: int = 1) -> None:
        """Note that ``ops`` operations took ``seconds`` each, from being queued to their outcome."""
        milliseconds = seconds * 1e3
        self._samples.extend(repeat(milliseconds, ops))
        self._count += ops
        self._total += milliseconds * ops
        self._buckets[bisect_left(BOUNDS_MS, milliseconds)] += ops
        if milliseconds > self._max:
            self._max = milliseconds

    def histogram(self) -> Histogram:
        """Return the histogram of all latencies so far."""
        return Histogram(BOUNDS_MS, tuple(self._buckets), self._total)

    def read(self) -> StageStats:
        """Return the counters as they are now."""
        ordered = sorted(self._samples)
        latency = Latency(self._count, _at(ordered, 0.5), _at(ordered, 0.99), self._max)
        return StageStats(self.ops, self.pages, self.full_pages, self.bytes, self.errors, latency)


def _at(ordered: Sequence[float], quantile: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * quantile))] if ordered else 0.0
