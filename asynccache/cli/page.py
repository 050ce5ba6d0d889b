"""One HTML page of a run's report. It needs no other file, no script and no network; the report's JSON is in it as
well.

Each figure is a question, answered by a sentence, a plot and a table of its numbers. Where a run was too short for a
plot over time, there are bars or a sentence in its place; a figure without any data is left out. Plots are SVG, 480
pixels wide, so that their text is legible on a telephone as well as on a wide screen. Colours, fonts and dashes are
classes of the style sheet, so one drawing serves light and dark, which the reader's system chooses. For readers who
cannot tell the colours apart, legend and table have the same order. The page is valid XML as well as HTML.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from asynccache import __version__, compiled
from asynccache.cli.options import RunSettings
from asynccache.cli.output import BUSY, HIT_RATIO, TIER_NAMES, milliseconds, number, pages_verified, percent, size

Report = Mapping[str, Any]
Point = tuple[float, float]

_BINS = 40
_FEWEST = 4
"""Samples over time that a line needs: fewer make it straight, whatever has happened."""
WIDTH, HEIGHT = 480, 270
_TOP, _BOTTOM, _LEFT, _RIGHT = 14, 46, 52, 16
_LETTER = 6.6


class Axis(NamedTuple):
    """An axis from ``low`` to ``high``. ``show`` writes a value as text."""

    label: str
    low: float
    high: float
    show: Callable[[float], str]
    log: bool = False
    """True if the scale is logarithmic; then ``low`` must be above 0."""

    def share(self, value: float) -> float:
        """The place of ``value`` on the axis, from 0 to 1. A value beyond an end lies at that end."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5

    def ticks(self, most: int) -> list[float]:
        """The values that get a tick, at most ``most``: round numbers, or on a logarithmic scale powers of ten."""
        low, high = self.low, self.high
        if self.log:
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            steps = (1,) if math.log10(high / low) > 2.5 else (1, 2, 5)
            found = [m * 10.0**p for p in powers for m in steps if low * 0.999 <= m * 10.0**p <= high * 1.001]
        else:
            raw = ((high - low) or 1.0) / most
            power = 10 ** math.floor(math.log10(raw))
            step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
            found = [round(i * step, 10) for i in range(math.ceil(low / step - 1e-9), int(high / step + 1e-9) + 1)]
        return found[:: -(-len(found) // max(2, most))]


class Figure(NamedTuple):
    """A question and its answer."""

    name: str
    question: str
    answer: str
    x: Axis
    y: Axis
    lines: Sequence[tuple[str, str, Sequence[Point]]]
    """The lines: a name, the class of the style sheet that gives the colour, the points. None: the run was too
    short."""
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    """The table's rows; the first cell is the row's name."""
    source: str
    """Where the numbers are from and how to read them."""
    bars: Sequence[tuple[str, str, float]] = ()
    """Drawn instead in a short run: name, class and share of each bar."""


def page(report: Report) -> str:
    """The whole page for the report of a run."""
    settings, total = report["settings"], report["tokens"]["total"]
    what = settings["workload"] if settings["trace"] is None else settings["trace"].rsplit("/", 1)[-1]
    title = escape(f"asynccache {report['command']}: {what}")
    problems = "".join(f"<li>{escape(problem)}</li>" for problem in report["problems"])
    tiles = (
        ("of prompt tokens hit", percent(sum(report["tokens"]["hit"].values()), total)),
        ("first token, mean", milliseconds(report["ttft_mean_ms"])),
        ("without the cache", milliseconds(report["ttft_without_cache_mean_ms"])),
        ("loop lag, p99", milliseconds(report["loop_lag_ms"]["p99"])),
        ("lost for good", f"{number(report['lost_pages'])} pages"),
    )
    figures = [found for make in (hits, first_token, filling, lag) if (found := make(report)) is not None]
    usual = RunSettings.read(report["command"], {}, {}).plain()
    unused = {name for part, names in _OF.items() if part not in settings["components"] for name in names}
    rows = [(name, _setting(name, value))
            for name, value in sorted(settings.items(), key=lambda item: item[1] == usual.get(item[0]))
            if value is not None and name not in {*_NO_SETTINGS, *unused}]
    data = json.dumps(report)
    for letter in "<>&":                               # so that nothing in it ends the element
        data = data.replace(letter, f"\\u{ord(letter):04x}")
    return Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8")).substitute(
        title=title, data=data, version=f"{__version__}, {compiled.CORE} core",
        good="good" if report["ok"] else "bad", ok="OK" if report["ok"] else "NOT OK",
        verdict=f"{number(report['served'])} requests in {report['elapsed_s']:.1f} s"
                f"{', interrupted' if report['interrupted'] else ''}, {pages_verified(report)}, "
                f"{number(report['verify']['mismatches'])} wrong",
        problems=f'<ul class="problems">{problems}</ul>' if problems else "",
        tiles="".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in tiles),
        figures="".join(map(_section, figures)) or "<p>There was not enough data to draw.</p>",
        settings=_table("Settings, those that are not the defaults first", ("setting", "value"), rows),
    )  # fmt: skip


