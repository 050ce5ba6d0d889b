"""The counters of a run, and the report that is made of them as plain values: ``--json`` writes it, and the summary and
the page are made from it. ``look`` finds what a run has left behind in the core: slots that are neither free nor in the
tree, and pins that were not removed. ``facts`` are the cache's own counters.

Only prompt tokens count as hits, each token once, and only of prompts that became complete.

The counters need no more memory however long the run lasts.

Samples of the counters are taken over time, a few hundred at most. A sample holds the counters' values and not their
increases, so every other sample can be dropped without losing anything but detail. Whenever there are too many samples,
every other one is dropped and the time between samples is doubled. Taking a sample costs the loop a fraction of a
millisecond.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asynccache import compiled
from asynccache.cli.engine import Comparison
from asynccache.cli.meter import Meter, Samples, Spread, peak_rss
from asynccache.cli.options import RunSettings
from asynccache.cli.output import HIT_RATIO
from asynccache.cli.workloads import RunRequest
from asynccache.core.cache import CacheCore
from asynccache.core.plan import SLOT_BYTES
from asynccache.core.tree import Node
from asynccache.runtime.explain import curves

if TYPE_CHECKING:
    from asynccache.runtime.cache import AsyncCache
    from asynccache.runtime.lookups import LookupStats


_SHOWN = 5


@dataclass(slots=True)
class Tally:
    """Counters of one run."""

    requests: int = 0
    """How many requests have arrived."""
    served: int = 0
    cancelled: int = 0
    failed: int = 0
    """How many requests ended in this way; ``served`` and ``cancelled``: in the others."""
    entered_again: int = 0
    """Leases taken again after a failed load."""
    cut_short: int = 0
    """Outputs that the cache had no room for."""
    tokens: int = 0
    """Prompt tokens of all requests whose prompt is complete."""
    device: int = 0
    """How many of ``tokens`` hit on the device; ``host``, ``storage``: on the other tiers."""
    host: int = 0
    storage: int = 0
    output_tokens: int = 0
    blocks: int = 0
    """Full blocks of a trace."""
    blocks_hit: int = 0
    """How many of the blocks hit."""
    blocks_shared: int = 0
    """How many of the blocks earlier prompts have as well."""
    verified: int = 0
    """Pages that were read back."""
    mismatches: int = 0
    """How many of the verified pages were wrong."""
    waits: Samples = field(default_factory=Samples)
    """Seconds from asking for a lease until its pages were on the device."""
    first_token: Samples = field(default_factory=Samples)
    """Seconds to the first token."""
    first_token_without: Samples = field(default_factory=Samples)
    """The same by the same model without the cache."""
    line_without: Samples = field(default_factory=Samples)
    """How much of ``first_token_without`` each request would wait in line."""
    slowdown: float = 1.0
    """How many times as long the engine's work took because the machine was busy."""
    problems: list[str] = field(default_factory=list)
    """Sentences for the reader; any of them makes the run fail."""

    def hit(self) -> int:
        """Prompt tokens that the cache had, so that they were not computed."""
        return self.device + self.host + self.storage

    def prompt(
        self, request: RunRequest, cached: int, hits: tuple[int, int, int], wait: float, rate: float, slowdown: float,
    ) -> float:  # fmt: skip
        """Count a prompt whose KV is complete, and return the seconds in which it would be computed without the cache.

        ``cached`` of its tokens came from the cache (``hits``: from device, host and storage) after ``wait`` seconds.
        The time for the others is modelled: ``rate`` tokens a second, times the ``slowdown`` by other work of the
        machine. The time without the cache has the same slowdown, because it would be the same machine. What it would
        wait in line is known to an ``UncachedEngine`` when the request has ended.
        """
        self.tokens += request.length
        self.device += hits[0]
        self.host += hits[1]
        self.storage += hits[2]
        self.blocks += request.length // request.block_size
        self.blocks_hit += cached // request.block_size
        self.blocks_shared += request.shared_blocks
        self.waits.append(wait)
        self.slowdown = slowdown
        self.first_token.append(wait + (request.length - cached) / rate * slowdown)
        return request.length / rate * slowdown

    def verdict(self, request: RunRequest, verdict: Comparison) -> None:
        """Count pages of a request that were read back; wrong ones make a problem."""
        self.verified += verdict.pages
        if verdict.wrong:
            self.mismatches += verdict.wrong
            self.problem(f"request {request.number}: {verdict.wrong} of {verdict.pages} pages are wrong: "
                         f"{'; '.join(verdict.what[:2])}")

    def problem(self, sentence: str) -> None:
        """Note a sentence about something that was wrong. The first five are kept, then "and more"."""
        if len(self.problems) < _SHOWN:
            self.problems.append(sentence)
        elif len(self.problems) == _SHOWN:
            self.problems.append("and more")


@dataclass(slots=True)
class Placed:
    """A request in the ``UncachedEngine``: it came at second ``at``, for room for ``tokens``."""

    at: float
    tokens: int
    held: float | None = None
    """The seconds for which the request had its room in the run; None: it has it still."""
    computes: float | None = None
    """The seconds in which the prompt would be computed; None: it never was."""


