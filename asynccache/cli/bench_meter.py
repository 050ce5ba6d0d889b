"""What one pass over many pages took, and what several such passes come to."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass(slots=True)
class Meter:
    """Wall and CPU time of one pass, and how long each call took; ``flush``: seconds until it was durable."""

    pages: int
    page_bytes: int
    latencies: list[float] = field(default_factory=list)
    wall: float = 0.0
    cpu: float = 0.0
    flush: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure what is inside."""
        cpu, wall = _cpu(), time.perf_counter()
        yield
        self.wall, self.cpu = time.perf_counter() - wall, _cpu() - cpu

    @contextmanager
    def call(self) -> Iterator[None]:
        """One call."""
        began = time.perf_counter()
        yield
        self.latencies.append(time.perf_counter() - began)


def summary(passes: Sequence[Meter], *, moves: bool = True) -> dict[str, Any]:
    """Medians over passes, and how long calls took over all. ``moves``: pages went from one place to another."""
    calls = sorted(latency for one in passes for latency in one.latencies)

    def middle(figure: Callable[[Meter], float], digits: int) -> float:
        return round(median(map(figure, passes)), digits)

    found: dict[str, Any] = {
        "pages_per_s": middle(lambda one: one.pages / one.wall, 0),
        "calls_per_s": middle(lambda one: len(one.latencies) / one.wall, 1),
        "cpu_us_per_page": middle(lambda one: one.cpu / one.pages * 1e6, 2),
        "calls": len(calls),
        **{f"{name}_ms": round(_quantile(calls, share) * 1e3, 3)
           for name, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999))},
    }
    if any(one.flush for one in passes):
        found["flush_ms"] = middle(lambda one: one.flush * 1e3, 1)
    rate = {"gb_per_s": middle(lambda one: one.pages * one.page_bytes / one.wall / 1e9, 3)}
    return {**rate, **found} if moves else found


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
