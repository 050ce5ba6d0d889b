"""What a fleet saves by routing, by a shared store, and by both: ``python -m benchmarks.fleet trace.jsonl``.

A simulation. Each of N replicas has room for ``--local`` blocks (device and host as one tier), which a core of ours
keeps under ``--eviction``, and serves one prefill after another. With ``--together 8`` the replicas are machines of
eight, which share the memory of all eight, as under ``asynccache serve``. The trace is scaled to the fleet: its
conversations are drawn again and again, as copies of their own, until all prompts together would keep each replica busy
for ``--load`` of the time if nothing were cached. Blocks that ``HEAD`` or more different blocks follow, and all before
them, are heads (system prompts), which all copies share. A copy of a conversation keeps the times between its requests
and begins at any moment of the trace.

Routing: *random*; *sticky*, a conversation stays with one replica; *prefix*, the router knows each replica's queue and
what it holds, and takes the replica that will have the first token soonest, out of those that were last seen with the
longest prefixes and those with the shortest queues (``CANDIDATES`` of each).

The store (``--store``) is shared and unlimited. A block that the replica lacks is read from it where reading takes less
time than computing. Each block is written once.

Of a fleet of more than ``--sample`` replicas so many are simulated, and the others are like them. With *random* they
get their share of every conversation's requests, and the store has what the other requests wrote. With *sticky* and
*prefix* whole conversations go to them: so one router knows ``--sample`` replicas, and a large fleet has several, among
which conversations are spread.

The first tenth of the requests warms up and is not counted. Figures are of one seed. Not in the model: failures, a
store that is full, decoding, and the time to write.

``--svg FOLDER`` draws what the fleet computes, how long the first token takes, and what the shared store carries.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise, product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from asynccache.cli.page import Axis, Figure, svg
from asynccache.cli.traces import BLOCK_TOKENS, Trace, arrivals, paths_of, read_trace
from asynccache.core.cache import CacheCore, Grant, LeaseRequest
from asynccache.core.settings import ComponentKind, ComponentSlots, CoreConfig
from benchmarks.parsing import integer, listed

HEAD = 16
CANDIDATES = 4
SPACE = bytes(32)
UNSLICED = 1 << 40
ROUTINGS = ("random", "sticky", "prefix")


class Prompt(NamedTuple):
    """A request. ``at``: its arrival, in seconds. ``path``: its full blocks, as keys. ``tokens``: its length.
    ``before``: how many of its first blocks requests had that are not simulated."""

    at: float
    conversation: int
    path: tuple[int, ...]
    tokens: int
    before: int = 0


class Model(NamedTuple):
    """``prefill``: tokens a second. ``block_bytes``: the KV of a block of ``block`` tokens. ``read``: bytes a second
    from the store."""

    prefill: float
    block_bytes: float
    read: float
    block: int = BLOCK_TOKENS


class Row(NamedTuple):
    """One fleet. ``together``: replicas that share their memory. Shares are of all tokens; ``read``, ``written``: MB/s
    of a replica; times to the first token in seconds; ``busiest``: the work of the busiest replica over the mean."""

    replicas: int
    together: int
    local: int
    store: bool
    routing: str
    requests: int
    computed: float
    local_hits: float
    store_hits: float
    read: float
    written: float
    p50: float
    p99: float
    busiest: float


def conversations(trace: Trace) -> tuple[list[list[Prompt]], set[int]]:
    """The trace's requests by conversation, and which keys are heads. A conversation is named by its first block that
    is no head. ``before`` of a prompt: its blocks that earlier ones of the conversation have, and heads."""
    paths = list(paths_of(trace))
    children: dict[int, set[int]] = {}
    for path in paths:
        for parent, child in pairwise(path):
            children.setdefault(parent, set()).add(child)
    many = {key for key, below in children.items() if len(below) >= HEAD}
    heads = {key for path in paths for end, last in enumerate(path) if last in many for key in path[: end + 1]}
    prompts = [
        Prompt(at, next((key for key in path if key not in heads), -1 - number), tuple(path), request.input_length)
        for number, (at, path, request) in enumerate(zip(arrivals(trace, 1.0), paths, trace.requests, strict=True))
    ]
    prompts.sort(key=lambda prompt: (prompt.conversation, prompt.at))
    texts, seen = [list(one) for _, one in groupby(prompts, key=lambda prompt: prompt.conversation)], set(heads)
    for text in texts:
        for place, prompt in enumerate(text):
            text[place] = prompt._replace(before=sum(key in seen for key in prompt.path))
            seen.update(prompt.path)
    return texts, heads


def fleet_load(trace: Trace, tokens: float, seed: int, share: float = 1.0) -> list[Prompt]:
    """Prompts of about ``tokens`` tokens in all, made of copies of the trace's conversations, by arrival. ``share``: of
    the prompts of each conversation so many are taken."""
    texts, heads = conversations(trace)
    rng, end = random.Random(seed), arrivals(trace, 1.0)[-1]
    made: list[Prompt] = []
    stride = 1 + max(key for text in texts for prompt in text for key in prompt.path)
    copy, total, order = 0, 0, list(range(len(texts)))
    while total < tokens:
        rng.shuffle(order)
        for number in order:
            copy += 1
            begin = rng.uniform(0, end) - texts[number][0].at
            for at, _, path, length, before in texts[number]:
                total += length
                if share < 1 and rng.random() >= share:
                    continue
                keys = tuple(key if key in heads else key + copy * stride for key in path)
                made.append(Prompt((at + begin) % end, copy, keys, length, 0 if share == 1 else before))
            if total >= tokens:
                break
    made.sort(key=lambda prompt: prompt.at)
    small: dict[int, int] = {}
    return [one._replace(path=tuple(small.setdefault(key, len(small)) for key in one.path)) for one in made]


class Memory:
    """The blocks that one replica holds, or several together."""

    def __init__(self, blocks: int, eviction: str) -> None:
        component = ComponentSlots(ComponentKind.FULL, blocks)
        self.core = CacheCore(CoreConfig(page_size=1, components=(component,), eviction=eviction, slice_steps=UNSLICED))
        self.blocks = blocks

    def holds(self, path: Sequence[int]) -> int:
        """How many blocks of ``path`` are here."""
        return self.core.match(SPACE, _key(path)).device

    def keep(self, path: Sequence[int], at: float) -> None:
        """Keep the blocks of ``path``, which was served, as the policy likes."""
        if not 0 < len(path) <= self.blocks:
            return
        self.core.at(at)
        key, length = _key(path), len(path)
        granted = self.core.lease(LeaseRequest(SPACE, key, length, length, length))
        assert isinstance(granted, Grant)
        self.core.commit(granted.lease, key, b"")
        self.core.release(granted.lease)


class Replica:
    """``free_at``: when its queue is done. ``work``: seconds that it has computed or loaded."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.free_at = self.work = 0.0