class UncachedEngine:
    """The line before the same engine without a cache, so that waiting counts on both sides.

    That engine has as much room on its device (``room`` tokens). Requests come to it when they came to the cache, first
    come, first served, and each has its room for as long as its lease lasted in the run, which is rather too short for
    an engine that computes every prompt. Needs memory for the requests that come while one runs.
    """

    def __init__(self, tally: Tally, room: int) -> None:
        self._tally = tally
        self._free = room
        self._latest = 0.0
        self._open: deque[Placed] = deque()
        self._running: list[tuple[float, int]] = []

    def come(self, at: float, tokens: int) -> Placed:
        """A request asks for a lease now. Every one is to be given to ``left`` later."""
        self._open.append(Placed(at, tokens))
        return self._open[-1]

    def left(self, placed: Placed, held: float, computes: float | None) -> None:
        """The request has released its lease, which it ``held`` for so many seconds."""
        placed.held, placed.computes = held, computes
        while self._open and self._open[0].held is not None:
            self._admit(self._open.popleft())

    def _admit(self, placed: Placed) -> None:
        begin = max(placed.at, self._latest)
        while self._running and (self._running[0][0] <= begin or self._free < placed.tokens):
            end, tokens = heappop(self._running)
            self._free += tokens
            begin = max(begin, end)
        self._latest = begin
        self._free -= placed.tokens
        heappush(self._running, (begin + (placed.held or 0.0), placed.tokens))
        if placed.computes is not None:
            self._tally.line_without.append(begin - placed.at)
            self._tally.first_token_without.append(begin - placed.at + placed.computes)


EVERY = 0.25
LIMIT = 480


class Sampler:
    """Samples one run. To be used in the loop's thread only.

    The figures of a sample are counts since the start of the run, at second ``t_s``. Three differ: ``l1`` and ``l2``
    are the shares of FULL's pages in use at that moment, and ``lag_max_ms`` is the worst lateness of the loop since the
    sample before.
    """

    def __init__(self, cache: AsyncCache, tally: Tally, meter: Meter) -> None:
        self._cache = cache
        self._tally = tally
        self._meter = meter
        self._every = EVERY
        self._taken: list[dict[str, Any]] = []

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            self.take()
            await asyncio.sleep(self._every)

    def take(self) -> None:
        """Take one sample now."""
        statistics, tally = self._cache.statistics(), self._tally
        l1, l2 = (round(1 - shelf.free / shelf.capacity, 4) if shelf.capacity else 0.0
                  for shelf in (statistics.device["full"], statistics.host["full"]))
        self._taken.append({
            "t_s": round(self._meter.elapsed(), 3), "tokens": tally.tokens, "device": tally.device, "host": tally.host,
            "storage": tally.storage, "l1": l1, "l2": l2, "l3_bytes": int(statistics.storage.get("bytes", 0)),
            "evicted_device": statistics.core.evicted_device, "evicted_host": statistics.core.evicted_host,
            "moved_bytes": {name: stage.bytes for name, stage in statistics.stages.items()},
            "lag_max_ms": round(self._meter.worst_lag() * 1e3, 3),
        })
        if len(self._taken) > LIMIT:
            self._taken = thinned(self._taken)
            self._every *= 2

    def report(self) -> dict[str, Any]:
        """The samples as a list for each column; those of ``moved_bytes`` are by stage."""
        columns = {name: [one[name] for one in self._taken] for name in self._taken[0]}
        moved = columns["moved_bytes"]
        return columns | {"moved_bytes": {stage: [one[stage] for one in moved] for stage in moved[0]}}


