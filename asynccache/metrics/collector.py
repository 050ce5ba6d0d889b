"""The counters of a cache as Prometheus metrics. Each scrape reads them; between scrapes nothing happens here.

Names follow the conventions of Prometheus: base units, and ``_total`` at the end of counters. Every metric has the
label ``cache``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    StateSetMetricFamily,
)
from prometheus_client.registry import Collector

from asynccache import checks, compiled
from asynccache.metrics.loop_lag import LoopLag
from asynccache.runtime.cache import AsyncCache
from asynccache.runtime.explain import AGES, kinds
from asynccache.storage import BreakerState
from asynccache.version import VERSION
from asynccache.worker.stages import Histogram, StageStats

if TYPE_CHECKING:
    from asynccache.core.cache import ShelfStatistics
    from asynccache.core.eviction import Learned
    from asynccache.events.publisher import PublisherStats
    from asynccache.runtime.cache import CacheStatistics

_PREFIX = "asynccache"
Values = float | Mapping[str, float] | Mapping[tuple[str, str], float]
"""The value of a metric, or the values by its labels; or by both of them, if it has two."""


class CacheCollector(Collector):
    """Collects the metrics of one cache: ``registry.register(CacheCollector(cache))``.

    A registry may call the collector in another thread than that of the cache's event loop. Then the loop may change
    some counters while others are being read, so figures that should add up may differ a little.

    Args:
        cache: the cache; it need not be open yet.
        name: the value of the label ``cache``; the model's name by default.
        lag: a ``LoopLag`` that was started, for the metric ``loop_lag_seconds``.
        publisher: ``ZmqPublisher.stats``, for the metrics of KV events.

    Raises:
        ConfigError: an argument is unusable.
    """

    def __init__(
        self, cache: AsyncCache, *, name: str | None = None, lag: LoopLag | None = None,
        publisher: Callable[[], PublisherStats] | None = None,
    ) -> None:  # fmt: skip
        self._cache = checks.instance("cache", cache, AsyncCache)
        self._name = cache.config.model if name is None else checks.text("name", name)
        self._page_size = cache.config.page_size
        self._lag = None if lag is None else checks.instance("lag", lag, LoopLag)
        self._publisher = None if publisher is None else checks.function("publisher", publisher)

    def __repr__(self) -> str:
        return f"CacheCollector({self._name!r})"

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that a registry does not call ``collect`` when the collector is registered: the cache need
        not be open then."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics as they are now."""
        statistics = self._cache.statistics()
        why = self._cache.closed
        yield self._gauge("closed", "1 if the cache takes no requests, and why; 0 if it does.",
                          {why or "": why is not None}, "reason")  # fmt: skip
        build = InfoMetricFamily(f"{_PREFIX}_build", "The version, and which core runs.", labels=("cache",))
        build.add_metric((self._name,), {"version": VERSION, "core": compiled.CORE})
        yield build
        yield from self._lookups(statistics)
        yield from self._tiers(statistics)
        yield from self._stages(statistics)
        yield from self._core(statistics)
        learned = self._cache.learned()
        if learned is not None:
            yield from self._learned(learned)
        yield from self._storage(statistics)
        if self._lag is not None:
            yield self._histogram("loop_lag_seconds", "Lateness of a timer on the loop.", [((), self._lag.histogram())])
        if self._publisher is not None:
            yield from self._events(self._publisher())

    def _lookups(self, statistics: CacheStatistics) -> Iterator[Metric]:
        found = statistics.lookups
        yield self._counter("requests", "Leases that were granted.", found.requests)
        yield self._counter("prompt_tokens", "Tokens in whole pages that granted leases asked for.", found.tokens)
        yield self._counter("hit_tokens", "Prompt tokens that were cached, by the tier that had them on arrival.",
                            found.hits, "tier")  # fmt: skip
        yield self._counter("miss_tokens", "Prompt tokens that were not cached, by reason.", found.misses, "reason")
        yield self._gauge("new_tokens", "Tokens of different pages, missing when first asked for; an estimate.",
                          found.new_tokens)  # fmt: skip
        yield self._gauge("hit_ratio_ceiling", "The highest hit ratio that a cache of any size could have had.",
                          found.ceiling)  # fmt: skip
        yield self._counter("miss_requests", "Granted leases with tokens that were not cached, by reason.",
                            found.missed_requests, "reason")  # fmt: skip
        yield self._counter("prefetches", "Prefetches, by how they ended.", statistics.prefetches, "status")

    def _tiers(self, statistics: CacheStatistics) -> Iterator[Metric]:
        tiers = (("device", statistics.device), ("host", statistics.host))
        shelves = {(tier, pool): shelf for tier, pools in tiers for pool, shelf in pools.items()}
        counts: tuple[tuple[str, str, Callable[[ShelfStatistics], int]], ...] = (
            ("slots", "Slots of the pool; each is for a page or a state.", lambda s: s.capacity),
            ("free_slots", "Slots that hold nothing.", lambda s: s.free),
            ("evictable_slots", "Slots that eviction could free now.", lambda s: s.evictable),
            ("pinned_slots", "Slots that leases, kept prefixes or transfers pin.",
             lambda s: s.capacity - s.free - s.evictable),
        )  # fmt: skip
        for name, text, count in counts:
            yield self._gauge(f"pool_{name}", text, {where: count(s) for where, s in shelves.items()}, "tier", "pool")

    def _stages(self, statistics: CacheStatistics) -> Iterator[Metric]:
        counts: tuple[tuple[str, str, Callable[[StageStats], int]], ...] = (
            ("operations", "Operations, by stage.", lambda s: s.ops),
            ("tokens", "Tokens whose FULL pages moved.", lambda s: s.full_pages * self._page_size),
            ("pages", "Pages that moved, in all pools.", lambda s: s.pages),
            ("bytes", "Bytes that moved.", lambda s: s.bytes),
            ("errors", "Operations that failed; of the stage prefetch, pages.", lambda s: s.errors),
        )
        for name, text, count in counts:
            yield self._counter(f"stage_{name}", text, {n: count(s) for n, s in statistics.stages.items()}, "stage")
        yield self._histogram("stage_latency_seconds", "From an operation's entry into the queue to its outcome.",
                              [((n,), h) for n, h in statistics.histograms.items()], ("stage",))  # fmt: skip
        yield self._gauge("queue_depth", "How much waits in each queue.", statistics.queues, "queue")

    def _core(self, statistics: CacheStatistics) -> Iterator[Metric]:
        core = statistics.core
        yield self._gauge("leases", "Leases that are held.", statistics.leases)
        yield self._gauge("waiting_leases", "Leases in line for pages.", statistics.waiting)
        yield self._gauge("kept_tokens", "Tokens pinned by keep().", statistics.kept_tokens)
        yield self._gauge("tree_nodes", "Nodes of the radix tree.", core.nodes)
        yield self._gauge("operations", "Operations in flight, by kind.", core.operations, "kind")
        yield self._counter("evicted_pages", "Pages evicted, by tier.",
                            {"device": core.evicted_device, "host": core.evicted_host}, "tier")  # fmt: skip
        yield self._counter("lost_pages", "Pages whose only copy was dropped.", core.lost_pages)
        yield self._counter("dropped_backups", "Backups to storage that were dropped because too much waited.",
                            statistics.dropped_backups)  # fmt: skip
        yield self._counter("failed_loads", "Loads from the host that failed.", core.failed_loads)

    def _learned(self, learned: Learned) -> Iterator[Metric]:
        found = kinds(learned)
        yield self._counter("eviction_requests", "Requests that the eviction policy has learned from.",
                            learned.requests)  # fmt: skip
        yield self._counter("eviction_lessons", "How often the policy has worked out what pages are worth.",
                            learned.lessons)  # fmt: skip
        yield self._gauge("eviction_ghosts", "Evicted nodes that the policy remembers.", learned.ghosts)
        yield self._gauge("eviction_watched", "Nodes in the two small caches that are compared.", learned.watched)
        yield self._gauge("eviction_leads", "1: what was learned chooses; 0: what was used least recently goes.",
                          int(learned.leads))  # fmt: skip
        yield self._counter("eviction_returned_blocks", "Blocks that came back while the policy remembered them.",
                            learned.returned)  # fmt: skip
        yield self._gauge("eviction_kind_blocks", "Blocks from which a kind of page is known; older ones count less.",
                          {kind.name: kind.blocks for kind in found}, "kind")  # fmt: skip
        again = {(kind.name, f"{age:g}"): v for kind in found for age, v in zip(AGES, kind.again, strict=True)}
        worth = {(kind.name, f"{age:g}"): v for kind in found for age, v in zip(AGES, kind.worth, strict=True)}
        yield self._gauge("eviction_reuse_share", "Share of a kind that is used again within so many seconds.",
                          again, "kind", "within")  # fmt: skip
        yield self._gauge("eviction_worth", "What a block is worth so many seconds after its last use; the least goes.",
                          worth, "kind", "age")  # fmt: skip

    def _storage(self, statistics: CacheStatistics) -> Iterator[Metric]:
        stores = statistics.stores
        if not stores:
            return
        yield self._gauge("storage", "The counters of each store, by name.", {
            (name, figure): value for name, counts in stores.items() for figure, value in counts.items()
            if figure != "breaker"
        }, "backend", "figure")  # fmt: skip
        breaker = StateSetMetricFamily(f"{_PREFIX}_storage_breaker", "The state of the store's breaker.",
                                       labels=("cache", "backend"))  # fmt: skip
        for name, counts in stores.items():
            if "breaker" not in counts:  # the store of another process, whose counters have not arrived yet
                continue
            state = BreakerState(int(counts["breaker"]))
            breaker.add_metric((self._name, name), {s.name.lower(): s is state for s in BreakerState})
        yield breaker
        for name, text in (("promoted_pages", "Pages of a farther store that were copied to a nearer one."),
                           ("unpromoted_pages", "Pages of a farther store that were not copied: there was no memory, "
                                                "or the nearer store did not take them.")):  # fmt: skip
            yield self._counter(name, text, statistics.storage.get(name, 0))

    def _events(self, stats: PublisherStats) -> Iterator[Metric]:
        yield self._counter("event_batches", "Batches of KV events sent.", stats.batches)
        yield self._counter("events", "KV events sent.", stats.events)
        yield self._counter("events_lost", "KV events dropped before they were sent.", stats.lost)
        yield self._gauge("events_waiting", "KV events that wait to be sent.", stats.waiting)

    def _counter(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        return self._filled(CounterMetricFamily(f"{_PREFIX}_{name}", text, labels=("cache", *labels)), values)

    def _gauge(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        return self._filled(GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=("cache", *labels)), values)

    def _filled(self, family: CounterMetricFamily | GaugeMetricFamily, values: Values) -> Metric:
        for key, value in values.items() if isinstance(values, Mapping) else [((), values)]:
            family.add_metric((self._name, *(key if isinstance(key, tuple) else (key,))), value)
        return family

    def _histogram(
        self, name: str, text: str, rows: Iterable[tuple[Sequence[str], Histogram]], labels: Sequence[str] = ()
    ) -> Metric:
        family = HistogramMetricFamily(f"{_PREFIX}_{name}", text, labels=("cache", *labels))
        for values, histogram in rows:
            family.add_metric((self._name, *values), _buckets(histogram), histogram.total_ms / 1e3)
        return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return the buckets of a Prometheus histogram. Each counts all values up to its bound, so the counts add up."""
    total, buckets = 0, []
    for bound, count in zip((*histogram.bounds_ms, None), histogram.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound is None else repr(bound / 1e3), float(total)))
    return buckets
