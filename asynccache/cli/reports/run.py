"""The figures of the page for ``stress`` and ``replay``. Each function returns None if the report has too little
data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asynccache.cli.reports import svg
from asynccache.cli.reports.learned import learned
from asynccache.cli.reports.svg import Figure, Report, Table, share
from asynccache.cli.text import ARROWS, HIT_RATIO, TIER_NAMES, milliseconds, number, percent, size

HITS = tuple((name, key, name[:2].lower()) for key, name in TIER_NAMES.items())
_BINS = 40


def figures(report: Report) -> list[Figure]:
    """The figures that the report has data for."""
    makers = (hits, capacity, first_token, filling, bandwidth, lag, learned)
    return [found for make in makers if (found := make(report)) is not None]


def _seconds(value: float) -> str:
    return f"{value:g} s"


def _count(value: float) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"


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
                  f"{number(total)} prompt tokens were in the cache when their request arrived.", plot,
                  [(name, kind) for name, _, kind in HITS], Table(("tier", "share", "prompt tokens"), rows),
                  f"Hit ratio: {HIT_RATIO}. Each point is of the prompts that became complete since the point before. "
                  "A token counts for the nearest tier that had it.")


# capacity


def capacity(report: Report) -> Figure | None:
    """The hit ratios of caches of other sizes, also under other policies."""
    found: Mapping[str, Any] = report.get("capacity", {})
    points = [(p["units"], p["hit_ratio"]) for p in found.get("points", ())]
    if len(points) < 3 or not points[-1][1]:
        return None
    tiers, most = found["tiers"], points[-1][1]
    low, high = max(1, points[-1][0] // 300), max([points[-1][0], *(t["units"] for t in tiers)]) * 1.3
    top = 1.12 * max([most, *(t["measured"] for t in tiers)])
    unit = found["unit_tokens"]
    curves = _curves(found, points)

    shown = [one._replace(points=[(x, y) for x, y in [*one.points, (high, most)] if x >= low]) for one in curves]
    dots = [svg.Series(t["tier"], t["tier"].lower(), [(t["units"], t["measured"])]) for t in tiers]
    marks = [svg.Mark(t["tier"], t["units"]) for t in tiers]
    plot = svg.lines(svg.Axis(f"cache size, pages of {unit} tokens", low, high, _count, log=True),
                     svg.Axis("", 0, top, share), shown, marks, dots)
    colours = [*((one.name, one.kind) for one in curves),
               *((f"measured: {t['tier']} and above", t["tier"].lower()) for t in tiers)]
    return Figure("capacity", "What would more memory bring, or less memory cost?",
                  f"No cache, however large, finds more than {percent(most, 1)} of the prompt tokens; "
                  f"that takes {number(points[-1][0])} pages of {unit} tokens.", plot, colours, _sizes(found, points),
                  f"Every hit ratio here is {HIT_RATIO}, with requests served one at a time. LRU: one pass of stack "
                  f"distances (Mattson et al. 1970) over {found['source']}; {number(found['lookups'])} lookups of "
                  f"{number(found['different'])} different pages. Best: no cache of that size finds more, even if it "
                  "knows the whole future (Belady 1966).")


def _curves(found: Mapping[str, Any], points: Sequence[tuple[float, float]]) -> list[svg.Series]:
    """The curves: the policy in use in the colour of the text, those that it is compared with in grey."""
    compared, policy = found.get("compared", ()), found.get("eviction", "lru")
    named = {name: [(row["units"], row[name]) for row in compared] for name in ("policy", "optimum")}
    lru = svg.Series("LRU of this size", "ink" if policy == "lru" else "soft", points)
    curves = [lru] if policy == "lru" else [svg.Series(f"{policy}, in use", "ink", named["policy"]), lru]
    return [*curves, svg.Series("best of this size", "plain", named["optimum"])] if compared else curves


def _sizes(found: Mapping[str, Any], points: Sequence[tuple[float, float]]) -> Table:
    """The hit ratios of the tiers' own sizes, with what the run measured, and of a few other sizes."""
    compared, policy = found.get("compared", ()), found.get("eviction", "lru")
    names = {"optimum": "best"} if policy == "lru" else {"policy": policy, "optimum": "best"}
    others = {row["units"]: [percent(row[name], 1) for name in names] for row in compared}
    blank = [""] * len(names) if compared else []
    rows = [(f"{t['tier']}: {number(t['units'])}", percent(t["hit_ratio"], 1), *others.get(t["units"], blank),
             percent(t["measured"], 1)) for t in found["tiers"]]
    plain = [(row["units"], row["lru"]) for row in compared] or points[-1::-12][::-1]
    placed = {t["units"] for t in found["tiers"]}
    rows += [(number(x), percent(y, 1), *others.get(x, blank), "") for x, y in plain if x not in placed]
    return Table(("pages", "LRU", *(names.values() if compared else ()), "measured"), rows)


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
    return Figure("first-token", "How much sooner does the first token come?",
                  _sooner(report["ttft_mean_ms"], report["ttft_without_cache_mean_ms"]), plot,
                  [(p.name, p.kind) for p in plots],
                  Table(("", "with", "without"), rows),
                  f"Share of requests that had their first token by then. The time is the measured wait for pages plus "
                  f"prefill, modelled at {rate} tokens/s and {slowdown:.2f} times as long because the machine was busy "
                  "with other work.")


