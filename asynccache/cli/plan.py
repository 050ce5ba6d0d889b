"""``asynccache plan TRACE``: what hit ratio, and how much prefill, each GiB of host memory or disk would save.

One pass over the trace gives the hit ratio of an LRU of every size; a tier is taken to hold what the tiers above it
hold, too, as write_through makes it. A token that hits saves its prefill and costs the time to load it: from the host
over one link, from storage over two. Nothing is served and nothing overlaps, so a real run loads in less time than is
counted here; how near it comes to the hit ratios, ``replay --report`` shows. Imports no torch.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from asynccache.cli.curve import Curve, blocks, curve
from asynccache.cli.output import check_writable, dump
from asynccache.cli.request import BLOCK_TOKENS
from asynccache.cli.text import number, percent
from asynccache.cli.trace import TraceRequest, read_trace
from asynccache.errors import ConfigError

GIB = 1 << 30
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
    """One size of one tier, beside the tiers above it. ``gib``: of this tier; ``tokens``: that any tier holds."""

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
    found = curve(blocks(trace))
    tokens = sum(request.input_length for request in trace)
    seconds = (trace[-1].timestamp - trace[0].timestamp) / 1000
    prefill = tokens / model.prefill_tokens_per_s
    return {
        "command": "plan", "trace": args.trace, "requests": len(trace), "seconds": seconds, "tokens": tokens,
        "prefill_s": round(prefill, 3), "highest_hit_ratio": round(float(found.hits[-1]) * BLOCK_TOKENS / tokens, 5),
        "highest_needs_gib": round((len(found.hits) - 1) * BLOCK_TOKENS * model.bytes_per_token / GIB, 3),
        "model": model._asdict(), "source": "LRU stack distances of full blocks, one pass (Mattson et al. 1970)",
        "rows": list(_rows(list(_steps(args, model)), found, model, tokens)),
    }


def _steps(args: argparse.Namespace, model: Model) -> Iterator[Step]:
    device = args.device_tokens
    yield Step("device", device * model.bytes_per_token / GIB, device, 0.0)
    host = sizes("--host-gib", args.host_gib)
    for gib in host:
        yield Step("host", gib, max(device, model.tokens(gib)), gib * args.host_gib_price)
    above = max([device, *(model.tokens(gib) for gib in host)])
    for gib in sizes("--storage-gib", args.storage_gib):
        yield Step("storage", gib, max(above, model.tokens(gib)), gib * args.storage_gib_price)


def _rows(steps: Sequence[Step], found: Curve, model: Model, tokens: int) -> Iterator[dict[str, Any]]:
    """``saved_s``: prefill less loading, of all tiers together. What a GiB adds is counted from the size before, and
    the first of a tier from going without."""
    above, hits_above, saved_above = "", 0, 0.0
    before = Step("", 0.0, 0, 0.0), 0.0
    last = before[0], 0, 0.0
    for step in steps:
        if step.tier != above:
            hits_above, saved_above, above = last[1], last[2], step.tier
            before = Step(step.tier, 0.0, 0, 0.0), saved_above
        hits = found.found(step.tokens // BLOCK_TOKENS) * BLOCK_TOKENS
        saved = saved_above + (hits - hits_above) * model.saves(step.tier)
        more, price = saved - before[1], step.price - before[0].price
        yield {
            "tier": step.tier, "gib": round(step.gib, 3), "tokens": step.tokens, "hit_ratio": round(hits / tokens, 5),
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
    return "\n".join([*lines, "", *_notes(report)])


def _notes(report: Report) -> Iterator[str]:
    yield (f"No cache finds more than {percent(report['highest_hit_ratio'], 1)}; that takes "
           f"{report['highest_needs_gib']:,.0f} GiB.")
    yield "hits: of all prompt tokens, full blocks only; saved: prefill less loading."
    yield "Both are of all tiers together, per GiB: what this size adds to the one before."
    if any(row["tier"] == "host" and row["tokens"] <= report["rows"][0]["tokens"] for row in report["rows"]):
        yield "A host tier that is no larger than L1 holds what L1 holds, and adds nothing."
    model = Model(**report["model"])
    for tier, name in (("host", "L2"), ("storage", "L3")):
        if model.saves(tier) <= 0:
            yield f"Loading a token from {name} takes longer than computing it: {name} saves nothing here."
