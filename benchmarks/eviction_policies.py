"""Checks a law of the eviction policies: ``python -m benchmarks.eviction_policies trace.jsonl``.

The law: ``p2c`` never hits more than ``ALLOWED`` points less than ``lru``, whatever the size, the workload and the
tiers. The core alone serves the requests, one at a time, and moves no byte. So the figures are counts, the same on
every machine. The workloads are made of a trace (``workloads``). Each is served at each size, on the device alone and
with half of the room on a host. A row has both hit ratios in points (blocks that hit, in per cent of all blocks of
prompts), their difference, and how much of the way from ``lru`` to the offline optimum of that size ``p2c`` goes.

The exit status is 1 if some row breaks the law.

``--ends``: instead, what it brings to tell the cache that conversations are over: the trace alone, on the device alone,
with no conversation's end told, half of them (drawn with a seed) and all, under both policies, and in the page table of
a host process, which knows keys and no prefixes; there a hint names what comes after the last fork, as the vLLM tier
does. A conversation's last request is the one whose prompt no later one has whole.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from asynccache_vllm.hints import Successors

from asynccache.cli.hit_curves import BlockPath, next_uses, optimum, policy_hits
from asynccache.cli.traces import BLOCK_TOKENS, Trace, arrivals, paths_of, read_trace, survey
from asynccache.core.cache import CacheCore, Grant, LeaseRequest
from asynccache.core.plan import Outcome, Plan, Status, Wait, operations
from asynccache.core.settings import ComponentKind, ComponentSlots, CoreConfig
from asynccache.host.memory import UNIT, layout_of, units_of
from asynccache.host.pages import PageTable, Writer
from benchmarks.parsing import integer, listed

ALLOWED = 0.2
SIZES = (500, 1000, 3000, 10_000, 30_000, 100_000)
EARLY, HALF, LOOP_BLOCKS = 100, 4000, 20
HASH_BYTES = 32
SPACE = bytes(HASH_BYTES)


class Workload(NamedTuple):
    """``paths``: the blocks of each request. ``times``: the seconds at which the requests come."""

    paths: list[BlockPath]
    times: list[float]


class Row(NamedTuple):
    """One pair of runs. ``lru``, ``p2c``: hit ratios in points. ``way``: the share of the way from ``lru`` to the
    optimum, in per cent; None if there is no way to go."""

    workload: str
    blocks: int
    host: bool
    lru: float
    p2c: float
    way: float | None

    @property
    def difference(self) -> float:
        """The number of points that ``p2c`` is above ``lru``."""
        return self.p2c - self.lru


def workloads(trace: Workload, size: int) -> Iterator[tuple[str, Workload]]:
    """Yield the workloads for a cache of ``size`` blocks, by name. Those of two parts begin with the trace's first
    ``HALF`` requests."""
    paths, times = trace
    fresh = count(1 + max(max(path, default=0) for path in paths))
    yield "trace", trace
    for name, some in (("first hundred", EARLY), ("first thousand", 10 * EARLY)):
        yield name, Workload(paths[:some], times[:some])
    yield "no reuse", Workload([[next(fresh) for _ in path] for path in paths], times)
    half, until = paths[:HALF], times[:HALF]
    anew: dict[int, int] = {}
    others: list[BlockPath] = [[anew.setdefault(key, next(fresh)) for key in path] for path in half]
    random.Random(1).shuffle(others)
    yield "trace, then others in any order", _then(half, until, others)
    texts = [[next(fresh) for _ in range(LOOP_BLOCKS)] for _ in range(max(1, size * 9 // 10 // LOOP_BLOCKS))]
    looped: list[BlockPath] = [texts[number % len(texts)] for number in range(len(half))]
    yield "trace, then a loop that fits", _then(half, until, looped)


def _then(first: list[BlockPath], times: list[float], second: list[BlockPath]) -> Workload:
    """Return one workload: first the requests of ``first``, and then those of ``second``, which come as fast.
    ``times``: the seconds at which those of ``first`` come."""
    return Workload(first + second, times + [times[-1] + 1 + at - times[0] for at in times])


def hits(workload: Workload, size: int, host: bool, eviction: str) -> int:
    """Return how many blocks are found. ``host``: half of the ``size`` is on a host."""
    if not host:
        return policy_hits(workload.paths, size, eviction, workload.times)
    device = size // 2
    core = CacheCore(CoreConfig(
        page_size=BLOCK_TOKENS, components=(ComponentSlots(ComponentKind.FULL, device, size - device),),
        eviction=eviction, storage=False,
    ))  # fmt: skip
    found = 0
    for path, at in zip(workload.paths, workload.times, strict=True):
        if len(path) <= device:
            core.at(at)
            found += _serve(core, path)
    return found


def _serve(core: CacheCore, path: BlockPath) -> int:
    """Serve the request with this path, with copies that end as soon as they begin; return how many blocks it found."""
    keys = np.asarray(path, dtype=np.int32)
    key, length = np.repeat(keys, BLOCK_TOKENS).tobytes(), len(keys) * BLOCK_TOKENS
    while not isinstance(answer := core.lease(LeaseRequest(SPACE, key, length, length, length)), Grant):
        _perform(core, answer.plan)
    _perform(core, answer.plan)
    found = answer.lease.cached // BLOCK_TOKENS
    hashes = np.zeros((len(keys), HASH_BYTES // 4), dtype=np.int32)
    hashes[:, 0] = keys                                # a key stands for all blocks before it, too
    done = core.commit(answer.lease, key, hashes.tobytes())
    assert not isinstance(done, Wait), "pages are on their way, but all copies have ended"
    _perform(core, done.plan)
    _perform(core, core.release(answer.lease))
    return found


def _perform(core: CacheCore, plan: Plan) -> None:
    """End all that ``plan`` begins, and what follows from that."""
    while plan.effects or core.behind:
        ended = [Outcome(op, Status.DONE) for effect in plan.effects for op in operations(effect)]
        plan = core.complete(ended) if ended else core.follow_up()


def rows(trace: Workload, sizes: Sequence[int]) -> Iterator[Row]:
    """Serve every workload at every size, on the device alone and with a host, under both policies; yield the rows."""
    for size in sizes:
        for name, workload in workloads(trace, size):
            uses = next_uses(workload.paths)
            looked_up = sum(len(path) for path in workload.paths)
            most = optimum(workload.paths, uses, size)
            for host in (False, True):
                lru, p2c = (hits(workload, size, host, eviction) for eviction in ("lru", "p2c"))
                way = round(100 * (p2c - lru) / (most - lru), 1) if most > lru else None
                yield Row(name, size, host, 100 * lru / looked_up, 100 * p2c / looked_up, way)


SHARES = (0.0, 0.5, 1.0)
PAGE = 3 * UNIT


def ends(trace: Trace, share: float) -> list[bool]:
    """Return of which requests the cache is told that they are their conversations' last: so large a ``share``."""
    draws = random.Random(0)
    return [last and draws.random() < share for last in survey(trace).last]


