"""The figures of the page for ``stress`` and ``replay``. Each function returns None if the report has too little
data."""

from __future__ import annotations

from collections.abc import Sequence

from asynccache.cli.reports import svg
from asynccache.cli.reports.svg import Figure, Report, Table, share
from asynccache.cli.text import BUSY, HIT_RATIO, TIER_NAMES, milliseconds, number, percent

HITS = tuple((name, key, name[:2].lower()) for key, name in TIER_NAMES.items())
_BINS = 40


def figures(report: Report) -> list[Figure]:
    """The figures that the report has data for."""
    makers = (hits, first_token, filling, lag)
    return [found for make in makers if (found := make(report)) is not None]


def _seconds(value: float) -> str:
    return f"{value:g} s"


# hits


def bins(times: Sequence[float], columns: Sequence[Sequence[int]], count: int) -> list[tuple[float, list[int]]]:
    """By how much counters rose in each of at most ``count`` spans of equally many samples: the time at the end of the
    span, and the rise of each of ``columns``."""
    step = max(1, -(-(len(times) - 1) // count))
    ends = [*range(step, len(times) - 1, step), len(times) - 1]
    starts = [0, *ends[:-1]]
    return [(times[b], [c[b] - c[a] for c in columns]) for a, b in zip(starts, ends, strict=True) if b > a]


def hits(report: Report) -> Figure | None:
    """The hit ratio over time, by tier."""
    series = report["series"]
    rises = [(t, rise) for t, rise in bins(series["t_s"], [series[k] for k in ("tokens", "device", "host", "storage")],
                                           _BINS) if rise[0]]
    if len(rises) < 2:
        return None
    plots = [svg.Series(name, kind, [(t, rise[i] / rise[0]) for t, rise in rises])
             for i, (name, _, kind) in enumerate(HITS, 1)]
    top = max(max(rise[1:]) / rise[0] for _, rise in rises)

    plot = svg.lines(svg.Axis("time", 0, series["t_s"][-1], _seconds),
                     svg.Axis("", 0, min(1.0, max(0.05, top * 1.05)), share), plots)
    total, hit = report["tokens"]["total"], report["tokens"]["hit"]
    rows = [(name, percent(hit[key], total), number(hit[key])) for name, key, _ in HITS]
    rows.append(("computed", percent(total - sum(hit.values()), total), number(total - sum(hit.values()))))
    return Figure("hits", "Where did the KV of prompts come from?", f"{percent(sum(hit.values()), total)} of "
                  f"{number(total)} prompt tokens came from the cache.", plot,
                  [(name, kind) for name, _, kind in HITS], Table(("tier", "share", "prompt tokens"), rows),
                  f"Hit ratio: {HIT_RATIO}. Each point is of the prompts that became complete since the point before. "
                  "A token counts for the nearest tier that had it.")


# time to first token


def first_token(report: Report) -> Figure | None:
    """The distribution of the time to first token, with the cache and without it."""
    found = report["ttft_percentiles_ms"]
    if len(set(found["with"])) < 2:
        return None
    low = max(0.01, min(v for v in found["with"] if v > 0) * 0.8)
    high = max(*found["with"], *found["without"]) * 1.2
    plots = [svg.Series(name, kind, [(max(v, low), i / 100) for i, v in enumerate(found[key])])
             for name, key, kind in (("with the cache", "with", "l1"), ("without", "without", "plain"))]

    plot = svg.lines(svg.Axis("time to first token", low, high, _ms, log=True), svg.Axis("", 0, 1, share), plots)
    rows = [(f"p{p}" if p < 100 else "max", milliseconds(found["with"][p]), milliseconds(found["without"][p]))
            for p in (10, 25, 50, 75, 90, 99, 100)]
    rows.append(("mean", milliseconds(report["ttft_mean_ms"]), milliseconds(report["ttft_without_cache_mean_ms"])))
    rate, slowdown = number(report["settings"]["prefill_tokens_per_s"]), report["prefill_slowdown"]
    busy = f" and {slowdown:.2f} times as long because the machine was busy with other work" if slowdown >= BUSY else ""
    return Figure("first-token", "How much sooner does the first token come?",
                  _sooner(report["ttft_mean_ms"], report["ttft_without_cache_mean_ms"]), plot,
                  [(p.name, p.kind) for p in plots],
                  Table(("", "with", "without"), rows),
                  f"Share of requests that had their first token by then. The time is the measured wait for pages plus "
                  f"prefill, modelled at {rate} tokens/s{busy}.")


def _sooner(mean: float, without: float) -> str:
    if without >= mean > 0:
        return f"{without / mean:.2f} times sooner on average."
    return (f"Not sooner: on average it took {milliseconds(mean)}, and computing the whole prompt would have taken "
            f"{milliseconds(without)}. Waiting for pages cost more time than their hits saved.")


def _ms(value: float) -> str:
    return f"{value / 1000:g} s" if value >= 1000 else f"{value:g} ms"


# tiers


def filling(report: Report) -> Figure | None:
    """The share of L1 and L2 that was in use, over time."""
    series = report["series"]
    tiers = [(name, key, kind) for name, key, kind in (("L1", "l1", "l1"), ("L2", "l2", "l2")) if any(series[key])]
    if len(series["t_s"]) < 3 or not tiers:
        return None
    plots = [svg.Series(name, kind, list(zip(series["t_s"], series[key], strict=True))) for name, key, kind in tiers]

    plot = svg.lines(svg.Axis("time", 0, series["t_s"][-1], _seconds), svg.Axis("", 0, 1, share), plots)
    evicted, last = report["evicted"], {key: series[key][-1] for _, key, _ in tiers}
    rows = [(name, percent(last[key], 1), number(evicted[side])) for (name, key, _), side in
            zip(tiers, ("device", "host"), strict=False)]
    full = " and ".join(name for name, key, _ in tiers if max(series[key]) > 0.95)
    return Figure("filling", "Are the tiers full?", f"{full} filled up." if full else "No, there was room left.", plot,
                  [(p.name, p.kind) for p in plots], Table(("tier", "in use at the end", "pages evicted"), rows),
                  "Share of FULL's pages in use. Evictions count pages of all components; "
                  f"{number(report['lost_pages'])} pages were lost for good.")


# the loop


def lag(report: Report) -> Figure | None:
    """The lateness of the event loop over time."""
    series, spread, waited = report["series"], report["loop_lag_ms"], report["run_queue_ms"]
    worst = list(zip(series["t_s"], series["lag_max_ms"], strict=True))
    if len(worst) < 2 or not spread["max"]:
        return None
    plot = svg.lines(svg.Axis("time", 0, worst[-1][0], _seconds),
                     svg.Axis("", 0, max(ms for _, ms in worst) * 1.05 or 1.0, _ms), [svg.Series("worst", "l1", worst)])
    rows = [(name, milliseconds(spread[key]), milliseconds(waited[key]))
            for name, key in (("p50", "p50"), ("p99", "p99"), ("p99.9", "p999"), ("max", "max"))]
    return Figure("lag", "Does anything block the event loop?",
                  f"99 % of the ticks of 5 ms were at most {milliseconds(spread['p99'])} late; the worst was "
                  f"{milliseconds(spread['max'])}.", plot, [("the worst tick since the sample before", "l1")],
                  Table(("ticks", "late", "waited for a core"), rows),
                  "Where the loop's thread waited for a core, the machine was busy; the rest is work in the loop.")
