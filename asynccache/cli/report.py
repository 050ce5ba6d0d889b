"""The report of a run as plain values: ``--json`` writes it, and the summary and the page are made from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asynccache import compiled
from asynccache.cli.leaks import Leaks
from asynccache.cli.meter import Meter, Samples, Spread, peak_rss
from asynccache.cli.options import RunSettings
from asynccache.cli.samples import percentiles
from asynccache.cli.tally import Tally
from asynccache.cli.text import HIT_RATIO

Report = dict[str, Any]


def build(settings: RunSettings, tally: Tally, meter: Meter, cache: Mapping[str, Any], leaks: Leaks) -> Report:
    """The report. ``cache``: the cache's own figures (``stages``, ``evicted``, ``lost_pages``, ...) as plain values."""
    report: Report = {
        "command": settings.command,
        "core": compiled.CORE,
        "ok": not tally.problems,
        "problems": list(tally.problems),
        "requests": tally.requests,
        "served": tally.served,
        "cancelled": tally.cancelled,
        "failed": tally.failed,
        "entered_again": tally.entered_again,
        "cut_short": tally.cut_short,
        "tokens": {
            "total": tally.tokens,
            "hit": {"device": tally.device, "host": tally.host, "storage": tally.storage},
            "output": tally.output_tokens,
        },
        "hit_ratio": tally.ratio(),
        "hit_ratio_is": HIT_RATIO,
        "verify": {"pages": tally.verified, "mismatches": tally.mismatches},
        "leaks": leaks._asdict(),
        "wait_ms": _spread(tally.waits.spread(1e3)),
        "wait_mean_ms": _mean(tally.waits),
        "ttft_ms": _spread(tally.first_token.spread(1e3)),
        "ttft_without_cache_ms": _spread(tally.first_token_without.spread(1e3)),
        "ttft_percentiles_ms": {"with": percentiles(tally.first_token, 1e3),
                                "without": percentiles(tally.first_token_without, 1e3)},
        "ttft_mean_ms": _mean(tally.first_token),
        "ttft_without_cache_mean_ms": _mean(tally.first_token_without),
        "prefill_slowdown": round(tally.slowdown, 3),
        "loop_lag_ms": _spread(meter.lag_ms()),
        "run_queue_ms": _spread(meter.run_queue_ms()),
        "elapsed_s": round(meter.elapsed(), 3),
        "cpu_s": round(meter.cpu(), 3),
        "rss_bytes": peak_rss(),
        **cache,
        "settings": settings.plain(),
    }
    if settings.command == "replay":
        report["blocks"] = {"total": tally.blocks, "hit": tally.blocks_hit, "shared": tally.blocks_shared}
    return report


def _spread(values: Spread) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values._asdict().items()}


def _mean(samples: Samples) -> float:
    return round(samples.mean() * 1e3, 4)
