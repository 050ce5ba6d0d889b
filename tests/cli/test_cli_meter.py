"""Percentiles and samples, and a meter of the loop's lateness that goes by the clock."""

from __future__ import annotations

import asyncio
import pickle

import numpy as np
import pytest

import asynccache.cli.meter as meter_module
from asynccache.cli.meter import TICK, Meter, Samples, Spread, peak_rss, spread
from asynccache.cli.report import Line, Tally
from asynccache.cli.workloads import RunRequest


def test_percentiles() -> None:
    assert spread([]) == Spread(0, 0, 0, 0)
    assert spread([3.0]) == Spread(3, 3, 3, 3)
    assert spread(range(1000), 2.0) == Spread(1000, 1980, 1998, 1998)


def test_samples_are_exact_until_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Samples, "LIMIT", 100)
    few = Samples(range(100))
    assert (list(few), few.mean(), few.spread(2.0)) == (list(range(100)), 49.5, spread(range(100), 2.0))
    many = Samples(float(i) for i in range(10_007))
    assert 50 <= len(many) <= 100
    assert (many.count, many.mean(), many.spread().max) == (10_007, 5003.0, 10_006.0)
    assert many.spread().p50 == pytest.approx(5003, rel=0.05)
    steps = {after - before for before, after in zip(list(many), list(many)[1:], strict=False)}
    assert len(steps) == 1, "what is kept is spread evenly over all of them"
    assert (Samples().mean(), Samples().spread(), Samples([-3.0]).spread().max) == (0.0, Spread(0, 0, 0, 0), -3.0)


def test_what_a_run_measures_takes_no_more_memory_the_longer_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A meter and a tally after so many ticks and requests, and after ten times as many."""
    monkeypatch.setattr(Samples, "LIMIT", 1 << 10)

    def size(rounds: int) -> int:
        meter, tally = Meter(), Tally()
        request = RunRequest(0, 64, 1, prompt=lambda: np.zeros(64, np.int32), output=lambda: np.zeros(1, np.int32))
        monkeypatch.setattr(meter, "_arm", lambda: None)
        for number in range(rounds):
            meter._tick()
            tally.prompt(request._replace(number=number), 16, (16, 0, 0), 0.1, 8000.0, 1.0)
            tally.problem("nothing is right")
        meter.stop()
        return len(pickle.dumps((tally, meter.lag, meter.queued, meter.recent)))

    assert size(40_000) <= 1.05 * size(4_000)


class Clock:
    """Stands for the module ``time``."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.now / 2


@pytest.mark.asyncio
async def test_lateness_is_what_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(meter_module, "time", clock)
    meter = Meter()
    meter.start()
    for late in (0.0, 0.0, 0.060):
        clock.now += TICK + late
        meter._tick()
    clock.now -= TICK  # a timer that uvloop fires early is not late
    meter._tick()
    assert meter.lag.spread(1e3).max == pytest.approx(60)
    assert meter.lag.spread(1e3).p50 == pytest.approx(0, abs=1e-6)
    assert len(meter.recent) == 4
    assert [meter.worst_lag(), meter.worst_lag()] == pytest.approx([0.060, 0.0])
    meter.stop()
    elapsed = meter.elapsed()
    clock.now += 5
    meter.stop()
    assert meter.elapsed() == elapsed == pytest.approx(0.070)
    assert meter.cpu() == pytest.approx(0.035)
    assert meter.queued.spread(1e3).max >= 0
    assert peak_rss() > 1 << 20


@pytest.mark.asyncio
async def test_it_ticks_by_itself() -> None:
    meter = Meter()
    meter.start()
    while not meter.recent:  # noqa: ASYNC110  only time makes it tick
        await asyncio.sleep(TICK)
    meter.stop()
    assert meter.lag.spread(1e3).max >= 0


def test_requests_without_a_cache_wait_in_the_same_line() -> None:
    """Two fit at a time; each came at its second and had its room for ten."""
    tally = Tally()
    line = Line(tally, 100)
    placed = [line.come(at, 50) for at in (0.0, 1.0, 2.0, 3.0)]
    for one in reversed(placed):                       # they may end in any order, and are admitted in that of coming
        assert not tally.first_token_without
        line.left(one, 10.0, None if one is placed[2] else 0.5)
    assert list(tally.line_without) == [0.0, 0.0, 8.0]  # the third has its place at 10, and was cancelled later
    assert list(tally.first_token_without) == [0.5, 0.5, 8.5]


def test_a_line_of_a_run_without_end_keeps_only_who_is_there() -> None:
    tally = Tally()
    line = Line(tally, 64)
    for second in range(10_000):
        line.left(line.come(float(second), 64), 0.5, 0.25)
    assert tally.line_without.spread(1.0).max == 0.0
    assert (len(line._open), len(line._running)) == (0, 1)
