"""The figures of a page, and their plots as SVG text: lines between axes. Pure functions of their values.

Colours, fonts and dashes are classes of the page's style sheet, so one drawing serves light and dark. A drawing is 480
pixels wide, so that its text is legible on a telephone as well as on a wide screen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

Format = Callable[[float], str]
Report = Mapping[str, Any]

WIDTH, HEIGHT = 480, 270
_TOP, _BOTTOM, _LEFT, _RIGHT = 14, 46, 52, 16
_LETTER = 6.6


class Axis(NamedTuple):
    """An axis from ``low`` to ``high``. ``show`` writes a value as text. ``log``: the scale is logarithmic; ``low``
    must be above 0 then."""

    label: str
    low: float
    high: float
    show: Format
    log: bool = False

    def share(self, value: float) -> float:
        """The place of ``value`` on the axis, from 0 to 1. A value beyond an end lies at that end."""
        if self.log:
            low, high, value = math.log(self.low), math.log(self.high), math.log(max(value, self.low))
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5

    def ticks(self, most: int) -> list[float]:
        """The values that get a tick, at most ``most``."""
        found = _decades(self.low, self.high) if self.log else _round(self.low, self.high, most)
        step = -(-len(found) // max(2, most))
        return found[::step]


class Series(NamedTuple):
    """A line. ``kind``: the style sheet's class that gives it its colour."""

    name: str
    kind: str
    points: Sequence[tuple[float, float]]


def _round(low: float, high: float, most: int) -> list[float]:
    span = (high - low) or 1.0
    raw = span / max(1, most)
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, int(high / step + 1e-9) + 1)]


def _decades(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1,) if math.log10(high / low) > 2.5 else (1, 2, 5)
    return [m * 10.0**p for p in powers for m in steps if low * 0.999 <= m * 10.0**p <= high * 1.001]


class Drawing:
    """A drawing with two axes, of which it draws the grid, the ticks and the label at once. ``parts``: the SVG elements
    drawn so far. Lengths are pixels."""

    def __init__(self, x: Axis, y: Axis) -> None:
        self.x, self.y = x, y
        self.parts: list[str] = []
        bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
        widest = max((len(x.show(v)) for v in x.ticks(9)), default=1) * _LETTER + 10
        for value in x.ticks(int((right - _LEFT) // widest)):
            self.line(self.at_x(value), _TOP, self.at_x(value), bottom, "grid")
            half = len(x.show(value)) * _LETTER / 2  # below its line, but moved sideways until it is whole
            self.text(max(half, min(self.at_x(value), WIDTH - half)), bottom + 16, x.show(value), "middle", "tick")
        for value in y.ticks(6):
            self.line(_LEFT, self.at_y(value), right, self.at_y(value), "grid")
            self.text(_LEFT - 6, self.at_y(value) + 4, y.show(value), "end", "tick")
        self.line(_LEFT, bottom, right, bottom, "axis")
        self.text((_LEFT + right) / 2, HEIGHT - 8, x.label, "middle", "label")

    def at_x(self, value: float) -> float:
        return round(_LEFT + self.x.share(value) * (WIDTH - _LEFT - _RIGHT), 1)

    def at_y(self, value: float) -> float:
        return round(HEIGHT - _BOTTOM - self.y.share(value) * (HEIGHT - _TOP - _BOTTOM), 1)

    def text(self, x: float, y: float, words: str, anchor: str, kind: str) -> None:
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self.parts.append(f'<line class="{kind}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>')

    def svg(self, name: str, title: str) -> str:
        """The drawing as an SVG element. ``name``: an id, unique on the page; ``title``: what a screen reader says."""
        return (f'<svg role="img" aria-labelledby="{name}" viewBox="0 0 {WIDTH} {HEIGHT}" '
                f'xmlns="http://www.w3.org/2000/svg"><title id="{name}">{escape(title)}</title>'
                f'{"".join(self.parts)}</svg>')


def lines(x: Axis, y: Axis, series: Sequence[Series]) -> Drawing:
    """Draw a line for each of ``series``."""
    drawing = Drawing(x, y)
    for one in series:
        steps = " ".join(f"{drawing.at_x(at):g},{drawing.at_y(value):g}" for at, value in one.points)
        drawing.parts.append(f'<polyline class="line {one.kind}" points="{steps}"/>')
    return drawing


class Table(NamedTuple):
    """A table of texts; the first cell of each row is the row's name."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


class Figure(NamedTuple):
    """A question, answered by a sentence, a plot and a table of its numbers. ``colours``: the names and classes of the
    legend; ``source``: where the numbers are from and how to read them."""

    name: str
    question: str
    answer: str
    plot: Drawing
    colours: Sequence[tuple[str, str]]
    table: Table
    source: str = ""


def share(value: float) -> str:
    """Return a share as the text at a tick: 0.25 is ``25 %``."""
    return f"{100 * value:.0f} %"
