"""Worlds of a scheduler whose model has a shard on each of several ranks, over simulated links.

One seed decides everything: the pools, who asks for what, how long copies, reads, models and links take, and which
copies and reads fail on which rank. In every world there must be: the right tokens for every request, the right bytes
in every page that any shard reads, and the same batches on every rank in the same order. Each commit and release must
name a batch that was sent.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from asynccache_shim import Batch, Limits, Request, Sampling, Scheduler, SchedulerConfig, follow
from asynccache_shim.board import ScheduledRequest
from msgspec import structs

from asynccache import AsyncCache, CacheConfig, ConfigError, Lease, RankFailure, SlidingWindow
from asynccache.core import audit
from asynccache.memory.host_copies import Faults
from asynccache.runtime.lease import LeaseState
from asynccache.storage import PageKey
from asynccache.worker import Topology
from asynccache.worker.local import Storage
from tests.shim.shim_kit import LAYERS, PAGE, PatternModel, config, continuation, plain
from tests.simulated.backend import Hostility, SimulatedBackend
from tests.simulated.device import SimulatedDevice
from tests.simulated.links import SimulatedGroup
from tests.simulated.loop import SimulatedLoop

TIMEOUT = 30.0
REQUESTS = 10


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that a caller makes. ``tokens``: a walk through segments that others share. ``after``: seconds since
    the request before; ``abort``: seconds until it is aborted, None: never."""

    tokens: tuple[int, ...]
    new: int
    priority: int
    namespace: str | None
    after: float
    abort: float | None


@dataclass(slots=True)
class Report:
    """The results of a world. ``ends``: how many requests ended in each way. ``errors``: the errors that ended ranks.
    ``named``, ``unnamed``: commits and releases with and without a batch."""

    outputs: list[list[int]] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    errors: dict[int, BaseException] = field(default_factory=dict)
    failures: list[BaseException] = field(default_factory=list)
    named: int = 0
    unnamed: int = 0
    retractions: int = 0


class ShardModel(PatternModel):
    """One rank's shard, which keeps what it was handed. ``fails``: the forwards, counted from 0, that raise."""

    def __init__(self, pools: Any, window: int, rank: int) -> None:
        super().__init__(pools, window, salt=rank + 1)
        self.handed: list[Any] = []
        self.fails: Callable[[int], bool] = lambda _: False

    def forward(self, batch: Batch) -> list[int]:
        self.handed.append(plain(batch))
        if self.fails(len(self.handed) - 1):
            raise OSError("out of memory")
        return super().forward(batch)


