"""The cost of each call of the core by itself, without runtime, bytes or other threads: ``calls`` of ``tree.py``.

There are two workloads, which can be compared with other systems. *shared*: 200 prompts of 2,048 tokens with 20
continuations of 512 tokens each, shuffled. *turns*: 40 conversations of 40 turns of 64 tokens; each is a path of 40
nodes. The wall and CPU time of every operation is taken by itself. What happens between two timings (completing
backups, making keys) is in no figure. The hashes of pages are zeros, because computing them is the runtime's work.
Imports no torch.
"""

from __future__ import annotations

import gc
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from statistics import median_high
from typing import Any, TypeVar

from asynccache import compiled
from asynccache.cli.output import Tell
from asynccache.core.cache import CacheCore, CoreLease, Grant, LeaseRequest
from asynccache.core.holds import release_hold, take_hold
from asynccache.core.plan import More, Outcome, Plan, Status, Wait, operations
from asynccache.core.settings import ComponentKind, ComponentSlots, CoreConfig
from asynccache.core.tree import Node
from benchmarks.tables import Chart, Row

_T = TypeVar("_T")

Figures = dict[str, Any]

SPACE = b"bench".ljust(32)
PROMPTS, CONTINUATIONS, PROMPT, CONTINUATION = 200, 20, 2048, 512
CONVERSATIONS, TURNS, TURN = 40, 40, 64
EVICTED = 8192
MEMORY_NODES = 20_000
WINDOW = 1024
FREEZE_EVERY = 4096
HASH = bytes(32)
GROWTH_PAGE, GROWTH_PAGES = 16, 4    # tokens of a page, and pages of a node, where trees are compared by their size
BETWEEN_S = 0.37                # seconds from one request to the next, on the clock that the core is told

OPERATIONS = {
    "match": "match of 2,560 tokens, with its pages",
    "insert": "insert of a 2,560-token key, 512 new, with its write-through plan",
    "pin": "pin + unpin",
    "match_path": "match, 40-node path",
    "pin_path": "pin + unpin, 40-node path",
    "evict": "evict 8,192 tokens in one call, shared",
    "evict_node": "evict, per node removed",
}
GOALS = {
    "full": {"match": 10, "insert": 20, "pin": 3, "match_path": 35, "pin_path": 12, "evict": 120, "evict_node": 8},
    "all": {"match": 14, "insert": 45, "pin": 5, "match_path": 42, "pin_path": 15, "evict": 300, "evict_node": 12},
}
COMPILED_GOALS = {
    "full": {"match": 5, "insert": 18, "pin": 1, "match_path": 20, "pin_path": 2.5, "evict": 60},
    "all": {"match": 10, "insert": 30, "pin": 3.2, "match_path": 28, "pin_path": 5, "evict": 110},
}
"""Goals in µs of CPU time. ``GOALS`` are for the mean of the pure core, ``COMPILED_GOALS`` for the p50 of the compiled
one."""
SHAPES = {"full p16": ("full", 16), "full,swa,mamba p64": ("all", 64), "full,swa,mamba p16": ("all", 16)}


