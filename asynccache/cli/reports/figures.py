"""The parts of a page: figures, each of which answers a question with a sentence, a plot and a table of its numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from asynccache.cli.reports import svg

Report = Mapping[str, Any]
Draw = Callable[[int], svg.Frame]

WIDE, NARROW = 720, 360


class Table(NamedTuple):
    """A table of texts; the first cell of each row is the row's name."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


class Figure(NamedTuple):
    """One figure. ``draw`` makes the plot for a width in pixels; ``colours``: the names and classes of the legend;
    ``source``: where the numbers are from and how to read them."""

    name: str
    question: str
    answer: str
    draw: Draw
    colours: Sequence[tuple[str, str]]
    table: Table
    source: str = ""


def height(width: int, wide: int = 300) -> int:
    """The height of a plot in pixels: ``wide``, but at most 260 if it is narrow."""
    return wide if width > 500 else min(wide, 260)


def dot_height(width: int, rows: int) -> int:
    """The height of a dot plot in pixels; in a narrow one each row needs room for its name above it."""
    return 80 + rows * (30 if width > 500 else 40)
