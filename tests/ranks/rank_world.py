"""A world of ranks that agree on transfers of nothing: who opens what is the same everywhere, when it ends is not.

One ``Toy`` per rank is the replica; ``RankWorld`` sees all of them and holds the laws against them after every step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from random import Random

from asynccache.errors import RankDivergence, RankFailure
from asynccache.ranks import NEUTRAL, Chain, Frames, Progress, Steps, Topology
from asynccache.ranks.frames import Health
from asynccache.ranks.progress import PENDING, advances, fold
from asynccache.testing.simulated_loop import SimulatedLoop
from asynccache.testing.simulated_ranks import Fate, SimulatedRanks

POOLS = 3
WINDOW = 4
TIMEOUT = 3.0
FAILED, DONE = 1, 2
PAGES = 8


class Toy:
    """A ledger whose transfers end here when a local clock says so; ``commits``: what was decided, at which step."""

    def __init__(self, world: RankWorld, rank: int) -> None:
        self.chain = Chain()
        self.world = world
        self.rank = rank
        self.stage = world.topology.place(rank).pp
        self.ledger: dict[int, Progress] = {}
        self.final_at: dict[int, int] = {}
        self.next = 1
        self.commits: list[tuple[int, int, Progress]] = []
        self.random = Random(f"{world.seed}/{rank}")
        self.work: dict[int, asyncio.Task[None]] = {}
        self.steps: Steps

    def in_flight(self) -> Sequence[int]:
        return tuple(self.ledger)

    def local(self, op: int) -> Progress:
        return self.ledger[op]

    def open(self, step: int) -> None:
        """A lockstep call: begin a transfer. What is here of a pool depends on the stage."""
        op, self.next = self.next, self.next + 1
        roles = [0 if pool % self.world.topology.pp == self.stage else NEUTRAL for pool in range(POOLS)]
        self.ledger[op] = Progress(PENDING, 1, tuple(roles))
        self.chain.add(step, "open", op.to_bytes(8, "little"))
        self.work[op] = asyncio.get_running_loop().create_task(self._work(op))

    async def _work(self, op: int) -> None:
        for page in range(1, PAGES + 1):
            await asyncio.sleep(self.random.random() * 0.003)
            fails = self.random.random() < 0.02
            counts = tuple(c if c == NEUTRAL else page - fails for c in self.ledger[op].counts)
            status = FAILED if fails else DONE if page == PAGES else PENDING
            new = Progress(status, 1, counts)
            assert advances(self.ledger[op], new)
            self.ledger[op] = new
            if status != PENDING:
                self.final_at[op] = self.steps.step_number
            if fails:
                return

    def decide(self, op: int, agreed: Progress) -> None:
        if agreed.status == PENDING:
            return
        step = self.steps.step_number
        self.world.check_decision(op, agreed)
        self.world.check_staleness(op, step)
        self.commits.append((step, op, agreed))
        self.chain.add(step, "decide", repr((op, agreed)).encode())
        del self.ledger[op]


class RankWorld:
    """``length``: steps with new work now and then; after them ranks step until nothing is in flight. ``idle``: there
    are stretches longer than the time-out in which nothing is."""

    def __init__(
        self, loop: SimulatedLoop, seed: int, topology: Topology, *, length: int = 30, idle: bool = True
    ) -> None:
        self.loop = loop
        self.seed = seed
        self.topology = topology
        self.length = length
        self.net = SimulatedRanks(topology, Random(f"net {seed}"), timeout=TIMEOUT)
        self.idle = idle
        self.toys = [Toy(self, rank) for rank in range(topology.ranks)]
        self.digests: dict[int, int] = {}
        self.finals: dict[int, Progress] = {}
        self.errors: dict[int, Exception] = {}
        self.sizes: dict[int, int] = {}
        self.stalest = 0
        self.credit = 2 * topology.pp
        for rank, toy in enumerate(self.toys):
            toy.steps = Steps(toy, self.net.links(rank), Frames(POOLS, WINDOW), credit=self.credit)

    def check_decision(self, op: int, agreed: Progress) -> None:
        """Nobody may still touch a buffer, and what was decided is what all have, no more and no less."""
        assert agreed == self.finals.setdefault(op, agreed), f"op {op} was decided twice, and differently"
        for toy in self.toys:
            if self.net.fates[toy.rank] is not Fate.ALIVE:
                return
            assert op < toy.next, f"op {op} was decided before rank {toy.rank} began it"
            if op in toy.ledger:
                assert toy.ledger[op].status != PENDING, f"op {op} was decided while rank {toy.rank} is at it"
        if all(op in toy.ledger for toy in self.toys):
            whole = fold([toy.ledger[op] for toy in self.toys])
            assert agreed == whole, f"op {op}: decided {agreed}, all have {whole}"

    def check_staleness(self, op: int, step: int) -> None:
        """A decision comes no later than the next step after the last rank was through, and ``credit`` steps for each
        stage behind the first, and one; where frames do not tell of everything, each stage may take a round more."""
        if all(op in toy.final_at for toy in self.toys):
            told = min(step, max(toy.final_at[op] + 1 for toy in self.toys))
            stages = self.topology.pp
            rounds = max(-(-self.sizes.get(k, 0) // WINDOW) for k in range(told, step + 1))
            bound = (stages - 1) * self.credit + 1 + (stages * rounds if rounds > 1 else 0)
            late = step - told
            self.stalest = max(self.stalest, late if rounds == 1 else 0)
            assert late <= bound, f"op {op}: all were through at step {told}, decided at {step}, {bound} are allowed"

    async def run(self) -> None:
        """Every rank in tasks of its own, to the end."""
        tasks = [self.loop.create_task(self._rank(toy), name=f"rank {toy.rank}") for toy in self.toys]
        try:
            await self._ended(tasks)
        finally:
            for toy in self.toys:
                for task in toy.work.values():
                    task.cancel()
            await asyncio.gather(*(t for toy in self.toys for t in toy.work.values()), return_exceptions=True)

    async def _ended(self, tasks: list[asyncio.Task[None]]) -> None:
        """Whoever is gone or hangs comes no further, and is not waited for."""
        while running := [task for task in tasks if not task.done()]:
            alive = [task for task in running if self.net.fates[tasks.index(task)] is Fate.ALIVE]
            if not alive:
                for task in running:
                    task.cancel()
            await asyncio.wait(alive or running, timeout=0.1)
            for task in tasks:
                if task.done() and not task.cancelled():
                    task.result()

    async def _rank(self, toy: Toy) -> None:
        reader = None
        if self.topology.below(self.topology.place(toy.rank)) is not None:
            reader = self.loop.create_task(toy.steps.read_reports())
        try:
            await self._steps(toy)
        except (RankFailure, RankDivergence) as error:
            self.errors[toy.rank] = error
        finally:
            if reader is not None:
                reader.cancel()
                with suppress(asyncio.CancelledError):
                    await reader

    async def _steps(self, toy: Toy) -> None:
        script = Random(f"script {self.seed}")
        while toy.steps.step_number < self.length or toy.ledger:
            if self.net.fates[toy.rank] is not Fate.ALIVE:
                return
            await asyncio.sleep(toy.random.random() * 0.004)
            if self.idle and not toy.ledger and script.random() < 0.1:
                await asyncio.sleep(2 * self.net.timeout)  # nothing in flight: no message, and nobody waits for one
            for _ in range(script.choice((0, 0, 0, 1, 6)) if toy.steps.step_number < self.length else 0):
                self.act(toy)
            self.sizes[toy.steps.step_number + 1] = len(toy.ledger)
            await toy.steps.step()
            step = toy.steps.step_number
            if self.net.fates[toy.rank] is Fate.ALIVE:
                assert self.digests.setdefault(step, toy.chain.digest) == toy.chain.digest, f"rank {toy.rank}, {step}"
                assert toy.steps.due <= self.credit or toy.steps.health is not Health.OK, f"{toy.steps.due} are due"

    def act(self, toy: Toy) -> None:
        """One lockstep call; tests override it for a rank that does something else."""
        toy.open(toy.steps.step_number)
