"""Explains where the pages of a prompt are, over all tiers: the core's answer, and what the stores say of the pages
that the tree does not know. Below that is what the eviction policy has learned, in short. Nothing here changes a cache.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from asynccache.config import POOL_NAME
from asynccache.core.cache import PrefetchShape, usable_end
from asynccache.core.eviction import Judged, Learned
from asynccache.core.keys import HASH_BYTES, TOKEN_BYTES
from asynccache.core.match import Explanation
from asynccache.core.settings import ComponentKind
from asynccache.runtime.prefetch import usable_by_a_lease
from asynccache.runtime.tokens import Chain
from asynccache.worker.local import Result
from asynccache.worker.pool_layout import PoolLayout
from asynccache.worker.work import StoreQuestion

if TYPE_CHECKING:
    from asynccache.core.cache import CacheCore
    from asynccache.worker.local import LocalWorker

_HERE = ("present", "arriving")


class Where(Enum):
    """The nearest tier that has a page's FULL data."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"
    NOWHERE = "nowhere"
    UNKNOWN = "unknown"


class Span(NamedTuple):
    """Tokens ``start`` to ``stop``, which have all other fields in common."""

    start: int
    stop: int
    where: Where
    """The nearest tier that has these tokens."""
    states: dict[str, tuple[str, str]]
    """The state on device and host, by component; empty if the tree does not know these tokens."""
    pinned: tuple[int, int]
    """How many pins FULL has on the device, and on the host."""
    stored: bool
    """True if these tokens are known to be in storage."""
    judged: Judged | None
    """The eviction policy's judgement of FULL, with the age to a tenth of a second; None for policies such as
    ``lru``."""


class Explained(NamedTuple):
    """The places of a prompt's pages over all tiers, in tokens."""

    tokens: int
    """The whole prompt."""
    length: int
    """The prompt's whole pages."""
    device: int
    host: int
    storage: int
    """How far a match would reach with the pages of storage, too; ``device`` and ``host``: without them. It may reach
    further: a window that begins on the host and ends in storage is not put together here."""
    spans: tuple[Span, ...]
    loads: dict[str, int]
    """How many pages the match would bring from the host, by component."""
    ends: str | None
    """The component that ends the match on device and host; None if it is not cut short."""
    why: str
    """Why the match ends there, in words."""
    fetch: str
    """What a prefetch would do, in words."""
    policy: str
    learned: Learned | None
    """What ``policy``, the eviction policy, has learned from all requests; None if it learns nothing."""

    def plain(self) -> dict[str, Any]:
        """Return the explanation as values that JSON has. ``learned`` is given in its short form (``plain_learned``),
        which has the ``policy``, too; it is left out if the policy learns nothing. ``judged`` is left out of a span
        that the policy does not judge."""
        values = self._asdict()
        policy, learned = values.pop("policy"), values.pop("learned")
        values["spans"] = [_plain_span(span) for span in self.spans]
        return values if learned is None else {**values, "learned": plain_learned(policy, learned)}

    def lines(self) -> list[str]:
        """Return the explanation as lines of text."""
        return describe(self.plain())


def _plain_span(span: Span) -> dict[str, Any]:
    values = {**span._asdict(), "where": span.where.value}
    judged = values.pop("judged")
    return values if judged is None else {**values, "judged": judged._asdict()}


async def explain(core: CacheCore, worker: LocalWorker, pools: PoolLayout, space: bytes, key: bytes) -> Explained:
    found = fetched = core.explain(space, key)
    if len(pools.components) > 1:
        fetched = core.explain(space, usable_by_a_lease(key, core.config.page_size))  # as a prefetch leaves it
    stores = worker.has_stores
    present = await _stored(core, worker, pools, space, key, found) if stores else {}
    reach = _reach(core, pools, found, present)
    spans = tuple(_merged([*_in_tree(found), *_beyond(found, _of_full(pools, present), core.config.page_size)]))
    return Explained(
        tokens=len(key) // TOKEN_BYTES, length=found.length, device=found.device, host=found.host, storage=reach,
        spans=spans, loads={POOL_NAME[load.component]: load.pages for load in found.loads},
        ends=None if found.ends is None else POOL_NAME[found.ends], why=found.why,
        fetch=_fetch(core, pools, fetched, present) if stores else "there is no storage",
        policy=core.config.eviction, learned=core.learned(),
    )  # fmt: skip


