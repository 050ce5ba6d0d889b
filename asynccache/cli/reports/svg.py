"""Plots as SVG text: axes, lines, areas, bars and dots. Pure functions of their values.

Colours, fonts and dashes are classes of the page's style sheet, so one drawing serves light and dark. A plot is drawn
for a given width. The page has a plot for wide screens and one for narrow screens, so that text stays legible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import NamedTuple

Format = Callable[[float], str]

_TOP, _BOTTOM, _RIGHT = 14, 46, 16
_LETTER = 6.6


class Axis(NamedTuple):
    """An axis from ``low`` to ``high``. ``show`` writes a value as text. ``log``: the scale is logarithmic; ``low``
    must be above 0 then. ``at``: the values that get a tick; empty: round values are chosen."""

    label: str
    low: float
    high: float
    show: Format
    log: bool = False
    at: tuple[float, ...] = ()

    def share(self, value: float) -> float:
        """Where ``value`` lies on the axis, from 0 to 1. A value beyond an end lies at that end."""
        if self.log:
            low, high, value = math.log(self.low), math.log(self.high), math.log(max(value, self.low))
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5

    def ticks(self, most: int) -> list[float]:
        """The values that get a tick, at most ``most``."""
        found = list(self.at) or (_decades(self.low, self.high) if self.log else _round(self.low, self.high, most))
        step = -(-len(found) // max(2, most))
        return found[::step]


class Series(NamedTuple):
    """A line or a set of bars. ``kind``: the style sheet's class that gives it its colour."""

    name: str
    kind: str
    points: Sequence[tuple[float, float]]


class Row(NamedTuple):
    """A line of a dot plot. ``dots``: for each dot its class in the style sheet and its value."""

    name: str
    dots: Sequence[tuple[str, float]]


class Mark(NamedTuple):
    """A value on the x axis that is marked with a name."""

    name: str
    at: float


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


