"""Random worlds of groups, and the accidents that a rank may have."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from asynccache import BatchFailed, CacheConfig, CacheFull, ConfigError, LoadFailed, Replicated, Sidecar
from asynccache.core import audit
from asynccache.core.keys import HASH_BYTES
from asynccache.core.plan import Status
from asynccache.core.settings import ComponentKind, PrefetchPolicy, WritePolicy
from asynccache.core.tree import Node
from asynccache.errors import AsyncCacheError, RankFailure
from asynccache.memory.host_copies import Faults
from asynccache.runtime.lease import Lease
from asynccache.worker import Topology
from asynccache.worker.messages import Ended
from tests.group.group_kit import GUEST, PAGE, GroupWorld, deepseek, servers, settings, text
from tests.group.rank_engine import BAD, CANNOT, Task, task_for
from tests.simulated.backend import HONEST, Hostility
from tests.simulated.leading import check_books, leading
from tests.simulated.loop import Order, SimulatedLoop, simulate

# Accidents that a rank of a simulated group may have, and what the others are told then.


if TYPE_CHECKING:
    from tests.group.group_kit import GroupWorld


class Fate(NamedTuple):
    """One kind of accident. ``strike``: makes it happen to a rank. ``reason``: a text in the errors of the others.
    ``silences``: the process itself knows nothing of it. ``all``: it happens to all ranks at once. ``needs_host``: it
    shows only where pages are copied."""

    strike: Callable[[GroupWorld, int], None]
    reason: str
    silences: bool = False
    all: bool = False
    needs_host: bool = False


def kill(world: GroupWorld, rank: int) -> None:
    world.process(rank).kill()


def silence(world: GroupWorld, rank: int) -> None:
    world.process(rank).link.fall_silent()


def broken(*_: object, **__: object) -> None:
    raise OSError("the driver is gone")


def raise_at_effects(world: GroupWorld, rank: int) -> None:
    mover = world.local(rank).mover
    mover.backup = mover.load = broken  # type: ignore[assignment]


def raise_at_private_copies(world: GroupWorld, rank: int) -> None:
    world.local(rank).mover.clone = broken  # type: ignore[assignment]


def raise_at_storage(*calls: str) -> Callable[[GroupWorld, int], None]:
    """Have these calls of a rank's worker raise an error that no store may raise."""

    def strike(world: GroupWorld, rank: int) -> None:
        for call in calls:
            setattr(world.local(rank), call, broken)

    return strike


def cut_soon(world: GroupWorld, rank: int) -> None:
    link = world.process(rank).link.peer
    link.cut_at = link.frames + 2


def babble(world: GroupWorld, rank: int) -> None:
    world.process(rank).link.send(b"\x93\x01\x02\xc1")


def say_nonsense(world: GroupWorld, rank: int) -> None:
    world.process(rank).server._tell(Ended(Status.DONE, [999_999]))


def cut_all(world: GroupWorld, rank: int) -> None:
    for process in world.group.processes.values():
        process.link.cut()


FATES: dict[str, Fate] = {
    "killed": Fate(kill, "closed the connection"),
    "silent": Fate(silence, "was silent for 3 s", silences=True),
    "an effect raises": Fate(raise_at_effects, "the driver is gone", needs_host=True),
    "the link is cut in the middle of a sequence": Fate(cut_soon, "closed the connection"),
    "malformed": Fate(babble, "sent what is no message"),
    "nonsense": Fate(say_nonsense, "ended operation 999999"),
    "all links are cut": Fate(cut_all, "closed the connection", all=True),
}


EFFECTS: dict[str, Fate] = {
    "a storage write raises": Fate(raise_at_storage("store"), "the driver is gone"),
    "a storage question raises": Fate(raise_at_storage("ask"), "the driver is gone"),
    "a storage read raises": Fate(raise_at_storage("read"), "the driver is gone"),
    "a private copy raises": Fate(raise_at_private_copies, "the driver is gone"),
}
"""Accidents that show in one kind of work only, which not every random world has."""


