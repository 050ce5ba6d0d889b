"""Percentiles, and a meter that sees a loop that was held up."""

from __future__ import annotations

import asyncio
import time

import pytest

from asynccache.cli.meter import TICK, Meter, Spread, peak_rss, spread


def test_percentiles() -> None:
    assert spread([]) == Spread(0, 0, 0, 0)
    assert spread([3.0]) == Spread(3, 3, 3, 3)
    assert spread(range(1000), 2.0) == Spread(1000, 1980, 1998, 1998)


@pytest.mark.asyncio
async def test_a_blocked_loop_is_late() -> None:
    meter = Meter()
    meter.start()
    await asyncio.sleep(TICK * 2)
    time.sleep(0.05)  # noqa: ASYNC251  what a meter must see
    await asyncio.sleep(TICK * 2)
    meter.stop()
    meter.stop()
    assert 30 <= meter.lag_ms().max < 5000
    assert meter.run_queue_ms().max >= 0
    assert 0.05 < meter.elapsed() < 10
    assert meter.elapsed() == meter.elapsed()
    assert peak_rss() > 1 << 20
