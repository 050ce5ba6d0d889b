"""Measures one pass over many pages, and sums several such passes up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from asynccache.cli.meter import spread


@dataclass(slots=True)
class PassMeter:
    """What one pass took. ``latencies``: seconds of each call; ``wall``, ``cpu``: seconds of the whole pass, CPU time
    of all threads of this process; ``flush``: seconds after that until the pages were durable."""

    pages: int
    page_bytes: int
    latencies: list[float] = field(default_factory=list)
    wall: float = 0.0
    cpu: float = 0.0
    flush: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure the pass, which is what runs inside."""
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        self.wall, self.cpu = time.perf_counter() - wall, time.process_time() - cpu

    @contextmanager
    def call(self) -> Iterator[None]:
        """Measure one call, which is what runs inside."""
        began = time.perf_counter()
        yield
        self.latencies.append(time.perf_counter() - began)


def summary(passes: Sequence[PassMeter], *, moves: bool = True) -> dict[str, Any]:
    """Medians over the passes, and percentiles over the calls of all passes. ``moves``: the calls moved pages, so that
    there is a bandwidth."""
    calls = [latency for one in passes for latency in one.latencies]

    def middle(figure: Callable[[PassMeter], float], digits: int) -> float:
        return round(median(map(figure, passes)), digits)

    found: dict[str, Any] = {
        "pages_per_s": middle(lambda one: one.pages / one.wall, 0),
        "calls_per_s": middle(lambda one: len(one.latencies) / one.wall, 1),
        "cpu_us_per_page": middle(lambda one: one.cpu / one.pages * 1e6, 2),
        "calls": len(calls),
        **{f"{name}_ms": round(value, 3) for name, value in spread(calls, 1e3)._asdict().items() if name != "max"},
    }
    if any(one.flush for one in passes):
        found["flush_ms"] = middle(lambda one: one.flush * 1e3, 1)
    rate = {"gb_per_s": middle(lambda one: one.pages * one.page_bytes / one.wall / 1e9, 3)}
    return {**rate, **found} if moves else found