@dataclass(slots=True)
class Timer:
    """Wall and CPU nanoseconds of every call of one operation, minus ``own``: those that timing an empty call takes."""

    own: tuple[int, int] = (0, 0)
    wall: array[int] = field(default_factory=lambda: array("q"))
    cpu: array[int] = field(default_factory=lambda: array("q"))

    def call(self, work: Callable[[], _T]) -> _T:
        """Time one call of ``work``, and return its result."""
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        result = work()
        self.cpu.append(max(0, time.thread_time_ns() - cpu - self.own[1]))
        self.wall.append(max(0, time.perf_counter_ns() - wall - self.own[0]))
        return result

    def figures(self) -> Figures:
        """Return the figures: the number of calls, and times in microseconds."""
        return {"calls": len(self.wall)} | {
            name: {"mean": microseconds(sum(values) / len(values)), "p50": microseconds(median_high(values)),
                   "p99": microseconds(sorted(values)[len(values) * 99 // 100]), "max": microseconds(max(values))}
            for name, values in (("wall", self.wall), ("cpu", self.cpu))
        }  # fmt: skip

    def worst(self) -> Figures:
        """Return the longest CPU time and the longest wall time of a call, in milliseconds. If the wall time is far
        above the CPU time, the machine was busy."""
        return {"cpu_ms": round(max(self.cpu) / 1e6, 3), "wall_ms": round(max(self.wall) / 1e6, 3)}


def timer() -> Timer:
    """Return a timer that subtracts its own cost, which the first call of this function measures."""
    if not _own:
        bare = Timer()
        for _ in range(4000):
            bare.call(lambda: None)
        _own.append((median_high(bare.wall), median_high(bare.cpu)))
    return Timer(_own[0])


_own: list[tuple[int, int]] = []


def microseconds(nanoseconds: float) -> float:
    """Return nanoseconds as microseconds with two digits after the point."""
    return round(nanoseconds / 1000, 2)


class Bed:
    """A core that is measured. Backups are completed between the timings, so that a timed call never waits."""

    def __init__(
        self, kind: str, page: int, tokens: int, *, host: bool = True, states: int = 0, slice_steps: int = 1 << 30,
        remember: int = 0, eviction: str = "lru",
    ) -> None:  # fmt: skip
        self.page = page
        self.kind = kind
        pages = -(-tokens // page)
        states = states or 2 * pages
        slots = [ComponentSlots(ComponentKind.FULL, pages, pages if host else 0)]
        if kind == "all":
            slots.append(ComponentSlots(ComponentKind.SWA, pages, pages if host else 0, WINDOW))
            slots.append(ComponentSlots(ComponentKind.MAMBA, states, states if host else 0))
        self.core = CacheCore(CoreConfig(
            page_size=page, components=tuple(slots), storage=host, max_backup_ops=1 << 30, slice_steps=slice_steps,
            remember=remember, eviction=eviction,
        ))  # fmt: skip
        self._frozen = 0
        self._now = 0.0

    def complete(self, plan: Plan) -> None:
        """Apply a successful outcome for every effect of ``plan``, and for the effects that follow from that."""
        while plan.effects or self.core.behind:
            ops = [op for effect in plan.effects for op in operations(effect)]
            plan = self.core.complete([Outcome(op, Status.DONE) for op in ops])

    def lease(self, key: bytes) -> CoreLease:
        """Return a lease with room for ``key``, granted ``BETWEEN_S`` seconds after the one before."""
        self._now += BETWEEN_S
        self.core.at(self._now)
        tokens = len(key) // 4
        ask = LeaseRequest(SPACE, key, tokens, tokens, tokens, 3 if self.kind == "all" else 0)
        while isinstance(answer := self.core.lease(ask), (More, Wait)):
            self.complete(answer.plan)
        assert isinstance(answer, Grant)
        self.complete(answer.plan)
        return answer.lease

    def commit(self, lease: CoreLease, key: bytes) -> Plan:
        """Publish ``key``, with a checkpoint at its end if there are states, and return the plan."""
        end = len(key) // 4 // self.page * self.page
        checkpoint = (end, int.from_bytes(lease.states[-4:], "little")) if self.kind == "all" else None
        answer = self.core.commit(lease, key, HASH * (end // self.page), checkpoint)
        assert not isinstance(answer, Wait)
        return answer.plan

    def insert(self, key: bytes) -> None:
        """Serve a whole request without timing it: lease, commit and release."""
        lease = self.lease(key)
        self.complete(self.commit(lease, key))
        self.complete(self.core.release(lease))
        self.freeze()

    def freeze(self) -> None:
        """Freeze the garbage collector's objects now and then, as the runtime does, so that its old generation never
        has more than a few thousand nodes."""
        nodes = self.core.statistics().nodes
        if nodes - self._frozen >= FREEZE_EVERY:
            gc.freeze()
            self._frozen = nodes


# workloads


def tokens(random: Random, count: int) -> bytes:
    """Return ``count`` random tokens."""
    return array("i", [random.randrange(1 << 17) for _ in range(count)]).tobytes()


def shared(seed: int = 0) -> list[bytes]:
    """Return the keys of *shared*, shuffled."""
    random = Random(seed)
    prompts = [tokens(random, PROMPT) for _ in range(PROMPTS)]
    keys = [prompt + tokens(random, CONTINUATION) for prompt in prompts for _ in range(CONTINUATIONS)]
    random.shuffle(keys)
    return keys


def turns(seed: int = 0) -> Iterator[bytes]:
    """Yield the keys of *turns*: in each round every conversation gets one turn longer, one after the other."""
    random = Random(seed)
    conversations = [b""] * CONVERSATIONS
    for _ in range(TURNS):
        for i in range(CONVERSATIONS):
            conversations[i] += tokens(random, TURN)
            yield conversations[i]


# measurements


def measure_shared(kind: str, page: int, eviction: str) -> dict[str, Timer]:
    """Time insert, match and pin on *shared*."""
    keys = shared()
    bed = Bed(kind, page, (PROMPTS * PROMPT + len(keys) * CONTINUATION) * 5 // 4, eviction=eviction)
    timers = {name: timer() for name in ("insert", "match", "pin")}
    for key in keys:
        lease = bed.lease(key)
        insert = timers["insert"] if lease.cached == PROMPT else timer()
        if not lease.cached:
            bed.complete(bed.commit(lease, key[: PROMPT * 4]))
        bed.complete(insert.call(partial(bed.commit, lease, key)))
        bed.complete(bed.core.release(lease))
        bed.freeze()
    time_hits(bed, keys[:2000], timers["match"], timers["pin"])
    return timers


def measure_turns(kind: str, page: int, eviction: str) -> dict[str, Timer]:
    """Time match and pin on the paths of 40 nodes of *turns*."""
    bed = Bed(kind, page, CONVERSATIONS * TURNS * TURN * 3, eviction=eviction)
    keys = list(turns())
    for key in keys:
        bed.insert(key)
    timers = {"match_path": timer(), "pin_path": timer()}
    time_hits(bed, keys[-CONVERSATIONS:] * 25, timers["match_path"], timers["pin_path"])
    return timers


def time_hits(bed: Bed, keys: Sequence[bytes], match: Timer, pin: Timer) -> None:
    """For each key, time a match with the page tables of what it found, and then pinning and unpinning that path, which
    has no other pins. The first round warms up and is not counted."""
    for timers in ((timer(), timer()), (match, pin)):
        for key in keys:
            lease = bed.lease(key)
            timers[0].call(partial(_match_with_pages, bed, lease, key))
            end = lease.hold.end
            bed.complete(bed.core.release(lease))
            timers[1].call(partial(_pin_and_unpin, bed, end))


def _match_with_pages(bed: Bed, lease: CoreLease, key: bytes) -> None:
    bed.core.match(SPACE, key)
    bed.core.pages(lease, ComponentKind.FULL)
    if bed.kind == "all":
        bed.core.pages(lease, ComponentKind.SWA)


def _pin_and_unpin(bed: Bed, end: Node) -> None:
    release_hold(bed.core.world, take_hold(bed.core.world, end, end.end))


def measure_evict(kind: str, page: int, eviction: str, calls: int = 60) -> dict[str, Timer]:
    """Time leases of 8,192 tokens on a full device; each evicts all that it needs in one call."""
    keys = shared()
    bed = Bed(kind, page, PROMPTS * PROMPT + len(keys) * CONTINUATION, host=False, states=PROMPTS * CONTINUATIONS + 4,
              eviction=eviction)  # fmt: skip
    for key in keys:
        bed.insert(key)
    timers = {"evict": timer(), "evict_node": timer()}
    ask = LeaseRequest(SPACE, b"", 0, EVICTED, EVICTED, 0)
    for _ in range(calls):
        before = bed.core.statistics().nodes
        grant = timers["evict"].call(partial(bed.core.lease, ask))
        assert isinstance(grant, Grant)
        removed = before - bed.core.statistics().nodes
        if removed:
            timers["evict_node"].cpu.append(timers["evict"].cpu[-1] // removed)
            timers["evict_node"].wall.append(timers["evict"].wall[-1] // removed)
    return timers


def measure_shape(kind: str, page: int, eviction: str) -> Figures:
    """Return every row of the table for one configuration."""
    timers: dict[str, Timer] = {}
    for part in (measure_shared, measure_turns, measure_evict):
        timers |= part(kind, page, eviction)
        gc.unfreeze()
        gc.collect()
    goals = COMPILED_GOALS if compiled.CORE == "compiled" else GOALS
    return {
        name: timers[name].figures() | {"what": what, "goal_us": goals[kind].get(name)}
        for name, what in OPERATIONS.items()
    }


# memory


def measure_memory(kind: str, eviction: str) -> Figures:
    """Measure the bytes of memory per node besides its tokens (4 bytes each), slots (4 bytes for each page and tier)
    and hashes (32 bytes for each page). Nothing is evicted, so what a policy remembers of evicted nodes is not in
    it."""
    random = Random(1)
    nodes = MEMORY_NODES
    bed = Bed(kind, GROWTH_PAGE, 3 * nodes * GROWTH_PAGES * GROWTH_PAGE, host=True, states=2 * nodes,
              eviction=eviction)  # fmt: skip
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    while bed.core.statistics().nodes < nodes:
        bed.insert(random.randbytes(GROWTH_PAGES * GROWTH_PAGE * 4))
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    count = bed.core.statistics().nodes
    payload = sum(_payload(node) for root in bed.core.world.roots.values() for node in (root.children or {}).values())
    freed = sum((shelf.capacity - shelf.free) * 4 for shelf in bed.core.statistics().device)
    return {"nodes": count, "bytes_per_node": round((used - payload) / count), "goal": 1024 if kind == "full" else 1843,
            "payload_per_node": round(payload / count), "free_list_shrunk": freed}  # fmt: skip


def _payload(node: Node) -> int:
    return len(node.key) + len(node.hashes) + sum(map(len, node.slots))


# all shapes


def measure_calls(shapes: Sequence[str], eviction: str, tell: Tell) -> Figures:
    """Measure ``shapes``, given by their places in ``SHAPES``, and return the figures, in microseconds unless a name
    says otherwise."""
    found = {}
    for name, (kind, page) in [list(SHAPES.items())[int(number)] for number in shapes]:
        tell(f"{name}: shared, turns, evict")
        found[name] = measure_shape(kind, page, eviction)
    tell("memory")
    return {"eviction": eviction, "python": sys.version.split()[0], "shapes": found,
            "memory": {kind: measure_memory(kind, eviction) for kind in ("full", "all")}}


def charts_of_calls(figures: Figures) -> Iterator[Chart]:
    """Yield a chart for each shape: CPU times beside the goals, which are for the p50 of the compiled core and for the
    mean of the pure one; and one of the memory of a node."""
    judged = "p50" if compiled.CORE == "compiled" else "mean"
    columns = ("mean", "p50", "p99", "goal")
    for name, rows in figures["shapes"].items():
        yield Chart(f"What a call of the core costs, {name}: CPU µs", columns, [
            Row(row["what"], [*(cpu[one] for one in ("mean", "p50", "p99")), row["goal_us"]],
                missed=row["goal_us"] is not None and cpu[judged] > row["goal_us"])
            for row in rows.values() for cpu in [row["cpu"]]
        ])
    yield Chart("What a node of the tree takes beside its tokens, slots and hashes: bytes",
                ("bytes", "goal"),
                [Row(kind, [row["bytes_per_node"], row["goal"]], missed=row["bytes_per_node"] > row["goal"])
                 for kind, row in figures["memory"].items()])
