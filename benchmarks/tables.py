"""Runs a benchmark as a command, and prints its figures, which are charts, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Any, NamedTuple

from asynccache import compiled
from asynccache.cli.main import Parser, sentence
from asynccache.cli.output import answer, check_writable, progress

WIDTH = 80
MISSED = "  missed"


class Row(NamedTuple):
    """A line of a chart. ``values``: one for each column; None: there is no such figure. ``missed``: the row misses its
    goal."""

    name: str
    values: Sequence[float | None]
    missed: bool = False


class Chart(NamedTuple):
    """A table of figures with a title above it. ``columns``: their names. ``notes``: sentences that go below."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Row]
    notes: Sequence[str] = ()


def cell(value: float | None) -> str:
    """A figure in three digits, or in all of them before the point; "" for None."""
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def text(chart: Chart) -> str:
    """The chart as a table of at most 80 columns, and its notes."""
    cells = [("", *chart.columns), *((row.name, *map(cell, row.values)) for row in chart.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    marked = len(MISSED) * any(row.missed for row in chart.rows)
    widths[0] = max(1, min(widths[0], WIDTH - marked - sum(width + 2 for width in widths[1:])))
    lines = [f"{first[:widths[0]]:<{widths[0]}}" + "".join(
        f"{one:>{width + 2}}" for one, width in zip(rest, widths[1:], strict=True)) for first, *rest in cells]
    told = [line + (MISSED if row.missed else "") for line, row in zip(lines[1:], chart.rows, strict=True)]
    notes = [line for note in chart.notes for line in wrap(note, WIDTH)]
    return "\n".join([*wrap(chart.title, WIDTH), lines[0], *told, *notes])


def bench(module: Any, arguments: list[str], *, prog: str) -> int:
    """Run the benchmark ``module``, and print and write its figures; returns the exit status.

    The module has ``add_arguments(parser)``; ``run(options, tell)``, which returns the figures and calls ``tell`` with
    lines that say how far it has come; and ``charts(figures)``. ``prog``: how the command is called.
    """
    own = Parser(prog=prog, description=sentence((module.__doc__ or " ").partition(":")[0]))
    own.add_argument("--json", metavar="PATH|-", nargs="?", const="-",
                     help="write the figures as JSON to a file, or to standard output (-) instead of the table")
    own.add_argument("--quiet", action="store_true", help="print neither progress nor a table")
    module.add_arguments(own)
    options = own.parse_args(arguments)
    if options.json is not None:
        check_writable(options.json)
    with progress() as tell:
        figures = {"core": compiled.CORE, **module.run(options, (lambda _: None) if options.quiet else tell)}
    told = [*map(text, module.charts(figures)), f"the {compiled.CORE} core ran"]
    answer(figures, None if options.quiet else "\n\n".join(told), options.json)
    return 0
