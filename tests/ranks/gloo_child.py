"""One rank as a process of its own: connects, shakes hands, steps a toy ledger, and says what came of it.

Reads jobs from stdin, a line of JSON each, until there are no more; answers each with a line, and says once in between
that it is stepping. What is opened when is the same on all ranks, by the seed; how long it takes is not.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from random import Random
from typing import Any

import torch.distributed as dist
import uvloop

from asynccache.errors import ConfigError, RankDivergence, RankFailure
from asynccache.ranks import NEUTRAL, Chain, Frames, Progress, Steps, Topology
from asynccache.ranks.circle import Circle
from asynccache.ranks.gloo import GlooRanks, adopt, connect
from asynccache.ranks.handshake import shake_hands
from asynccache.ranks.progress import PENDING

POOLS = 3
PAGES = 8
FAILED, DONE = 1, 2
WARM = 10


@dataclass
class Job:
    """``odd``: at which step this rank makes a call of its own; ``pause``: seconds between steps at most; ``stall``:
    seconds more before every step from ``WARM`` on; ``adopt``: over groups that torch's own calls made.
    ``timeout``: None leaves it as it is by default."""

    meeting: str
    topology: tuple[int, int, int]
    rank: int
    steps: int
    seed: int = 0
    timeout: float | None = 3.0
    pause: float = 0.003
    stall: float = 0.0
    odd: int = -1
    adopt: bool = False
    uvloop: bool = False
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass
class Answer:
    """``at``: the machine's monotonic clock when stepping ended; ``closing``: how long closing took; ``lag``: the worst
    of the loop, in seconds, from the first step on; ``timeouts``: of each group, and of the calls in it."""

    rank: int
    error: str = ""
    text: str = ""
    at: float = 0.0
    closing: float = 0.0
    lag: float = 0.0
    messages: int = 0
    commits: int = 0
    digests: list[int] = field(default_factory=list)
    timeouts: list[list[float]] = field(default_factory=list)


class Toy:
    """A ledger whose transfers end here when a local clock says so."""

    def __init__(self, job: Job) -> None:
        self.chain = Chain()
        self.ledger: dict[int, Progress] = {}
        self.next = 1
        self.commits = 0
        self._job = job
        self._topology = Topology(*job.topology)
        self._random = Random(f"{job.seed}/{job.rank}")
        self._script = Random(f"script {job.seed}")
        self._work: set[asyncio.Task[None]] = set()

    def in_flight(self) -> Sequence[int]:
        return tuple(self.ledger)

    def local(self, op: int) -> Progress:
        return self.ledger[op]

    def decide(self, op: int, agreed: Progress) -> None:
        if agreed.status == PENDING:
            return
        assert self.ledger[op].status != PENDING, f"op {op} was decided while this rank is at it"
        del self.ledger[op]
        self.commits += 1
        self.chain.add(0, "decide", repr((op, agreed)).encode())

    def open_some(self, step: int) -> None:
        """The lockstep calls between two steps."""
        for _ in range(self._script.choice((0, 0, 0, 1, 2))):
            self._open(step)
        if step == self._job.odd:
            self.chain.add(step, "a call of its own", b"")
            self._open(step)

    def _open(self, step: int) -> None:
        op, self.next = self.next, self.next + 1
        stage = self._topology.place(self._job.rank).pp
        roles = (0 if pool % self._topology.pp == stage else NEUTRAL for pool in range(POOLS))
        self.ledger[op] = Progress(PENDING, 1, tuple(roles))
        self.chain.add(step, "open", op.to_bytes(8, "little"))
        task = asyncio.create_task(self._transfer(op))
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _transfer(self, op: int) -> None:
        await asyncio.sleep(self._random.random() * 0.02)
        pages = PAGES if self._random.random() < 0.9 else self._random.randrange(PAGES)
        counts = tuple(c if c == NEUTRAL else pages for c in self.ledger[op].counts)
        self.ledger[op] = Progress(DONE if pages == PAGES else FAILED, 1, counts)

    async def end(self) -> None:
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)


async def serve(job: Job) -> Answer:
    """Everything that a rank does, and how it ended."""
    answer = Answer(job.rank)
    try:
        ranks = await _connected(job)
    except (RankFailure, ConfigError) as error:
        return _failed(answer, error)
    answer.timeouts = [_timeouts(circle) for circle in ranks._circles.each()]
    try:
        await shake_hands(ranks.gather, {"page_size": 16, "topology": asdict(ranks.topology), **job.fields})
        await _stepping(job, ranks, answer)
    except (RankFailure, RankDivergence, ConfigError) as error:
        _failed(answer, error)
    began = time.monotonic()
    await ranks.aclose()
    answer.closing = time.monotonic() - began
    return answer


def _failed(answer: Answer, error: Exception) -> Answer:
    answer.error, answer.text = type(error).__name__, str(error)
    answer.at = time.monotonic()
    return answer


def _timeouts(circle: Circle) -> list[float]:
    calls = [circle._timeout, *(options.timeout.total_seconds() for options in (circle._lowest, circle._highest))]
    group: Any = circle._group
    return [*calls, group.options._timeout.total_seconds()] if circle.own else calls  # one of ours is made with it, too


def _given(job: Job) -> dict[str, Any]:
    return {} if job.timeout is None else {"timeout": job.timeout}


async def _connected(job: Job) -> GlooRanks:
    topology = Topology(*job.topology)
    if not job.adopt:
        return await connect(topology, job.rank, f"file://{job.meeting}", **_given(job), arrival=60)
    return await asyncio.to_thread(_adopted, job, topology)


def _adopted(job: Job, topology: Topology) -> GlooRanks:
    """As an engine would: its default group, then every group on every rank in one order."""
    patience = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{job.meeting}", rank=job.rank, world_size=topology.ranks, timeout=patience
    )
    mine: dict[str, Any] = {"tp": None, "cp": None, "pp": None}
    for name in mine:
        for rank in range(topology.ranks):
            place = topology.place(rank)
            if getattr(place, name) == 0:
                members = [topology.rank(place._replace(**{name: i})) for i in range(getattr(topology, name))]
                group = dist.new_group(members, timeout=patience)
                if job.rank in members:
                    mine[name] = group
    return adopt(dist.new_group(timeout=patience), **mine, **_given(job))


async def _stepping(job: Job, ranks: GlooRanks, answer: Answer) -> None:
    toy = Toy(job)
    frames = Frames(POOLS)
    links = ranks.links(frames.length)
    steps = Steps(toy, links, frames, credit=2 * ranks.topology.pp)
    reader = asyncio.create_task(steps.read_reports()) if links.below is not None else None
    ticker = asyncio.create_task(_tick(answer))
    try:
        await _step(job, toy, steps, answer)
        await steps.reports_in()
    finally:
        answer.at = time.monotonic()
        answer.messages, answer.commits = steps.messages, toy.commits
        for task in (ticker, reader):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        await toy.end()


async def _step(job: Job, toy: Toy, steps: Steps, answer: Answer) -> None:
    pauses = Random(f"pauses {job.seed}/{job.rank}")
    while steps.step_number < job.steps or toy.ledger:
        if steps.step_number == WARM:
            say({"stepping": job.rank})
        await asyncio.sleep(pauses.random() * job.pause + (job.stall if steps.step_number >= WARM else 0))
        if steps.step_number < job.steps:
            toy.open_some(steps.step_number)
        await steps.step()
        answer.digests.append(toy.chain.digest)


async def _tick(answer: Answer) -> None:
    """How late a timer of 1 ms is."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(0.001)
        answer.lag = max(answer.lag, time.monotonic() - before - 0.001)


def say(line: dict[str, Any]) -> None:
    """To whom the jobs come from."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Jobs, one after the other."""
    say({"ready": True})
    for line in sys.stdin:
        job = Job(**json.loads(line))
        answer = (uvloop.run if job.uvloop else asyncio.run)(serve(job))
        say({"answer": asdict(answer)})
        if job.adopt:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
