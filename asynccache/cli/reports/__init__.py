"""Makes one HTML page of a report. It needs no other file, no script and no network; the report's JSON is in it as
well.

The page is valid XML as well as HTML. The reader's system chooses light or dark. For readers who cannot tell the
colours apart, legend and table have the same order, and a table beside every plot has its figures."""

from __future__ import annotations

import json
from html import escape

from asynccache import __version__, compiled
from asynccache.cli.display import pages_verified
from asynccache.cli.reports import run
from asynccache.cli.reports.style import STYLE
from asynccache.cli.reports.svg import Figure, Report, Table
from asynccache.cli.text import milliseconds, number, percent


def page(report: Report) -> str:
    """The whole page for the report of a run."""
    title, lead = _run_lead(report)
    body = "".join(map(_figure, run.figures(report))) or "<p>There was not enough data to draw.</p>"
    return (
        '<!DOCTYPE html>\n<html lang="en" xmlns="http://www.w3.org/1999/xhtml"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f"<header><h1>{escape(title)}</h1>{lead}</header>{body}{_settings(report)}"
        f"<footer>asynccache {__version__}, {compiled.CORE} core</footer></main>{_data(report)}</body></html>\n"
    )


def _run_lead(report: Report) -> tuple[str, str]:
    settings = report["settings"]
    what = settings["workload"] if settings["trace"] is None else settings["trace"].rsplit("/", 1)[-1]
    ok = "OK" if report["ok"] else "NOT OK"
    ended = ", interrupted" if report["interrupted"] else ""
    verdict = (f'<p class="verdict {"good" if report["ok"] else "bad"}"><strong>{ok}</strong>: '
               f'{number(report["served"])} requests in {report["elapsed_s"]:.1f} s{ended}, '
               f'{pages_verified(report)}, {number(report["verify"]["mismatches"])} wrong</p>')
    problems = "".join(f"<li>{escape(problem)}</li>" for problem in report["problems"])
    total = report["tokens"]["total"]
    tiles = (
        ("of prompt tokens hit", percent(sum(report["tokens"]["hit"].values()), total)),
        ("first token, mean", milliseconds(report["ttft_mean_ms"])),
        ("without the cache", milliseconds(report["ttft_without_cache_mean_ms"])),
        ("loop lag, p99", milliseconds(report["loop_lag_ms"]["p99"])),
        ("lost for good", f"{number(report['lost_pages'])} pages"),
    )
    shown = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in tiles)
    return f"asynccache {report['command']}: {what}", (
        verdict + (f'<ul class="problems">{problems}</ul>' if problems else "") + f'<dl class="tiles">{shown}</dl>')


def _figure(figure: Figure) -> str:
    plot = figure.plot.svg(f"{figure.name}-plot", f"{figure.question} {figure.answer}")
    legend = "".join(f'<li><span class="swatch {kind}"></span>{escape(name)}</li>' for name, kind in figure.colours)
    source = f'<p class="source">{escape(figure.source)}</p>' if figure.source else ""
    return (f'<section id="{figure.name}"><h2>{escape(figure.question)}</h2>'
            f'<p class="answer">{escape(figure.answer)}</p>'
            f'<div class="beside"><figure>{plot}<figcaption><ul class="legend">{legend}</ul></figcaption></figure>'
            f"{_table(figure.table, figure.question)}</div>{source}</section>")


def _table(table: Table, caption: str) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.head)
    rows = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in table.rows
    )
    return (f'<div class="table"><table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>")


def _settings(report: Report) -> str:
    found = report.get("settings")
    if not found:
        return ""
    rows: list[tuple[str, ...]] = [(name, json.dumps(value) if isinstance(value, (list, dict)) else str(value))
            for name, value in found.items() if value is not None]
    return f'<section id="settings"><h2>Settings</h2>{_table(Table(("setting", "value"), rows), "Settings")}</section>'


def _data(report: Report) -> str:
    """The report as JSON, for programs. ``<``, ``>`` and ``&`` are escaped, so that nothing in it ends the element."""
    text = json.dumps(report)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return f'<script type="application/json" id="report">{text}</script>'
