"""What a page is made of: figures that each answer a question with a sentence, a plot and its numbers as a table.

No figure where there is nothing to show: whoever makes one returns None then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from asynccache.cli.reports import svg

Report = Mapping[str, Any]
Draw = Callable[[int], svg.Frame]

WIDE, NARROW = 720, 360


class Table(NamedTuple):
    """Cells as they are shown; the first of each row is its name."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


class Figure(NamedTuple):
    """``draw`` makes the plot for a width in pixels; ``colours``: names and classes for the legend."""

    name: str
    question: str
    answer: str
    draw: Draw
    colours: Sequence[tuple[str, str]]
    table: Table
    source: str = ""


def height(width: int, wide: int = 300) -> int:
    """Narrow plots are a little lower."""
    return wide if width > 500 else min(wide, 260)


def dot_height(width: int, rows: int) -> int:
    """Rows of dots, with names above them where it is narrow."""
    return 80 + rows * (30 if width > 500 else 40)
