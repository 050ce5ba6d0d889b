"""Whole caches with workers in one simulated world: a head, its workers' processes, their engines, devices and stores.

``GroupWorld`` puts a group together; ``serve`` is one request through it: every rank checks the bytes that are called
cached, writes its part of the rest, and ends the batch, now or later.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from inspect import signature
from itertools import chain
from random import Random
from typing import Any, Concatenate, ParamSpec, TypeVar

from msgspec.structs import replace

from asynccache import AsyncCache, CacheConfig, CopyFailed, LoadFailed, RankFailure
from asynccache.core import audit
from asynccache.core.plan import Status
from asynccache.memory.device import Stream
from asynccache.memory.host_copies import Fates, Faults
from asynccache.memory.pools import PageCopy
from asynccache.runtime.lease import Lease
from asynccache.storage import PageKey, Record, Result
from asynccache.worker import EngineBatch, RankWorker, Topology
from asynccache.worker.local import LocalWorker, Storage
from asynccache.worker.messages import Message, WorksOver
from asynccache.worker.rank_server import RankServer
from asynccache.worker.ranks import Shard
from asynccache.worker.work import Work
from tests.simulated.backend import HONEST, Hostility, SimulatedBackend
from tests.simulated.device import SimulatedDevice, SimulatedEvent, SimulatedGate
from tests.simulated.drawn import GUEST as GUEST
from tests.simulated.drawn import PAGE as PAGE
from tests.simulated.drawn import STORE
from tests.simulated.drawn import settings as settings
from tests.simulated.drawn import text as text
from tests.simulated.links import SimulatedGroup, SimulatedWorker
from tests.simulated.loop import SimulatedLoop, simulate
from tests.simulated.world import CANNOT, BadBytes, EngineBytes, Task, WrongBytes, check_idle, task_for, task_of

T = TypeVar("T")
P = ParamSpec("P")


class SharedStore(SimulatedBackend):
    """One rank's side of a store that all write to. ``writers``: who has written a page, of all ranks."""

    def __init__(
        self, random: Random, hostility: Hostility, pages: dict[PageKey, tuple[bytes, bytes]], rank: int,
        writers: dict[PageKey, set[int]],
    ) -> None:  # fmt: skip
        super().__init__(random, hostility, pages, shared=True)
        self._rank = rank
        self._writers = writers

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        for key in keys:
            self._writers[key].add(self._rank)
        return await super().put(keys, records)


class RankDevice(SimulatedDevice):
    """A rank's device. ``loads``: what goes wrong with copies from the host, in place of the faults of all other
    copies."""

    def __init__(self, seed: int, latency: float, faults: Faults | None, loads: Faults | None) -> None:
        super().__init__(seed=seed, latency=(0.0, latency), faults=faults)
        self._of_loads = self._fates if loads is None else Fates(loads)

    def load(self, stream: Stream, copies: Sequence[PageCopy], layers: int) -> Sequence[SimulatedEvent]:
        others, self._fates = self._fates, self._of_loads
        try:
            return super().load(stream, copies, layers)
        finally:
            self._fates = others

    def mend_loads(self) -> None:
        """From now on no copy from the host fails."""
        self._of_loads = Fates(Faults())


def stage_of(topology: Topology, rank: int) -> Shard:
    """The layers of the rank's pipeline stage: as many as any other has."""

    def shard(config: CacheConfig) -> CacheConfig:
        stage = topology.place(rank).pp

        def mine(part: Any) -> Any:
            return replace(part, covers=tuple(range(stage * part.layers, (stage + 1) * part.layers)))

        components = tuple(map(mine, config.components))
        return replace(config, components=components, sidecars=tuple(map(mine, config.sidecars)))

    return shard


# The engine of one rank in a simulated world: batches in the order in which the head sent them, on one stream.
#
# As on a GPU, the host runs ahead of the stream. It ends a batch by an event before the work is done, or, if it is
# slow, some time later, or without an event when the work is over. The stream does the work in order: it waits for the
# batch's loads (the host has asked for them at once, or asks now), takes its time, reads what is called cached and
# writes the rest. So a copy or another request that does not wait for the event finds the page as it was, and a page
# that is given away too early is found overwritten.


