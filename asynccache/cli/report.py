"""The report of a run as plain values: ``--json`` writes it, and the summary and the page are made from it.

``look`` finds what a run has left behind in the core: slots that are neither free nor in the tree, and pins that were
not removed. ``facts`` are the cache's own counters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from asynccache import compiled
from asynccache.cli.meter import Meter, Spread, peak_rss
from asynccache.cli.options import RunSettings
from asynccache.cli.tally import Tally, percentiles
from asynccache.cli.text import HIT_RATIO
from asynccache.core.cache import CacheCore
from asynccache.core.plan import SLOT_BYTES
from asynccache.core.tree import Node
from asynccache.runtime.explain import curves

if TYPE_CHECKING:
    from asynccache.runtime.cache import AsyncCache

Report = dict[str, Any]


class Leaks(NamedTuple):
    """Counts of things that a run has left and that should be gone.

    device_pages, host_pages: slots of all components that are neither free nor in the tree.
    pins: leases that are still open, and pins that the tree still counts.
    tasks: tasks of asyncio that run after the cache was closed.
    """

    device_pages: int = 0
    host_pages: int = 0
    pins: int = 0
    tasks: int = 0


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
                          ("ttft_without_cache", tally.first_token_without)):
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