class World:
    """One world. ``drawn`` replaces attributes that the seed draws. Devices and stores outlive a group, as machines
    do."""

    def __init__(self, loop: SimulatedLoop, seed: int, topology: Topology, **drawn: Any) -> None:
        random = Random(f"{seed}/shim")
        self.loop = loop
        self.seed = seed
        self.topology = topology
        self.config = draw_config(seed)
        self.has_store = random.random() < 0.8
        running = random.randint(1, 5)
        self.settings = SchedulerConfig(
            step_tokens=running + PAGE + random.choice((0, 3, 8, 40)), max_running=running, checkpoint_every=2 * PAGE,
            load_attempts=1000,
        )  # fmt: skip
        self.latency = random.choice((0.0, 1e-4, 1e-3, 1e-2))
        self.delay = random.choice((0.0, 1e-4, 1e-3, 1e-2))
        calm = random.random() < 0.3
        self.faults = Faults() if calm else Faults(delayed=0.1, failing=random.choice((0.0, 0.05, 0.2)))
        self.hostility = Hostility(delay=0.001) if calm else Hostility(
            delay=random.choice((0.0, 0.001, 0.05)), failed=random.choice((0.0, 0.1)), wrong=random.choice((0.0, 0.1)),
            unavailable=random.choice((0.0, 0.1)), vanished=random.choice((0.0, 0.05)),
        )  # fmt: skip
        self.asks: Sequence[Ask] = draw_asks(seed, self.config)
        self.fails: dict[int, Callable[[int], bool]] = {}
        for name, value in drawn.items():
            assert hasattr(self, name)
            setattr(self, name, value)
        self.stored: dict[int, dict[PageKey, tuple[bytes, bytes]]] = {rank: {} for rank in range(topology.ranks)}
        self.report = Report()
        self.group: SimulatedGroup
        self.cache: AsyncCache
        self.scheduler: Scheduler
        self.models: dict[int, ShardModel] = {}
        self.followers: dict[int, asyncio.Task[None]] = {}
        self.silent: set[int] = set()
        self._lives = 0

    async def run(self) -> Report:
        """Run the world to its end; with a store a second time, on what was stored the first time."""
        for _ in range(2 if self.has_store else 1):
            await self.live(self.callers)
            assert not self.report.errors
            self._alike()
        return self.report

    async def live(self, callers: Callable[[], Any]) -> None:
        """One group from open to close, which does what ``callers`` says; how it ended is in the report."""
        self._lives += 1
        async with AsyncExitStack() as stack:
            devices, backends = self._machines(stack)
            self.group = SimulatedGroup(
                Random(f"{self.seed}/links {self._lives}"), self.topology, delay=self.delay, timeout=TIMEOUT,
                devices=devices, shards={rank: self._shard(rank) for rank in devices},
                locates={rank: _located(backend) for rank, backend in backends.items()},
            )  # fmt: skip
            self.followers = {rank: self.loop.create_task(self._follow(rank)) for rank in self.group.processes}
            own = self.config
            if self.has_store:
                own = structs.replace(own, storage="simulated:{rank}")
            self.cache = AsyncCache(own, device=devices[0], workers=self.group.workers)
            self.cache._given.locate = _located(backends.get(0))
            try:
                await self._lead(callers)
            except RankFailure as error:
                self.report.errors[0] = error
            finally:
                for rank in self.silent:  # a process that hears nothing is killed in the end
                    self.followers[rank].cancel()
                    self.group.processes[rank].task.cancel()
                await asyncio.gather(*self.followers.values(), return_exceptions=True)
                assert all(task.cancelled() or task.exception() is None for task in self.followers.values())
                await self.group.ended()  # a process that has lost the head lets its stores' calls finish
                await self.group.aclose()
                audit.check(self.cache.core)
                assert not self.cache.core.active_leases()

    async def _lead(self, callers: Callable[[], Any]) -> None:
        async with self.cache:
            assert self.cache.worker is not None
            self.models[0] = self._model(self.cache.worker, 0)
            async with Scheduler(self.cache, self.models[0], self.settings) as scheduler:
                self.scheduler = scheduler
                await callers()
            await self.cache.flush()
            assert not self.cache.core.active_fetches()

    async def _follow(self, rank: int) -> None:
        process = self.group.processes[rank]
        await process.opened.wait()
        if process.failure is not None:
            self.report.errors[rank] = process.failure
            return
        self.models[rank] = self._model(process.face, rank)
        try:
            await follow(process.face, self.models[rank])
        except (RankFailure, ConfigError) as error:
            self.report.errors[rank] = error
            process.kill()

    def _model(self, worker: Any, rank: int) -> ShardModel:
        window = max((c.window for c in self.config.components if isinstance(c, SlidingWindow)), default=0)
        model = ShardModel(worker, window, rank)
        model.fails = self.fails.get(rank, model.fails)
        return model

    def _alike(self) -> None:
        """Check that every shard was handed the same batches as the scheduler's own."""
        first = self.models[0].handed
        for rank, model in self.models.items():
            assert model.handed == first, f"rank {rank} was handed something else"

    def _machines(self, stack: AsyncExitStack) -> tuple[dict[int, SimulatedDevice], dict[int, SimulatedBackend]]:
        devices: dict[int, SimulatedDevice] = {}
        backends: dict[int, SimulatedBackend] = {}
        for rank in range(self.topology.ranks):
            faults = replace(self.faults, seed=self.seed + rank)
            devices[rank] = SimulatedDevice(seed=self.seed + rank, latency=(0.0, self.latency), faults=faults)
            stack.push_async_callback(devices[rank].aclose)
            if self.has_store:
                random = Random(f"{self.seed}/backend {rank} {self._lives}")
                backends[rank] = SimulatedBackend(random, self.hostility, self.stored[rank])
                stack.push_async_callback(_close, backends[rank])
        return devices, backends

    def _shard(self, rank: int) -> Callable[[CacheConfig], CacheConfig]:
        """The function that gives a configuration the layers of this rank's pipeline stage."""
        covers = tuple(range(LAYERS * self.topology.place(rank).pp, LAYERS * (self.topology.place(rank).pp + 1)))

        def shard(whole: CacheConfig) -> CacheConfig:
            parts = tuple(structs.replace(part, layers=LAYERS, covers=covers) for part in whole.components)
            return structs.replace(whole, components=parts)

        return shard

    def kill(self, rank: int) -> None:
        """End the rank's process; its peers are told."""
        self.group.processes[rank].kill()

    def hang(self, rank: int) -> None:
        """Let the rank's process do nothing any more."""
        self.group.processes[rank].link.fall_silent()
        self.silent.add(rank)

    async def lose(self, strike: Callable[[], None], after: float) -> Report:
        """``strike`` ends a rank while requests run: all others are told and end. Then a new group begins."""
        async def struck_down() -> None:
            self.loop.call_later(after, strike)
            await self.callers()
            await asyncio.sleep(2 * TIMEOUT)  # an idle scheduler hears it, too
            assert isinstance(self.scheduler.failure, RankFailure)
            raise RankFailure("told")

        await self.live(struck_down)
        self.fails, self.silent = {}, set()
        lost, self.report.errors = self.report.errors, {}
        await self.live(self.callers)
        assert not self.report.errors
        self.report.errors = lost
        return self.report

    async def callers(self) -> None:
        """Make every request, and check its output."""
        try:
            async with asyncio.TaskGroup() as group:
                for ask in self.asks:
                    await asyncio.sleep(ask.after)
                    group.create_task(self._one(ask))
        except* RankFailure as errors:
            raise errors.exceptions[0] from None

    async def _one(self, ask: Ask) -> None:
        tokens = list(ask.tokens)
        request = Request(
            tokens, Limits(ask.new), priority=ask.priority, namespace=ask.namespace, sampling=Sampling(0.5)
        )  # fmt: skip
        if ask.abort is not None:
            self.loop.call_later(ask.abort, request.abort)
        self.scheduler.submit(request)
        expected = continuation(tokens, ask.new)
        try:
            output = await request.done()
        except RankFailure:
            raise
        except Exception as error:
            if not self.fails:
                raise
            self.report.failures.append(error)
            output = request.output
            assert output == expected[: len(output)]
        else:
            assert output == expected if ask.abort is None else output == expected[: len(output)]
        assert request.finish is not None
        self.report.outputs.append(output)
        self.report.ends[request.finish.value] += 1
        self.report.retractions += request.retractions
        for name in ("device", "host", "storage") if request.hits else ():
            self.report.hits[name] += getattr(request.hits, name)