def thinned(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every other sample, beginning with the first. Each one that is kept takes over the lateness of the dropped sample
    before it if that is worse."""
    left_out = [0.0, *(one["lag_max_ms"] for one in samples[1::2])]
    return [one | {"lag_max_ms": max(one["lag_max_ms"], lag)} for one, lag in zip(samples[::2], left_out, strict=False)]


def percentiles(samples: Sequence[float] | Samples, scale: float) -> list[float]:
    """The 0th to the 100th percentile of ``samples``, each times ``scale``; an empty list if there are no samples."""
    if not samples:
        return []
    ordered = np.percentile(np.fromiter(samples, np.float64) * scale, range(101))
    return [round(float(value), 3) for value in ordered]


Report = dict[str, Any]


class Leaks(NamedTuple):
    """Counts of things that a run has left and that should be gone."""

    device_pages: int = 0
    """Slots of all components that are neither free nor in the tree; ``host_pages`` likewise."""
    host_pages: int = 0
    pins: int = 0
    """Leases that are still open, and pins that the tree still counts."""
    tasks: int = 0
    """Tasks of asyncio that run after the cache was closed."""


NOTHING: Report = {
    "left": Leaks(), "stages": {}, "evicted": {}, "lost_pages": 0, "failed_loads": 0, "splits": 0, "nodes": 0,
    "prefetches": {}, "storage": {}, "stores": {}, "tiers": {"device": {}, "host": {}},
}  # fmt: skip
"""The facts of a cache that could not be asked."""


def build(settings: RunSettings, tally: Tally, meter: Meter, cache: Mapping[str, Any], leaks: Leaks) -> Report:
    """The report. ``cache``: the cache's own figures (``stages``, ``evicted``, ``lost_pages``, ...) as plain values."""
    def plain(values: Spread) -> dict[str, float]:
        return {name: round(value, 4) for name, value in values._asdict().items()}

    report: Report = {
        "command": settings.command,
        "core": compiled.CORE,
        "ok": not tally.problems,
        "problems": list(tally.problems),
        **{name: getattr(tally, name)
           for name in ("requests", "served", "cancelled", "failed", "entered_again", "cut_short")},
        "tokens": {
            "total": tally.tokens,
            "hit": {"device": tally.device, "host": tally.host, "storage": tally.storage},
            "output": tally.output_tokens,
        },
        "hit_ratio": tally.hit() / tally.tokens if tally.tokens else 0.0,
        "hit_ratio_is": HIT_RATIO,
        "verify": {"pages": tally.verified, "mismatches": tally.mismatches},
        "leaks": leaks._asdict(),
        "ttft_percentiles_ms": {"with": percentiles(tally.first_token, 1e3),
                                "without": percentiles(tally.first_token_without, 1e3)},
        "prefill_slowdown": round(tally.slowdown, 3),
        "loop_lag_ms": plain(meter.lag.spread(1e3)),
        "run_queue_ms": plain(meter.queued.spread(1e3)),
        "elapsed_s": round(meter.elapsed(), 3),
        "cpu_s": round(meter.cpu(), 3),
        "rss_bytes": peak_rss(),
        **cache,
        "settings": settings.plain(),
    }  # fmt: skip
    for name, samples in (("wait", tally.waits), ("ttft", tally.first_token),
                          ("ttft_without_cache", tally.first_token_without),
                          ("line_without_cache", tally.line_without)):
        report |= {f"{name}_ms": plain(samples.spread(1e3)), f"{name}_mean_ms": round(samples.mean() * 1e3, 4)}
    hit, stages = sum(report["tokens"]["hit"].values()), report["stages"]
    if hit and stages and settings.host_tokens:
        report["per_hit"] = {"written_to_host": round(stages["backup_host"]["tokens"] / hit, 3),
                             "loaded_from_host": round(stages["load_back"]["tokens"] / hit, 3)}
    if settings.command == "replay":
        report["blocks"] = {"total": tally.blocks, "hit": tally.blocks_hit, "shared": tally.blocks_shared}
    return report


def look(core: CacheCore) -> Leaks:
    """Count the pages and pins that leaked. To be called when all requests have ended and no operation is in flight; it
    walks the whole tree."""
    statistics = core.statistics()
    shelves = (*statistics.device, *statistics.host)
    missing = [shelf.capacity - shelf.free for shelf in shelves]
    pins = statistics.leases
    stack: list[Node] = [*core.world.roots.values(), *core.world.dead_roots]
    while stack:
        node = stack.pop()
        stack.extend((node.children or {}).values())
        for place, slots in enumerate(node.slots):
            missing[place] -= len(slots) // SLOT_BYTES
        pins += sum(node.pins)
    device = len(statistics.device)
    return Leaks(sum(map(abs, missing[:device])), sum(map(abs, missing[device:])), pins)


def ceiling(lookups: LookupStats, tokens: int, hits: int) -> float:
    """Prompt tokens out of ``tokens`` that a cache of any size could have had, at least ``hits``. Lookups count whole
    pages only."""
    return max(hits, lookups.ceiling * min(lookups.tokens, tokens))


def facts(cache: AsyncCache, page_size: int) -> dict[str, Any]:
    """The cache's own counters, as plain values for the report."""
    statistics, learned = cache.statistics(), cache.learned()
    stages = {}
    for name, stage in statistics.stages.items():
        latency = {quantile: round(value, 4) for quantile, value in stage.latency_ms._asdict().items()}
        stages[name] = {**stage._asdict(), "tokens": stage.full_pages * page_size, "latency_ms": latency}
    core = statistics.core
    return {
        "stages": stages,
        "evicted": {"device": core.evicted_device, "host": core.evicted_host},
        **{name: getattr(core, name) for name in ("lost_pages", "failed_loads", "splits", "nodes")},
        "prefetches": dict(statistics.prefetches),
        "storage": dict(statistics.storage),
        "stores": {name: dict(figures) for name, figures in statistics.stores.items()},
        "tiers": {tier: {name: shelf._asdict() for name, shelf in shelves.items()}
                  for tier, shelves in (("device", statistics.device), ("host", statistics.host))},
        **({} if learned is None else {"learned": curves(cache.config.eviction, learned)}),
    }  # fmt: skip
