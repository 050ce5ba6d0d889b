"""Random worlds of groups, and the accidents that a rank may have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Any, NamedTuple

from asynccache.core import audit
from asynccache.core.keys import HASH_BYTES
from asynccache.core.plan import Status
from asynccache.core.settings import ComponentKind
from asynccache.core.tree import Node
from asynccache.errors import RankFailure
from asynccache.runtime.lease import Lease
from asynccache.worker.messages import WorksOver
from tests.group.group_kit import GroupWorld, servers
from tests.simulated import drawn
from tests.simulated.drawn import PAGE, Climate
from tests.simulated.loop import SimulatedLoop
from tests.simulated.world import BAD, Asker, Crowd, Report, Task, played, task_for

# Accidents that a rank of a simulated group may have, and what the others are told then.


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
    world.process(rank).server._tell(WorksOver(Status.DONE, [999_999]))


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


TIMEOUT = 3.0


def draw(seed: int) -> Climate:
    """The climate of a seed."""
    return drawn.draw(seed, lambda host: [name for name, fate in FATES.items() if host or not fate.needs_host])


def play(seed: int) -> Report:
    """Run the world of this seed."""
    climate = draw(seed)
    return played(seed, climate.leads, lambda loop: RandomWorld(loop, climate))


class RandomWorld(Crowd):
    def __init__(self, loop: SimulatedLoop, climate: Climate) -> None:
        super().__init__(loop, climate)
        self.failures: list[BaseException] = []
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
        self.cache = world.cache
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
                await self._all_requests()
                if striking is not None:
                    await striking
                    await self._until_closed()
                await cache.flush(timeout=600.0)
                self._note_end()
                self._check_stored()
                await self._all_batches()
                self.check_idle()
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
        last = self.cache.send_batch(Task(None, [], {name: [] for name in self.world.names}, 0, -1, -1).payload())
        await self.cache.batch_ended(last)

    def _note_end(self) -> None:
        statistics, met = self.cache.statistics(), self.report.met
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
        core = self.cache.core.world
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
        handle = self.cache.prefetch(prompt, namespace=space)
        await handle
        cached = await self.world.serve(prompt, space, prefetch=handle)
        assert cached == len(prompt) - 1, f"{cached} of {len(text)} tokens were found again"
        self.report.met["found again"] += 1

    # accidents

    async def _strike(self, fate: str) -> None:
        await asyncio.sleep(self.random.random() * 0.1)
        group: Any = self.cache._opened().worker
        while FATES[fate].silences and group._opening:  # noqa: ASYNC110
            await asyncio.sleep(0.01)                  # who opens a store may be silent for long
        self.struck = self.loop.time()
        FATES[fate].strike(self.world, self.climate.victim)
        self.report.met[fate] += 1

    async def _until_closed(self) -> None:
        """Some accidents show when a worker is asked for something the next time."""
        number = 9
        while self.cache.closed is None:
            await self.world.serve([number := number + 1] * 2 * PAGE, "after")
            await self.world.push_out(3)
            await self.cache.flush()
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
        audit.check(self.cache.core)
        assert not self.cache.core.active_leases()

    # requests

    async def _all_requests(self) -> None:
        self.failures.clear()
        await self.requests(self.climate.requests if not self.published else 2)
        if self.failures:
            raise self.failures[0]

    def request(self, random: Random) -> Asker:
        return Request(self, random)

    def failed(self, error: BaseException) -> None:
        """All others go on, and are told, too."""
        if isinstance(error, RankFailure):
            self._check_told(error)
        self.failures.append(error)


def _is_bad(payload: bytes) -> bool:
    return bytes(payload) == bytes([BAD]) * len(payload)


def _nodes(roots: Iterable[Node]) -> Iterator[Node]:
    """All below ``roots``."""
    below = [child for root in roots for child in (root.children or {}).values()]
    while below:
        node = below.pop()
        below.extend((node.children or {}).values())
        yield node


class Request(Asker):
    """``last`` is the last batch that uses the pages, also when this is cancelled or fails."""

    def __init__(self, owner: RandomWorld, random: Random) -> None:
        super().__init__(owner, random)
        self.owner = owner
        self.world = owner.world

    def mend(self) -> None:
        self.met["loads mended"] += 1
        for device in self.world.devices.values():
            device.mend_loads()

    def granted(self, lease: Lease) -> None:
        self.known = self.world.known_to_fail()
        super().granted(lease)
        self.last = self._send(lease, self.prompt, lease.cached, first=True)

    def void(self) -> None:
        self.world.void.add(self.last)

    def leave(self, lease: Lease) -> None:
        lease.release(after=self.last, ended=self.random.random() < 0.2)

    async def serve(self, lease: Lease) -> None:
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
