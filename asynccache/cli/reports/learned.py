"""The figures of what an eviction policy has learned, for runs whose policy learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from asynccache.cli.reports import svg
from asynccache.cli.reports.figures import Figure, Report, Table, plot, share
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


def again(report: Report) -> Figure | None:
    """The share of each kind of page that is used again within a time since its last use."""
    kinds = _kinds(report)
    if not kinds:
        return None
    found = report["learned"]
    edges = found["edges_s"]
    plots = [svg.Series(kind.name, kind.colour, list(zip(edges, kind.again, strict=True))[1 : kind.points])
             for kind in kinds]
    top = max(y for one in plots for _, y in one.points)

    draw = plot(_axis(edges, kinds), svg.Axis("", 0, min(1.0, max(0.05, top * 1.05)), share),
                lambda frame: svg.lines(frame, plots), height=320)
    rows = [(kind.name, number(round(kind.blocks)),
             *(percent(share_at(edges, kind.again, age), 1) if age < edges[kind.points - 1] else "" for age in _TOLD))
            for kind in kinds]
    best = max(kinds, key=lambda kind: kind.again[kind.points - 1])
    last = best.points - 1
    return Figure("again", "Which pages come back, and when?",
                  f"Most often, pages that were {best.name}: {percent(best.again[last], 1)} of them within "
                  f"{_span(edges[last])}.",
                  draw, [(kind.name, kind.colour) for kind in kinds],
                  Table(("kind", "blocks", *map(_span, _TOLD)), rows),
                  f"What {found['policy']} has learned from {number(found['requests'])} requests: the share of a kind "
                  "of page that is used again within a time since its last use (Kaplan and Meier 1958), up to the age "
                  f"that {FEW_BLOCKS} blocks of 512 tokens have reached. Older observations count less. "
                  f"{number(round(found['returned_blocks']))} blocks came back after they had been evicted.")


def worth(report: Report) -> Figure | None:
    """What a page of each kind is worth to the policy, by its age."""
    kinds = _kinds(report)
    if not kinds or not report["learned"]["lessons"]:
        return None
    edges = report["learned"]["edges_s"]
    plots = [svg.Series(kind.name, kind.colour, list(zip(edges, kind.worth, strict=True))[1 : kind.points])
             for kind in kinds]
    points = [(y, x, one.name) for one in plots for x, y in one.points if y > 0]
    if not points:
        return None
    least, most = min(points), max(points)

    draw = plot(_axis(edges, kinds), svg.Axis("", least[0] / 1.2, most[0] * 1.2, _small, log=True),
                lambda frame: svg.lines(frame, plots), height=320, left=64)
    rows = [(kind.name, *(_small(worth_at(edges, kind.worth, age)) if age < edges[kind.points - 1] else ""
                          for age in _TOLD)) for kind in kinds]
    return Figure("worth", "What is worth keeping?",
                  f"Most of all, pages that were {most[2]}, {_span(most[1])} after their last use "
                  f"({_small(most[0])}); least of all, pages that were {least[2]}, {_span(least[1])} after it "
                  f"({_small(least[0])}).",
                  draw, [(kind.name, kind.colour) for kind in kinds],
                  Table(("kind", *map(_span, _TOLD)), rows),
                  "The uses to be expected of a block for each second that it is held, up to the best moment to give "
                  "it up. The policy compares the oldest and the newest page of every kind and evicts the one that is "
                  "worth least.")


def _kinds(report: Report) -> list[_Kind]:
    """The kinds whose curve has more than two points."""
    found: Mapping[str, Any] = report.get("learned", {})
    every = [_Kind(curve["name"], f"k{i % _COLOURS + 1}", curve["reached"][0], curve["again"], curve["worth"],
                   sum(count >= FEW_BLOCKS for count in curve["reached"]))
             for i, curve in enumerate(found.get("curves", ()))]
    return [kind for kind in every if kind.points > 2]


def _axis(edges: Sequence[float], kinds: Sequence[_Kind]) -> svg.Axis:
    last = edges[max(kind.points for kind in kinds) - 1]
    return svg.Axis("time since the last use", edges[1], last, _span, log=True,
                    at=tuple(age for age in _TICKS if edges[1] <= age <= last))


def _span(seconds: float) -> str:
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"


def _small(value: float) -> str:
    return f"{value:.2g}"