class Frame:
    """A drawing with two axes: places of values, and the SVG elements drawn so far (``parts``). Lengths are pixels."""

    def __init__(self, width: int, height: int, x: Axis, y: Axis, left: int = 52) -> None:
        self.width, self.height, self.x, self.y, self.left = width, height, x, y, left
        self.parts: list[str] = []

    def at_x(self, value: float) -> float:
        return round(self.left + self.x.share(value) * (self.width - self.left - _RIGHT), 1)

    def at_y(self, value: float) -> float:
        return round(self.height - _BOTTOM - self.y.share(value) * (self.height - _TOP - _BOTTOM), 1)

    def text(self, x: float, y: float, words: str, anchor: str = "middle", kind: str = "tick") -> None:
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self.parts.append(f'<line class="{kind}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>')

    def path(self, points: Sequence[tuple[float, float]], kind: str, *, close: bool = False) -> None:
        steps = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<{"polygon" if close else "polyline"} class="{kind}" points="{steps}"/>')

    def rect(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        self.parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{max(0.0, width):.4g}" height="{max(0.0, height):.4g}"/>')

    def axes(self, *, y_ticks: bool = True) -> None:
        """Grid, ticks and labels."""
        bottom, right = self.height - _BOTTOM, self.width - _RIGHT
        widest = max((len(self.x.show(v)) for v in self.x.ticks(9)), default=1) * _LETTER + 10
        for value in self.x.ticks(int((right - self.left) // widest)):
            self.line(self.at_x(value), _TOP, self.at_x(value), bottom, "grid")
            self._x_tick(value, bottom + 16)
        for value in self.y.ticks(6) if y_ticks else ():
            self.line(self.left, self.at_y(value), right, self.at_y(value), "grid")
            self.text(self.left - 6, self.at_y(value) + 4, self.y.show(value), "end")
        self.line(self.left, bottom, right, bottom, "axis")
        self.text((self.left + right) / 2, self.height - 8, self.x.label, kind="label")

    def _x_tick(self, value: float, y: float) -> None:
        """Write a tick of the x axis, centred below its line, but moved sideways as far as needed to be whole."""
        words = self.x.show(value)
        half = len(words) * _LETTER / 2
        self.text(max(half, min(self.at_x(value), self.width - half)), y, words)

    def svg(self, name: str, title: str) -> str:
        """The drawing as an SVG element. ``name``: an id, unique on the page; ``title``: what a screen reader says."""
        return (f'<svg class="{"wide" if self.width > 500 else "narrow"}" role="img" aria-labelledby="{name}" '
                f'viewBox="0 0 {self.width} {self.height}" xmlns="http://www.w3.org/2000/svg">'
                f'<title id="{name}">{escape(title)}</title>{"".join(self.parts)}</svg>')


def lines(frame: Frame, series: Sequence[Series], marks: Sequence[Mark] = (), dots: Sequence[Series] = ()) -> None:
    """Draw lines, marks on the x axis, and single dots."""
    frame.axes()
    _marks(frame, marks)
    for one in series:
        frame.path([(frame.at_x(x), frame.at_y(y)) for x, y in one.points], f"line {one.kind}")
    for one in dots:
        for x, y in one.points:
            _dot(frame, frame.at_x(x), frame.at_y(y), one.kind)


def areas(frame: Frame, series: Sequence[Series]) -> None:
    """Draw areas stacked on each other, the first at the bottom. All must have the same x values."""
    frame.axes()
    floor = [0.0] * len(series[0].points)
    for one in series:
        top = [low + y for low, (_, y) in zip(floor, one.points, strict=True)]
        xs = [frame.at_x(x) for x, _ in one.points]
        upper = list(zip(xs, map(frame.at_y, top), strict=True))
        lower = list(zip(xs, map(frame.at_y, floor), strict=True))
        frame.path([*upper, *reversed(lower)], f"area {one.kind}", close=True)
        frame.path(upper, f"line {one.kind}")
        floor = top


def bars(frame: Frame, names: Sequence[str], series: Sequence[Series]) -> None:
    """Draw a group of bars for each name: bar n of group i is ``series[n].points[i]``, of which only y is used.
    ``frame.x`` must count the groups from 0."""
    frame.axes()
    bottom = frame.height - _BOTTOM
    room = frame.at_x(1) - frame.at_x(0)
    width = room * 0.8 / max(1, len(series))
    skip = -(-(max(map(len, names)) * _LETTER + 6) // room)
    for i, name in enumerate(names):
        if not i % skip:
            frame.text(frame.at_x(i) + room / 2, bottom + 16, name)
        for n, one in enumerate(series):
            value = one.points[i][1]
            top = frame.at_y(value) if value > 0 else bottom
            frame.rect(frame.at_x(i) + room * 0.1 + n * width, top, width, bottom - top, f"bar {one.kind}")


def rows(frame: Frame, found: Sequence[Row], marks: Sequence[Mark] = ()) -> None:
    """Draw a dot plot: a line for each row, with its name at the left, or above it where there is no room."""
    frame.axes(y_ticks=False)
    _marks(frame, marks)
    step = (frame.height - _TOP - _BOTTOM - (14 if marks else 0)) / max(1, len(found))
    top = _TOP + (14 if marks else 0)
    for i, row in enumerate(found):
        y = round(top + (i + 0.62) * step, 1)
        beside = frame.left > 60
        frame.text(frame.left - 10 if beside else frame.left, y + 4 if beside else y - 9, row.name,
                   "end" if beside else "start", "name")
        frame.line(frame.left, y, frame.width - _RIGHT, y, "grid")
        for kind, value in row.dots:
            _dot(frame, frame.at_x(value), y, kind)


def _dot(frame: Frame, x: float, y: float, kind: str) -> None:
    """Draw a dot; a value of class ``limit`` is a short vertical line instead."""
    if kind == "limit":
        frame.line(x, y - 8, x, y + 8, "limit")
    else:
        frame.parts.append(f'<circle class="dot {kind}" cx="{x:g}" cy="{y:g}" r="5"/>')


def _marks(frame: Frame, marks: Sequence[Mark]) -> None:
    """Draw marks with their names; names that would overlap are put one below the other."""
    ends: list[float] = []
    for mark in sorted(marks, key=lambda m: m.at):
        x = frame.at_x(mark.at)
        frame.line(x, _TOP, x, frame.height - _BOTTOM, "mark")
        width = len(mark.name) * _LETTER + 8
        left = x + width > frame.width
        start = x - width if left else x
        level = next((i for i, end in enumerate(ends) if end <= start), len(ends))
        ends[level:level + 1] = [start + width]
        frame.text(x - 4 if left else x + 4, _TOP + 10 + 14 * level, mark.name, "end" if left else "start", "name")


def legend(found: Iterator[tuple[str, str]] | Sequence[tuple[str, str]]) -> str:
    """The legend as an HTML list. ``found``: the name and class of each colour."""
    items = "".join(f'<li><span class="swatch {kind}"></span>{escape(name)}</li>' for name, kind in found)
    return f'<ul class="legend">{items}</ul>'
