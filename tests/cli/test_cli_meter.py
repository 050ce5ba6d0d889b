"""Percentiles, and a meter that believes the clock, not the loop."""

from __future__ import annotations

import asyncio

import pytest

import asynccache.cli.meter as meter_module
from asynccache.cli.meter import TICK, Meter, Spread, peak_rss, spread


def test_percentiles() -> None:
    assert spread([]) == Spread(0, 0, 0, 0)
    assert spread([3.0]) == Spread(3, 3, 3, 3)
    assert spread(range(1000), 2.0) == Spread(1000, 1980, 1998, 1998)


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
    assert meter.lag_ms().max == pytest.approx(60)
    assert meter.lag_ms().p50 == pytest.approx(0, abs=1e-6)
    assert len(meter.recent()) == 4
    meter.stop()
    elapsed = meter.elapsed()
    clock.now += 5
    meter.stop()
    assert meter.elapsed() == elapsed == pytest.approx(0.070)
    assert meter.cpu() == pytest.approx(0.035)
    assert meter.run_queue_ms().max >= 0
    assert peak_rss() > 1 << 20


@pytest.mark.asyncio
async def test_it_ticks_by_itself() -> None:
    meter = Meter()
    meter.start()
    while not meter.recent():  # noqa: ASYNC110  only time makes it tick
        await asyncio.sleep(TICK)
    meter.stop()
    assert meter.lag_ms().max >= 0
