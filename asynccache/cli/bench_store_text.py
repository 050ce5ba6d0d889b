"""The figures of ``asynccache bench store`` as a table of at most 80 columns. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from asynccache.cli.text import number, size

VARIANTS = ("raw", "off", "on")
OPERATIONS = {"put": "put", "get": "get", "get_shuffled": "get, shuffled", "exists": "exists"}
HEAD = ("", "verify", "GB/s", "of raw", "pages/s", "CPU", "own", "p50", "p99", "p99.9")
WIDTH = 80
WIDTHS = (14, 6, 7, 8, 10, 7, 7, 7, 7, 7)

Report = Mapping[str, Any]


def table(report: Report) -> str:
    """The whole table. ``raw`` is the raw client; ``CPU`` and ``own`` are in µs for each page, p50 to p99.9 in ms for
    each call."""
    settings = report.get("settings")
    if settings is None:
        return ""
    how = (f"{settings['concurrency']} calls at a time, medians of {settings['rounds']} rounds; "
           "CPU, own: µs a page; p50 ...: ms a call")
    lines = [settings["url"], *wrap(how, WIDTH)]
    for figures in report["sizes"]:
        for mode, found in figures.items():
            if isinstance(found, dict) and "ratio" in found:
                lines += ["", *_store(figures, mode, found)]
    return "\n".join(lines)


def _store(figures: Report, mode: str, found: Report) -> Iterator[str]:
    raw = figures["raw"]
    yield from wrap(
        f"{size(figures['page_bytes'])} pages{'' if mode == 'store' else f', {mode}'}: {number(figures['pages'])}, "
        f"{figures['pages_per_call']} a call; checksum {raw['checksum']['cpu_us_per_page']:.1f} µs, "
        f"memcpy {raw['memcpy']['gb_per_s']:.2f} GB/s", WIDTH,
    )
    yield _row(HEAD)
    for operation, name in OPERATIONS.items():
        for variant in VARIANTS:
            if operation in found.get(variant, {}):
                ratio = found["ratio"].get(variant, {}).get(operation)
                yield _row((name, variant, *_cells(found[variant][operation], ratio)))
                name = ""
    if found["without_raw"]:
        yield from wrap(f"no raw client: {found['without_raw']}", WIDTH)
    if found["mismatches"]:
        yield f"NOT OK: {number(found['mismatches'])} pages came back wrong"


def _cells(figures: Report, ratio: float | None) -> Iterator[str]:
    own = figures.get("own_us_per_page")
    yield f"{figures['gb_per_s']:.2f}" if "gb_per_s" in figures else ""
    yield "" if ratio is None else f"{ratio:.2f}"
    yield number(figures["pages_per_s"])
    yield f"{figures['cpu_us_per_page']:.1f}"
    yield "" if own is None else f"{own:.1f}"
    for name in ("p50_ms", "p99_ms", "p999_ms"):
        yield f"{figures[name]:.4g}"


def _row(cells: Sequence[str]) -> str:
    first, second, *rest = cells
    widths = WIDTHS[2:]
    shown = (f"{cell:>{width}}" for cell, width in zip(rest, widths, strict=True))
    return f"{first:{WIDTHS[0]}}{second:{WIDTHS[1]}}{''.join(shown)}".rstrip()