def _key(path: Sequence[int]) -> bytes:
    return np.asarray(path, np.int32).tobytes()


class Router:
    """Chooses a replica for each prompt. ``seen``: the replicas that were last given a block."""

    def __init__(self, routing: str, replicas: Sequence[Replica], model: Model, seed: int) -> None:
        self.routing, self.replicas, self.model = routing, replicas, model
        self.rng = random.Random(seed)
        self.seen: dict[int, list[int]] = {}

    def choose(self, prompt: Prompt) -> int:
        """The number of the replica that serves ``prompt``."""
        if self.routing == "random":
            return self.rng.randrange(len(self.replicas))
        if self.routing == "sticky":
            return random.Random(prompt.conversation).randrange(len(self.replicas))
        near = next((self.seen[key] for key in reversed(prompt.path) if key in self.seen), [])
        some = self.rng.sample(range(len(self.replicas)), min(len(self.replicas), 4 * CANDIDATES))
        idle = sorted(some, key=lambda number: self.replicas[number].free_at)[:CANDIDATES]
        chosen = min([*near, *idle], key=lambda number: self._soon(number, prompt))
        for key in prompt.path:
            last = self.seen.setdefault(key, [])
            if chosen not in last:
                last.append(chosen)
                del last[:-CANDIDATES]
        return chosen

    def _soon(self, number: int, prompt: Prompt) -> float:
        replica = self.replicas[number]
        missing = prompt.tokens - replica.memory.holds(prompt.path) * self.model.block
        return max(prompt.at, replica.free_at) + missing / self.model.prefill


