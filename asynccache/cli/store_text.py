"""The reports of ``asynccache store`` as text of at most 80 columns. Pure functions."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from asynccache.cli.text import milliseconds, number, size
from asynccache.storage import HEADER_BYTES, Stored

WIDTH = 80

Report = Mapping[str, Any]


def text(report: Report) -> str:
    """The report of any action as text."""
    makers = {"ls": _listed, "stat": _stat, "verify": _verified, "gc": _collected, "clear": _cleared}
    return "\n".join(makers[report["command"]](report))


def line(page: Stored, now: float) -> str:
    """The line of one page in a list: key, size of its payload, age. ``now``: the present time, as ``time.time()``."""
    return f"{page.key.hex()} {size(page.size - HEADER_BYTES):>8} {age(now - page.written) if page.written else '?':>5}"


def age(seconds: float) -> str:
    """An age in its largest whole unit: ``7 s``, ``12 m``, ``3 h``, ``14 d``."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _listed(report: Report) -> list[str]:
    more = "; there are more" if report["more"] else ""
    return [f"{number(report['pages'])} pages, {size(report['bytes'])}{more}"]


def _stat(report: Report) -> list[str]:
    stats = report["stats"]
    told = ("disk_bytes", "segments", "capacity_bytes")
    on_disk = ("; {} of {} in {} segments".format(size(stats["disk_bytes"]), size(stats["capacity_bytes"]),
                                                  number(stats["segments"]))
               if stats.keys() >= set(told) else "")
    lines = [f"{report['url']}: {number(report['pages'])} pages, {size(report['bytes'])}{on_disk}"]
    lines += [f"  {number(one['pages'])} pages of {size(one['page_bytes'])}" for one in report.get("by_page_size", ())]
    ages = [f"{number(count)} {_younger(name)}" for name, count in report.get("by_age", {}).items()]
    if ages:
        lines += textwrap.wrap("by age: " + ", ".join(ages), WIDTH, initial_indent="  ", subsequent_indent="    ")
    probe = report["probe"]
    answer = (f"it answers in {milliseconds(probe['median_ms'])}, at worst {milliseconds(probe['worst_ms'])}"
              if not probe["failed"] else f"NOT OK: it failed to answer {probe['failed']} of the questions")
    lines.append(f"  {answer}; breaker {report['breaker']}")
    counts = [_count(name, value) for name, value in stats.items() if value and not (on_disk and name in told)]
    if counts:
        lines += textwrap.wrap(" · ".join(counts), WIDTH, initial_indent="  ", subsequent_indent="  ",
                               break_on_hyphens=False)
    return lines


def _count(name: str, value: float) -> str:
    for end, write in (("_bytes", size), ("_ms", milliseconds)):
        if name.endswith(end):
            return f"{name.removesuffix(end)} {write(value)}"
    return f"{name} {value:,.5g}"


def _younger(name: str) -> str:
    return name if name in ("older", "unknown") else f"below {name}"


def _verified(report: Report) -> list[str]:
    rate = report["bytes"] / report["elapsed_s"] if report["elapsed_s"] else 0.0
    head = "OK" if report["ok"] else "NOT OK"
    lines = [f"{head}: {number(report['pages'])} pages, {size(report['bytes'])} in {report['elapsed_s']:.1f} s "
             f"({size(rate)}/s)"]
    if report["bad"]:
        lines.append(f"  {number(report['bad'])} damaged pages were dropped")
    if report["unread"]:
        lines.append(f"  {number(report['unread'])} pages could not be read")
    return lines


def _collected(report: Report) -> list[str]:
    if report["dry_run"]:
        unknown = f"; the age of {number(report['unknown'])} pages is not known" if report["unknown"] else ""
        return [f"{number(report['pages'])} pages are that old: {size(report['size'])}; nothing was removed{unknown}"]
    return [f"{number(report['pages'])} old pages and {number(report['waste'])} pieces of waste removed, "
            f"{size(report['size'])} freed"]


def _cleared(report: Report) -> list[str]:
    return [f"{report['url']} is empty"]