def host_hits(paths: Sequence[BlockPath], size: int, ended: Sequence[bool]) -> int:
    """Return how many blocks of prompts are found, before the first that is not, in a host process of ``size``
    blocks."""
    table_of = layout_of((size + 64) * (PAGE + 256) + (1 << 20))
    table, writer, following = PageTable(table_of, array("Q", bytes(8 * table_of.slots))), Writer("w"), Successors()
    table.grow(size * units_of(PAGE))
    label, found = table.label(""), 0
    for path, over in zip(paths, ended, strict=True):
        keys = [key.to_bytes(HASH_BYTES, "little") for key in path]
        hits = next((at for at, key in enumerate(keys) if key not in table.index), len(keys))
        found += hits
        table.touch(keys[:hits])
        for at in range(len(keys) - 1, hits - 1, -1):
            place = None if keys[at] in table.index else table.reserve(writer, keys[at], "", PAGE, label)
            if place is not None:
                table.publish(writer, place, 0.0)
        table.touch(keys)
        following.note(keys)
        if over:
            table.ended(following.private(keys))
    return found


def ends_table(trace: Trace, sizes: Sequence[int]) -> Iterator[str]:
    """Yield the table of hit ratios with so many ends told."""
    paths, times = list(paths_of(trace)), arrivals(trace, 1.0)
    told, looked_up = [ends(trace, share) for share in SHARES], sum(map(len, paths))
    yield f"{'blocks':>8}  {'':8}" + "".join(f"{f'{share:.0%} told':>12}" for share in SHARES)
    for size in sizes:
        for name in ("lru", "p2c", "host"):
            found = [host_hits(paths, size, over) if name == "host" else
                     policy_hits(paths, size, name, times, ended=over) for over in told]  # fmt: skip
            yield f"{size:>8,}  {name:8}" + "".join(f"{one / looked_up:>12.4f}" for one in found)


def line(row: Row) -> str:
    """Return the row as a line of the table; one that breaks the law is marked."""
    way = "" if row.way is None else f"{row.way:.0f} %"
    broken = "  below" if row.difference < -ALLOWED else ""
    return (f"{row.workload:32}{row.blocks:>8,}{'half' if row.host else '':>6}{row.lru:>9.2f}{row.p2c:>9.2f}"
            f"{row.difference:>+9.2f}{way:>7}{broken}")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", help="a trace in the Mooncake format (JSON lines)")
    parser.add_argument("--sizes", type=listed(integer(1)), default=",".join(map(str, SIZES)), metavar="N,N",
                        help="room in blocks of 512 tokens, host included (default: %(default)s)")
    parser.add_argument("--limit", type=integer(1), metavar="N", help="use the first N requests of the trace only")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of the table")
    parser.add_argument("--ends", action="store_true", help="what it brings to tell that conversations are over")
    args = parser.parse_args(arguments)
    requests = read_trace(args.trace, args.limit)
    if args.ends:
        for text in ends_table(requests, args.sizes):
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
        return 0
    trace = Workload(list(paths_of(requests)), arrivals(requests, 1.0))
    if not args.json:
        sys.stdout.write(f"{'workload':32}{'blocks':>8}{'host':>6}{'lru':>9}{'p2c':>9}{'points':>9}{'way':>7}\n")
    broken = 0
    for row in rows(trace, args.sizes):
        broken += row.difference < -ALLOWED
        found: dict[str, Any] = {**row._asdict(), "difference": row.difference}
        sys.stdout.write((json.dumps(found) if args.json else line(row)) + "\n")
        sys.stdout.flush()
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
