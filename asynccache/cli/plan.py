"""``asynccache plan TRACE``: how many hits, and how much prefill saved, each GiB of host memory or disk would bring.

For each size the trace goes through the core once, with the eviction policy in use. One more pass gives the hit ratio
of an LRU of every size, and one pass for each size gives that of the best possible cache. The model: device and host
hold different pages, and storage also holds theirs, as far as it has room. A token that hits saves its prefill and
costs the time to load it, from the host over one link and from storage over two. Nothing overlaps in this model, so a
real run loads in less time than is counted here. The hit ratio of ``replay`` on the same trace shows how
near a real run comes to these. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, convert

from asynccache.cli.hit_curves import curve, next_uses, optimum, policy_hits
from asynccache.cli.options import (
    BLOCK_SIZE,
    CONVERSATIONS_OPEN,
    EVICTION,
    PREFILL_RATE,
    ROOM,
    TRACE,
    BlockSize,
    CommandOptions,
    Concurrency,
    Json,
    Rate,
    option,
)
from asynccache.cli.output import HIT_RATIO, TIER_NAMES, answer, number, percent, progress, size
from asynccache.cli.traces import Trace, arrivals, paths_of, read_trace
from asynccache.config import eviction_policies
from asynccache.errors import ConfigError
from asynccache.settings import Amount, Count

GIB = 1 << 30
MODEL = ("bytes_per_token", "prefill_tokens_per_s", "host_gb_per_s", "storage_gb_per_s")
"""The cost of a token: its bytes, and the rates at which tokens are computed and loaded."""

Report = dict[str, Any]
Step = tuple[str, float, int]
"""A size of a tier: the tier, its room in GiB, and the tokens that it and the tiers above it have room for together."""


def saves(model: Mapping[str, float], tier: str) -> float:
    """Seconds saved by a token that is found in ``tier`` (device, host or storage); negative if computing the token
    takes less time than loading it."""
    links = {"device": (), "host": ("host_gb_per_s",), "storage": ("host_gb_per_s", "storage_gb_per_s")}[tier]
    load = sum(model["bytes_per_token"] / (model[link] * 1e9) for link in links)
    return 1 / model["prefill_tokens_per_s"] - load


def _sizes(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(convert(part.strip(), float, strict=False) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"{name}={text} must be sizes in GiB above 0, with commas between them") from None


Sizes = tuple[Annotated[float, Meta(gt=0, le=1e9)], ...]


class Options(CommandOptions, frozen=True, kw_only=True):
    """The options of ``plan``."""

    trace: Annotated[str, option("TRACE", TRACE, argument=True)]
    limit: Annotated[Count | None, option("N", "use the first N requests only")] = None
    block_size: Annotated[BlockSize | None, option("TOKENS", BLOCK_SIZE)] = None
    conversations: Annotated[Concurrency | None, option("N", CONVERSATIONS_OPEN)] = None
    device_tokens: Annotated[Amount, option("N", "tokens that the device has room for (L1)")] = ROOM["device_tokens"]
    bytes_per_token: Annotated[Count, option(
        "BYTES", "KV of one token in all layers; as it is, keys and values of 32 layers with 8 heads of 128 elements "
                 "of 2 bytes")] = 131_072
    prefill_tokens_per_s: Annotated[Rate, option("X", "tokens that the engine computes per second")] = PREFILL_RATE
    host_gib: Annotated[Sizes, option("GIB,GIB", "sizes of L2", parse=_sizes)] = (32.0, 64.0, 128.0, 256.0)
    storage_gib: Annotated[Sizes, option(
        "GIB,GIB", "sizes of L3, together with the largest L2; empty: no L3", parse=_sizes,
    )] = (512.0, 1024.0, 2048.0, 4096.0)
    host_gb_per_s: Annotated[Rate, option("X", "GB/s from host to device")] = 25.0
    storage_gb_per_s: Annotated[Rate, option("X", "GB/s from storage to host")] = 3.0
    eviction: Annotated[str, option("NAME", "the policy in use", choices=eviction_policies)] = EVICTION
    json: Json = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.storage_gib and not self.host_gib:
            raise ConfigError("--storage-gib needs a host tier, and --host-gib is empty")


def execute(options: Options) -> int:
    """Compute the plan and print it; returns the exit status.

    Raises:
        AsyncCacheError: an option or the trace cannot be used.
    """
    report = plan(options, read_trace(options.trace, options.limit, block_size=options.block_size,
                                      conversations=options.conversations))
    answer(report, text(report), options.json)
    return 0


def plan(options: Options, trace: Trace) -> Report:
    """The plan as plain values. Shows on standard error how far it has come."""
    model = {name: getattr(options, name) for name in MODEL}
    paths, block = list(paths_of(trace)), trace.block_size
    found = curve(paths)
    tokens = sum(request.input_length for request in trace.requests)
    steps = list(_steps(options))
    rooms = sorted({room // block for _, _, room in steps})
    uses, times, hits = next_uses(paths), arrivals(trace, 1.0), dict[int, dict[str, int]]()
    with progress() as tell:
        for room in rooms:
            lru, evicts = found.found(room), room < found.blocks and options.eviction != "lru"
            hits[room] = {"lru": lru, "optimum": optimum(paths, uses, room),
                          "policy": policy_hits(paths, room, options.eviction, times, block) if evicts else lru}
            tell(f"plan: {len(hits)} of {len(rooms)} sizes")
    return {
        "command": "plan", "trace": options.trace, "format": trace.form, "block_size": block,
        "requests": len(trace.requests),
        "seconds": (trace.requests[-1].timestamp - trace.requests[0].timestamp) / 1000, "tokens": tokens,
        "prefill_s": round(tokens / options.prefill_tokens_per_s, 3),
        "highest_hit_ratio": round(float(found.hits[-1]) * block / tokens, 5),
        "highest_needs_gib": round((len(found.hits) - 1) * block * options.bytes_per_token / GIB, 3),
        "model": model, "eviction": options.eviction, "hit_ratio_is": HIT_RATIO,
        "source": "full blocks, one request at a time: LRU by stack distances (Mattson et al. 1970), the policy by the "
                  "core itself, the optimum with the future known (Belady 1966)",
        "rows": list(_rows(steps, hits, model, tokens, block)),
        "tokens_per_end": found.blocks * block // max(1, len({path[-1] for path in paths if path})),
    }


def _steps(options: Options) -> Iterator[Step]:
    def room(gib: float) -> int:
        return int(gib * GIB // options.bytes_per_token)

    device = above = options.device_tokens
    yield "device", device * options.bytes_per_token / GIB, device
    for gib in sorted(options.host_gib):
        above = device + room(gib)
        yield "host", gib, above
    for gib in sorted(options.storage_gib):
        yield "storage", gib, max(above, room(gib))


def _rows(
    steps: Sequence[Step], found: Mapping[int, Mapping[str, int]], model: Mapping[str, float], tokens: int,
    block: int,
) -> Iterator[dict[str, Any]]:
    """The rows of the plan. ``hit_ratio``: under the policy in use. ``saved_s``: prefill saved minus time to load, in
    seconds, of this tier and those above it. What a GiB adds is counted from the next smaller size of the same tier,
    and for the smallest size from not having this tier."""
    tier, gib, hits, saved = "", 0.0, 0, 0.0
    hits_above, saved_above = hits, saved
    for name, gibs, room in steps:
        if name != tier:
            tier, gib, hits_above, saved_above = name, 0.0, hits, saved
        more, row, before = gibs - gib or 1.0, found[room // block], saved
        gib, hits = gibs, row["policy"] * block
        saved = saved_above + (hits - hits_above) * saves(model, tier)
        yield {
            "tier": tier, "gib": round(gib, 3), "tokens": room, "hit_ratio": round(hits / tokens, 5),
            **{way: round(row[way] * block / tokens, 5) for way in ("lru", "optimum")},
            "saved_s": round(saved, 3), "adds_s_per_gib": round((saved - before) / more, 4),
        }


def text(report: Report) -> str:
    """The plan as a table of at most 80 columns, and what its columns are."""
    seconds = report["seconds"]
    time = f"{seconds / 3600:.2f} h" if seconds >= 360 else f"{number(seconds)} s"
    head = (f"{number(report['requests'])} requests in {time}, {number(report['tokens'])} prompt tokens: "
            f"{number(report['prefill_s'])} s of prefill")
    model = report["model"]
    cache = (f"L1 {number(report['rows'][0]['tokens'])} tokens, in blocks of {report['block_size']} "
             f"({report['format']}); {size(model['bytes_per_token'])} a token")
    columns = f"  {'':<10}{'GiB':>8}{'tokens':>13}{'hits':>8}{'LRU':>8}{'best':>8}{'saved':>12}{'s per GiB':>11}"
    kept, left_out = list[Mapping[str, Any]](), dict[str, list[str]]()
    for row in report["rows"]:
        if kept and all(row[name] <= kept[-1][name] for name in ("hit_ratio", "lru", "optimum")):
            left_out.setdefault(row["tier"], []).append(f"{row['gib']:g}")
        else:
            kept.append(row)
    rows = [f"  {TIER_NAMES[row['tier']]:<10}{row['gib']:>8g}{number(row['tokens']):>13}"
            + "".join(f"{percent(row[name], 1):>8}" for name in ("hit_ratio", "lru", "optimum"))
            + f"{number(row['saved_s']):>10} s{row['adds_s_per_gib']:>11.2f}" for row in kept]
    rows += [f"  {TIER_NAMES[tier]} of {', '.join(sizes)} GiB: no more hits" for tier, sizes in left_out.items()]
    return "\n".join([head, cache, "", columns, *rows, "", *_notes(report)])


def _notes(report: Report) -> Iterator[str]:
    yield (f"No cache finds more than {percent(report['highest_hit_ratio'], 1)}; that takes "
           f"{report['highest_needs_gib']:,.0f} GiB.")
    yield f"hits: {HIT_RATIO}, full blocks only,"
    yield f"of all tiers together, under {report['eviction']}. LRU: by stack distances, so it may give up"
    yield "what a running request holds, which no real cache can. best: no cache of"
    yield "this size finds more, even if it knows the future. saved: prefill saved minus"
    yield "loading."
    yield "s per GiB: what a GiB of this size adds to the next smaller size of the tier."
    yield f"Recurrent states (Mamba): each tier needs one for every {number(report['tokens_per_end'])} tokens, or it"
    yield "has KV that no request can use: so many lie before each end of a prompt here."
    for tier, name in (("host", "L2"), ("storage", "L3")):
        if saves(report["model"], tier) <= 0:
            yield f"Loading a token from {name} takes longer than computing it: {name} saves nothing here."
