"""What a run's requests would have got out of an LRU cache of any size, beside what its tiers gave.

Under ``replay`` the requests are the trace's, in blocks; under ``stress`` those that were served, in pages, in the
order in which their prompts were complete. ``curve`` does the one pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asynccache.cli.curve import Curve, Request, blocks, curve, points
from asynccache.cli.options import Settings
from asynccache.cli.request import BLOCK_TOKENS
from asynccache.cli.tally import Tally
from asynccache.cli.trace import TraceRequest
from asynccache.errors import ConfigError
from asynccache.storage import parse_size, parse_url

TIERS = (("L1", "device"), ("L2", "host"), ("L3", "storage"))


def capacity(
    settings: Settings, trace: Sequence[TraceRequest] | None, tally: Tally, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The curve as plain values, with the sizes of the tiers on it. ``facts``: what the cache says about itself."""
    unit = settings.page_size if trace is None else BLOCK_TOKENS
    requests: Iterable[Request] = tally.paths if trace is None else blocks(trace)
    found = curve(requests)
    served = f"the {len(tally.paths)} prompts that were served, in pages of {unit} tokens"
    source = served if trace is None else f"all {len(trace)} requests of the trace, in full blocks of {unit} tokens"
    return {
        "source": source, "unit_tokens": unit, "lookups": found.lookups, "different": found.pages,
        "points": [{"units": at, "hit_ratio": round(found.ratio(at), 5)} for at in points(found)],
        "tiers": _tiers(found, tally, _tokens(settings, facts), unit),
    }


def _tiers(found: Curve, tally: Tally, tokens: Mapping[str, float], unit: int) -> list[dict[str, Any]]:
    """``hit_ratio``: of an LRU as large as this tier, which holds what the tiers above it hold, too. ``measured``: what
    this tier and those above it gave."""
    rows, hit = [], 0
    for short, name in TIERS:
        hit += getattr(tally, name)
        if name in tokens:
            units = int(tokens[name] // unit)
            rows.append({"tier": short, "units": units, "hit_ratio": round(found.ratio(units), 5),
                         "measured": round(hit / tally.tokens, 5) if tally.tokens else 0.0})
    return rows


def _tokens(settings: Settings, facts: Mapping[str, Any]) -> dict[str, float]:
    """Room in tokens of each tier whose room is known."""
    tiers = facts.get("tiers", {})
    rooms = {name: tiers[name]["full"]["capacity"] * settings.page_size for name in ("device", "host")
             if tiers.get(name, {}).get("full", {}).get("capacity")}
    stage = facts.get("stages", {}).get("backup_storage", {})
    room = storage_bytes(settings.storage, facts.get("storage", {}))
    if room and stage.get("tokens"):
        rooms["storage"] = room / (stage["bytes"] / stage["tokens"])
    return rooms


def storage_bytes(storage: str | tuple[str, ...] | None, statistics: Mapping[str, float]) -> float:
    """Room in the stores: what the only one says, else what the URLs say; 0 if that of one is not known."""
    if storage is None:
        return 0.0
    if isinstance(storage, str):
        return statistics.get("capacity_bytes") or _said(storage)
    rooms = [_said(url) for url in storage]
    return sum(rooms) if all(rooms) else 0.0


def _said(url: str) -> float:
    try:
        return float(parse_size("capacity", dict(parse_url(url).options)["capacity"]))
    except (KeyError, ConfigError):
        return 0.0