def _located(backend: SimulatedBackend | None) -> Callable[[str], Storage]:
    return lambda url: url if backend is None else backend


async def _close(backend: SimulatedBackend) -> None:
    await backend.aclose()
    assert backend.holding == 0


def look_closely(world: World, patch: Callable[[Any, str, Any], None]) -> None:
    """Have the world's report say which commits and releases named the last batch, of those that came after the first
    one; and see to it that no token leaves while a load that it stands on is under way anywhere."""
    commit, release, append = Lease.commit, Lease.release, ScheduledRequest.append

    def note(batch: object) -> None:
        shards = world.scheduler._board.shards
        if shards is not None and shards.sent is not None:
            world.report.named += batch == shards.sent
            world.report.unnamed += batch != shards.sent

    async def commit_named(self: Lease, tokens: Any, ready: object = None, checkpoint: Any = None) -> Any:
        note(ready)
        return await commit(self, tokens, ready, checkpoint)

    def release_named(self: Lease, after: object = None, ended: bool = False) -> None:
        if self._state is LeaseState.HELD:
            note(after)
        release(self, after, ended)

    def append_late(self: ScheduledRequest, token: int) -> None:
        assert self.lease is not None
        assert not self.lease.loading, "a token leaves before the load that it stands on has ended everywhere"
        append(self, token)

    patch(ScheduledRequest, "append", append_late)
    patch(Lease, "commit", commit_named)
    patch(Lease, "release", release_named)


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
        prefetch_timeout_base=0.05, prefetch_quota=random.choice((0.2, 1.0)), close_timeout=60.0,
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
