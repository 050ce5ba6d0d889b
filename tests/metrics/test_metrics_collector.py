"""The counters as Prometheus metrics, and the dashboard and pages that use them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from asynccache_backends.memory import MemoryBackend
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from asynccache import AsyncCache
from asynccache.events.publisher import PublisherStats
from asynccache.metrics import CacheCollector, LoopLag
from asynccache.runtime.lookups import Miss
from asynccache.worker.stages import BOUNDS_MS, StageMeter
from tests.runtime.runtime_kit import PAGE, opened, serve, settings, settled, text, until

# The counters as Prometheus metrics: complete, right, and readable by its own parser.


Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(registry: CollectorRegistry) -> Samples:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    samples = [sample for family in families for sample in family.samples]
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}


def registered(cache: AsyncCache, **more: object) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(CacheCollector(cache, name="c", **more))  # type: ignore[arg-type]
    return registry


def one(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"asynccache_{name}", frozenset({"cache": "c", **labels}.items())]


async def test_a_scrape_says_what_happened() -> None:
    backend = MemoryBackend()
    async with opened(settings(device=8, host=8, swa=8, eviction="lru"), storage=backend) as cache:
        registry = registered(cache)
        for seed in (0, 0, 1, 2):
            await serve(cache, text(4, seed=seed, extra=1), pools=("full", "swa"))
            await settled(cache)
        samples = scrape(registry)
        statistics = cache.statistics()
        assert one(samples, "requests_total") == 4
        assert one(samples, "prompt_tokens_total") == 16 * PAGE
        assert one(samples, "hit_tokens_total", tier="device") == 4 * PAGE
        assert one(samples, "miss_tokens_total", reason="never_stored") == 12 * PAGE
        assert one(samples, "miss_requests_total", reason="never_stored") == 3
        assert one(samples, "new_tokens") == 12 * PAGE
        assert one(samples, "hit_ratio_ceiling") == 0.25
        assert one(samples, "pool_slots", tier="host", pool="swa") == 16
        assert one(samples, "stage_bytes_total", stage="backup_host") == statistics.stages["backup_host"].bytes > 0
        assert one(samples, "stage_tokens_total", stage="backup_storage") == 12 * PAGE
        assert one(samples, "stage_latency_seconds_count", stage="backup_host") == statistics.stages["backup_host"].ops
        assert one(samples, "evicted_pages_total", tier="device") == statistics.core.evicted_device > 0
        assert one(samples, "queue_depth", queue="backup_host") == 0
        buckets = sorted((float(dict(labels)["le"]), value) for (name, labels), value in samples.items()
                         if name == "asynccache_stage_latency_seconds_bucket" and ("stage", "backup_host") in labels)
        counts = [count for _, count in buckets]
        assert counts == sorted(counts), "they are cumulative, and end with all"
        assert buckets[-1] == (float("inf"), statistics.stages["backup_host"].ops)
        assert not any(name.startswith("asynccache_eviction_") for name, _ in samples), "lru learns nothing"
        assert one(samples, "storage", backend="MemoryBackend", figure="pages") == len(backend._stored)
        assert one(samples, "storage_breaker", backend="MemoryBackend", asynccache_storage_breaker="closed") == 1
        assert one(samples, "storage_breaker", backend="MemoryBackend", asynccache_storage_breaker="open") == 0
        reasons = {dict(labels)["reason"] for name, labels in samples if name == "asynccache_miss_tokens_total"}
        assert reasons == {reason.name.lower() for reason in Miss}
    assert one(scrape(registry), "requests_total") == 4
    await backend.aclose()


async def test_what_an_eviction_policy_has_learned_is_a_bounded_number_of_series() -> None:
    async with opened(settings(device=64, eviction="p2c")) as cache:
        registry = registered(cache)
        before = scrape(registry)
        for seed in range(60):
            await serve(cache, text(8, seed=seed))
            await serve(cache, text(8, seed=seed))
        samples = scrape(registry)
        assert samples.keys() == before.keys()
        assert sum(name.startswith("asynccache_eviction_") for name, _ in samples) == 6 + 8 + 2 * 8 * 5
        assert one(samples, "eviction_requests_total") == 120
        assert one(samples, "eviction_lessons_total") == 1
        learned = cache.learned()
        assert learned is not None
        assert one(samples, "eviction_ghosts") == learned.ghosts > 0
        assert one(samples, "eviction_watched") == learned.watched > 0
        assert one(samples, "eviction_leads") == learned.leads
        assert one(samples, "eviction_kind_blocks", kind="used once") == pytest.approx(60 * 8 * PAGE / 512, rel=0.02)
        shares = [one(samples, "eviction_reuse_share", kind="used once", within=age) for age in ("1", "60", "3600")]
        assert shares == sorted(shares)
        assert shares[0] > 0.8
        assert one(samples, "eviction_worth", kind="used once", age="1") > 0


async def test_pins_are_what_cannot_go() -> None:
    async with opened(settings(device=16)) as cache:
        registry = registered(cache)
        await serve(cache, text(4))
        assert one(scrape(registry), "pool_pinned_slots", tier="device", pool="full") == 0
        async with cache.lease(text(6)):
            samples = scrape(registry)
            assert one(samples, "pool_pinned_slots", tier="device", pool="full") == 6
            assert one(samples, "pool_free_slots", tier="device", pool="full") == 10
            assert one(samples, "leases") == 1


async def test_two_caches_share_a_registry() -> None:
    async with opened(settings()) as first, opened(settings()) as second:
        registry = CollectorRegistry()
        registry.register(CacheCollector(first, name="c"))
        registry.register(CacheCollector(second, name="d"))
        await serve(first, text(4))
        samples = scrape(registry)
    assert one(samples, "requests_total") == 1
    assert samples["asynccache_requests_total", frozenset({("cache", "d")})] == 0


async def test_lag_and_events_are_told_if_there_are_any() -> None:
    async with opened(settings()) as cache:
        lag = LoopLag(tick=0.001)
        lag.start()
        lag.start()
        await until(lambda: lag.histogram().total_ms > 0)
        lag.stop()
        registry = registered(cache, lag=lag, publisher=lambda: PublisherStats(3, 7, 100, 0, 2, 1))
        samples = scrape(registry)
    assert one(samples, "loop_lag_seconds_count") == sum(lag.histogram().counts) > 0
    assert (one(samples, "event_batches_total"), one(samples, "events_total")) == (3, 7)
    assert (one(samples, "events_lost_total"), one(samples, "events_waiting")) == (2, 1)


def test_a_latency_falls_into_the_bucket_that_holds_it() -> None:
    meter = StageMeter()
    for milliseconds in (0.01, 0.05, 0.06, 10_000.0, 10_001.0):
        meter.took(milliseconds / 1e3)
    counts = meter.histogram().counts
    assert counts[0] == 2
    assert counts[1] == 1
    assert counts[-2:] == (1, 1)
    assert len(counts) == len(BOUNDS_MS) + 1
    assert meter.histogram().total_ms == pytest.approx(20_001.12)


async def test_several_stores_are_told_apart() -> None:
    urls = ("memory:?name=near&write=no", "memory:?name=far")
    async with opened(settings(device=12, host=12, storage=urls)) as cache:
        registry = registered(cache)
        for seed in range(4):
            await serve(cache, text(4, seed=seed))
        await cache.flush()
        await serve(cache, text(4, extra=1))
        await until(lambda: cache.statistics().stores["near"]["pages"] > 0)
        samples = scrape(registry)
        assert one(samples, "storage", backend="far", figure="pages") == 16
        assert one(samples, "storage", backend="near", figure="pages") == 4
        assert one(samples, "promoted_pages_total") == 4
        assert one(samples, "unpromoted_pages_total") == 0
        for name in ("near", "far"):
            assert one(samples, "storage_breaker", backend=name, asynccache_storage_breaker="closed") == 1
        await cache.detach_storage("far")
        samples = scrape(registry)
        assert not [labels for _, labels in samples if ("backend", "far") in labels]


# The examples on the pages about events and metrics work as printed.


DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.slow(2)
@pytest.mark.parametrize(
    ("page", "printed"), [("events.md", "Mirror(GPU 4, CPU 4, STORAGE 0)"), ("metrics.md", "match: 64 on the device")]
)
def test_the_example_runs(page: str, printed: str, tmp_path: Path) -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, "-W", "error", str(script)], capture_output=True, text=True, timeout=120,
                          check=False)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout


@pytest.mark.slow(2)
def test_every_reason_is_explained() -> None:
    text = (DOCS / "metrics.md").read_text()
    table = re.findall(r"^\|`(\w+)`\|[^|]+\|[^|]*\|$", text, re.MULTILINE)
    assert [reason.name.lower() for reason in Miss] == [name for name in table if name.upper() in Miss.__members__]