# Random worlds of groups: whole caches with one to eight workers, on the virtual clock, out of one seed each.
#
# The seed says how many ranks there are and how they share every page; which pools, stores and policies; what each
# rank's device, store and link does wrong; what requests do and where they are cancelled; and which rank has an
# accident. In every world must hold:
#
# * The core's books are right after every plan (``audit``).
# * Every rank finds in its pages, when its stream reads them, its own part of what was computed for them.
# * A request that was not cancelled is served, or fails with the true reason. After an accident all are told in time.
# * Every page that the head calls stored is stored by every rank.
# * At the end nothing is held and nothing in flight, no process and no task is left, and in a calm world what was
#   published is found by the next group.


ATTEMPTS = 30
TRIES_OF_ROUGH_LOADS = 20  # where three of eight ranks fail half of their loads, thirty in a row may fail
TIMEOUT = 3.0
MAMBA = int(ComponentKind.MAMBA)
SHAPES = (
    *[Topology()] * 2, *[Topology(tp=2)] * 5, Topology(tp=7), *[Topology(pp=2)] * 5, *[Topology(cp=2)] * 3,
    *[Topology(tp=3)] * 2, *[Topology(tp=2, pp=2)] * 3, *[Topology(tp=2, cp=2)] * 3, Topology(cp=2, pp=2),
    Topology(tp=2, pp=3), Topology(tp=2, cp=2, pp=2), Topology(tp=8), Topology(pp=5),
)  # fmt: skip


class Climate(NamedTuple):
    """The settings of a world. ``calm``: nothing goes wrong in it. ``faults``, ``loads``, ``hostility``, ``delays``:
    of each rank's device, its copies from the host, its store and link. ``pressure``: the share of attempts before
    which the device is emptied, so that what is cached is on the host. ``leads``: whether its ``p2c`` is one that
    leads, see ``leading``. ``fate``: what befalls ``victim``, if any."""

    topology: Topology
    own: int | None
    config: CacheConfig
    shared: bool
    calm: bool
    faults: Mapping[int, Faults]
    hostility: Mapping[int, Hostility]
    delays: Mapping[int, float]
    lag: float
    requests: int
    concurrency: int
    cancel: float
    unable: float
    disturb: float
    fate: str
    victim: int
    loads: Mapping[int, Faults]
    pressure: float
    leads: bool


@dataclass(slots=True)
class Report:
    """The results of a world. ``verified``: pages of which the bytes were compared, on any rank. ``met``: everything
    that the world came across, by name."""

    climate: Climate
    verified: int = 0
    met: Counter[str] = field(default_factory=Counter)


def play(seed: int, change: Callable[[Climate], Climate] = lambda climate: climate) -> Report:
    """Run the world of this seed. ``change``: alters its settings.

    Raises:
        Exception: whatever went wrong; the seed is in its notes.
    """
    climate = change(draw(seed))

    async def main(loop: SimulatedLoop) -> Report:
        return await RandomWorld(loop, climate).run()

    order = Random(f"{seed}/order").choice((Order.FIFO, Order.SHUFFLED, Order.SHUFFLED))
    with leading(seed) if climate.leads else nullcontext(Counter[str]()) as choices:
        report = simulate(main, seed, order=order, step_limit=400_000)
    report.met["p2c leads"] += choices["led"]
    return report


# the climate