class RankEngine:
    """The engine of one rank. ``lag``: seconds that a batch takes at most. ``failures``: what went wrong in its work,
    by batch; ``loads``: what each of these needed. ``spoilt``: batches that have read what a failed one left.
    ``verified``: as ``EngineBytes`` has it."""

    def __init__(self, face: RankWorker, device: SimulatedDevice, random: Random, lag: float) -> None:
        self.rank = face.rank
        self.failures: dict[int, BaseException] = {}
        self.loads: dict[int, tuple[int, ...]] = {}
        self.spoilt: set[int] = set()
        self._face = face
        self._device = device
        self._random = random
        self._lag = lag
        self._bytes = EngineBytes(face.pools, face.config, face.topology.place(face.rank))
        self._works: set[asyncio.Task[None]] = set()
        self._last: SimulatedGate | None = None

    @property
    def verified(self) -> int:
        return self._bytes.verified

    async def run(self) -> None:
        """Run until the cache is closed or the group has failed, and until the stream is empty."""
        try:
            async for batch in self._face:
                await self._take(batch)
        except RankFailure:
            pass
        while self._works:
            await asyncio.wait(self._works)

    async def _take(self, batch: EngineBatch) -> None:
        if self.rank in task_of(batch.payload).unable:
            await self._fail(batch)
            return
        gate = self._device.gate()
        loop = asyncio.get_running_loop()
        early = bool(batch.loads) and self._random.random() < 0.5
        loads = loop.create_task(self._arrived(batch), name="loads") if early else None
        work = loop.create_task(self._work(batch, loads, self._last, gate), name="stream")
        self._works.add(work)
        work.add_done_callback(self._works.discard)
        self._last = gate
        style = self._random.random()
        if style < 0.5:
            batch.end(gate)
        elif style < 0.8:
            await asyncio.sleep(self._pause())
            batch.end(gate)
        else:
            await asyncio.wait([work])
            batch.end()

    async def _fail(self, batch: EngineBatch) -> None:
        """Leave garbage in the batch's pages, when the stream comes to it, and say that it failed: by an event or
        not."""
        gate = self._device.gate() if self._random.random() < 0.4 else None
        if gate is not None:
            batch.end(gate)
        if self._last is not None:
            await self._last.wait()
        await asyncio.sleep(self._pause())
        self._bytes.spoil(task_of(batch.payload))
        if gate is None:
            batch.fail(CANNOT)
        else:
            gate.fire(RuntimeError(CANNOT))

    async def _work(
        self, batch: EngineBatch, loads: asyncio.Task[bool] | None, before: SimulatedGate | None, gate: SimulatedGate
    ) -> None:
        if before is not None:
            await before.wait()
        try:
            task = task_of(batch.payload)
            await asyncio.sleep(self._pause())
            there = await (self._arrived(batch) if loads is None else loads)
            if there:
                try:
                    self._bytes.verify(task)
                    self._bytes.write(task)
                except BadBytes:
                    self.spoilt.add(batch.number)
                    self._bytes.spoil(task)
        except Exception as error:
            self.failures[batch.number] = error
            self.loads[batch.number] = batch.loads
        gate.open()

    async def _arrived(self, batch: EngineBatch) -> bool:
        """Whether the batch's loads have arrived. If not, the head is told, and takes nothing of the batch for
        computed."""
        try:
            await self._face.layer(batch, self._face.layers - 1)
        except (CopyFailed, RankFailure):
            return False
        return True

    def _pause(self) -> float:
        return self._random.random() * self._lag


