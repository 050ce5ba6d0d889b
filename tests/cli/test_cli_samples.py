"""Samples thin out without losing counts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from asynccache import AsyncCache, CacheConfig, Full
from asynccache.cli import report as samples
from asynccache.cli.meter import Meter, Samples
from asynccache.cli.report import Sampler, Tally, percentiles, thinned
from asynccache.core.eviction import Recency


@pytest.mark.asyncio
async def test_samples_thin_out_and_end_where_the_counters_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "LIMIT", 4)
    kv = Full(bytes_per_token=16, device_tokens=8 * 16)
    async with AsyncCache(CacheConfig(model="m", components=(kv,), page_size=16)) as cache:
        tally, meter = Tally(), Meter()
        sampler = Sampler(cache, tally, meter)
        for start in range(3):
            prompt = list(range(1000 * start, 1000 * start + 64))
            async with cache.lease(prompt) as lease:
                await lease.commit(prompt)
            tally.tokens += 64
            sampler.take()
        evicted = cache.statistics().core.evicted_device
        assert evicted > 0
        for _ in range(8):
            sampler.take()
        report = sampler.report()
    assert report["evicted_device"][-1] == evicted
    assert report["tokens"][-1] == 192
    assert {len(column) for column in report["moved_bytes"].values()} == {len(report["t_s"])}
    assert 2 <= len(report["t_s"]) <= 5


@pytest.mark.asyncio
async def test_the_sampler_runs_until_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "EVERY", 0.0)
    taken = asyncio.Event()

    class Counting(Sampler):
        def take(self) -> None:
            super().take()
            taken.set()

    kv = Full(bytes_per_token=16, device_tokens=128)
    async with AsyncCache(CacheConfig(model="m", components=(kv,), page_size=16)) as cache:
        task = asyncio.create_task(Counting(cache, Tally(), Meter()).run())
        await taken.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_lag_is_the_worst_since_the_sample_before_also_where_that_was_left_out() -> None:
    taken = [{"t_s": float(i), "lag_max_ms": lag, "tokens": i} for i, lag in enumerate((3.0, 0.0, 2.0, 7.0, 1.0))]
    assert thinned(taken) == [
        {"t_s": 0.0, "lag_max_ms": 3.0, "tokens": 0}, {"t_s": 2.0, "lag_max_ms": 2.0, "tokens": 2},
        {"t_s": 4.0, "lag_max_ms": 7.0, "tokens": 4},
    ]  # fmt: skip


def test_percentiles_of_what_is_kept() -> None:
    found = percentiles([i / 1000 for i in range(101)], 1e3)
    assert (len(found), found[0], found[50], found[100]) == (101, 0.0, 50.0, 100.0)
    assert percentiles([], 1.0) == []
    assert percentiles(Samples([2.0, 4.0]), 1.0)[::50] == [2.0, 3.0, 4.0]


def test_stamps_rise_with_every_touch_and_an_ended_node_has_a_time_too() -> None:
    from asynccache.core.eviction import last_touch

    recency, node = Recency(), SimpleNamespace(stamp=[0])
    recency.touch(node, 0)  # type: ignore[arg-type]
    recency.touch(node, 0)  # type: ignore[arg-type]
    assert (recency.now, last_touch(node, 0)) == (2, 2)  # type: ignore[arg-type]
    recency.end(node, 0)  # type: ignore[arg-type]
    assert node.stamp[0] < 0
    assert (recency.now, last_touch(node, 0)) == (3, 3)  # type: ignore[arg-type]
