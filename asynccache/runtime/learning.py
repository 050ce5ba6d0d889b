"""The short form of all that the eviction policy has learned: for each kind of page a line with a few ages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from asynccache.core.eviction import Learned

AGES = (1.0, 10.0, 60.0, 600.0, 3600.0)
"""The ages, in seconds, that the short form has."""
_SHORT = ("1 s", "10 s", "1 min", "10 min", "1 h")


class LearnedKind(NamedTuple):
    """One kind of page. ``blocks``: blocks of 512 tokens that the curve was learned from, faded with time. ``again``:
    for each of ``AGES``, the share of these blocks that is used again before that age, 0 to 1. ``worth``: for each of
    ``AGES``, what a block of that age is worth; the policy evicts what is worth least."""

    name: str
    blocks: float
    again: tuple[float, ...]
    worth: tuple[float, ...]


def kinds(learned: Learned) -> tuple[LearnedKind, ...]:
    """Return every kind of page, in the policy's order."""
    edges = learned.edges
    return tuple(
        LearnedKind(curve.name, max(0.0, curve.reached[0]), tuple(share_at(edges, curve.again, age) for age in AGES),
             tuple(worth_at(edges, curve.worth, age) for age in AGES))
        for curve in learned.curves
    )  # fmt: skip


def share_at(edges: Sequence[float], again: Sequence[float], age: float) -> float:
    """Return the share that is used again before ``age`` seconds. ``again``: the shares before each of ``edges``."""
    k = bisect_right(edges, age) - 1
    if k + 1 >= len(edges):
        return again[k]
    return again[k] + (again[k + 1] - again[k]) * (age - edges[k]) / (edges[k + 1] - edges[k])


def worth_at(edges: Sequence[float], worth: Sequence[float], age: float) -> float:
    """Return how much a block is worth ``age`` seconds after its last use."""
    return worth[bisect_right(edges, age) - 1]


def plain(policy: str, learned: Learned) -> dict[str, Any]:
    """Return the short form, as values that JSON has. ``policy``: the policy's name."""
    return {
        **_counts(policy, learned), "ages_s": list(AGES),
        "kinds": [
            {"name": kind.name, "blocks": round(kind.blocks, 2), "again": [round(share, 5) for share in kind.again],
             "worth": [_figures(worth) for worth in kind.worth]}
            for kind in kinds(learned)
        ],
    }  # fmt: skip


def curves(policy: str, learned: Learned) -> dict[str, Any]:
    """Return the whole curves, as values that JSON has. ``policy``: the policy's name."""
    return {
        **_counts(policy, learned), "edges_s": [_figures(edge) for edge in learned.edges],
        "curves": [
            {"name": curve.name, "used": [round(count, 2) for count in curve.used],
             "reached": [round(count, 2) for count in curve.reached],
             "again": [round(share, 5) for share in curve.again], "worth": [_figures(worth) for worth in curve.worth]}
            for curve in learned.curves
        ],
    }  # fmt: skip


def _counts(policy: str, learned: Learned) -> dict[str, Any]:
    return {
        "policy": policy, "requests": learned.requests, "lessons": learned.lessons, "ghosts": learned.ghosts,
        "watched": learned.watched, "leads": learned.leads, "returned_blocks": round(learned.returned, 2),
    }  # fmt: skip


def _figures(value: float) -> float:
    return float(f"{value:.4g}")


def lines(found: dict[str, Any]) -> list[str]:
    """Return lines of text for ``found``, which ``plain`` has returned. Kinds of which nothing is known are left
    out."""
    head = f"{found['policy']} has learned from {found['requests']} requests"
    if not found["lessons"]:
        return [f"{head}, which is too few to choose by"]
    told = [f"{head}: blocks of a kind, and the share used again within {', '.join(_SHORT)}"]
    for kind in found["kinds"]:
        if kind["blocks"] >= 1:
            shares = "".join(f"{100 * share:>7.1f} %" for share in kind["again"])
            told.append(f"  {kind['name']:<20} {kind['blocks']:>10,.0f}{shares}")
    return told


def judgement(found: dict[str, Any]) -> str:
    """Return the policy's judgement of some pages, in words. ``found``: a ``Judged`` as values that JSON has."""
    if not found["worth"]:
        return f"{found['kind']}, ended"
    return f"{found['kind']}, {found['age']:.1f} s ago, worth {found['worth']:.2g}"
