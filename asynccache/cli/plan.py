"""``asynccache plan TRACE``: what hit ratio, and how much prefill, each GiB of host memory or disk would save.

The trace is played through the core once for each size, with the eviction policy in use; one pass gives the hit ratio
of an LRU of every size, and another one for each size what the best cache of it would find. Device and host are taken
to hold different pages, and storage to hold theirs, too, as far as it has room. A token that hits saves its prefill and
costs the time to load it: from the host over one link, from storage over two. Nothing is served and nothing overlaps,
so a real run loads in less time than is counted here; how near it comes to the hit ratios, ``replay --report`` shows.
Imports no torch.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from asynccache.cli.capacity import compared
from asynccache.cli.curve import Curve, Request, blocks, curve
from asynccache.cli.output import check_writable, dump
from asynccache.cli.progress import Progress
from asynccache.cli.request import BLOCK_TOKENS
from asynccache.cli.text import HIT_RATIO, number, percent
from asynccache.cli.trace import TraceRequest, arrivals, read_trace
from asynccache.config import EVICTION_POLICIES, CacheConfig
from asynccache.errors import ConfigError

GIB = 1 << 30
EVICTION: str = next(str(field.default) for field in fields(CacheConfig) if field.name == "eviction")
Report = dict[str, Any]


class Model(NamedTuple):
    """What a token takes, in bytes and in seconds."""

    bytes_per_token: int
    prefill_tokens_per_s: float
    host_gb_per_s: float
    storage_gb_per_s: float

    def tokens(self, gib: float) -> int:
        """Tokens that fit."""
        return int(gib * GIB // self.bytes_per_token)

    def saves(self, tier: str) -> float:
        """Seconds that a token saves which is found in ``tier``: below 0 where computing it is faster."""
        host = self.bytes_per_token / (self.host_gb_per_s * 1e9)
        storage = self.bytes_per_token / (self.storage_gb_per_s * 1e9)
        load = {"device": 0.0, "host": host, "storage": host + storage}[tier]
        return 1 / self.prefill_tokens_per_s - load


class Step(NamedTuple):
    """One size of one tier, beside the tiers above it. ``gib``: of this tier; ``tokens``: what
    these tiers have room for together."""

    tier: str
    gib: float
    tokens: int
    price: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    add = parser.add_argument
    add("trace", metavar="TRACE", help="a trace in the Mooncake format (JSON lines)")
    add("--limit", type=int, metavar="N", help="the first N requests only")
    add("--device-tokens", type=int, default=1 << 18, metavar="N", help="room in L1 (default: %(default)s)")
    add("--bytes-per-token", type=int, default=131_072, metavar="BYTES",
        help="KV of one token, all layers; the default, %(default)s, is 32 layers of 8 heads of 128, 2 bytes each")
    add("--prefill-tokens-per-s", type=float, default=8000.0, metavar="X", help="default: %(default)s")
    add("--host-gib", default="64,128,256,512", metavar="GIB,GIB", help="sizes of L2 (default: %(default)s)")
    add("--storage-gib", default="1024,2048,4096,8192", metavar="GIB,GIB",
        help="sizes of L3, beside the largest L2; empty: none (default: %(default)s)")
    add("--host-gb-per-s", type=float, default=25.0, metavar="X", help="host to device (default: %(default)s)")
    add("--storage-gb-per-s", type=float, default=3.0, metavar="X", help="storage to host (default: %(default)s)")
    add("--host-gib-price", type=float, default=0.0, metavar="X", help="of one GiB, in any currency, for any time")
    add("--storage-gib-price", type=float, default=0.0, metavar="X", help="the same for storage")
    add("--eviction", default=EVICTION, choices=EVICTION_POLICIES, help="the policy in use (default: %(default)s)")
    add("--json", metavar="PATH|-", help="the answer as JSON, to a file or (-) instead of the table")


def execute(args: argparse.Namespace) -> int:
    """Work it out and say it; the exit status.

    Raises:
        AsyncCacheError: an option or the trace cannot be used.
    """
    check(args)
    if args.json is not None:
        check_writable(args.json)
    report = plan(args, asyncio.run(read_trace(args.trace, args.limit)))
    if args.json != "-":
        print(text(report))
    if args.json is not None:
        dump(report, args.json)
    return 0


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot be used.

    Raises:
        ConfigError: names the option and its value.
    """
    for name in ("limit", "bytes_per_token", "prefill_tokens_per_s", "host_gb_per_s", "storage_gb_per_s"):
        value = getattr(args, name)
        if value is not None and not 0 < value < 1e15:
            raise ConfigError(f"--{name.replace('_', '-')}={value} must be above 0")
    for name in ("device_tokens", "host_gib_price", "storage_gib_price"):
        if not 0 <= getattr(args, name) < 1e15:
            raise ConfigError(f"--{name.replace('_', '-')}={getattr(args, name)} must be 0 or more")
    host, storage = sizes("--host-gib", args.host_gib), sizes("--storage-gib", args.storage_gib)
    if storage and not host:
        raise ConfigError(f"--storage-gib={args.storage_gib} needs a host tier, and --host-gib is empty")


