"""Samples thin out without losing counts; ages of evictions are times between a last touch and an eviction."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from asynccache import AsyncCache, CacheConfig, Full
from asynccache.cli import samples
from asynccache.cli.meter import Meter, Samples
from asynccache.cli.samples import AGES_S, Ages, Sample, Sampler, columns, percentiles, thinned
from asynccache.cli.tally import Tally
from asynccache.core.eviction import Recency


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ages_of(found: Ages, tier: int) -> dict[float, int]:
    return {bound: count for bound, count in zip((*AGES_S, 1e9), found.pages[tier], strict=True) if count}


def test_ages_are_interpolated_between_marks() -> None:
    clock, recency = Clock(), Recency()
    ages = Ages(recency, clock)
    recency.now, clock.now = 10, 110.0
    ages.mark()
    recency.now, clock.now = 20, 130.0
    ages.mark()
    clock.now = 131.0
    ages.evicted(0, 20, 1)  # touched at 130: 1 s
    ages.evicted(0, 15, 2)  # touched at 120: 11 s
    ages.evicted(1, 5, 4)  # touched at 105: 26 s
    ages.evicted(1, 0, 8)  # at 100: 31 s
    assert ages_of(ages, 0) == {1.0: 1, 16.0: 2}
    assert ages_of(ages, 1) == {32.0: 12}
    assert ages.report()["host"] == ages.pages[1]


def test_what_was_touched_after_the_last_mark_counts_from_it() -> None:
    clock, recency = Clock(), Recency()
    recency.now = 7
    ages = Ages(recency, clock)
    clock.now = 103.0
    ages.evicted(0, 9, 1)
    ages.evicted(0, 3, 1)  # before there was a mark: no older than the first
    assert ages_of(ages, 0) == {4.0: 2}


@pytest.mark.asyncio
async def test_the_core_tells_of_evictions_and_samples_thin_out(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert sum(report["eviction_age"]["device"]) == evicted
    assert report["series"]["evicted_device"][-1] == evicted
    assert report["series"]["tokens"][-1] == 192
    assert 2 <= len(report["series"]["t_s"]) <= 5


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


def sample(t: float, lag: float, moved: int) -> Sample:
    values: dict[str, Any] = dict.fromkeys(Sample._fields, 0)
    return Sample(**{**values, "t_s": t, "lag_s": lag, "moved": (moved,)})


def test_lag_is_the_worst_since_the_sample_before_also_where_that_was_left_out() -> None:
    taken = [sample(float(i), lag, i) for i, lag in enumerate((0.003, 0.0, 0.002, 0.007, 0.001))]
    found = columns(taken, ("up",))
    assert found["lag_max_ms"] == [3.0, 0.0, 2.0, 7.0, 1.0]
    assert found["moved_bytes"] == {"up": [0, 1, 2, 3, 4]}
    assert "lag_s" not in found
    assert columns(thinned(taken), ("up",)) == found | {
        "lag_max_ms": [3.0, 2.0, 7.0], "moved_bytes": {"up": [0, 2, 4]}, "t_s": [0.0, 2.0, 4.0],
        **{name: [0, 0, 0] for name in Sample._fields if name not in ("t_s", "moved", "lag_s")},
    }  # fmt: skip


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