_NO_SETTINGS = ("command", "cache", "quiet", "json", "report")
_BYTES = ("bytes_per_token", "mamba_bytes")
_OF = {"swa": ("window", "swa_ratio"), "mamba": ("mamba_bytes",)}
"""The settings of the components that a run may lack."""


def _setting(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if isinstance(value, int) and name in _BYTES:
        return size(value)
    return number(value) if isinstance(value, int) and name not in ("seed", "serve") else str(value)


def _section(figure: Figure) -> str:
    shown = figure.lines or figure.bars
    legend = "".join(f'<li><span class="swatch {kind}"></span>{escape(name)}</li>' for name, kind, _ in shown)
    drawn = (svg(figure) if figure.lines else _bars(figure) if figure.bars else
             '<p class="short">The run was too short to draw this over time.</p>')
    return (f'<section id="{figure.name}"><h2>{escape(figure.question)}</h2>'
            f'<p class="answer">{escape(figure.answer)}</p>'
            f'<div class="beside"><figure>{drawn}<figcaption><ul class="legend">{legend}</ul></figcaption>'
            f"</figure>{_table(figure.question, figure.head, figure.rows)}</div>"
            f'<p class="source">{escape(figure.source)}</p></section>')


def _table(caption: str, head: Sequence[str], rows: Sequence[tuple[str, ...]]) -> str:
    cells = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    return (f'<div class="table"><table><caption>{escape(caption)}</caption><thead><tr>{cells}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>")


def _bars(figure: Figure) -> str:
    """A bar for each share, one below the other, as an SVG element."""
    height, width, parts = 34, WIDTH - _LEFT - _RIGHT, list[str]()
    for place, (_, kind, share) in enumerate(figure.bars):
        top, length = _TOP + place * height, round(share * width, 1)
        parts.append(f'<rect class="bar {kind}" x="{_LEFT}" y="{top}" width="{length:g}" height="{height - 12}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{top + 16}" text-anchor="end">{_share(share)}</text>')
    return _drawing(figure, 2 * _TOP + height * len(figure.bars), parts)


def _drawing(figure: Figure, height: int, parts: Sequence[str]) -> str:
    return (f'<svg role="img" aria-labelledby="{figure.name}-plot" viewBox="0 0 {WIDTH} {height}" '
            f'xmlns="http://www.w3.org/2000/svg"><title id="{figure.name}-plot">'
            f'{escape(f"{figure.question} {figure.answer}")}</title>{"".join(parts)}</svg>')


def svg(figure: Figure) -> str:
    """The plot of a figure as an SVG element: grid, ticks, the label of x, and the lines."""
    x, y, bottom, right, parts = figure.x, figure.y, HEIGHT - _BOTTOM, WIDTH - _RIGHT, list[str]()

    def at_x(value: float) -> float:
        return round(_LEFT + x.share(value) * (right - _LEFT), 1)

    def at_y(value: float) -> float:
        return round(bottom - y.share(value) * (bottom - _TOP), 1)

    def text(left: float, top: float, words: str, anchor: str, kind: str) -> None:
        parts.append(f'<text class="{kind}" x="{left:g}" y="{top:g}" text-anchor="{anchor}">{escape(words)}</text>')

    def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        parts.append(f'<line class="{kind}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>')

    widest = max((len(x.show(v)) for v in x.ticks(9)), default=1) * _LETTER + 10
    for value in x.ticks(int((right - _LEFT) // widest)):
        line(at_x(value), _TOP, at_x(value), bottom, "grid")
        half = len(x.show(value)) * _LETTER / 2        # below its line, but moved sideways until it is whole
        text(max(half, min(at_x(value), WIDTH - half)), bottom + 16, x.show(value), "middle", "tick")
    for value in y.ticks(6):
        line(_LEFT, at_y(value), right, at_y(value), "grid")
        text(_LEFT - 6, at_y(value) + 4, y.show(value), "end", "tick")
    line(_LEFT, bottom, right, bottom, "axis")
    text((_LEFT + right) / 2, HEIGHT - 8, x.label, "middle", "label")
    for _, kind, points in figure.lines:
        steps = " ".join(f"{at_x(at):g},{at_y(value):g}" for at, value in points)
        parts.append(f'<polyline class="line {kind}" points="{steps}"/>')
    return _drawing(figure, HEIGHT, parts)


def bins(times: Sequence[float], columns: Sequence[Sequence[int]], count: int) -> list[tuple[float, list[int]]]:
    """By how much counters rose in each of at most ``count`` spans of equally many samples: the time at the end of the
    span, and the rise of each of ``columns``."""
    step = max(1, -(-(len(times) - 1) // count))
    ends = [*range(step, len(times) - 1, step), len(times) - 1]
    starts = [0, *ends[:-1]]
    return [(times[b], [c[b] - c[a] for c in columns]) for a, b in zip(starts, ends, strict=True) if b > a]


def hits(report: Report) -> Figure | None:
    """The hit ratio over time, by tier."""
    series, total, hit = report["series"], report["tokens"]["total"], report["tokens"]["hit"]
    columns = [series[name] for name in ("tokens", *TIER_NAMES)]
    rises = [(t, rise) for t, rise in bins(series["t_s"], columns, _BINS) if rise[0]]
    if not total or not series["t_s"]:
        return None
    top = max((max(rise[1:]) / rise[0] for _, rise in rises), default=0.0)
    computed = total - sum(hit.values())
    shares = [*((name, name[:2].lower(), hit[key] / total) for key, name in TIER_NAMES.items()),
              ("computed", "plain", computed / total)]
    return Figure(
        "hits", "Where did the KV of prompts come from?",
        f"{percent(sum(hit.values()), total)} of {number(total)} prompt tokens came from the cache.",
        Axis("time", 0, series["t_s"][-1], _seconds), Axis("", 0, min(1.0, max(0.05, top * 1.05)), _share),
        [(name, name[:2].lower(), [(t, rise[i] / rise[0]) for t, rise in rises])
         for i, name in enumerate(TIER_NAMES.values(), 1)] if len(rises) >= _FEWEST else [],
        ("tier", "share", "prompt tokens"),
        [*((name, percent(hit[key], total), number(hit[key])) for key, name in TIER_NAMES.items()),
         ("computed", percent(computed, total), number(computed))],
        f"Hit ratio: {HIT_RATIO}. "
        + ("Each point is of the prompts that became complete since the point before. " if len(rises) >= _FEWEST
           else "")
        + "A token counts for the nearest tier that had it.",
        shares,
    )


def first_token(report: Report) -> Figure | None:
    """The distribution of the time to first token, with the cache and without it."""
    found = report["ttft_percentiles_ms"]
    if len(set(found["with"])) < 2:
        return None
    low = max(0.01, min(v for v in found["with"] if v > 0) * 0.8)
    mean, without = report["ttft_mean_ms"], report["ttft_without_cache_mean_ms"]
    rate, slowdown = number(report["settings"]["prefill_tokens_per_s"]), report["prefill_slowdown"]
    busy = f" and {slowdown:.2f} times as long because the machine was busy with other work" if slowdown >= BUSY else ""
    sooner = f"{without / mean:.2f} times sooner on average." if without >= mean > 0 else (
        f"Not sooner: on average it took {milliseconds(mean)}, and computing the whole prompt would have taken "
        f"{milliseconds(without)}. Waiting for pages cost more time than their hits saved.")
    return Figure(
        "first-token", "How much sooner does the first token come?", sooner,
        Axis("time to first token", low, max(*found["with"], *found["without"]) * 1.2, _ms, log=True),
        Axis("", 0, 1, _share),
        [(name, kind, [(max(v, low), i / 100) for i, v in enumerate(found[key])])
         for name, key, kind in (("with the cache", "with", "l1"), ("without", "without", "plain"))],
        ("", "with", "without"),
        [*((f"p{p}" if p < 100 else "max", milliseconds(found["with"][p]), milliseconds(found["without"][p]))
           for p in (10, 25, 50, 75, 90, 99, 100)), ("mean", milliseconds(mean), milliseconds(without))],
        "Share of requests that had their first token by then. The time is the measured wait plus prefill, "
        f"modelled at {rate} tokens/s{busy}. Without the cache, requests wait in line for the same room: "
        f"{milliseconds(report['line_without_cache_mean_ms'])} on average, and {milliseconds(report['wait_mean_ms'])} "
        "for room and pages with it.",
    )


def filling(report: Report) -> Figure | None:
    """The share of L1 and L2 that was in use, over time."""
    series, evicted = report["series"], report["evicted"]
    tiers = [(key.upper(), key, side) for key, side in (("l1", "device"), ("l2", "host")) if any(series[key])]
    if not tiers:
        return None
    full = " and ".join(name for name, key, _ in tiers if max(series[key]) > 0.95)
    return Figure(
        "filling", "Are the tiers full?", f"{full} filled up." if full else "No, there was room left.",
        Axis("time", 0, series["t_s"][-1], _seconds), Axis("", 0, 1, _share),
        [(name, key, list(zip(series["t_s"], series[key], strict=True))) for name, key, _ in tiers
         if len(series["t_s"]) >= _FEWEST],
        ("tier", "in use at the end", "pages evicted"),
        [(name, percent(series[key][-1], 1), number(evicted[side])) for name, key, side in tiers if side in evicted],
        "Share of FULL's pages in use. Evictions count pages of all components; "
        f"{number(report['lost_pages'])} pages were lost for good.",
    )


def lag(report: Report) -> Figure | None:
    """The lateness of the event loop over time."""
    series, spread, waited = report["series"], report["loop_lag_ms"], report["run_queue_ms"]
    worst = list(zip(series["t_s"], series["lag_max_ms"], strict=True))
    if len(worst) < 2 or not spread["max"]:
        return None
    return Figure(
        "lag", "Does anything block the event loop?",
        f"99 % of the ticks of 5 ms were at most {milliseconds(spread['p99'])} late; the worst was "
        f"{milliseconds(spread['max'])}.",
        Axis("time", 0, worst[-1][0], _seconds), Axis("", 0, max(ms for _, ms in worst) * 1.05 or 1.0, _ms),
        [("the worst tick since the sample before", "plain", worst)] if len(worst) >= _FEWEST else [],
        ("ticks", "late", "waited for a core"),
        [(name, milliseconds(spread[key]), milliseconds(waited[key]))
         for name, key in (("p50", "p50"), ("p99", "p99"), ("p99.9", "p999"), ("max", "max"))],
        "Where the loop's thread waited for a core, the machine was busy; the rest is work in the loop.",
    )


def _seconds(value: float) -> str:
    return f"{value:g} s"


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _ms(value: float) -> str:
    return f"{value / 1000:g} s" if value >= 1000 else f"{value:g} ms"
