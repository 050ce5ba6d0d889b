"""The core by itself, and in trees of every size: ``python -m benchmarks.tree [WHAT]``.

``calls``: what each call of the core costs, and the memory of a node. ``growth``: the calls of the core in trees of
different sizes, and the slowest single calls, also in trees that are made to be slow (``tree_shapes``). ``ghosts``: the
memory of a node that left the tree and that the eviction policy remembers. ``metrics``: how much counting for metrics
adds. ``cores``: ``calls`` with the pure core and with the compiled one, side by side. ``tree_calls`` has the workloads,
and how calls are timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from statistics import median_high

from asynccache import compiled
from asynccache.cli.output import Tell
from asynccache.config import EVICTION_POLICIES
from asynccache.core.cache import Grant, LeaseRequest
from asynccache.core.plan import More, Wait
from asynccache.core.settings import SLICE_STEPS
from benchmarks.parsing import choice, integer, listed
from benchmarks.tables import Chart, Row, bench
from benchmarks.tree_calls import (
    CONTINUATION,
    EVICTED,
    GROWTH_PAGE,
    GROWTH_PAGES,
    MEMORY_NODES,
    PROMPT,
    PROMPTS,
    SHAPES,
    SPACE,
    Bed,
    Figures,
    Timer,
    charts_of_calls,
    measure_calls,
    microseconds,
    shared,
    time_hits,
    timer,
)  # fmt: skip
from benchmarks.tree_shapes import SHAPES as SHAPES_OF_TREES
from benchmarks.tree_shapes import sizes as sizes_of_trees

REMEMBERED = 16_384             # how many evicted nodes the core remembers, as in a running cache
FANOUT, SAMPLE = 16, 4000
MOST_NODES = 100_000            # in a tree whose slowest calls are measured
WORST_MS = 2.0 if compiled.CORE == "compiled" else 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark to ``parser``."""
    numbers = [str(i) for i in range(len(SHAPES))]
    parser.add_argument("what", choices=("calls", "growth", "ghosts", "metrics", "cores"), nargs="?", default="calls",
                        help="what is measured (default: %(default)s)")
    parser.add_argument("--nodes", type=listed(integer(1)), default="1000,10000,100000,1000000", metavar="N,N",
                        help="growth: numbers of nodes of the trees that are measured (default: %(default)s)")
    parser.add_argument("--shapes", type=listed(choice(*numbers)), default=",".join(numbers), metavar="I,I",
                        help="calls, cores: shapes to measure (default: all): "
                             + "; ".join(map("{}: {}".format, numbers, SHAPES)))
    parser.add_argument("--rounds", type=integer(1), default=2, metavar="N", help="metrics: rounds (default: 2)")
    parser.add_argument("--eviction", default="lru", choices=EVICTION_POLICIES,
                        help="the eviction policy (default: %(default)s, for which the goals were set)")


def run(args: argparse.Namespace, tell: Tell) -> Figures:
    """Measure, and return the figures under the name of what is measured."""
    if args.what == "calls":
        return {"bench": "tree", **measure_calls(args.shapes, args.eviction, tell)}
    if args.what == "growth":
        found: Figures = {kind: measure_growth(kind, args.nodes, args.eviction, tell) for kind in ("full", "all")}
        slowest = measure_slowest(min(max(args.nodes), MOST_NODES), tell)
        return {"bench": "tree", "growth": found, "slowest": slowest}
    elif args.what == "ghosts":
        found = measure_ghosts(args.eviction)
    elif args.what == "metrics":
        found = measure_metrics(args.rounds, tell)
    else:
        found = {core: measured_core(core, args) for core in ("compiled", "pure")}
    return {"bench": "tree", args.what: found}


