"""Worlds of schedulers in lockstep: one per rank, on caches in lockstep, with callers at rank 0 only.

One seed decides everything. What differs by rank: how long copies, reads, the model and the orders take, and which of
them fail. Must hold on all ranks, step for step: who holds pages and how far each is, who waits, who was retracted,
what is computed, the cache's digest; and the tokens of every request, and the right bytes in every page that is read.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from asynccache_shim import Limits, Request, Sampling, Scheduler, Settings
from asynccache_shim.orders import Order

from asynccache import AsyncCache, CacheConfig, RankDivergence, RankFailure, SlidingWindow
from asynccache.core import audit
from asynccache.memory.faults import Faults
from asynccache.ranks import Topology
from asynccache.storage import PageKey
from asynccache.testing.simulated_backend import Hostility, SimulatedBackend
from asynccache.testing.simulated_device import SimulatedDevice
from asynccache.testing.simulated_loop import SimulatedLoop
from asynccache.testing.simulated_ranks import Fate, SimulatedRanks
from tests.shim.shim_kit import PAGE, PatternModel, config, continuation

TIMEOUT = 30.0
REQUESTS = 10


class SimulatedOrders:
    """``Orders`` of one rank of a ``World``, in one process: late, in order, and silent once a rank is gone."""

    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.leads = rank == 0
        self.gather = world.net.member(rank).gather
        self.left = False
        self._flying: deque[bytes] = deque()
        self._arrived: deque[bytes] = deque()
        self._last = 0.0
        self._failure: RankFailure | None = None
        self._lost: Callable[[RankFailure], None] | None = None
        self._news = asyncio.Event()

    def watch(self, lost: Callable[[RankFailure], None]) -> None:
        self._lost = lost

    def send(self, order: bytes) -> None:
        for other in self.world.orders[1:]:
            other.fly(order)

    def fly(self, order: bytes) -> None:
        loop = self.world.loop
        self._last = max(self._last, loop.time() + self.world.net.delay())
        self._flying.append(order)
        loop.call_at(self._last, self._arrive)

    def _arrive(self) -> None:
        self._arrived.append(self._flying.popleft())
        self._news.set()

    async def receive(self) -> bytes:
        await self.world.net.stand(self.rank)
        while not self._arrived:
            if self._failure is not None:
                raise self._failure
            self._news.clear()
            await self._news.wait()
        return self._arrived.popleft()

    def lose(self, reason: str) -> None:
        """Another rank is gone."""
        if self._failure is None and not self.left:
            self._failure = RankFailure(reason)
            if self._lost is not None:
                self._lost(self._failure)
            self._news.set()

    async def aclose(self, *, well: bool) -> None:
        self.left = True
        if not well and self.world.net.fates[self.rank] is Fate.ALIVE:
            self.world.gone(self.rank, self.world.net.delay())


@dataclass(frozen=True, slots=True)
class Ask:
    """``prompt`` is a walk through segments that others share; ``after``: seconds since the one before."""

    tokens: tuple[int, ...]
    new: int
    priority: int
    extra_key: str | None
    after: float
    abort: float | None


@dataclass(slots=True)
class Report:
    """``log``: by number of step, what the first rank to take it saw. ``idle``: steps without a batch."""

    log: dict[tuple[int, int], Any] = field(default_factory=dict)
    outputs: dict[tuple[int, int], tuple[Any, ...]] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    errors: dict[int, BaseException] = field(default_factory=dict)
    retractions: int = 0
    idle: int = 0
    steps: int = 0
    told: float = 0.0


class Watched(Scheduler):
    """Says after each step what the world compares."""

    def __init__(self, member: Member, orders: SimulatedOrders) -> None:
        super().__init__(member.cache, member.model, member.settings, orders=orders)
        self.member = member
        self.requests: dict[int, Request] = {}
        self.taken = 0
        self.begun = asyncio.Event()

    def _obey(self, order: Order) -> None:
        self.requests |= dict(order.arrivals)
        super()._obey(order)

    async def step(self) -> bool:
        self.begun.set()
        computed = await super().step()
        self.taken += 1
        if self.failure is None:  # who has heard that a rank is gone ends its requests, whatever the others do
            self.member.compare(self.taken, self._board, computed)
        return computed


class Member:
    """One rank."""

    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        self.rank = rank
        place = world.topology.place(rank)
        self.stage = place.pp
        self.settings = world.settings
        faults = replace(world.faults, seed=world.seed + rank)
        self.device = SimulatedDevice(seed=world.seed + rank, latency=(0.0, world.latency), faults=faults)
        self.backend = (
            SimulatedBackend(Random(f"{world.seed}/backend {rank}"), world.hostility, world.pages, shared=True)
            if world.has_store else None
        )  # fmt: skip
        self.cache: AsyncCache
        self.model: PatternModel
        self.scheduler: Watched

    async def live(self, life: int) -> None:
        """One cache and scheduler from open to close."""
        world = self.world
        own = _on_stage(world.config, self.stage)
        window = max((c.window for c in own.components if isinstance(c, SlidingWindow)), default=0)
        ranks = world.net.member(self.rank)
        self.cache = AsyncCache(own, device=self.device, storage=self.backend, ranks=ranks)
        try:
            async with self.cache:
                self.model = PatternModel(self.cache, window, salt=self.rank + 1)
                self.scheduler = Watched(self, world.orders[self.rank])
                async with self.scheduler:
                    if self.rank == 0:
                        await world.callers(self.scheduler, life)
                    else:
                        await self.scheduler.finished()
                self._ended(life)
                await self.cache.step()  # from here on this task is the one that steps
                await self.cache.flush()
                audit.check(self.cache.core)
                assert not self.cache.core.active_leases()
                assert not self.cache.core.active_fetches()
        except (RankFailure, RankDivergence) as error:
            world.report.errors[self.rank] = error
            audit.check(self.cache.core)
            assert not self.cache.core.active_leases()

    def _ended(self, life: int) -> None:
        for number, request in self.scheduler.requests.items():
            assert request.finish is not None
            said = (request.output, request.finish, request.hits, request.retractions, request.terms.sampling)
            first = self.world.report.outputs.setdefault((life, number), said)
            assert first == said, f"rank {self.rank}, request {number}: {said}, elsewhere {first}"

    def compare(self, taken: int, board: Any, computed: bool) -> None:
        report = self.world.report
        lockstep = self.cache._opened().lockstep
        assert lockstep is not None

        def of(jobs: dict[int, Any]) -> list[Any]:
            return [
                (j.id, j.request.state, j.computed, j.length, j.reserved, j.request.retractions, j.pages.tolist())
                for j in jobs.values()
            ]  # fmt: skip

        batch = [(w.request_id, w.start, w.stop, w.pages.tolist()) for w in self.model.batches[-1].works] \
            if computed else None  # fmt: skip
        seen = (of(board.held), of(board.waiting), board.freed, batch, lockstep.chain.digest)
        first = report.log.setdefault((self.world.life, taken), seen)
        assert first == seen, f"rank {self.rank}, step {taken}: {seen}, elsewhere {first}"
        if taken % 8 == 0:
            audit.check(self.cache.core)
        if self.rank == 0:
            report.steps += 1
            report.idle += not computed

    async def die(self, life: asyncio.Task[None]) -> None:
        """Its tasks are a process that is gone: they end, wherever they stand."""
        for task in (self.scheduler._loop, life):
            assert task is not None
            task.cancel()
            await asyncio.wait([task])
        await self.cache.aclose()

    async def close(self) -> None:
        if self.backend is not None:
            await self.backend.aclose()
            assert self.backend.holding == 0
        await self.device.aclose()


class World:
    """``config`` and the like replace what the seed draws."""

    def __init__(self, loop: SimulatedLoop, seed: int, topology: Topology, **drawn: Any) -> None:
        random = Random(f"{seed}/shim")
        self.loop = loop
        self.seed = seed
        self.topology = topology
        self.life = 0
        self.net = SimulatedRanks(topology, Random(f"{seed}/net"), timeout=TIMEOUT)
        self.config = draw_config(seed)
        self.has_store = random.random() < 0.8
        running = random.randint(1, 5)
        self.settings = Settings(
            step_tokens=running + PAGE + random.choice((0, 3, 8, 40)), max_running=running, checkpoint_every=2 * PAGE,
            load_attempts=1000,
        )  # fmt: skip
        self.latency = random.choice((0.0, 1e-4, 1e-3, 1e-2))
        calm = random.random() < 0.3
        self.faults = Faults() if calm else Faults(delayed=0.1, failing=random.choice((0.0, 0.05, 0.2)))
        self.hostility = Hostility(delay=0.001) if calm else Hostility(
            delay=random.choice((0.0, 0.001, 0.05)), failed=random.choice((0.0, 0.1)), wrong=random.choice((0.0, 0.1)),
            unavailable=random.choice((0.0, 0.1)), vanished=random.choice((0.0, 0.05)),
        )  # fmt: skip
        self.asks: Sequence[Ask] = draw_asks(seed, self.config)
        for name, value in drawn.items():
            assert hasattr(self, name)
            setattr(self, name, value)
        self.pages: dict[PageKey, tuple[bytes, bytes]] = {}
        self.report = Report()
        self.orders = [SimulatedOrders(self, rank) for rank in range(topology.ranks)]
        self.members = [Member(self, rank) for rank in range(topology.ranks)]

    async def run(self) -> Report:
        """To the end; with a store a second time, which finds what the first one stored."""
        for life in range(2 if self.has_store else 1):
            self.life = life
            await asyncio.gather(*(member.live(life) for member in self.members))
            self.renew()
        for member in self.members:
            await member.close()
        return self.report

    def renew(self) -> None:
        """New connections."""
        self.net.reconnect()
        self.orders = [SimulatedOrders(self, rank) for rank in range(self.topology.ranks)]

    async def lose(self, victim: int, fate: Fate, after: float) -> Report:
        """``victim`` is killed or hangs. All others are told and end; then a new group begins."""
        lives = [self.loop.create_task(member.live(0)) for member in self.members]
        await asyncio.sleep(after)
        struck = self.loop.time()
        if fate is Fate.KILLED:
            self.net.kill(victim)
            self.gone(victim, self.net.delay())
        else:
            self.net.hang(victim)
            self.gone(victim, TIMEOUT)
        await asyncio.gather(*(life for rank, life in enumerate(lives) if rank != victim))
        self.report.told = self.loop.time() - struck
        await self.members[victim].die(lives[victim])
        self.report.errors.pop(victim, None)
        self.net.fates[victim] = Fate.ALIVE
        self.renew()
        self.life = 1
        await asyncio.gather(*(member.live(1) for member in self.members))
        for member in self.members:
            await member.close()
        return self.report

    def gone(self, rank: int, after: float) -> None:
        """The others hear it in so many seconds; rank 0 only of all, and all of rank 0, which tells the rest."""
        others = self.orders[1:] if rank == 0 else [self.orders[0]]
        for other in others:
            self.loop.call_later(after, other.lose, f"rank {rank} is gone")

    async def callers(self, scheduler: Scheduler, life: int) -> None:
        """Every request, and what must come of it."""
        try:
            async with asyncio.TaskGroup() as group:
                for ask in self.asks:
                    await asyncio.sleep(ask.after)
                    group.create_task(self._one(scheduler, ask))
        except* (RankFailure, RankDivergence) as errors:
            raise errors.exceptions[0] from None

    async def _one(self, scheduler: Scheduler, ask: Ask) -> None:
        tokens = list(ask.tokens)
        request = Request(
            tokens, Limits(ask.new), priority=ask.priority, extra_key=ask.extra_key, sampling=Sampling(0.5)
        )  # fmt: skip
        if ask.abort is not None:
            self.loop.call_later(ask.abort, request.abort)
        scheduler.submit(request)
        output = await request.done()
        expected = continuation(tokens, ask.new)
        assert output == expected if ask.abort is None else output == expected[: len(output)]
        assert request.finish is not None
        self.report.ends[request.finish.value] += 1
        self.report.retractions += request.retractions
        for name in ("device", "host", "storage") if request.hits else ():
            self.report.hits[name] += getattr(request.hits, name)


def draw_config(seed: int) -> CacheConfig:
    """The pools and policies of the world of ``seed``."""
    random = Random(f"{seed}/config")
    full = random.randint(8, 24)
    window = random.randint(1, 4 * PAGE)
    least = -(-window // PAGE) + 2
    swa = random.choice((0, 0, least + random.randint(0, 2), least + random.randint(0, 20)))
    return config(
        full, random.choice((full // 2, 4 * full)), swa=swa, window=window, mamba=random.choice((0, 0, 2, 6)),
        write_policy=random.choice(("write_through", "write_back", "write_through_selective")),
        prefetch_policy=random.choice(("best_effort", "wait_complete", "timeout")),
        prefetch_timeout_base=0.05, prefetch_quota=random.choice((0.2, 1.0)), close_deadline=60.0,
    )  # fmt: skip


def draw_asks(seed: int, config: CacheConfig | None = None) -> list[Ask]:
    """What callers want in the world of ``seed``, in its pools or in others."""
    random = Random(f"{seed}/asks")
    return [_draw_ask(random, config or draw_config(seed)) for _ in range(REQUESTS)]


def _draw_ask(random: Random, config: CacheConfig) -> Ask:
    full = config.pools()[0].device_pages * PAGE
    new = random.randint(1, 5 * PAGE)
    tokens: list[int] = []
    place = 1
    for _ in range(random.randint(1, 4)):
        place = 2 * place + (random.random() < 0.2)
        tokens += [place * 1000 + i for i in range(random.choice((2, 3)) * PAGE - 1)]
    tokens = tokens[: max(1, full - new)]
    return Ask(
        tuple(tokens), new, random.choice((0, 0, 0, 1)), random.choice((None, None, "tenant")),
        random.choice((0.0, 0.0, 0.001, 0.02, 0.2)), random.random() * 0.1 if random.random() < 0.15 else None,
    )  # fmt: skip


def _on_stage(config: CacheConfig, stage: int) -> CacheConfig:
    """With the layers of this pipeline stage."""

    def mine(part: Any) -> Any:
        return replace(part, covers=tuple(range(stage * part.layers, (stage + 1) * part.layers)))

    return replace(config, components=tuple(map(mine, config.components)))
