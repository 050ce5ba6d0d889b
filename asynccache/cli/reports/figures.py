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


def plot(
    x: svg.Axis, y: svg.Axis, paint: Callable[[svg.Frame], None], *, height: int = 300, left: int = 52
) -> Draw:
    """Return what draws a plot with these axes; ``paint`` draws what is between them. ``height`` is in pixels, and at
    most 260 if the plot is narrow; ``left`` is the room for the labels of ``y``."""
    def draw(width: int) -> svg.Frame:
        frame = svg.Frame(width, height if width > 500 else min(height, 260), x, y, left)
        paint(frame)
        return frame
    return draw


def share(value: float) -> str:
    """Return a share as the text at a tick: 0.25 is ``25 %``."""
    return f"{100 * value:.0f} %"


def dot_height(width: int, rows: int) -> int:
    """The height of a dot plot in pixels; in a narrow one each row needs room for its name above it."""
    return 80 + rows * (30 if width > 500 else 40)