class _EndOf(asyncio.Future[Status]):
    """A waiter for the end of ``op`` that is never done: ``ended`` is called as the operation ends, in the same turn.
    The compiled ``Operations`` lets nothing else see that."""

    def __init__(self, op: int, ended: Callable[[int, Status], None], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._op = op
        self._ended = ended

    def set_result(self, result: Status, /) -> None:
        self._ended(self._op, result)

    def set_exception(self, exception: type | BaseException, /) -> None:
        """The cache is closed: the operation has no end."""


class GroupWorld:
    """The devices and stores of all ranks, which outlive a group. ``shared``: all ranks write to one store; else each
    to one of its own; the same holds for the store that may be attached. ``faults``, ``loads``, ``hostile``,
    ``delays``: what devices, their copies from the host, stores and links of ranks do wrong. ``names``: the components
    that there are. ``writers``: who has written each page of a shared store. ``void``: batches on loads that failed on
    some rank, of which nothing is taken. Such a load's slots are free as soon as all have let go of it: a rank on which
    it went well may *read* there what has come since. One on which it failed must have been told, and nothing else is
    excused."""

    def __init__(
        self, loop: SimulatedLoop, topology: Topology, config: CacheConfig, *, own: int | None = 0,
        shared: bool = False, latency: float = 0.001, faults: Mapping[int, Faults] | None = None,
        loads: Mapping[int, Faults] | None = None, hostile: Mapping[int, Hostility] | None = None,
        delays: Mapping[int, float] | None = None,
        delay: float = 0.001, timeout: float = 30.0, arrival: float = 300.0, lag: float = 0.01,
    ) -> None:  # fmt: skip
        _MADE.get([]).append(self)
        self.loop = loop
        self.topology = topology
        self.config = config
        self.own = own
        self.delay = delay
        self.delays = delays or {}
        self.timeout = timeout
        self.arrival = arrival
        self.lag = lag
        self.names = [spec.name for spec in config.pools() if spec.indices_from is None]
        ranks = range(topology.ranks)
        self.devices = {
            rank: RankDevice(loop.seed + rank, latency, (faults or {}).get(rank), (loads or {}).get(rank))
            for rank in ranks
        }
        self.writers: dict[PageKey, set[int]] = defaultdict(set)
        self.backends: dict[int, SimulatedBackend] = {}
        self.guests: dict[int, SimulatedBackend] = {}
        for name, backends in (("store", self.backends), ("guest", self.guests)):
            one: dict[PageKey, tuple[bytes, bytes]] = {}
            for rank in ranks:
                random, hostility = loop.entropy(f"{name} {rank}"), (hostile or {}).get(rank, HONEST)
                if shared:
                    backends[rank] = SharedStore(random, hostility, one, rank, self.writers)
                else:
                    backends[rank] = SimulatedBackend(random, hostility)
        self.verified = 0
        self.void: set[int] = set()
        self.failing: set[int] = set()  # batches that some engine cannot run
        self.granted: dict[int, frozenset[int]] = {}  # by batch: those that were known when its lease was granted
        self.said: dict[int, dict[int, Status]] = defaultdict(dict)  # how an operation ended, by rank
        self.works: dict[int, tuple[int, ...]] = {}  # operations that were handed over together, by the first of them
        self.group: SimulatedGroup
        self.cache: AsyncCache
        self.engines: dict[int, RankEngine] = {}
        self.running: dict[int, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def opened(self, **more: Any) -> AsyncIterator[AsyncCache]:
        """A cache with its workers and engines. At the end all have ended, well."""
        self.begin(**more)
        async with self.cache as cache:
            self.run()
            yield cache
        await self.ended()

    @asynccontextmanager
    async def bare(self) -> AsyncIterator[AsyncCache]:
        """A cache with its workers, whose engines are the test's."""
        self.begin()
        async with self.cache as cache:
            yield cache
        await self.group.ended()

    def begin(self, *, absent: frozenset[int] = frozenset(), **more: Any) -> None:
        """Make the processes of a new group, and the head's cache, which is not open yet."""
        topology = self.topology
        self.void.clear()
        self.failing.clear()
        self.granted.clear()
        self.said.clear()
        self.works.clear()
        self.group = SimulatedGroup(
            self.loop.entropy(f"links at {self.loop.time()}"), topology, own=self.own, delay=self.delay,
            timeout=self.timeout, devices=self.devices, locates={r: self._locate(r) for r in range(topology.ranks)},
            shards={rank: stage_of(topology, rank) for rank in range(topology.ranks)}, absent=absent,
            arrival=self.arrival,
        )  # fmt: skip
        for rank, process in self.group.processes.items():
            process.link.delay = process.link.peer.delay = self.delays.get(rank, self.delay)
        device = None if self.own is None else self.devices[self.own]
        self.cache = AsyncCache(self.config, workers=self.group.workers, device=device, **more)

    def _locate(self, rank: int) -> Callable[[str], Storage]:
        def locate(url: str) -> Storage:
            return {STORE: self.backends[rank], GUEST: self.guests[rank]}.get(url, url)

        return locate

    def run(self) -> None:
        """Begin the engines of a cache that is open, and audit it after every plan from now on."""
        faces = {rank: process.face for rank, process in self.group.processes.items()}
        if self.cache.worker is not None:
            faces[self.cache.worker.rank] = self.cache.worker
        self.engines = {
            rank: RankEngine(face, self.devices[rank], self.loop.entropy(f"engine {rank}"), self.lag)
            for rank, face in faces.items()
        }
        for server in servers(self):
            server._tell = partial(self._note_ends, server.rank, server._tell)
        self.running = {rank: self.loop.create_task(engine.run()) for rank, engine in self.engines.items()}
        driver, worker, core = self.cache._opened().driver, self.cache._opened().worker, self.cache.core
        clock, hand_over = driver.clock, worker.perform

        def audited() -> float:
            audit.check(core)
            return clock()

        def noted(plan: Sequence[Work]) -> None:
            self.works |= {work.ops[0]: work.ops for work in plan}
            for op in chain.from_iterable(work.ops for work in plan):
                driver.ops._live[op].append(_EndOf(op, self._check_end, loop=self.loop))
            hand_over(plan)

        driver.clock = audited  # asked before each call of the core
        worker.perform = noted  # type: ignore[method-assign]

    def _note_ends(self, rank: int, tell: Callable[[Message], None], message: Message) -> None:
        if isinstance(message, WorksOver):
            for first in message.works:
                for op in self.works.get(first, (first,)):
                    self.said[op][rank] = message.status
        tell(message)

    def _check_end(self, op: int, status: Status) -> None:
        """Check that an operation that has ended for the core has ended on every rank, and well on each if it is
        DONE."""
        if op in self.said:
            assert len(self.said[op]) == self.topology.ranks, f"operation {op} ended before all had let go of it"
            done = all(said is Status.DONE for said in self.said[op].values())
            assert done or status is Status.FAILED, f"operation {op}: {self.said[op]} came to {status}"

    async def ended(self) -> None:
        """Every process and engine has ended; what went wrong in an engine is raised."""
        await self.group.ended()
        for rank, running in self.running.items():
            await running
            engine = self.engines[rank]
            self.verified += engine.verified
            for number in engine.spoilt:
                known = self.failing <= self.granted[number]
                assert not known, f"batch {number} read pages of a batch that the head knew to have failed"
            for number, failure in engine.failures.items():
                went_well = all(self.said[op].get(rank) is not Status.FAILED for op in engine.loads[number])
                if not (number in self.void and went_well and isinstance(failure, WrongBytes)):
                    raise failure

    async def aclose(self) -> None:
        """The world is over: nobody holds anything."""
        for backend in (*self.backends.values(), *self.guests.values()):
            await backend.aclose()
            assert backend.holding == 0, "a store still holds buffers"
        for device in self.devices.values():
            await device.aclose()

    # requests

    def process(self, rank: int) -> SimulatedWorker:
        """The process of a rank that is not the head's."""
        return self.group.processes[rank]

    def local(self, rank: int) -> LocalWorker:
        """The worker of a rank, beneath its links."""
        own = self.cache.worker
        face = own if own is not None and own.rank == rank else self.process(rank).face
        local = face._server.local
        assert local is not None
        return local

    async def serve(self, text: Sequence[int], namespace: str | None = None, **terms: Any) -> int:
        """Serve one request to its end, again if a load fails. Returns how many tokens were cached."""
        while True:
            async with self.cache.lease(text, namespace=namespace, **terms) as lease:
                cached = lease.cached
                number = self.compute(lease, list(text), namespace)
                try:
                    await lease.loaded()
                    whole = len(text) % PAGE == 0 and len(lease.states) > 1
                    checkpoint = (len(text), int(lease.states[-1])) if whole else None
                    await lease.commit(text, after=number, checkpoint=checkpoint)
                except LoadFailed:
                    self.void.add(number)
                    lease.release(after=number)
                    continue
                lease.release(after=number)
                return cached

    def compute(self, lease: Lease, text: list[int], namespace: str | None = None) -> int:
        """Have all engines compute ``text`` beyond its cached part. Returns the batch's number."""
        task: Task = task_for(lease, namespace, text, self.names)
        return self.cache.send_batch(task.payload(), [lease])

    def known_to_fail(self) -> frozenset[int]:
        """The batches of which the head knows that they fail. None in debug, where a lease looks at its pages between
        its grant and its return: what the head has heard by then says nothing about the grant."""
        if self.cache._debug:
            return frozenset()
        group: Any = self.cache._opened().worker
        return frozenset([*group._unable, *[number for number, batch in group._sent.items() if batch.failed]])

    async def push_out(self, pages: int) -> None:
        """Take ``pages`` device pages for a moment, so that what is cached leaves the device."""
        async with self.cache.lease(text(pages, seed=999)):
            pass

    def idle(self) -> None:
        check_idle(self.cache.core)


def servers(world: GroupWorld) -> list[Any]:
    """The objects that do the work on each rank, in the order of the ranks."""
    own = world.cache.worker
    found: dict[int, RankServer] = {} if own is None else {own.rank: own._server}
    found |= {rank: process.server for rank, process in world.group.processes.items()}
    return [found[rank] for rank in sorted(found)]


_MADE: ContextVar[list[GroupWorld]] = ContextVar("_MADE")


def simulated(test: Callable[Concatenate[SimulatedLoop, P], Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make ``test`` a test that runs in a world of its own. At the end all worlds that it has made are closed: nobody
    holds anything."""

    def run(*given: P.args, **named: P.kwargs) -> None:
        async def main(loop: SimulatedLoop) -> None:
            _MADE.set([])
            await test(loop, *given, **named)
            for world in _MADE.get():
                await world.aclose()

        play(main)

    parameters = list(signature(test).parameters.values())[1:]
    run.__signature__ = signature(test).replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def play(work: Callable[[SimulatedLoop], Coroutine[Any, Any, T]]) -> T:
    """Run ``work`` in a world."""
    return simulate(work, 0)


def random_of(seed: object) -> Random:
    return Random(str(seed))
