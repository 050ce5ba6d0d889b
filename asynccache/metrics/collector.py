"""The counters of a cache as Prometheus metrics. A scrape reads them once; between scrapes nothing happens here.

Names follow Prometheus: base units, ``_total`` for what only rises. Every metric carries the label ``cache``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

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
from asynccache.metrics.lag import LoopLag
from asynccache.metrics.server import a_cache
from asynccache.runtime.learning import AGES, kinds
from asynccache.storage import BreakerState
from asynccache.version import VERSION
from asynccache.worker.stats import Histogram

if TYPE_CHECKING:
    from asynccache.core.eviction import Learned
    from asynccache.runtime.cache import AsyncCache, CacheStatistics

_PREFIX = "asynccache"
Rows = Iterable[tuple[Sequence[str], float]]


class Publishing(Protocol):
    """The part of ``events.PublisherStats`` that is told of."""

    @property
    def batches(self) -> int: ...
    @property
    def events(self) -> int: ...
    @property
    def lost(self) -> int: ...
    @property
    def waiting(self) -> int: ...


class CacheCollector(Collector):
    """``registry.register(CacheCollector(cache))``. ``name``: the label ``cache``, the model if not given. ``lag``: a
    ``LoopLag`` that was started. ``publisher``: ``ZmqPublisher.stats``.

    Collect from the loop's thread for exact figures; from another, those of different counters may be a turn apart.
    """

    def __init__(
        self, cache: AsyncCache, *, name: str | None = None, lag: LoopLag | None = None,
        publisher: Callable[[], Publishing] | None = None,
    ) -> None:  # fmt: skip
        self._cache = a_cache(cache)
        self._name = cache.config.model if name is None else checks.text("name", name)
        self._page_size = cache.config.page_size
        self._lag = None if lag is None else checks.instance("lag", lag, LoopLag)
        self._publisher = None if publisher is None else checks.function("publisher", publisher)

    def __repr__(self) -> str:
        return f"CacheCollector({self._name!r})"

    def describe(self) -> Iterable[Metric]:
        """Nothing: the cache need not be open when this is registered."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Everything, as of now."""
        statistics = self._cache.statistics()
        why = self._cache.closed
        yield self._gauge("closed", "1 if no requests are taken, and why; 0 if they are.", ("reason",),
                          [((why or "",), why is not None)])  # fmt: skip
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
        yield self._counter("requests", "Leases that got in.", (), [((), found.requests)])
        yield self._counter("prompt_tokens", "Tokens in whole pages that they wanted.", (), [((), found.tokens)])
        yield self._counter("hit_tokens", "Of these, cached, by the tier that had them at arrival.", ("tier",),
                            _rows(found.hits))  # fmt: skip
        yield self._counter("miss_tokens", "Of these, not cached, by reason.", ("reason",), _rows(found.misses))
        yield self._counter("miss_requests", "Leases that missed any, by reason.", ("reason",),
                            _rows(found.missed_requests))  # fmt: skip
        yield self._counter("prefetches", "Prefetches, by how they ended.", ("status",), _rows(statistics.prefetches))

    def _tiers(self, statistics: CacheStatistics) -> Iterator[Metric]:
        tiers = (("device", statistics.device), ("host", statistics.host))
        shelves = [(tier, pool, shelf) for tier, pools in tiers for pool, shelf in pools.items()]
        labels = ("tier", "pool")
        yield self._gauge("pool_slots", "Slots: pages, or states.", labels,
                          [((tier, pool), s.capacity) for tier, pool, s in shelves])  # fmt: skip
        yield self._gauge("pool_free_slots", "Slots that hold nothing.", labels,
                          [((tier, pool), s.free) for tier, pool, s in shelves])  # fmt: skip
        yield self._gauge("pool_evictable_slots", "Slots that eviction could free now.", labels,
                          [((tier, pool), s.evictable) for tier, pool, s in shelves])  # fmt: skip
        yield self._gauge("pool_pinned_slots", "Slots that leases, kept prefixes or transfers hold.", labels,
                          [((tier, pool), s.capacity - s.free - s.evictable) for tier, pool, s in shelves])  # fmt: skip

    def _stages(self, statistics: CacheStatistics) -> Iterator[Metric]:
        stages, label = statistics.stages, ("stage",)
        yield self._counter("stage_operations", "Operations.", label, [((n,), s.ops) for n, s in stages.items()])
        yield self._counter("stage_tokens", "Tokens whose FULL pages moved.", label,
                            [((n,), s.full_pages * self._page_size) for n, s in stages.items()])  # fmt: skip
        yield self._counter("stage_pages", "Pages that moved, in all pools.", label,
                            [((n,), s.pages) for n, s in stages.items()])  # fmt: skip
        yield self._counter("stage_bytes", "Bytes that moved.", label, [((n,), s.bytes) for n, s in stages.items()])
        yield self._counter("stage_errors", "Operations (prefetch: pages) that failed.", label,
                            [((n,), s.errors) for n, s in stages.items()])  # fmt: skip
        yield self._histogram("stage_latency_seconds", "From an operation's place in the queue to its outcome.",
                              [((n,), h) for n, h in statistics.histograms.items()], label)  # fmt: skip
        yield self._gauge("queue_depth", "What waits.", ("queue",), _rows(statistics.queues))

    def _core(self, statistics: CacheStatistics) -> Iterator[Metric]:
        core = statistics.core
        yield self._gauge("leases", "Leases that are held.", (), [((), statistics.leases)])
        yield self._gauge("waiting_leases", "Leases in line for pages.", (), [((), statistics.waiting)])
        yield self._gauge("kept_tokens", "Tokens pinned by keep().", (), [((), statistics.kept_tokens)])
        yield self._gauge("tree_nodes", "Nodes of the radix tree.", (), [((), core.nodes)])
        yield self._gauge("operations", "Operations in flight, by kind.", ("kind",), _rows(core.operations))
        yield self._counter("evicted_pages", "Pages evicted, by tier.", ("tier",),
                            [(("device",), core.evicted_device), (("host",), core.evicted_host)])  # fmt: skip
        yield self._counter("lost_pages", "Only copies that were dropped.", (), [((), core.lost_pages)])
        yield self._counter("dropped_backups", "Operations to storage that gave way to later ones: too much waited.",
                            (), [((), statistics.dropped_backups)])  # fmt: skip
        yield self._counter("failed_loads", "Loads from the host that failed.", (), [((), core.failed_loads)])

    def _learned(self, learned: Learned) -> Iterator[Metric]:
        found = kinds(learned)
        yield self._counter("eviction_requests", "Requests that the eviction policy has learned from.", (),
                            [((), learned.requests)])  # fmt: skip
        yield self._counter("eviction_lessons", "How often it has worked out what pages are worth.", (),
                            [((), learned.lessons)])  # fmt: skip
        yield self._gauge("eviction_ghosts", "Nodes that left and that it remembers.", (), [((), learned.ghosts)])
        yield self._counter("eviction_returned_blocks", "Blocks that came back while it remembered them.", (),
                            [((), learned.returned)])  # fmt: skip
        yield self._gauge("eviction_kind_blocks", "Blocks that it knows a kind of page from, faded with time.",
                          ("kind",), [((kind.name,), kind.blocks) for kind in found])  # fmt: skip
        yield self._gauge("eviction_reuse_share", "Share of a kind that is used again within so many seconds.",
                          ("kind", "within"), _by_age((kind.name, kind.again) for kind in found))  # fmt: skip
        yield self._gauge("eviction_worth", "What a block is worth so many seconds after its last use; the least goes.",
                          ("kind", "age"), _by_age((kind.name, kind.worth) for kind in found))  # fmt: skip

    def _storage(self, statistics: CacheStatistics) -> Iterator[Metric]:
        stores = statistics.stores
        if not stores:
            return
        figures = [(name, figure, value) for name, counts in stores.items() for figure, value in counts.items()]
        yield self._gauge("storage", "What each backend and the store around it count.", ("backend", "figure"),
                          [((name, figure), value) for name, figure, value in figures if figure != "breaker"])
        breaker = StateSetMetricFamily(f"{_PREFIX}_storage_breaker", "Whether calls pass.", labels=("cache", "backend"))
        for name, counts in stores.items():
            if "breaker" not in counts:                # of other processes, which have not told yet
                continue
            state = BreakerState(int(counts["breaker"]))
            breaker.add_metric((self._name, name), {s.name.lower(): s is state for s in BreakerState})
        yield breaker
        for name, text in (("promoted_pages", "Pages from a farther store that a nearer one has now."),
                           ("unpromoted_pages", "Pages from a farther store for whose copies there was no memory, or "
                                                "that a nearer one did not take.")):  # fmt: skip
            yield self._counter(name, text, (), [((), statistics.storage.get(name, 0))])

    def _events(self, stats: Publishing) -> Iterator[Metric]:
        yield self._counter("event_batches", "Batches of KV events sent.", (), [((), stats.batches)])
        yield self._counter("events", "KV events sent.", (), [((), stats.events)])
        yield self._counter("events_lost", "KV events dropped before they were sent.", (), [((), stats.lost)])
        yield self._gauge("events_waiting", "KV events that wait to be sent.", (), [((), stats.waiting)])

    def _counter(self, name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
        family = CounterMetricFamily(f"{_PREFIX}_{name}", text, labels=("cache", *labels))
        for values, value in rows:
            family.add_metric((self._name, *values), value)
        return family

    def _gauge(self, name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
        family = GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=("cache", *labels))
        for values, value in rows:
            family.add_metric((self._name, *values), value)
        return family

    def _histogram(
        self, name: str, text: str, rows: Iterable[tuple[Sequence[str], Histogram]], labels: Sequence[str] = ()
    ) -> Metric:
        family = HistogramMetricFamily(f"{_PREFIX}_{name}", text, labels=("cache", *labels))
        for values, histogram in rows:
            family.add_metric((self._name, *values), _buckets(histogram), histogram.total_ms / 1e3)
        return family


def _by_age(values: Iterable[tuple[str, Sequence[float]]]) -> Rows:
    return [((name, f"{age:g}"), value) for name, row in values for age, value in zip(AGES, row, strict=True)]


def _rows(values: Mapping[str, float]) -> Rows:
    return [((name,), value) for name, value in values.items()]


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Prometheus counts what is at most the bound."""
    total, buckets = 0, []
    for bound, count in zip((*histogram.bounds_ms, None), histogram.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound is None else repr(bound / 1e3), float(total)))
    return buckets