def draw(seed: int) -> Climate:
    """The climate of a seed."""
    random = Random(f"{seed}/climate")
    topology = random.choice(SHAPES)
    own = random.choice((0, 0, None, topology.ranks - 1))
    calm = random.random() < 0.3
    others = [rank for rank in range(topology.ranks) if rank != own]
    config = _config(random, calm)
    fates = [name for name, fate in FATES.items() if config.pools()[0].host_pages or not fate.needs_host]
    fate = random.choice(fates) if others and not calm and random.random() < 0.3 else ""
    ranks = range(topology.ranks)
    return Climate(
        topology=topology, own=own, config=config, shared=random.random() < 0.5, calm=calm,
        faults={} if calm else {rank: _faults(random, seed + rank) for rank in ranks},
        hostility={} if calm else {rank: _hostility(random) for rank in ranks},
        delays={rank: random.choice((0.0001, 0.001, 0.001, 0.02)) for rank in ranks},
        lag=random.choice((0.0, 0.005, 0.02)), requests=random.randint(3, 5), concurrency=random.randint(1, 3),
        cancel=0.0 if calm else random.choice((0.0, 0.2, 0.5)), unable=0.0 if calm else random.choice((0.0, 0.1, 0.3)),
        disturb=0.0 if calm else random.choice((0.0, 0.3)), fate=fate, victim=random.choice(others) if fate else 0,
        loads={} if calm else {rank: _load_faults(random, seed + rank) for rank in ranks},
        pressure=random.choice((0.0, 0.5, 0.9)) if config.pools()[0].host_pages else 0.0,
        leads=Random(f"{seed}/eviction").random() < 0.5,
    )  # fmt: skip


def _faults(random: Random, seed: int) -> Faults:
    failing = random.choice((0.0, 0.0, 0.0, 0.1, 0.3))
    return Faults(seed=seed, delayed=random.choice((0.0, 0.2)), failing=failing, delay=(0.001, 0.02))


def _load_faults(random: Random, seed: int) -> Faults:
    failing = random.choice((0.0, 0.0, 0.2, 0.5))
    return Faults(seed=seed, delayed=random.choice((0.0, 0.3)), failing=failing, delay=(0.001, 0.02))


def _hostility(random: Random) -> Hostility:
    if random.random() < 0.5:
        return HONEST
    return Hostility(
        delay=random.choice((0.0, 0.003, 0.02)), vanished=random.choice((0.0, 0.1)),
        **{name: random.choice((0.0, 0.0, 0.1, 0.3)) for name in ("unavailable", "failed", "wrong", "short", "empty")},
    )  # fmt: skip


def _config(random: Random, calm: bool) -> CacheConfig:
    """In a calm world all is stored and found again."""
    device, host = random.choice((7, 8, 10)), random.choice((0, 8, 24, 24))
    more: dict[str, Any] = {
        "layers": random.choice((1, 1, 2)), "stored": bool(host) and random.random() < 0.85,
        "write_policy": random.choice((*[WritePolicy.WRITE_THROUGH] * 3, *WritePolicy)),
        "prefetch_policy": random.choice(list(PrefetchPolicy)), "prefetch_timeout_base": 0.05, "prefetch_quota": 1.0,
        "load_back_threshold": random.choice((0, 0, 8)), "max_backup_ops": random.choice((1, 4, 256)),
        "window": random.choice((3, 6, 10)), "close_timeout": 20.0,
    }  # fmt: skip
    if calm:
        more |= {"write_policy": WritePolicy.WRITE_THROUGH, "prefetch_policy": PrefetchPolicy.WAIT_COMPLETE,
                 "load_back_threshold": 0, "backup_quota": 1.0}  # fmt: skip
    kind = random.choice(("full", "mla", "window", "window", "state", "all", "all", "deepseek"))
    if kind == "deepseek":
        return deepseek(device, host, **more)
    if kind in ("window", "all"):
        more["swa"] = random.choice((7, device))
    if kind in ("state", "all"):
        more["mamba"] = random.choice((6, 10))
    if kind == "mla" or random.random() < 0.15:
        more["replicated"] = random.choice((Replicated.TP, Replicated.TP, Replicated.TP_CP))
    if kind == "all" or random.random() < 0.2:
        more["sidecars"] = _sidecars(random, [name for name in ("full", "swa", "mamba") if name in ("full", *more)])
    return settings(device, host, **more)


def _sidecars(random: Random, sources: list[str]) -> tuple[Sidecar, ...]:
    sidecars = []
    for number in range(random.randint(1, 3)):
        sidecars.append(Sidecar(name=f"side{number}", indices_from=random.choice(sources), bytes_per_page=6,
                                layers=random.choice((1, 2)), replicated=random.choice(list(Replicated))))  # fmt: skip
        sources.append(f"side{number}")
    return tuple(sidecars)


# the world


