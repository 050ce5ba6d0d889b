"""The accounts of all ranks as one.

What the group does counts once, and must be the same on every rank; what each rank moves or checks is added up; what
takes time takes as long as on the slowest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asynccache.cli.meter import Samples, Spread
from asynccache.cli.ranked.messages import Ended
from asynccache.cli.report import Leaks
from asynccache.cli.tally import Tally
from asynccache.ranks import Topology
from asynccache.ranks.handshake import differing

COMMON = (
    "requests", "served", "cancelled", "failed", "entered_again", "cut_short", "tokens", "device", "host", "storage",
    "output_tokens", "blocks", "blocks_hit", "blocks_shared",
)
COMMON_FACTS = ("evicted", "lost_pages", "failed_loads", "splits", "nodes", "tiers")
_TIMES = ("waits", "first_token", "first_token_without")


def disagreement(ended: Mapping[int, Ended]) -> str | None:
    """The first thing that ranks have counted differently, in words."""
    accounts = {
        rank: {name: getattr(one.tally, name) for name in COMMON} | {name: one.facts[name] for name in COMMON_FACTS}
        | {"digest": one.digest, "tree": one.tree, "steps": one.steps}
        for rank, one in ended.items()
    }
    return differing(accounts)


def tallies(parts: Sequence[Tally], total: Tally) -> None:
    """Count ``parts`` into ``total``, which keeps its problems."""
    for name in COMMON:
        setattr(total, name, max(getattr(part, name) for part in parts))
    for name in _TIMES:
        setattr(total, name, _slowest([getattr(part, name) for part in parts]))
    total.verified = sum(part.verified for part in parts)
    total.mismatches = sum(part.mismatches for part in parts)
    total.paths = parts[0].paths


def _slowest(times: Sequence[Samples]) -> Samples:
    """Of each request that all ranks have kept."""
    return Samples(map(max, zip(*times, strict=False)))


def problems(ended: Mapping[int, Ended], total: Tally) -> None:
    """What ranks complain about, each under its name, unless it is what all of them do."""
    complaints: dict[str, list[int]] = {}
    for rank, one in sorted(ended.items()):
        failure = one.failure
        for sentence in ([f"{failure.kind}: {failure.sentence}"] if failure else []) + one.tally.problems:
            complaints.setdefault(sentence, []).append(rank)
    for sentence, ranks in complaints.items():
        everybody = 1 < len(ranks) == len(ended)
        who = "every rank" if everybody else f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        total.problem(f"{who}: {sentence}")


def all_facts(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the caches say about themselves; nothing, where none says anything."""
    found = [part for part in parts if part]
    if not found:
        return {}
    first = dict(found[0])
    first["stages"] = {name: _stage([part["stages"][name] for part in found]) for name in first["stages"]}
    first["storage"] = _sum([part["storage"] for part in found])
    first["stores"] = {
        name: _sum([part["stores"].get(name, {}) for part in found]) for name in first["stores"]
    }
    return first


def _stage(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    latency = {name: max(part["latency_ms"][name] for part in parts) for name in parts[0]["latency_ms"]}
    most = {name: max(part[name] for part in parts) for name in parts[0] if name != "latency_ms"}
    return most | {name: sum(part[name] for part in parts) for name in ("bytes", "errors")} | {"latency_ms": latency}


def _sum(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _added([part[name] for part in parts if name in part]) for name in names}


def _added(values: Sequence[Any]) -> Any:
    return sum(values) if all(isinstance(value, (int, float)) for value in values) else values[0]


def all_leaks(parts: Iterable[Ended]) -> Leaks:
    """In sum; of ranks that have failed nothing is known."""
    found = [part for part in parts if part.failure is None]
    return Leaks(
        sum(part.left.device_pages for part in found), sum(part.left.host_pages for part in found),
        sum(part.left.pins for part in found), sum(part.tasks for part in found),
    )  # fmt: skip


def worst(spreads: Sequence[Spread]) -> dict[str, float]:
    """Of each percentile."""
    return {name: round(max((getattr(one, name) for one in spreads), default=0.0), 4) for name in Spread._fields}


def entry(rank: int, topology: Topology, pid: int, ended: Ended | None, lost: str | None) -> dict[str, Any]:
    """One rank in the report."""
    one: dict[str, Any] = {"rank": rank, **topology.place(rank)._asdict(), "pid": pid, "lost": lost, "failure": None}
    if ended is None:
        return one
    tally, failure = ended.tally, ended.failure
    if failure is not None:
        one["failure"] = {"kind": failure.kind, "sentence": failure.sentence, "at": failure.at}
    return one | {
        "served": tally.served,
        "verify": {"pages": tally.verified, "mismatches": tally.mismatches},
        "hit": {"device": tally.device, "host": tally.host, "storage": tally.storage},
        "moved_bytes": {name: stage["bytes"] for name, stage in ended.facts.get("stages", {}).items()},
        "errors": {name: stage["errors"] for name, stage in ended.facts.get("stages", {}).items()},
        "leaks": None if failure else {**ended.left._asdict(), "tasks": ended.tasks},
        "steps": ended.steps, "digest": f"{ended.digest:016x}", "tree": f"{ended.tree:016x}",
        "loop_lag_ms": {name: round(value, 4) for name, value in ended.lag._asdict().items()},
        "cpu_s": round(ended.cpu, 3), "rss_bytes": ended.memory,
    }
