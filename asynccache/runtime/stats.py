"""Counters and latencies of the transfer stages. Frozen values come out; nothing here decides anything."""

from __future__ import annotations

from array import array
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
        self._max = 0.0

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
        self._max = max(self._max, milliseconds)

    def read(self) -> StageStats:
        """The counters as they are now."""
        ordered = sorted(self._samples)
        latency = Latency(self._count, _at(ordered, 0.5), _at(ordered, 0.99), self._max)
        return StageStats(self.ops, self.pages, self.full_pages, self.bytes, self.errors, latency)


def _at(ordered: Sequence[float], quantile: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * quantile))] if ordered else 0.0