def simulate(
    load: Sequence[Prompt], router: Router, store: bool, together: int, count: int | None = None
) -> Row:
    """Serve ``load`` with the replicas of the router, which stand for ``count``; None: for themselves."""
    replicas, model, known, warm = router.replicas, router.model, set[int](), len(load) // 10
    reads = store and model.block_bytes / model.read < model.block / model.prefill
    tokens = computed = local = far = 0
    written, waits = 0, []
    for number, prompt in enumerate(load):
        replica = replicas[router.choose(prompt)]
        here = replica.memory.holds(prompt.path)
        there = max(here, prompt.before) if reads else here
        while reads and there < len(prompt.path) and prompt.path[there] in known:
            there += 1
        new = sum(key not in known for key in prompt.path[prompt.before :])
        known.update(prompt.path)
        rest = prompt.tokens - there * model.block
        took = rest / model.prefill + (there - here) * model.block_bytes / model.read
        replica.free_at = max(prompt.at, replica.free_at) + took
        replica.memory.keep(prompt.path, prompt.at)
        if number < warm:
            continue
        replica.work += took
        waits.append(replica.free_at - prompt.at)
        tokens, computed = tokens + prompt.tokens, computed + rest
        local, far, written = local + here, far + there - here, written + new
    seconds = (load[-1].at - load[warm].at) * len(replicas)
    work = [replica.work for replica in replicas]
    p50, p99 = np.percentile(waits, (50, 99)).tolist()
    mega = model.block_bytes / 1e6 / seconds
    return Row(
        count or len(replicas), together, replicas[0].memory.blocks // together, store, router.routing, len(load),
        computed / tokens, local * model.block / tokens, far * model.block / tokens, far * mega,
        written * mega if store else 0.0, p50, p99, max(work) / (sum(work) / len(work)),
    )  # fmt: skip


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    """The row of each fleet that was asked for."""
    trace = read_trace(asked.trace, asked.limit)
    block = trace.block_size
    model = Model(asked.prefill, asked.bytes_per_token * block, asked.read * 1e9, block)
    each = asked.load * model.prefill * arrivals(trace, 1.0)[-1]
    known: dict[tuple[object, ...], Row] = {}
    for count in asked.replicas:
        few, together = min(count, asked.sample), min(asked.together, count)
        whole = fleet_load(trace, each * few, asked.seed)
        parts = fleet_load(trace, each * count, asked.seed, few / count) if few < count else whole
        for blocks, store, routing in product(asked.local, (False, True), asked.routing):
            same = (few, together, blocks, store, routing, parts is whole or routing != "random" or count)
            if same in known:
                yield known[same]._replace(replicas=count)
                continue
            machines = [Memory(blocks * together, asked.eviction) for _ in range(-(-few // together))]
            replicas = [Replica(machines[number // together]) for number in range(few)]
            load = parts if routing == "random" else whole
            known[same] = simulate(load, Router(routing, replicas, model, asked.seed), store, together, count)
            yield known[same]


LOOKS = {("random", False): ("plain", "random"), ("sticky", False): ("l2", "by conversation"),
         ("prefix", False): ("l3", "by prefix and queue"), ("random", True): ("l1", "random, shared store"),
         ("prefix", True): ("both", "by prefix, shared store")}  # fmt: skip


def figures(found: Sequence[Row], page_bytes: float) -> Iterator[Figure]:
    """A plot for each question and each amount of local memory. ``page_bytes``: of what is one request to the store."""
    sizes = sorted({row.replicas for row in found})
    replicas = Axis("replicas", sizes[0], max(sizes[-1], 2 * sizes[0]), lambda value: f"{value:,.0f}", log=True)
    for local in sorted({row.local for row in found}):
        here = [row for row in found if row.local == local]
        lines = {look: [row for row in here if (row.routing, row.store) == look] for look in LOOKS}
        for name, field, question, axis in (
            ("computed", "computed", "How much of all prompts is computed?", Axis("", 0, 1, lambda one: f"{one:.0%}")),
            ("ttft", "p50", "When is the first token there, p50?",
             Axis("", 0, 1.05 * max(row.p50 for row in found), lambda one: f"{one:g} s")),
        ):  # fmt: skip
            yield Figure(
                f"fleet-{name}-{local}", question, f"With room for {local:,} blocks a replica.", replicas, axis,
                [(LOOKS[look][1], LOOKS[look][0], [(row.replicas, getattr(row, field)) for row in rows])
                 for look, rows in lines.items() if rows], ("",), [], "")  # fmt: skip
    stored = [row for row in found if row.store and row.routing == "random" and row.local == found[0].local]
    if stored:
        ways = (("read", "l1", [row.read * row.replicas / 1000 for row in stored]),
                ("written", "l2", [row.written * row.replicas / 1000 for row in stored]))
        most = max(max(values) for _, _, values in ways)
        yield Figure(
            "fleet-store", "What does a shared store carry, GB/s?",
            f"Pages of {page_bytes / 1e6:.1f} MB; {found[0].local:,} blocks a replica, random routing.", replicas,
            Axis("", max(0.05, min(min(values) for _, _, values in ways) / 1.5), most * 1.5,
                 lambda value: f"{value:g}", log=True),
            [(name, kind, list(zip([row.replicas for row in stored], values, strict=True)))
             for name, kind, values in ways], ("",), [], "")  # fmt: skip


def drawing(figure: Figure) -> str:
    """The plot with its question and the names of its lines, in colours of its own for light and dark."""
    parts, left, top = [], 52.0, 296
    for name, kind, _ in figure.lines:
        if left + 30 + 6.6 * len(name) > 480:
            left, top = 52.0, top + 18
        parts.append(f'<line class="line {kind}" x1="{left:g}" y1="{top}" x2="{left + 18:g}" y2="{top}"/>'
                     f'<text x="{left + 23:g}" y="{top + 4}">{name}</text>')
        left += 40 + 6.6 * len(name)
    plot = svg(figure)
    inside = plot[plot.index("</title>") + len("</title>") : -len("</svg>")]
    title = f"{figure.question} {figure.answer}"
    return (f'<svg role="img" aria-label="{title}" viewBox="0 -40 480 {top + 56}" xmlns="http://www.w3.org/2000/svg">'
            f'<style>{STYLE}</style><rect class="back" x="0" y="-40" width="480" height="{top + 56}"/>'
            f'<text class="question" x="8" y="-20">{figure.question}</text>'
            f'<text x="8" y="-3">{figure.answer}</text>{inside}{"".join(parts)}</svg>\n')


STYLE = (
    ".back{fill:#fff}text{font:12px system-ui,sans-serif;fill:#5a5d66}.question{font-weight:700;fill:#1c1d20}"
    ".grid{stroke:#e3e4e8}.axis{stroke:#5a5d66}.line{fill:none;stroke-width:2;stroke-linejoin:round}"
    ".plain{stroke:#80838c;stroke-dasharray:6 4}.l1{stroke:#0067ac}.l2{stroke:#c95f00}.l3{stroke:#00805c}"
    ".both{stroke:#8a3ffc;stroke-dasharray:2 3}"
    "@media(prefers-color-scheme:dark){.back{fill:#1c1e23}text{fill:#a6a9b4}.question{fill:#ececf0}"
    ".grid{stroke:#32343c}.axis{stroke:#a6a9b4}.plain{stroke:#90939e}.l1{stroke:#62b4f0}.l2{stroke:#f2a654}"
    ".l3{stroke:#45cfa0}.both{stroke:#be95ff}}"
)


def carried(row: Row, page_bytes: float) -> str:
    """What the store of this fleet carries, as a line."""
    read, written = (mega * row.replicas / 1000 for mega in (row.read, row.written))
    return (f"{row.replicas:>8,} {row.local:>6} {row.routing:>8} {read:>9.2f} {written:>9.2f} "
            f"{read * 1e9 / page_bytes:>10,.0f} {written * 1e9 / page_bytes:>10,.0f}\n")


COLUMNS = (
    "replicas", "together", "local", "store", "routing", "computed", "here", "in store", "read", "written", "p50",
    "p99", "busiest",
)  # fmt: skip
WIDTHS = (8, 9, 6, 6, 8, 9, 5, 9, 5, 8, 6, 6, 8)


def shown(row: Row) -> str:
    """``row`` as a line of the table."""
    return _line((
        row.replicas, row.together, row.local, "yes" if row.store else "-", row.routing, f"{row.computed:.0%}",
        f"{row.local_hits:.0%}", f"{row.store_hits:.0%}", f"{row.read:.0f}", f"{row.written:.0f}", f"{row.p50:.2f}",
        f"{row.p99:.1f}", f"{row.busiest:.2f}",
    ))  # fmt: skip


def _line(cells: Sequence[object]) -> str:
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True)) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__.splitlines()[0])
    sizes = listed(integer(1))
    parser.add_argument("trace", help="a trace, as asynccache replay takes it")
    parser.add_argument("--replicas", type=sizes, default=(1, 8, 64), help="sizes of fleets (default: 1,8,64)")
    parser.add_argument("--local", type=sizes, default=(1000, 8000), help="blocks a replica (default: 1000,8000)")
    parser.add_argument("--together", type=integer(1), default=1, help="replicas of one machine, which share memory")
    parser.add_argument("--load", type=float, default=0.7, help="share of the time that is computed without a cache")
    parser.add_argument("--prefill", type=float, default=8000.0, help="tokens a second of a replica (default: 8000)")
    parser.add_argument("--bytes-per-token", type=integer(1), default=131072, help="KV of a token (default: 131072)")
    parser.add_argument("--read", type=float, default=3.0, help="GB/s of a replica from the store (default: 3)")
    parser.add_argument("--eviction", default="lru", help="policy of the replicas (default: lru)")
    parser.add_argument("--limit", type=integer(1), help="use the first N requests of the trace only")
    parser.add_argument("--sample", type=integer(1), default=64, help="replicas that are simulated (default: 64)")
    parser.add_argument("--routing", type=lambda text: text.split(","), default=ROUTINGS,
                        help="random, sticky and prefix, or some of them")
    parser.add_argument("--page", type=integer(1), default=64, help="tokens of a page in the store (default: 64)")
    parser.add_argument("--rows", help="draw and tell the rows that --json has printed into this file; no simulation")
    parser.add_argument("--svg", type=Path, metavar="FOLDER", help="draw plots into this folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of the table")
    asked = parser.parse_args(argv)
    if unknown := set(asked.routing) - set(ROUTINGS):
        parser.error(f"--routing: there is no {', '.join(sorted(unknown))}; there are {', '.join(ROUTINGS)}")
    if not asked.json:
        sys.stdout.write(_line(COLUMNS))
    found: list[Row] = []
    for row in rows(asked) if asked.rows is None else _written(asked.rows):
        sys.stdout.write(json.dumps(row._asdict()) + "\n" if asked.json else shown(row))
        sys.stdout.flush()
        found.append(row)
    page_bytes = asked.page * asked.bytes_per_token
    if not asked.json:
        sys.stdout.write(f"\nthe shared store: GB/s read and written, pages of {asked.page} tokens a second\n")
        sys.stdout.writelines(carried(row, page_bytes) for row in found if row.store)
    if asked.svg is not None:
        asked.svg.mkdir(parents=True, exist_ok=True)
        for figure in figures([row for row in found if row.together == 1], page_bytes):
            (asked.svg / f"{figure.name}.svg").write_text(drawing(figure))
    return 0


def _written(path: str) -> list[Row]:
    """The rows of a file, by size."""
    found = [Row(**json.loads(line)) for line in Path(path).read_text().splitlines()]
    return sorted(found, key=lambda row: (row.together, row.replicas, row.local, row.store, row.routing))


if __name__ == "__main__":
    sys.exit(main())
