"""``asynccache bench ranks``: what agreement between ranks costs, over gloo on this machine.

Every topology gets processes of its own, one per rank, that step a ledger of nothing. *empty*: nothing is in flight.
*full*: as many operations as one frame holds, a sixteenth of which has moved since the last step. *bare*: an all-reduce
of the same size, issued from the same thread for the same coroutine, and *in its thread* what that thread says it took;
steps and bare all-reduces take turns one by one, so that both meet the same machine and peers that are as late. With
more processes than cores either is mostly the wait for a core. What a rank sends is counted where it leaves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from asynccache.errors import ConfigError, RankFailure
from asynccache.ranks import NEUTRAL, PENDING, Chain, Frames, Links, Progress, Steps, Topology
from asynccache.ranks.frames import WINDOW, Words
from asynccache.ranks.gloo import GlooGroup, GlooRanks, connect
from asynccache.ranks.lane import Lane
from asynccache.ranks.links import Group, Link

Figures = dict[str, Any]

TOPOLOGIES = ("tp2", "pp2", "tp2-pp2", "pp4")
POOLS = 4
GOAL_EMPTY_US = 10.0
GOAL_RATIO = 1.5
WARM = 50
EMPTY_STEPS = 20_000
LIMIT = 300.0
MOVING = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--topology", nargs="+", default=list(TOPOLOGIES), metavar="T", type=_checked,
                        help=f"such as tp2, pp4, tp2-cp2-pp2 (default: {' '.join(TOPOLOGIES)})")
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="steps per figure (default: %(default)s)")
    parser.add_argument("--pools", type=int, default=POOLS, metavar="N",
                        help="pools of the model, each a count per operation (default: %(default)s)")
    parser.add_argument("--quiet", action="store_true", help="print no table")


def _checked(name: str) -> str:
    try:
        parse(name)
    except (ConfigError, ValueError, TypeError):
        raise argparse.ArgumentTypeError(f"{name!r} is no topology; one is tp2-pp2") from None
    return name


def parse(name: str) -> Topology:
    """``tp2-pp2`` as a topology."""
    return Topology(**{part[:2]: int(part[2:]) for part in name.split("-")})


def run(args: argparse.Namespace) -> Figures:
    """Measure every topology, print the figures, return them."""
    wake = {name: round(loop(_wake_up()), 1) for name, loop in (("uvloop", uvloop.run), ("asyncio", asyncio.run))}
    found = {}
    for name in args.topology:
        found[name] = measure(name, args.steps, args.pools)
        if not args.quiet:
            _show(name, found[name])
    if not args.quiet:
        print("thread and back, µs: " + ", ".join(f"{name} {us}" for name, us in wake.items()), file=sys.stderr)
    return {"bench": "ranks", "topologies": found, "thread_and_back_us": wake,
            "goals": {"empty_us": GOAL_EMPTY_US, "ratio": GOAL_RATIO}}  # fmt: skip


def _show(name: str, figures: Figures) -> None:
    empty, full, bare, inside = (figures[key] for key in ("empty", "full", "bare", "bare_in_thread"))
    print(f"{name:<9} empty {empty['us']:.2f} µs, {empty['messages']} messages; full p50 {full['p50_us']:.0f} µs",
          file=sys.stderr)  # fmt: skip
    if bare is not None:
        print(f"{'':<9} bare all-reduce {bare['p50_us']:.0f} µs, {figures['ratio']:.2f} x; "
              f"in its thread {inside['p50_us']:.0f}, {figures['ratio_in_thread']:.2f} x", file=sys.stderr)  # fmt: skip
    for stage, sent in enumerate(figures["stages"]):
        print(f"{'':<9} stage {stage}, a step: {sent['reductions']:g} all-reduces, {sent['frames']:g} frames, "
              f"{sent['bytes']:,.0f} bytes", file=sys.stderr)  # fmt: skip


async def _wake_up(calls: int = 2000) -> float:
    """What a call of nothing in a lane takes, median in µs."""
    lane = Lane("asynccache-bench")
    taken = []
    for _ in range(calls):
        began = time.perf_counter()
        await lane.run(_nothing)
        taken.append(time.perf_counter() - began)
    lane.end()
    return _percentile(taken, 50)


def _nothing() -> None:
    """Called to learn what calling costs."""


def _percentile(seconds: Sequence[float], percent: int) -> float:
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] * 1e6


# the processes


def measure(name: str, steps: int, pools: int) -> Figures:
    """One process per rank; the figures of rank 0, and what each stage has sent."""
    topology = parse(name)
    with tempfile.TemporaryDirectory(prefix="asynccache-bench-") as folder:
        jobs = [{"topology": asdict(topology), "rank": rank, "steps": steps, "pools": pools,
                 "meeting": (Path(folder) / "meeting").as_uri()} for rank in range(topology.ranks)]  # fmt: skip
        answers = _all([[sys.executable, "-m", "asynccache.cli.bench_ranks", json.dumps(job)] for job in jobs])
    column = topology.tp * topology.cp
    return {**answers[0]["figures"], "ranks": topology.ranks,
            "stages": [answers[stage * column]["sent"] for stage in range(topology.pp)]}  # fmt: skip


def _all(commands: Sequence[Sequence[str]]) -> list[Any]:
    """What each process prints."""
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for command in commands]
    try:
        ended = [(process, *process.communicate(timeout=LIMIT)) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, _, errors in ended:
        if process.returncode:
            raise RankFailure(f"a rank of the benchmark ended with {process.returncode}: {errors[-500:]}")
    return [json.loads(output) for _, output, _ in ended]


async def serve(topology: Topology, rank: int, meeting: str, steps: int, pools: int) -> Figures:
    """One rank: the figures, and what it sent per step."""
    ranks = await connect(topology, rank, meeting)
    try:
        return await Rank(ranks, pools).measure(steps)
    finally:
        await ranks.aclose()


# one rank


class Counted:
    """A group and a link that count what leaves."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """From here on."""
        self.reductions = 0
        self.frames = 0
        self.bytes = 0

    def links(self, links: Links) -> Links:
        """The same, counted."""
        link = partial(_CountedLink, self)
        return Links(
            [_CountedGroup(self, group) for group in links.groups],
            None if links.above is None else link(links.above),
            None if links.below is None else link(links.below),
        )

    def per_step(self, steps: int) -> Figures:
        """The means."""
        return {name: getattr(self, name) / steps for name in ("reductions", "frames", "bytes")}


class _CountedGroup:
    def __init__(self, counts: Counted, group: Group) -> None:
        self._counts = counts
        self._group = group

    async def minimum(self, words: Words) -> Words:
        self._counts.reductions += 1
        self._counts.bytes += words.nbytes
        return await self._group.minimum(words)


class _CountedLink:
    def __init__(self, counts: Counted, link: Link) -> None:
        self._counts = counts
        self._link = link
        self.receive = link.receive

    def send(self, words: Words) -> None:
        self._counts.frames += 1
        self._counts.bytes += words.nbytes
        self._link.send(words)


class Ledger:
    """A replica in which operations go on, each ``MOVING``th of them from one step to the next, and never end."""

    def __init__(self, pools: int) -> None:
        self.chain = Chain()
        self._pools = pools
        self._moves = 0
        self._progress: dict[int, Progress] = {}

    def begin(self, operations: int) -> None:
        """So many."""
        self._progress = {op: self._with(0) for op in range(1, operations + 1)}

    def move(self) -> None:
        """What I/O has done since the last step."""
        self._moves += 1
        for op in range(1 + self._moves % MOVING, len(self._progress) + 1, MOVING):
            self._progress[op] = self._with(self._moves)

    def _with(self, pages: int) -> Progress:
        return Progress(PENDING, 1, (pages,) * (self._pools - 1) + (NEUTRAL,))

    def in_flight(self) -> Sequence[int]:
        """All of them, every time."""
        return tuple(self._progress)

    def local(self, op: int) -> Progress:
        """As far as it has come."""
        return self._progress[op]

    def decide(self, op: int, agreed: Progress) -> None:
        """Nothing is ever decided."""


class Rank:
    """Steps over counted links."""

    def __init__(self, ranks: GlooRanks, pools: int) -> None:
        self.frames = Frames(pools)
        self.plain = ranks.links(self.frames.length)
        self.counts = Counted()
        self.ledger = Ledger(pools)
        links = self.counts.links(self.plain)
        self.steps = Steps(self.ledger, links, self.frames, credit=2 * ranks.topology.pp)

    async def measure(self, steps: int) -> Figures:
        """Empty; then full, and bare in turns with it."""
        reader = asyncio.create_task(self.steps.read_reports()) if self.plain.below is not None else None
        try:
            empty = await self._empty()
            await self._turns(WARM)
            self.counts.reset()
            full, bare, inside = await self._turns(steps)
            await self.steps.reports_in()
        finally:
            if reader is not None:
                reader.cancel()
                with suppress(asyncio.CancelledError):
                    await reader
        figures: Figures = {"empty": empty, "full": _quantiles(full), "bare": None, "bare_in_thread": None,
                            "ratio": None, "ratio_in_thread": None, "frame_bytes": self.frames.length * 8}  # fmt: skip
        if self.plain.groups:
            figures |= {"bare": _quantiles(bare), "bare_in_thread": _quantiles(inside),
                        "ratio": _ratio(full, bare), "ratio_in_thread": _ratio(full, inside)}  # fmt: skip
        return {"figures": figures, "sent": self.counts.per_step(steps)}

    async def _empty(self) -> Figures:
        began = time.perf_counter()
        for _ in range(EMPTY_STEPS):
            await self.steps.step()
        taken = (time.perf_counter() - began) / EMPTY_STEPS * 1e6
        return {"us": round(taken, 3), "messages": self.counts.reductions + self.counts.frames}

    async def _turns(self, steps: int) -> tuple[list[float], list[float], list[float]]:
        """A step, a bare all-reduce, and so on: seconds of either, and of the latter in its thread."""
        self.ledger.begin(WINDOW)
        full, bare, inside = [], [], []
        for _ in range(steps):
            self.ledger.move()
            began = time.perf_counter()
            await self.steps.step()
            full.append(time.perf_counter() - began)
            began = time.perf_counter()
            inside.append(await self._bare())
            bare.append(time.perf_counter() - began)
        return full, bare, inside

    async def _bare(self) -> float:
        """An all-reduce over every group of the column, in the thread in which steps do theirs: seconds there."""
        taken = 0.0
        for group in self.plain.groups:
            assert isinstance(group, GlooGroup)
            words = np.ones(self.frames.length, np.int64)
            taken += await group.lane.run(partial(_time_of, partial(group.circle.minimum, words)))
        return taken


def _time_of(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _ratio(one: Sequence[float], other: Sequence[float]) -> float:
    return round(_percentile(one, 50) / _percentile(other, 50), 3)


def _quantiles(seconds: Sequence[float]) -> Figures:
    return {f"p{percent}_us": round(_percentile(seconds, percent), 1) for percent in (50, 90, 99)}


def main() -> None:
    """One rank of a benchmark, as its command line says."""
    job = json.loads(sys.argv[1])
    topology = Topology(**job.pop("topology"))
    print(json.dumps(uvloop.run(serve(topology, **job))))


if __name__ == "__main__":
    main()