def charts(figures: Figures) -> Iterator[Chart]:
    """Yield a chart of what was measured: each call, how the mean grows with the tree, the memory of the nodes that the
    policy remembers, the cost of counting for metrics, or the p50 of both cores."""
    if "shapes" in figures:
        yield from charts_of_calls(figures)
    kinds = ("match", "pin", "insert", "evict")
    for kind, sizes in figures.get("growth", {}).items():
        yield Chart(f"How the cost grows with the tree, {kind}: mean CPU µs", kinds, [
            Row(f"{row['nodes']:,} nodes", [row[name]["cpu"]["mean"] for name in kinds]) for row in sizes
        ])
    for tree, slowest in figures.get("slowest", {}).items():
        yield Chart(f"The slowest call of each kind, {tree}", ("steps", "CPU ms", "goal"), [
            Row(call, [row["steps"], row["cpu_ms"], WORST_MS], missed=row["cpu_ms"] > WORST_MS)
            for call, row in slowest.items()
        ])
    if "ghosts" in figures:
        ghosts = figures["ghosts"]
        yield Chart("The evicted nodes that the eviction policy remembers", ("",), [
            Row("nodes in the tree", [ghosts["nodes"]]), Row("nodes remembered", [ghosts["ghosts"]]),
            Row("the most that are remembered", [ghosts["most"]]),
            Row("bytes for each of them", [ghosts["bytes_per_ghost"]]),
        ])
    if "metrics" in figures:
        yield from _charts_of_metrics(figures["metrics"])
    cores = figures.get("cores", {})
    for name, rows in cores.get("compiled", {}).items():
        yield Chart(f"What a call of either core costs, {name}: p50 of CPU µs", ("compiled", "pure"),
                    [Row(row["what"], [row["cpu"]["p50"], cores["pure"][name][operation]["cpu"]["p50"]])
                     for operation, row in rows.items()])


def _charts_of_metrics(found: Figures) -> Iterator[Chart]:
    off, on, goal = found["off_us"], found["on_us"], 100 * found["goal"]
    yield Chart("The CPU time of all calls, without and with counting for metrics: µs", ("without", "with"),
                [Row(name, [off[name], on[name]]) for name in off])
    yield Chart("The share that counting for metrics adds: %", ("share", "goal"), [
        Row("all calls together", [100 * found["all_adds"], goal], missed=found["all_adds"] > found["goal"]),
        Row("evict", [100 * found["evict_adds"], None]),
    ])


