"""The figure of what an eviction policy has learned, for runs whose policy learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from asynccache.cli.reports import svg
from asynccache.cli.reports.svg import Figure, Report, Table, share
from asynccache.cli.text import number, percent
from asynccache.runtime.learning import share_at

FEW_BLOCKS = 30
"""A curve ends at the age that fewer blocks than this have reached."""
_COLOURS = 8
_TICKS = (1.0, 10.0, 60.0, 600.0, 3600.0)
_TOLD = (10.0, 60.0, 600.0)


class _Kind(NamedTuple):
    """One kind of page. ``blocks``: how many blocks of it were seen. ``again``: values by age. ``points``:
    how many ages at least ``FEW_BLOCKS`` blocks have reached."""

    name: str
    colour: str
    blocks: float
    again: Sequence[float]
    points: int


def learned(report: Report) -> Figure | None:
    """The figure of how many pages of each kind are used again, by the time since their last use."""
    kinds = _kinds(report)
    if not kinds:
        return None
    found = report["learned"]
    edges, most = found["edges_s"], max(kinds, key=lambda kind: kind.again[kind.points - 1])
    last, top = edges[max(kind.points for kind in kinds) - 1], max(max(kind.again[1 : kind.points]) for kind in kinds)
    x = svg.Axis("time since the last use", edges[1], last, _span, log=True,
                 at=tuple(age for age in _TICKS if edges[1] <= age <= last))
    plots = [svg.Series(kind.name, kind.colour, list(zip(edges, kind.again, strict=True))[1 : kind.points])
             for kind in kinds]
    rows = [(kind.name, number(round(kind.blocks)),
             *(percent(share_at(edges, kind.again, age), 1) if age < edges[kind.points - 1] else "" for age in _TOLD))
            for kind in kinds]
    return Figure("again", "Which pages come back, and when?",
                  f"Most often, pages that were {most.name}: {percent(most.again[most.points - 1], 1)} of them within "
                  f"{_span(edges[most.points - 1])}.",
                  svg.lines(x, svg.Axis("", 0, min(1.0, max(0.05, top * 1.05)), share), plots),
                  [(kind.name, kind.colour) for kind in kinds], Table(("kind", "blocks", *map(_span, _TOLD)), rows),
                  f"What {found['policy']} has learned from {number(found['requests'])} requests: the share of a kind "
                  "of page that is used again within a time since its last use (Kaplan and Meier 1958), up to the age "
                  f"that {FEW_BLOCKS} blocks of 512 tokens have reached. Older observations count less. "
                  f"{number(round(found['returned_blocks']))} blocks came back after they had been evicted.")


def _kinds(report: Report) -> list[_Kind]:
    """The kinds whose curve has more than two points."""
    found: Mapping[str, Any] = report.get("learned", {})
    every = [_Kind(curve["name"], f"k{i % _COLOURS + 1}", curve["reached"][0], curve["again"],
                   sum(count >= FEW_BLOCKS for count in curve["reached"]))
             for i, curve in enumerate(found.get("curves", ()))]
    return [kind for kind in every if kind.points > 2]


def _span(seconds: float) -> str:
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"