class RandomWorld:
    """``said``: texts that were served, which others begin like."""

    def __init__(self, loop: SimulatedLoop, climate: Climate) -> None:
        self.loop = loop
        self.climate = climate
        self.random = loop.entropy("world")
        self.report = Report(climate)
        self.said: list[tuple[str | None, list[int]]] = [(None, [])]
        self.published: list[tuple[str | None, list[int]]] = []
        self.struck: float | None = None
        self.states = any(type(part).__name__ == "Mamba" for part in climate.config.components)
        self.world = GroupWorld(
            loop, climate.topology, climate.config, own=climate.own, shared=climate.shared, faults=climate.faults,
            loads=climate.loads, hostile=climate.hostility, delays=climate.delays, timeout=TIMEOUT, lag=climate.lag,
        )  # fmt: skip

    async def run(self) -> Report:
        """Run the world: two groups, if there are stores, which keep what the first one computed."""
        climate, met = self.climate, self.report.met
        met.update(component.kind.name for component in climate.config.core().components)
        met.update(name for name in ("tp", "cp", "pp") if getattr(climate.topology, name) > 1)
        met[f"{climate.topology.ranks} ranks"] = met["calm" if climate.calm else "rough"] = 1
        met["no worker at the head"] = climate.own is None
        met["replicated"] = any(spec.replicated for spec in climate.config.pools())
        met["sidecars"] = len(climate.config.sidecars)
        met["logical"] = not climate.config.pools()[0].bytes_per_page
        await self._live(climate.fate)
        if climate.config.stores:
            met["shared store" if climate.shared else "own stores"] = 1
            await self._live("")
        await self.world.aclose()
        self.report.verified = self.world.verified
        if climate.shared:
            assert all(len(ranks) == 1 for ranks in self.world.writers.values()), "two ranks wrote one page"
        return self.report

    async def _live(self, fate: str) -> None:
        """One group, from the first request to the last."""
        world = self.world
        world.begin()
        before = asyncio.all_tasks()
        self.struck = None
        striking: asyncio.Task[None] | None = None
        try:
            async with world.cache as cache:
                world.run()
                if fate:
                    striking = self.loop.create_task(self._strike(fate))
                elif self.published:
                    await self._find_again()
                await self._requests()
                if striking is not None:
                    await striking
                    await self._until_closed()
                await cache.flush(timeout=600.0)
                self._note_end()
                self._check_stored()
                await self._all_batches()
                core = cache.core
                audit.check(core, idle=not core.world.ledger.ops)
                check_books(core)
                assert not core.active_leases()
                assert not core.active_fetches()
        except RankFailure as error:
            self._check_told(error)
            await self._aftermath(striking)
        else:
            assert not fate, "nobody was told of the accident"
            assert all(process.failure is None for process in world.group.processes.values())
        await world.ended()
        assert asyncio.all_tasks() <= before, "a task outlives the group"

    async def _all_batches(self) -> None:
        """Engines end what they were told of before the cache is closed, as most do."""
        last = self.world.cache.send_batch(Task(None, [], {name: [] for name in self.world.names}, 0, -1, -1).payload())
        await self.world.cache.batch_ended(last)

    def _note_end(self) -> None:
        statistics, met = self.world.cache.statistics(), self.report.met
        stages = statistics.stages
        met["copy failed"] += stages["backup_host"].errors + stages["load_back"].errors
        met["store failed"] += stages["backup_storage"].errors + stages["prefetch"].errors
        met["backup dropped"] += statistics.dropped_backups
        met["lost pages"] += statistics.core.lost_pages
        met.update({f"prefetch {name}": count for name, count in statistics.prefetches.items()})

    def _check_stored(self) -> None:
        """Check that pages which the head knows to be stored are in the stores of every rank, as far as these lose none
        by themselves."""
        for backends in (self.world.backends, self.world.guests):
            for backend in backends.values():
                assert not any(_is_bad(payload) for _, payload in backend.pages.values()), "garbage is stored"
        if any(hostility.vanished for hostility in self.climate.hostility.values()):
            return
        core = self.world.cache.core.world
        stored = [(node, component) for node in _nodes(core.roots.values()) for component in core.components
                  if core.stored(node) >> component.index & 1]  # fmt: skip
        for server in servers(self.world):
            rank, pools = server.rank, server.local._map
            there = {*self.world.backends[rank].pages, *self.world.guests[rank].pages}
            for node, component in stored:
                hashes = [node.hashes[at : at + HASH_BYTES] for at in range(0, len(node.hashes), HASH_BYTES)]
                for page_hash in hashes[-1:] if component.kind is ComponentKind.MAMBA else hashes:
                    for spec in pools.of.get(int(component.kind), ()):
                        assert pools.key(spec.name, page_hash) in there, f"rank {rank}: {spec.name} is not stored"
                        self.report.met["stored"] += 1

    async def _find_again(self) -> None:
        """Check, in a calm world, that every page of a text that the last group published is in the stores."""
        if not self.climate.calm or self.states or self.report.met["backup dropped"] or self.report.met["lost pages"]:
            return
        space, text = self.published[-1]
        prompt = [*text[: len(text) // PAGE * PAGE], 7]
        handle = self.world.cache.prefetch(prompt, namespace=space)
        await handle
        cached = await self.world.serve(prompt, space, prefetch=handle)
        assert cached == len(prompt) - 1, f"{cached} of {len(text)} tokens were found again"
        self.report.met["found again"] += 1

    # accidents

    async def _strike(self, fate: str) -> None:
        await asyncio.sleep(self.random.random() * 0.1)
        group: Any = self.world.cache._opened().worker
        while FATES[fate].silences and group._opening:  # noqa: ASYNC110
            await asyncio.sleep(0.01)                  # who opens a store may be silent for long
        self.struck = self.loop.time()
        FATES[fate].strike(self.world, self.climate.victim)
        self.report.met[fate] += 1

    async def _until_closed(self) -> None:
        """Some accidents show when a worker is asked for something the next time."""
        number = 9
        while self.world.cache.closed is None:
            await self.world.serve([number := number + 1] * 2 * PAGE, "after")
            await self.world.push_out(3)
            await self.world.cache.flush()
            await asyncio.sleep(0.1)

    def _check_told(self, error: RankFailure) -> None:
        fate = FATES.get(self.climate.fate)
        assert fate is not None, f"nothing had happened: {error}"
        assert self.struck is not None, f"nothing had happened yet: {error}"
        assert error.rank == self.climate.victim or fate.all, error
        assert fate.reason in error.reason, error

    async def _aftermath(self, striking: asyncio.Task[None] | None) -> None:
        """Check the end of a group that has failed: the cache has closed in time, and all processes end by
        themselves."""
        assert striking is not None
        assert self.struck is not None
        await striking
        fate, victim = FATES[self.climate.fate], self.climate.victim
        assert self.loop.time() - self.struck <= 2 * TIMEOUT + 3.0, "it took too long"
        if fate.silences:
            self.world.process(victim).task.cancel()
            await asyncio.wait([self.world.process(victim).task])
        for rank, process in self.world.group.processes.items():
            await asyncio.wait([process.task])
            if rank != victim and not fate.all:
                failure = process.failure
                assert isinstance(failure, RankFailure), f"rank {rank} was not told"
                assert failure.rank == victim, failure
        audit.check(self.world.cache.core)
        assert not self.world.cache.core.active_leases()

    # requests

    async def _requests(self) -> None:
        running: set[asyncio.Task[None]] = set()
        failed: list[BaseException] = []
        for number in range(self.climate.requests if not self.published else 2):
            if len(running) >= self.climate.concurrency:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                failed += self._ends(done)
            running.add(self._begin(number))
            if self.random.random() < self.climate.disturb:
                running.add(self.loop.create_task(self._disturb(), name=f"disturbance {number}"))
            await asyncio.sleep(self.random.choice((0.0, 0.001, 0.02)))
        while running:
            done, running = await asyncio.wait(running)
            failed += self._ends(done)
        if failed:
            raise failed[0]

    def _begin(self, number: int) -> asyncio.Task[None]:
        random = self.loop.entropy(f"request {number} at {self.loop.time()}")
        task = self.loop.create_task(self._request(random).run(), name=f"request {number}")
        if self.random.random() < self.climate.cancel:
            self.loop.cancel_at(task, self.random.randint(1, 30))
        return task

    def _request(self, random: Random) -> Request:
        return Request(self, random)

    def _ends(self, done: set[asyncio.Task[None]]) -> list[BaseException]:
        failed = []
        for task in done:
            if task.cancelled():
                self.report.met["cancelled"] += 1
            elif (error := task.exception()) is not None:
                if isinstance(error, RankFailure):
                    self._check_told(error)
                failed.append(error)
        return failed

    async def _disturb(self) -> None:
        """Make other calls that a cache must take at any time."""
        cache, random = self.world.cache, self.random
        what = random.choice(("invalidate", "flush", "keep", "match", "prefetch", "guest", "guest", "reset"))
        self.report.met[what] += 1
        space, text = random.choice(self.said)
        match what:
            case "invalidate":
                await cache.invalidate(random.choice((None, "tenant")))
            case "flush":
                await cache.flush()
            case "keep":
                await cache.keep(text or [0], ttl=0.1, namespace=space)
                await asyncio.sleep(0.1)
            case "match":
                await cache.match(text or [0], namespace=space)
                cache.statistics()
            case "prefetch":
                handle = cache.prefetch(text or [0], namespace=space)
                await asyncio.sleep(random.random() * 0.02)
                handle.cancel()
                await handle
            case "reset":
                await self._unless_unavailable(cache.reset())
            case "guest":
                if self.climate.config.pools()[0].host_pages:
                    await self._guest(random)

    async def _guest(self, random: Random) -> None:
        """A store comes, or goes; somebody else may be at it."""
        cache = self.world.cache
        try:
            if "guest" in cache.stores:
                await cache.detach_storage("guest", timeout=random.choice((None, 0)))
                self.report.met["detached"] += 1
            else:
                write, promote = random.choice(("yes", "yes", "no")), random.choice(("yes", "no"))
                options = {"name": "guest", "write": write, "promote": promote}
                await cache.attach_storage(GUEST, options=options, position=random.choice((None, 0)),
                                           backfill=random.random() < 0.5)  # fmt: skip
                self.report.met["attached"] += 1
        except ConfigError as error:
            if "guest" not in str(error):  # the name is taken, or it was detached meanwhile
                raise
            self.report.met["two at a store"] += 1

    async def _unless_unavailable(self, work: Any) -> None:
        try:
            await work
        except RankFailure:
            raise
        except AsyncCacheError:
            assert not self.climate.calm
            self.report.met["unavailable"] += 1


def _is_bad(payload: bytes) -> bool:
    return bytes(payload) == bytes([BAD]) * len(payload)


def _nodes(roots: Iterable[Node]) -> Iterator[Node]:
    """All below ``roots``."""
    below = [child for root in roots for child in (root.children or {}).values()]
    while below:
        node = below.pop()
        below.extend((node.children or {}).values())
        yield node


class Request:
    """One request, from its arrival to its end, as often as loads fail. ``awaits``: the share of prefetches that it
    waits for to their end."""

    awaits = 0.5

    def __init__(self, owner: RandomWorld, random: Random) -> None:
        self.owner = owner
        self.world = owner.world
        self.cache = owner.world.cache
        self.random = random
        self.met = owner.report.met
        self.space, known = random.choice(owner.said[-5:])
        if random.random() < 0.2:
            self.space = random.choice((None, "tenant"))
        fresh = [random.randrange(3) for _ in range(random.randint(1, 4 * PAGE))]
        kept = random.choice((len(known), len(known), random.randint(0, len(known))))
        self.prompt = (known[:kept] + fresh)[: 5 * PAGE]
        self.new = random.choice((0, 0, random.randint(1, PAGE)))

    async def run(self) -> None:
        """Serve it.

        Raises:
            AsyncCacheError: the group has failed.
            AssertionError: it was not served.
        """
        handle = self.cache.prefetch(self.prompt, namespace=self.space) if self.random.random() < 0.5 else None
        try:
            for attempt in range(ATTEMPTS):
                if attempt == TRIES_OF_ROUGH_LOADS:
                    self.met["loads mended"] += 1
                    for device in self.world.devices.values():
                        device.mend_loads()
                if await self._attempt(handle):
                    return
                handle = None
            raise AssertionError(f"not served in {ATTEMPTS} attempts: {self.cache!r}")
        except CacheFull:
            self.met["full"] += 1
        except TimeoutError:
            self.met["timeout"] += 1
        except BatchFailed as error:
            if not all(CANNOT in reason for reason in error.reasons.values()):
                raise
            self.met["batch failed"] += 1
        finally:
            if handle is not None:
                handle.cancel()

    async def _empty_the_device(self) -> None:
        """Empty the device, as far as nothing on it is held."""
        pages = min(pool.device_pages for pool in self.owner.climate.config.pools() if int(pool.component) != MAMBA)
        with suppress(TimeoutError):
            async with self.cache.lease(text(pages, seed=999), timeout=0.2):
                self.met["emptied"] += 1

    async def _attempt(self, handle: Any) -> bool:
        random = self.random
        if random.random() < self.owner.climate.pressure:
            await self._empty_the_device()
        if handle is not None and random.random() < self.awaits:
            await handle
        lease = self.cache.lease(
            self.prompt, new_tokens=self.new, namespace=self.space, prefetch=handle, wait=random.random() < 0.9,
            timeout=random.choice((None, None, None, 1.0)),
        )  # fmt: skip
        async with lease:
            self.known, hits = self.world.known_to_fail(), lease.hits
            self.met.update({"device hit": hits.device, "host hit": hits.host, "storage hit": hits.storage})
            self.last = self._send(lease, self.prompt, lease.cached, first=True)
            try:
                await self._serve(lease)
            except LoadFailed:
                self.met["load failed"] += 1
                self.world.void.add(self.last)
                return False
            finally:
                lease.release(after=self.last, ended=random.random() < 0.2)
        self.met["served"] += 1
        return True

    async def _serve(self, lease: Lease) -> None:
        """The prompt, and then perhaps some tokens more. ``last`` is the last batch that uses the pages, also when this
        is cancelled or fails."""
        await self._publish(lease, self.prompt, self.last)
        if self.new:
            text = self.prompt + [self.random.randrange(3) for _ in range(self.new)]
            last = self.last = self._send(lease, text, len(self.prompt), first=False)
            if self.random.random() < 0.7:
                lease.adopt(after=last)
            if self.random.random() < 0.5:
                lease.advance(len(text), after=last)
            await self._publish(lease, text, last)
            self.owner.said.append((self.space, text))

    def _send(self, lease: Lease, text: list[int], cached: int, *, first: bool) -> int:
        unable = []
        if self.random.random() < self.owner.climate.unable:
            unable = [self.random.randrange(self.owner.climate.topology.ranks)]
        task = task_for(lease, self.space, text, self.world.names)
        if not first:
            task = task._replace(cached=cached, state=-1)
        self.fails = bool(unable)
        number = self.cache.send_batch(task._replace(unable=unable).payload(), [lease])
        self.world.granted[number] = self.known
        if unable:
            self.world.failing.add(number)
        return number

    async def _publish(self, lease: Lease, text: list[int], number: int) -> None:
        """Publish ``text``: when all engines are known to have run the batch, or with the batch's number."""
        await lease.loaded()
        waits = self.random.random() < (0.4 if self.fails else 0.2)
        self.met["a failing batch is published"] += self.fails and not waits
        if waits:
            await self.cache.batch_ended(number)
        whole = len(text) % PAGE == 0 and len(lease.states) > 1
        checkpoint = (len(text), int(lease.states[-1])) if whole else None
        await lease.commit(text, after=None if waits else number, checkpoint=checkpoint)
        self.owner.said.append((self.space, text))
        if len(text) > PAGE:
            self.owner.published.append((self.space, text))