def measured_core(core: str, args: argparse.Namespace) -> Figures:
    """Return the figures of ``calls`` by shape, with this core, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "tree.json")
        command = [sys.executable, "-m", "benchmarks.tree", "--shapes", ",".join(args.shapes), "--eviction",
                   args.eviction, "--quiet", "--json", path]  # fmt: skip
        subprocess.run(command, env={**os.environ, "ASYNCCACHE_PURE": "1" if core == "pure" else ""}, check=True)
        with open(path) as file:
            figures: Figures = json.load(file)
    if figures["core"] != core:
        raise SystemExit(f"there is no {core} core here; make compiled makes it")
    shapes: Figures = figures["shapes"]
    return shapes


# metrics


def measure_metrics(rounds: int, tell: Tell) -> Figures:
    """Measure how much counting for metrics adds to all calls together and to an eviction, as shares.

    Two trees, one with and one without it, are called in turns, so that other work of the machine slows both alike.
    Most of the metrics are always counted; what a running cache has in addition is a memory of evicted nodes, from
    which it knows the reason of a miss. In the sum over all calls, an operation counts with its median CPU time, as
    often as it is called.
    """
    both: list[dict[str, Timer]] = [{name: timer() for name in ("insert", "match", "pin", "evict")} for _ in range(2)]
    for number in range(rounds):
        tell(f"metrics off and on, round {number + 1} of {rounds}")
        _side_by_side(both)
        gc.unfreeze()
        gc.collect()
    off, on = ({name: len(one.cpu) * median_high(one.cpu) for name, one in timers.items()} for timers in both)
    adds = sum(on.values()) / sum(off.values()) - 1
    return {"rounds": rounds, "off_us": {name: microseconds(value) for name, value in off.items()},
            "on_us": {name: microseconds(value) for name, value in on.items()}, "all_adds": round(adds, 4),
            "evict_adds": round(on["evict"] / off["evict"] - 1, 4), "goal": 0.02}  # fmt: skip


def _side_by_side(both: Sequence[dict[str, Timer]]) -> None:
    """Run *shared* on both trees in turns: insert all keys, look some of them up, then evict."""
    keys = shared()
    size = PROMPTS * PROMPT + len(keys) * CONTINUATION
    beds = [Bed("full", 16, size, host=False, remember=remember) for remember in (0, REMEMBERED)]
    pairs = list(zip(beds, both, strict=True))
    for number, key in enumerate(keys):
        for bed, timers in pairs[:: 1 - 2 * (number % 2)]:
            lease = bed.lease(key)
            bed.complete(timers["insert"].call(partial(bed.commit, lease, key)))
            bed.complete(bed.core.release(lease))
    for number, key in enumerate(keys[:500]):
        for bed, timers in pairs[:: 1 - 2 * (number % 2)]:
            time_hits(bed, [key], timers["match"], timers["pin"])
    ask = LeaseRequest(SPACE, b"", 0, EVICTED, EVICTED, 0)
    for number in range(60):
        for bed, timers in pairs[:: 1 - 2 * (number % 2)]:
            assert isinstance(timers["evict"].call(partial(bed.core.lease, ask)), Grant)


# growth


class Forest:
    """A tree that grows to any size: prompts of four pages, each with sixteen continuations of four pages."""

    def __init__(self, kind: str, nodes: int, eviction: str) -> None:
        self._random = Random(nodes)
        self._prompt = b""
        self._left = 0
        spare = 2 * SAMPLE * GROWTH_PAGES * GROWTH_PAGE
        self.bed = Bed(
            kind, GROWTH_PAGE, nodes * GROWTH_PAGES * GROWTH_PAGE + spare, host=False, states=nodes + SAMPLE,
            slice_steps=SLICE_STEPS, eviction=eviction,
        )  # fmt: skip
        self.keys: list[bytes] = []

    def key(self) -> bytes:
        """Return the next key to insert."""
        if not self._left:
            self._prompt = self._random.randbytes(GROWTH_PAGES * GROWTH_PAGE * 4)
            self._left = FANOUT
        self._left -= 1
        key = self._prompt + self._random.randbytes(GROWTH_PAGES * GROWTH_PAGE * 4)
        if self._random.random() < SAMPLE / 20_000 or len(self.keys) < SAMPLE:
            self.keys.append(key)
        return key

    def sample(self, count: int) -> list[bytes]:
        """Return at most ``count`` of the keys that were inserted."""
        return self._random.sample(self.keys, min(count, len(self.keys)))

    def grow(self, nodes: int) -> None:
        """Insert keys until the tree has ``nodes`` nodes."""
        while self.bed.core.statistics().nodes < nodes:
            self.bed.insert(self.key())


def measure_growth(kind: str, sizes: Sequence[int], eviction: str, tell: Tell) -> list[Figures]:
    """Time match, pin, insert, release and evict in trees of different sizes."""
    rows = []
    for size in sizes:
        tell(f"{kind}: a tree of {size:,} nodes")
        rows.append({"nodes": size} | _grown(kind, size, eviction))
        gc.unfreeze()
        gc.collect()
    return rows


def _grown(kind: str, size: int, eviction: str) -> Figures:
    forest = Forest(kind, size, eviction)
    forest.grow(size)
    bed = forest.bed
    told = ("match", "pin", "insert", "release", "evict")
    worst = ("commit", "complete", "evict", "evict_slice", "freeze", "lease", "release")
    timers = {name: timer() for name in (*told, *worst)}
    time_hits(bed, forest.sample(SAMPLE // 4), timers["match"], timers["pin"])
    for _ in range(SAMPLE // 2):
        _timed_insert(bed, forest.key(), timers)
    timers["commit"] = timers["insert"]
    _fill(bed)
    ask = LeaseRequest(SPACE, b"", 0, GROWTH_PAGE * GROWTH_PAGES, GROWTH_PAGE * GROWTH_PAGES, 0)
    for _ in range(SAMPLE // 4):
        _evict_in_slices(bed, ask, timers["evict"].call)
    tenth = size // 10 * GROWTH_PAGES * GROWTH_PAGE
    _evict_in_slices(bed, LeaseRequest(SPACE, b"", 0, tenth, tenth, 0), timers["evict_slice"].call)
    return {**{name: timers[name].figures() for name in told},
            "worst_call": {name: timers[name].worst() for name in worst}}


def measure_slowest(nodes: int, tell: Tell) -> Figures:
    """Measure the slowest call of each kind in trees of ``nodes`` pages in which calls used to be slow."""
    found: Figures = {}
    for name, shape in SHAPES_OF_TREES.items():
        for leaves, pages in sizes_of_trees(nodes):
            tree = f"{name}, {leaves:,} leaves of {pages:,} pages"
            tell(tree)
            found[tree] = {call: took._asdict() for call, took in shape(leaves, pages).longest.items()}
            gc.unfreeze()
            gc.collect()
    return found


Answer = Grant | Wait | More


def _evict_in_slices(bed: Bed, ask: LeaseRequest, call: Callable[[Callable[[], Answer]], Answer]) -> None:
    """Ask for a lease that has to evict, in as many calls as the core divides that into."""
    while isinstance(answer := call(lambda: bed.core.lease(ask)), More):
        bed.complete(answer.plan)
    assert isinstance(answer, Grant)


def _timed_insert(bed: Bed, key: bytes, timers: dict[str, Timer]) -> None:
    lease = timers["lease"].call(lambda: bed.lease(key))
    plan = timers["insert"].call(lambda: bed.commit(lease, key))
    timers["complete"].call(lambda: bed.complete(plan))
    bed.complete(timers["release"].call(lambda: bed.core.release(lease)))
    timers["freeze"].call(bed.freeze)


def _fill(bed: Bed) -> None:
    """Take all free slots of the device."""
    free = bed.core.statistics().device[0].free * bed.page
    swa = bed.core.statistics().device[1].free * bed.page if bed.kind == "all" else free
    assert isinstance(bed.core.lease(LeaseRequest(SPACE, b"", 0, free, swa, 0)), Grant)


# memory


def measure_ghosts(eviction: str) -> Figures:
    """Measure the bytes of memory for each evicted node that the policy remembers. ``most`` among the figures: how many
    nodes it may remember at this size."""
    random, nodes = Random(2), MEMORY_NODES // 8
    bed = Bed("full", GROWTH_PAGE, nodes * GROWTH_PAGES * GROWTH_PAGE, host=False, eviction=eviction)
    if bed.core.learned() is None:
        raise SystemExit(f"{eviction} remembers no node that left; --eviction p2c does")
    ghosts, counts = [], []
    tracemalloc.start()
    for rounds in (2, 16):
        for _ in range(rounds * nodes):
            bed.insert(random.randbytes(GROWTH_PAGES * GROWTH_PAGE * 4))
        gc.collect()
        learned = bed.core.learned()
        assert learned is not None
        ghosts.append(learned.ghosts)
        counts.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    return {"nodes": bed.core.statistics().nodes, "ghosts": ghosts[1], "most": 8 * nodes,
            "bytes_per_ghost": round((counts[1] - counts[0]) / (ghosts[1] - ghosts[0]))}  # fmt: skip


def main(arguments: list[str]) -> int:
    """Measure, and print and write the figures; returns the exit status."""
    return bench(sys.modules[__name__], arguments, prog="python -m benchmarks.tree")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
