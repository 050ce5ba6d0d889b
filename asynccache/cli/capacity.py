"""The hit ratios that caches of other sizes would have had with a run's requests, beside those that its tiers had.

Under ``replay`` the requests are the trace's, in blocks. Under ``stress`` they are the requests that were served, in
pages, in the order in which their prompts became complete. Every ratio here is ``text.HIT_RATIO``: pages that hit,
times the tokens of a page, over all prompt tokens. Tokens after the last whole page of a prompt never hit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from asynccache.cli.curve import HitCurve, PagePath, blocks, curve, points
from asynccache.cli.optimum import next_uses, optimum
from asynccache.cli.options import RunSettings
from asynccache.cli.request import BLOCK_TOKENS
from asynccache.cli.tally import Tally
from asynccache.cli.text import HIT_RATIO
from asynccache.cli.trace import TraceRequest, arrivals
from asynccache.core.cache import CacheCore, Grant, LeaseRequest, Wait
from asynccache.core.settings import ComponentKind, ComponentSlots, CoreConfig
from asynccache.errors import ConfigError, InvariantViolation
from asynccache.storage import parse_size, parse_url

TIERS = (("L1", "device"), ("L2", "host"), ("L3", "storage"))
_COMPARED = 7
_SPACE = bytes(32)
_UNSLICED = 1 << 30


class _Ratios(NamedTuple):
    """Turns numbers of pages that hit into hit ratios. ``unit``: tokens of a page; ``tokens``: those of all prompts."""

    unit: int
    tokens: int

    def of(self, pages: float) -> float:
        return round(float(pages) * self.unit / self.tokens, 5) if self.tokens else 0.0


def capacity(
    settings: RunSettings, trace: Sequence[TraceRequest] | None, tally: Tally, facts: Mapping[str, Any], *, compare:
    bool
) -> dict[str, Any]:
    """The hit ratio of an LRU of every size, as plain values, with the sizes of the run's tiers among them.

    ``trace``: the trace under ``replay``, None under ``stress``. ``facts``: the cache's own figures. With ``compare``,
    some sizes are also computed under the policy in use and with the whole future known; that takes a while. Policies
    other than LRU go by the time at which prompts came, which only a trace tells; without one LRU stands for them.
    """
    unit = settings.page_size if trace is None else BLOCK_TOKENS
    requests = list(_numbered(tally.paths) if trace is None else blocks(trace))
    found = curve(requests)
    ratios = _Ratios(unit, tally.paths.tokens if trace is None else sum(line.input_length for line in trace))
    served = f"the {len(tally.paths)} prompts that were served, in pages of {unit} tokens"
    source = served if trace is None else f"all {len(trace)} requests of the trace, in full blocks of {unit} tokens"
    shown = points(found)
    tiers = _tiers(found, ratios, tally, _tokens(settings, facts))
    report = {
        "source": source, "unit_tokens": unit, "lookups": found.lookups, "different": found.pages,
        "hit_ratio_is": HIT_RATIO,
        "points": [{"units": at, "hit_ratio": ratios.of(found.found(at))} for at in shown],
        "tiers": tiers,
    }
    if compare:
        eviction = settings.eviction if trace is not None else "lru"
        wanted = {tier["units"] for tier in tiers} | {_evenly(shown, i) for i in range(_COMPARED)}
        sizes = sorted(units for units in wanted if units <= found.pages)
        times = [0.0] * len(requests) if trace is None else arrivals(trace, 1.0)
        rows = list(compared(requests, found, sizes, eviction, times))
        report |= {"eviction": eviction, "compared": [
            {"units": size, **{name: ratios.of(pages) for name, pages in row.items()}}
            for size, row in zip(sizes, rows, strict=True)
        ]}
    return report


def _evenly(shown: Sequence[int], i: int) -> int:
    """The ``i``-th of ``_COMPARED`` sizes: evenly spaced on a logarithmic scale, from the largest size of ``shown``
    down to a three-hundredth of it."""
    return max(1, int(shown[-1] / 300.0 ** (i / (_COMPARED - 1))))


def compared(
    requests: Sequence[PagePath], found: HitCurve, sizes: Sequence[int], eviction: str, times: Sequence[float]
) -> Iterator[dict[str, int]]:
    """For each of ``sizes``: how many lookups ``lru``, the ``policy`` in use and the ``optimum`` answer, in pages.

    ``found``: the curve of the same requests, which LRU's figures are from, also where LRU is the policy in use.
    ``times``: the seconds at which the requests come.
    """
    uses = next_uses(requests)
    for size in sizes:
        lru = found.found(size)
        evicts = size < found.pages and eviction != "lru"
        policy = policy_hits(requests, size, eviction, times) if evicts else lru
        yield {"lru": lru, "policy": policy, "optimum": optimum(requests, uses, size)}


def _numbered(paths: Iterable[PagePath]) -> Iterator[PagePath]:
    """The same paths with small numbers as keys, counted in the order in which the keys appear."""
    known: dict[int, int] = {}
    for path, looked_up in paths:
        yield PagePath([known.setdefault(key, len(known)) for key in path], looked_up)


def _tiers(found: HitCurve, ratios: _Ratios, tally: Tally, tokens: Mapping[str, float]) -> list[dict[str, Any]]:
    """A row for each tier whose room is known. ``units``: different pages that this tier and the tiers above it have
    room for together; device and host hold different pages, and storage also holds all that they hold. ``hit_ratio``:
    that of an LRU of this size; ``measured``: that of this tier and the tiers above it in the run."""
    rows, hit, units = [], 0, 0
    for short, name in TIERS:
        hit += getattr(tally, name)
        if name in tokens:
            room = int(tokens[name] // ratios.unit)
            units = max(units, room) if name == "storage" else units + room
            rows.append({"tier": short, "units": units, "hit_ratio": ratios.of(found.found(units)),
                         "measured": round(hit / tally.tokens, 5) if tally.tokens else 0.0})
    return rows


def _tokens(settings: RunSettings, facts: Mapping[str, Any]) -> dict[str, float]:
    """The room of each tier in tokens, for the tiers whose room is known."""
    tiers = facts.get("tiers", {})
    rooms = {name: tiers[name]["full"]["capacity"] * settings.page_size for name in ("device", "host")
             if tiers.get(name, {}).get("full", {}).get("capacity")}
    stage = facts.get("stages", {}).get("backup_storage", {})
    room = storage_bytes(settings.storage, facts.get("storage", {}))
    if room and stage.get("tokens"):
        rooms["storage"] = room / (stage["bytes"] / stage["tokens"])
    return rooms


def storage_bytes(storage: str | tuple[str, ...] | None, statistics: Mapping[str, float]) -> float:
    """The room of all stores in bytes: what the store reports if there is only one, otherwise what the URLs say. 0 if
    the room of one of them is not known."""
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


def policy_hits(requests: Sequence[PagePath], capacity: int, eviction: str, times: Sequence[float]) -> int:
    """The number of lookups that a device of ``capacity`` blocks answers under the policy named ``eviction``.
    ``times``: the seconds at which the requests come, ascending.

    The requests go through a core one at a time, at these times, with one page for each block, no host tier, no store
    and no hints. No byte is moved. So the answer is that of the policy's own code, with what it learns on the way.
    Unlike ``optimum`` and ``curve``, this cache keeps every block that a request holds while the request runs. A
    request whose path is longer than the cache only looks up what is there and leaves nothing.
    """
    if capacity < 1:
        return 0
    core = CacheCore(CoreConfig(
        page_size=BLOCK_TOKENS, components=(ComponentSlots(ComponentKind.FULL, capacity),), eviction=eviction,
        slice_steps=_UNSLICED,
    ))  # fmt: skip
    hits = 0
    for request, at in zip(requests, times, strict=True):
        core.at(at)
        hits += _serve(core, request, capacity)
    return hits


def _serve(core: CacheCore, request: PagePath, capacity: int) -> int:
    """Serve one request; returns how many of its lookups were answered."""
    path, looked_up = request
    key, length = np.repeat(np.asarray(path, dtype=np.int32), BLOCK_TOKENS).tobytes(), len(path) * BLOCK_TOKENS
    if len(path) > capacity:
        return min(core.match(_SPACE, key).device // BLOCK_TOKENS, looked_up)
    answer = core.lease(LeaseRequest(_SPACE, key, looked_up * BLOCK_TOKENS, length, length))
    if not isinstance(answer, Grant):
        raise InvariantViolation(f"a device of {capacity} blocks that nobody else uses has no room for {len(path)}")
    lease = answer.lease
    cached = lease.cached // BLOCK_TOKENS
    if isinstance(core.commit(lease, key, b""), Wait):
        raise InvariantViolation("pages are on their way, and there is nowhere that they could come from")
    core.release(lease)
    return cached