async def _stored(
    core: CacheCore, worker: LocalWorker, pools: PoolLayout, space: bytes, key: bytes, found: Explanation
) -> dict[str, bytes]:
    hashes = await Chain(space, core.config.page_size, key, core.known_hashes(space, key)).extend(key)
    whole = hashes[: found.length // core.config.page_size * HASH_BYTES]
    asked = [StoreQuestion(name, whole) for name, _ in pools.named()]
    return dict(zip([pool for pool, _ in asked], await worker.ask(asked), strict=True))


def _of_full(pools: PoolLayout, present: Mapping[str, bytes]) -> list[int]:
    """Return a ``Result`` for every page of FULL, all pools that FULL consists of taken together."""
    parts = [present[spec.name] for spec in pools.lead if spec.name in present]
    return [int(Result.FAILED) if Result.FAILED in page else min(page) for page in zip(*parts, strict=True)]


def _in_tree(found: Explanation) -> Iterator[Span]:
    for run in found.runs:
        full = run.cells[0]
        where = Where.DEVICE if full.device in _HERE else Where.HOST if full.host == "present" else Where.NOWHERE
        states = {POOL_NAME[cell.component]: (cell.device, cell.host) for cell in run.cells}
        judged = run.judged and Judged(run.judged.kind, round(run.judged.age, 1), run.judged.worth)
        yield Span(run.start, run.stop, where, states, full.pins, run.stored, judged)


_WHERE = {int(Result.HIT): Where.STORAGE, int(Result.FAILED): Where.UNKNOWN}


def _beyond(found: Explanation, present: Sequence[int], size: int) -> Iterator[Span]:
    """Yield a span for each page that the tree does not know."""
    for start in range(found.tree, found.length, size):
        at = start // size
        where = _WHERE.get(present[at], Where.NOWHERE) if at < len(present) else Where.NOWHERE
        yield Span(start, start + size, where, {}, (0, 0), where is Where.STORAGE, None)


def _merged(spans: Sequence[Span]) -> Iterator[Span]:
    for _, group in groupby(spans, lambda span: span[2:]):
        together = list(group)
        yield together[0]._replace(stop=together[-1].stop)


def _reach(core: CacheCore, pools: PoolLayout, found: Explanation, present: Mapping[str, bytes]) -> int:
    if not present:
        return found.host
    config = core.config
    window = next((component.window for component in config.components if component.window), 0)
    mamba = any(component.kind is ComponentKind.MAMBA for component in config.components)
    shape = PrefetchShape(config.page_size, found.full, found.host, found.length, window, (), mamba)
    there = {name: [result == Result.HIT for result in results] for name, results in present.items()}
    return usable_end(shape, pools.named(), there, found.length)


def _fetch(core: CacheCore, pools: PoolLayout, found: Explanation, present: Mapping[str, bytes]) -> str:
    """Return what a prefetch would do, in words. ``found``: the core's answer for the pages that it would look for."""
    threshold, reach = core.config.prefetch_threshold, _reach(core, pools, found, present)
    if any(Result.FAILED in results for results in present.values()):
        return "storage does not answer"
    if found.length - found.host < max(1, threshold):
        return f"nothing: what is missing is shorter than prefetch_threshold={threshold}"
    gain = reach - found.host
    if gain <= 0:
        return "nothing: storage has none of what is missing"
    if gain < threshold:
        return f"nothing: storage has {gain} tokens of what is missing, less than prefetch_threshold={threshold}"
    return f"up to {reach}"


def describe(plain: dict[str, Any]) -> list[str]:
    """Return lines of text for ``plain``, which ``Explained.plain`` has returned."""
    lines = [f"{plain['tokens']} tokens, {plain['length']} of them in whole pages"]
    if not plain["length"]:
        return [*lines, "there is nothing to look for: only whole pages are kept"]
    for span in plain["spans"]:
        states = ", ".join(f"{name} {device}/{host}" for name, (device, host) in span["states"].items())
        more = "  +storage" if span["stored"] and span["where"] != "storage" else ""
        more += "  pinned" if any(span["pinned"]) else ""
        more += f"  {judgement(span['judged'])}" if "judged" in span else ""
        lines.append(f"{span['start']:>9} .. {span['stop']:<9} {span['where']:<8} {states}{more}".rstrip())
    device, host, storage = plain["device"], plain["host"], plain["storage"]
    lines.append(f"match: {device} on the device, {host} with the host, {storage} with storage")
    if plain["loads"]:
        loads = ", ".join(f"{pages} of {name}" for name, pages in plain["loads"].items())
        lines.append(f"would be loaded from the host, in pages: {loads}")
    lines.append(f"ended by {plain['ends']}: {plain['why']}" if plain["ends"] else plain["why"])
    lines.append(f"a prefetch would fetch: {plain['fetch']}")
    return lines + (learned_lines(plain["learned"]) if "learned" in plain else [])


# what the eviction policy has learned: for each kind of page a line with a few ages

AGES = (1.0, 10.0, 60.0, 600.0, 3600.0)
"""The ages, in seconds, that the short form has."""
_SHORT = ("1 s", "10 s", "1 min", "10 min", "1 h")


class LearnedKind(NamedTuple):
    """One kind of page."""

    name: str
    blocks: float
    """Blocks of 512 tokens that the curve was learned from, faded with time."""
    again: tuple[float, ...]
    """For each of ``AGES``, the share of these blocks that is used again before that age, 0 to 1."""
    worth: tuple[float, ...]
    """For each of ``AGES``, what a block of that age is worth; the policy evicts what is worth least."""


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


def plain_learned(policy: str, learned: Learned) -> dict[str, Any]:
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


def learned_lines(found: dict[str, Any]) -> list[str]:
    """Return lines of text for ``found``, which ``plain_learned`` has returned. Kinds of which nothing is known are
    left out."""
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