def _sooner(mean: float, without: float) -> str:
    if without >= mean > 0:
        return f"{without / mean:.2f} times sooner on average."
    return (f"Not sooner: on average it took {milliseconds(mean)}, and computing the whole prompt would have taken "
            f"{milliseconds(without)}. Waiting for pages cost more time than their hits saved.")


def _ms(value: float) -> str:
    return f"{value / 1000:g} s" if value >= 1000 else f"{value:g} ms"


# tiers, stages


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


def bandwidth(report: Report) -> Figure | None:
    """The bandwidth of each stage beside what one thread of this machine can copy."""
    series, limit = report["series"], report.get("memcpy_bytes_per_s")
    times, moved = series["t_s"], series["moved_bytes"]
    found = []
    for name, counts in moved.items():
        rises = [(c - b) / (t - s) for s, t, b, c in zip(times, times[1:], counts, counts[1:], strict=False)
                 if t - s > 0.05]
        if counts and counts[-1] and rises:
            found.append((name, counts[-1] / times[-1], max(rises), counts[-1]))
    if not found or not limit:
        return None
    low = min(mean for _, mean, _, _ in found) / 2

    dots = [svg.DotRow(f"{name} {ARROWS.get(name, '')}", [("l1", mean), ("l2", peak)]) for name, mean, peak, _ in found]
    plot = svg.rows(svg.Axis("bytes per second", low, limit * 2, lambda v: size(v) + "/s", log=True,
                             at=_powers(low, limit * 2)), dots, [svg.Mark("memcpy", limit)])
    name, _, peak, _ = max(found, key=lambda row: row[2])
    rows = [(name, size(mean) + "/s", size(peak) + "/s", size(total)) for name, mean, peak, total in found]
    return Figure("bandwidth", "How close do transfers come to what the machine can do?",
                  f"{name} came to {percent(peak, limit)} of what one thread copies here ({size(limit)}/s).", plot,
                  [("mean of the run", "l1"), ("peak between two samples", "l2")],
                  Table(("stage", "mean", "peak", "bytes"), [*rows, ("memcpy", size(limit) + "/s", "", "")]),
                  "memcpy: 64 MiB copied by one thread, measured right after the run. A stage moves what is asked of "
                  "it. So a bandwidth far below memcpy's means that there was no more to move, or that something else "
                  "set the limit.")


def _powers(low: float, high: float) -> tuple[float, ...]:
    return tuple(float(1 << p) for p in range(0, 60, 5) if low <= 1 << p <= high)


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