def sizes(option: str, listed: str) -> list[float]:
    """Sizes in GiB, ascending.

    Raises:
        ConfigError: one is not a number above 0.
    """
    try:
        found = sorted(float(part) for part in listed.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"{option}={listed} must be sizes in GiB, with commas between them") from None
    if any(not 0 < gib < 1e9 for gib in found):
        raise ConfigError(f"{option}={listed}: a size must be above 0")
    return found


def plan(args: argparse.Namespace, trace: Sequence[TraceRequest]) -> Report:
    """The answer as plain values."""
    model = Model(args.bytes_per_token, args.prefill_tokens_per_s, args.host_gb_per_s, args.storage_gb_per_s)
    requests = list(blocks(trace))
    found = curve(requests)
    tokens = sum(request.input_length for request in trace)
    steps = list(_steps(args, model))
    units = sorted({step.tokens // BLOCK_TOKENS for step in steps})
    hits = _hits(requests, found, units, args.eviction, arrivals(trace, 1.0))
    seconds = (trace[-1].timestamp - trace[0].timestamp) / 1000
    prefill = tokens / model.prefill_tokens_per_s
    return {
        "command": "plan", "trace": args.trace, "requests": len(trace), "seconds": seconds, "tokens": tokens,
        "prefill_s": round(prefill, 3), "highest_hit_ratio": round(float(found.hits[-1]) * BLOCK_TOKENS / tokens, 5),
        "highest_needs_gib": round((len(found.hits) - 1) * BLOCK_TOKENS * model.bytes_per_token / GIB, 3),
        "model": model._asdict(), "eviction": args.eviction, "hit_ratio_is": HIT_RATIO,
        "source": "full blocks, one request at a time: LRU by stack distances (Mattson et al. 1970), the policy by the "
                  "core itself, the optimum with the future known (Belady 1966)",
        "rows": list(_rows(steps, hits, model, tokens)),
    }


def _hits(
    requests: Sequence[Request], found: Curve, sizes: Sequence[int], eviction: str, times: Sequence[float]
) -> dict[int, dict[str, int]]:
    """What ``compared`` says of each size, in blocks; tells those who wait how far it is."""
    hits: dict[int, dict[str, int]] = {}
    progress = Progress(sys.stderr)
    try:
        for size, row in zip(sizes, compared(requests, found, sizes, eviction, times), strict=True):
            hits[size] = row
            progress.tell(f"plan: {len(hits)} of {len(sizes)} sizes")
    finally:
        progress.end()
    return hits


def _steps(args: argparse.Namespace, model: Model) -> Iterator[Step]:
    device = args.device_tokens
    yield Step("device", device * model.bytes_per_token / GIB, device, 0.0)
    host = sizes("--host-gib", args.host_gib)
    for gib in host:
        yield Step("host", gib, device + model.tokens(gib), gib * args.host_gib_price)
    above = device + max((model.tokens(gib) for gib in host), default=0)
    for gib in sizes("--storage-gib", args.storage_gib):
        yield Step("storage", gib, max(above, model.tokens(gib)), gib * args.storage_gib_price)


def _rows(
    steps: Sequence[Step], found: Mapping[int, Mapping[str, int]], model: Model, tokens: int
) -> Iterator[dict[str, Any]]:
    """``hit_ratio``: of the policy in use. ``saved_s``: prefill less loading, of all tiers together. What a GiB adds is
    counted from the size before, and the first of a tier from going without."""
    above, hits_above, saved_above = "", 0, 0.0
    before = Step("", 0.0, 0, 0.0), 0.0
    last = before[0], 0, 0.0
    for step in steps:
        if step.tier != above:
            hits_above, saved_above, above = last[1], last[2], step.tier
            before = Step(step.tier, 0.0, 0, 0.0), saved_above
        row = found[step.tokens // BLOCK_TOKENS]
        hits = row["policy"] * BLOCK_TOKENS
        saved = saved_above + (hits - hits_above) * model.saves(step.tier)
        more, price = saved - before[1], step.price - before[0].price
        yield {
            "tier": step.tier, "gib": round(step.gib, 3), "tokens": step.tokens, "hit_ratio": round(hits / tokens, 5),
            **{name: round(row[name] * BLOCK_TOKENS / tokens, 5) for name in ("lru", "optimum")},
            "saved_s": round(saved, 3), "adds_s_per_gib": round(more / (step.gib - before[0].gib or 1.0), 4),
            "price": round(step.price, 4), "adds_s_per_price": round(more / price, 4) if price else None,
        }
        before, last = (step, saved), (step, hits, saved)


def text(report: Report) -> str:
    """A table of 80 columns."""
    seconds = report["seconds"]
    time = f"{seconds / 3600:.2f} h" if seconds >= 360 else f"{number(seconds)} s"
    priced = any(row["price"] for row in report["rows"])
    head = (f"{number(report['requests'])} requests in {time}, {number(report['tokens'])} prompt tokens: "
            f"{number(report['prefill_s'])} s of prefill")
    columns = f"  {'':<11}{'GiB':>8}{'tokens':>14}{'hits':>9}{'saved':>11}{'s per GiB':>12}"
    lines = [head, "", columns + (f"{'s per price':>13}" if priced else "")]
    names = {"device": "L1 device", "host": "L2 host", "storage": "L3 storage"}
    for row in report["rows"]:
        price = row["adds_s_per_price"]
        last = f"{price:>13.2f}" if price is not None else ""
        lines.append(f"  {names[row['tier']]:<11}{row['gib']:>8g}{number(row['tokens']):>14}"
                     f"{percent(row['hit_ratio'], 1):>9}{number(row['saved_s']):>9} s{row['adds_s_per_gib']:>12.2f}"
                     f"{last}")
    return "\n".join([*lines, "", *_eviction(report, names), "", *_notes(report)])


def _eviction(report: Report, names: Mapping[str, str]) -> Iterator[str]:
    """What the same sizes find by policy, and what is left to be had."""
    policy = report["eviction"]
    middle = () if policy == "lru" else (policy,)
    yield "  " + f"{'hits with':<11}{'GiB':>8}{'LRU':>14}" + "".join(f"{name:>9}" for name in (*middle, "best"))
    for row in report["rows"]:
        shown = [row["lru"], *([row["hit_ratio"]] if middle else []), row["optimum"]]
        yield (f"  {names[row['tier']]:<11}{row['gib']:>8g}{percent(shown[0], 1):>14}"
               + "".join(f"{percent(value, 1):>9}" for value in shown[1:]))


def _notes(report: Report) -> Iterator[str]:
    yield (f"No cache finds more than {percent(report['highest_hit_ratio'], 1)}; that takes "
           f"{report['highest_needs_gib']:,.0f} GiB.")
    yield f"hits: {HIT_RATIO}, full blocks only,"
    yield f"of all tiers together, under {report['eviction']}. best: no cache of this size finds more,"
    yield "whatever it knows of the future. saved: prefill less loading, of all tiers."
    yield "s per GiB: what this size adds to the one before."
    model = Model(**report["model"])
    for tier, name in (("host", "L2"), ("storage", "L3")):
        if model.saves(tier) <= 0:
            yield f"Loading a token from {name} takes longer than computing it: {name} saves nothing here."
