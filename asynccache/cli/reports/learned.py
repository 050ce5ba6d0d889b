"""The figures of what an eviction policy has learned, for runs whose policy learns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from asynccache.cli.reports import svg
from asynccache.cli.reports.svg import Figure, Report, Table, share
from asynccache.cli.text import number, percent
from asynccache.runtime.learning import share_at, worth_at

FEW_BLOCKS = 30
"""A curve ends at the age that fewer blocks than this have reached."""
_COLOURS = 8
_TICKS = (1.0, 10.0, 60.0, 600.0, 3600.0)
_TOLD = (10.0, 60.0, 600.0)


class _Kind(NamedTuple):
    """One kind of page. ``blocks``: how many blocks of it were seen. ``again``, ``worth``: values by age. ``points``:
    how many ages at least ``FEW_BLOCKS`` blocks have reached."""

    name: str
    colour: str
    blocks: float
    again: Sequence[float]
    worth: Sequence[float]
    points: int


def learned(report: Report) -> list[Figure]:
    """Which kinds of page are used again, by the time since their last use; and what a page of each is worth to the
    policy. None of them if too little was learned."""
    kinds = _kinds(report)
    if not kinds:
        return []
    found = report["learned"]
    edges, most = found["edges_s"], max(kinds, key=lambda kind: kind.again[kind.points - 1])
    top = max(max(kind.again[1 : kind.points]) for kind in kinds)
    figures = [_figure(
        "again", "Which pages come back, and when?",
        f"Most often, pages that were {most.name}: {percent(most.again[most.points - 1], 1)} of them within "
        f"{_span(edges[most.points - 1])}.", edges, kinds, {kind.name: kind.again for kind in kinds},
        svg.Axis("", 0, min(1.0, max(0.05, top * 1.05)), share),
        lambda values, age: percent(share_at(edges, values, age), 1),
        f"What {found['policy']} has learned from {number(found['requests'])} requests: the share of a kind "
        "of page that is used again within a time since its last use (Kaplan and Meier 1958), up to the age "
        f"that {FEW_BLOCKS} blocks of 512 tokens have reached. Older observations count less. "
        f"{number(round(found['returned_blocks']))} blocks came back after they had been evicted.",
    )]  # fmt: skip
    points = [(y, edges[i], kind.name) for kind in kinds for i in range(1, kind.points) if (y := kind.worth[i]) > 0]
    if found["lessons"] and points:
        least, best = min(points), max(points)
        figures.append(_figure(
            "worth", "What is worth keeping?",
            f"Most of all, pages that were {best[2]}, {_span(best[1])} after their last use ({best[0]:.2g}); least of "
            f"all, pages that were {least[2]}, {_span(least[1])} after it ({least[0]:.2g}).",
            edges, kinds, {kind.name: kind.worth for kind in kinds},
            svg.Axis("", least[0] / 1.2, best[0] * 1.2, lambda value: f"{value:.2g}", log=True),
            lambda values, age: f"{worth_at(edges, values, age):.2g}",
            "The uses to be expected of a block for each second that it is held, up to the best moment to give it up. "
            "The policy compares the oldest and the newest page of every kind and evicts the one that is worth least.",
        ))  # fmt: skip
    return figures


def _figure(
    name: str, question: str, answer: str, edges: Sequence[float], kinds: Sequence[_Kind],
    curves: Mapping[str, Sequence[float]], y: svg.Axis, cell: Callable[[Sequence[float], float], str], source: str,
) -> Figure:  # fmt: skip
    """Return the figure of one curve for each kind. ``cell``: writes a curve's value at an age."""
    last = edges[max(kind.points for kind in kinds) - 1]
    x = svg.Axis("time since the last use", edges[1], last, _span, log=True,
                 at=tuple(age for age in _TICKS if edges[1] <= age <= last))
    plots = [svg.Series(kind.name, kind.colour, list(zip(edges, curves[kind.name], strict=True))[1 : kind.points])
             for kind in kinds]
    rows = [(kind.name, number(round(kind.blocks)),
             *(cell(curves[kind.name], age) if age < edges[kind.points - 1] else "" for age in _TOLD))
            for kind in kinds]
    return Figure(name, question, answer, svg.lines(x, y, plots), [(kind.name, kind.colour) for kind in kinds],
                  Table(("kind", "blocks", *map(_span, _TOLD)), rows), source)


def _kinds(report: Report) -> list[_Kind]:
    """The kinds whose curve has more than two points."""
    found: Mapping[str, Any] = report.get("learned", {})
    every = [_Kind(curve["name"], f"k{i % _COLOURS + 1}", curve["reached"][0], curve["again"], curve["worth"],
                   sum(count >= FEW_BLOCKS for count in curve["reached"]))
             for i, curve in enumerate(found.get("curves", ()))]
    return [kind for kind in every if kind.points > 2]


def _span(seconds: float) -> str:
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"
