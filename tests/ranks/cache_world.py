"""Worlds of whole caches, one per rank, in lockstep: what is late, fails, lies or is cancelled differs by rank.

One seed decides everything. ``Member`` is a rank: its cache, its scheduler, and requests that arrive, are admitted,
computed, published, aborted and released by a script that all ranks share. Must hold: equal digests after every step,
audits, the right bytes on every rank, and at the end nothing held and nothing in flight. ``Report.met`` counts what a
world came across, so that worlds that cover less are noticed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from asynccache.config import CacheConfig, Component
from asynccache.core import audit
from asynccache.errors import CacheFull, LoadFailed, RankDivergence, RankFailure
from asynccache.ranks import Topology
from asynccache.runtime.cache import AsyncCache
from asynccache.runtime.lease import Lease
from asynccache.runtime.prefetch import PrefetchHandle
from asynccache.storage import PageKey
from asynccache.testing.simulated_backend import SimulatedBackend
from asynccache.testing.simulated_device import SimulatedDevice, SimulatedGate
from asynccache.testing.simulated_loop import SimulatedLoop
from asynccache.testing.simulated_ranks import Fate, SimulatedRanks
from asynccache.testing.simulated_world import Climate, draw_climate
from tests.ranks.engine_bytes import EngineBytes

TIMEOUT = 30.0
AUDIT_EVERY = 8
JOBS = 6
TRIES = 2
KEPT = 0.2


@dataclass(slots=True, eq=False)
class Job:
    """One request on one rank. ``task``: waits for its lease elsewhere."""

    number: int
    tokens: list[int]
    extra_key: str | None
    total: int
    handle: PrefetchHandle | None
    lease: Lease | None = None
    entered: bool = False
    done: int = 0
    task: asyncio.Task[Any] | None = None


@dataclass(slots=True)
class Report:
    """What all members saw."""

    steps: int = 0
    verified: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    met: Counter[str] = field(default_factory=Counter)
    errors: dict[int, Exception] = field(default_factory=dict)
    told: float = 0.0


class CacheWorld:
    """``iterations``: of each scheduler, before everything that is left is finished. ``climate``: instead of the
    seed's."""

    def __init__(
        self, loop: SimulatedLoop, seed: int, topology: Topology, iterations: int = 24, climate: Climate | None = None
    ) -> None:
        self.loop = loop
        self.seed = seed
        self.topology = topology
        self.iterations = iterations
        self.idles = True
        self.climate = climate or _brisk(draw_climate(seed))
        self.net = SimulatedRanks(topology, Random(f"{seed}/net"), timeout=TIMEOUT)
        self.pages: dict[PageKey, tuple[bytes, bytes]] = {}
        self.guest_pages: dict[PageKey, tuple[bytes, bytes]] = {}
        self.digests: dict[int, int] = {}
        self.report = Report()
        self.has_host = self.climate.config.pools()[0].host_pages > 0
        self.has_store = Random(f"{seed}/store").random() < 0.8 and self.has_host
        random = Random(f"{seed}/books")
        page, alphabet = self.climate.config.page_size, self.climate.alphabet
        self.books = [[random.randrange(alphabet) for _ in range(10 * page)] for _ in range(3)]
        self.members = [Member(self, rank) for rank in range(topology.ranks)]
        self._note_climate()

    def _note_climate(self) -> None:
        config, topology, met = self.climate.config, self.topology, self.report.met
        met.update(component.kind.name for component in config.core().components)
        met.update({name: 1 for name in ("tp", "cp", "pp") if getattr(topology, name) > 1})
        met["sidecars"] = len(config.sidecars)
        met["replicated"] = sum(bool(spec.replicated) for spec in self.members[0].config.pools())
        met[config.prefetch_policy.value] = met[config.write_policy.value] = 1

    async def lose(self, victim: int, fate: Fate, after: float) -> Report:
        """``victim`` is killed or hangs; the others are told, each within the time-out, and close. Then a new group of
        all begins, with empty caches and what storage has. Nobody is idle in these lives: a rank that is would be told
        of the end as late as it likes."""
        self.idles = False
        lives = [self.loop.create_task(member.live(0)) for member in self.members]
        await asyncio.sleep(after)
        struck = self.loop.time()
        if fate is Fate.KILLED:
            self.net.kill(victim)
        else:
            self.net.hang(victim)
        others = [life for rank, life in enumerate(lives) if rank != victim]
        await asyncio.gather(*others)
        self.report.told = self.loop.time() - struck
        while not lives[victim].done():  # in a call that all ranks make to its end, the first is for the others to hear
            lives[victim].cancel()
            await asyncio.wait([lives[victim]], timeout=100 * TIMEOUT)
        self.net.reconnect()
        self.net.fates[victim] = Fate.ALIVE
        await self._live(1)
        return await self._end()

    async def run(self, lives: int = 2) -> Report:
        """Every rank, to the end; with a store a second time, which finds what the first one stored."""
        for life in range(lives if self.has_store else 1):
            await self._live(life)
            self.net.reconnect()
        return await self._end()

    async def _live(self, life: int) -> None:
        self.digests.clear()
        await asyncio.gather(*(member.live(life) for member in self.members))

    async def _end(self) -> Report:
        for member in self.members:
            await member.close()
        return self.report


class Member:
    """One rank."""

    def __init__(self, world: CacheWorld, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.place = world.topology.place(rank)
        self.met = world.report.met
        self.local = Random(f"{world.seed}/local {rank}")
        self.config = config_of(world.climate, world.topology, rank)
        climate = world.climate
        faults = climate.faults if climate.faults.failing == 0 else replace(climate.faults, seed=world.seed + rank)
        self.device = SimulatedDevice(seed=world.seed + rank, latency=(0.0, climate.latency), faults=faults)
        self.backend = self._store("backend", world.pages) if world.has_store else None
        self.guest = self._store("guest", world.guest_pages)
        self.page = self.config.page_size
        self.tries = 0
        self.cache: AsyncCache
        self.bytes: EngineBytes

    def _store(self, name: str, pages: dict[PageKey, tuple[bytes, bytes]]) -> SimulatedBackend:
        random = Random(f"{self.world.seed}/{name} {self.rank}")
        return SimulatedBackend(random, self.world.climate.hostility, pages, shared=True)

    async def close(self) -> None:
        for backend in (self.backend, self.guest):
            if backend is not None:
                await backend.aclose()
                assert backend.holding == 0, "the store still holds buffers"
        await self.device.aclose()

    # the scheduler

    async def live(self, life: int) -> None:
        """One cache from open to close. A rank that is told of another's end is done."""
        self.begin(life)
        try:
            async with self.cache:
                self.bytes = EngineBytes(self.cache, self.config, self.place)
                await self._iterate()
                await self._finish()
        except (RankFailure, RankDivergence) as error:
            self.world.report.errors[self.rank] = error
            await self._is_over()
        finally:
            for job in self.jobs:
                if job.task is not None:
                    job.task.cancel()
                    await asyncio.wait([job.task])
        self.world.report.verified += self.bytes.verified

    def begin(self, life: int) -> None:
        """A new cache, not open yet."""
        self.life = life
        self.script = Random(f"{self.world.seed}/script {life}")
        self.said: list[list[int]] = [[]]  # of a life that was cut short ranks remember different things
        self.jobs: list[Job] = []
        ranks = self.world.net.member(self.rank)
        self.cache = AsyncCache(self.config, device=self.device, storage=self.backend, ranks=ranks)

    def digest(self) -> int:
        """Of all that this rank has done; alone it keeps none."""
        lockstep = self.cache._opened().lockstep
        return lockstep.chain.digest if lockstep is not None else 0

    async def _iterate(self) -> None:
        for number in range(self.world.iterations if self.life == 0 else self.world.iterations // 2):
            await asyncio.sleep(self.local.random() * 0.01)
            await self.act(number)
            await self._step()

    async def act(self, number: int) -> None:
        """What the script says for one iteration: the same calls on all ranks."""
        if self.script.random() < 0.5 and len(self.jobs) < JOBS:
            self._arrive(number)
        await self._advance_all()
        if self.jobs and self.script.random() < 0.05:
            self._abort(self.script.choice(self.jobs))
        await self._disturb()

    async def _advance_all(self) -> None:
        self.tries = TRIES
        for job in list(self.jobs):
            await self._advance(job)

    async def _step(self) -> None:
        await self.cache.step()
        self._compare()

    def _compare(self) -> None:
        lockstep = self.cache._opened().lockstep
        assert lockstep is not None
        self.world.report.steps += 1
        step, digest = lockstep.steps.step_number, lockstep.chain.digest
        first = self.world.digests.setdefault(step, digest)
        assert first == digest, f"rank {self.rank}, step {step}: {lockstep.chain.last()[-8:]}"
        number, rest = divmod(step, AUDIT_EVERY)
        if rest == 0 and number % self.world.topology.ranks == self.rank:  # equal digests: one stands for all
            audit.check(self.cache.core)
            ops = self.cache.core.world.ledger.ops.values()
            self.met["split in flight"] += any(len(op.fragments) > 1 for op in ops)

    async def _finish(self) -> None:
        """Until every request has ended, and everything that can be saved is."""
        patience = 4000
        while self.jobs:
            await self._advance_all()
            await self._step()
            await asyncio.sleep(self.local.random() * 0.01)
            patience -= 1
            assert patience, f"requests do not end: {self.jobs}, {self.cache!r}"
        for _ in range(int(KEPT * 100) + 2):  # what was kept for a while expires by steps
            await self._step()
        if self.script.random() < 0.3:  # closing does it, too
            await self.cache.flush()
        while self.cache.core.active_fetches():  # of handles that were cancelled
            await self._step()
        await self._step()
        self._nothing_is_held()
        self._note_end()

    def _nothing_is_held(self) -> None:
        core = self.cache.core
        audit.check(core)
        assert not core.active_leases()
        assert not core.active_fetches()
        statistics = self.cache.statistics()
        assert (statistics.waiting, statistics.kept_tokens) == (0, 0)

    def _note_end(self) -> None:
        statistics = self.cache.statistics()
        stages = statistics.stages
        self.met["copy failed"] += stages["backup_host"].errors + stages["load_back"].errors
        self.met["store failed"] += stages["backup_storage"].errors + stages["prefetch"].errors
        self.met["backup dropped"] += statistics.dropped_backups
        self.met["lost pages"] += statistics.core.lost_pages
        self.met.update({f"prefetch {name}": count for name, count in statistics.prefetches.items()})

    async def _is_over(self) -> None:
        """The group has failed: whoever waited is told so, no call is taken, nothing touches a buffer any more, and
        what is held can be given back."""
        for job in self.jobs:
            if job.task is not None:
                await asyncio.wait([job.task])
            if job.lease is not None:
                job.lease.abort()
        audit.check(self.cache.core)
        assert not self.cache.core.active_leases()
        assert self.backend is None or self.backend.holding == 0
        try:
            self.cache.prefetch([0])
        except (RankFailure, RankDivergence):
            return
        raise AssertionError("a call was taken after the group had failed")

    # requests

    def _arrive(self, number: int) -> None:
        script, alphabet = self.script, self.world.climate.alphabet
        known = script.choice([*self.world.books, *self.world.books, *self.said[-4:]])
        fresh = [script.randrange(alphabet) for _ in range(script.randint(1, 4 * self.page))]
        tokens = (known[: script.randint(0, len(known) * 3 // 2)] + fresh)[: 12 * self.page]
        extra_key = script.choice((None, None, None, "tenant"))
        handle = self.cache.prefetch(tokens, extra_key=extra_key) if script.random() < 0.6 else None
        job = Job(number, tokens, extra_key, len(tokens) + script.randint(0, 2 * self.page), handle)
        self.jobs.append(job)
        if script.random() < 0.3:
            self._wait_elsewhere(job)

    def _wait_elsewhere(self, job: Job) -> None:
        """The lease is made here, in lockstep, and entered in a task that may be cancelled on this rank alone."""
        try:
            job.lease = self._lease(job, wait=True)
        except CacheFull:
            self._end(job, "full")
            return
        job.task = self.world.loop.create_task(self._enter(job), name=f"request {job.number} on {self.rank}")
        if self.local.random() < 0.2:
            self.world.loop.call_later(self.local.random() * 0.02, self._cancel_locally, job)

    def _cancel_locally(self, job: Job) -> None:
        assert job.lease is not None
        assert job.lease._waiting is not None
        assert job.task is not None
        if not job.lease._waiting.over:
            self.met["local cancel"] += 1
            job.task.cancel()

    async def _enter(self, job: Job) -> None:
        assert job.lease is not None
        try:
            async with job.lease:
                pass
        except (CacheFull, RankFailure, RankDivergence):
            return

    def _lease(self, job: Job, wait: bool) -> Lease:
        return self.cache.lease(
            job.tokens, new_tokens=job.total - len(job.tokens), extra_key=job.extra_key, prefetch=job.handle, wait=wait
        )

    async def _advance(self, job: Job) -> None:
        if not job.entered and not await self._admit(job):
            return
        lease = job.lease
        assert lease is not None
        try:
            if any(op in self.cache._opened().driver.ops for op in lease._core.loads):
                return
            await lease.loaded()
            await self._compute(job, lease)
        except LoadFailed:
            self._again(job, lease)

    async def _admit(self, job: Job) -> bool:
        if job.task is not None:
            return self._granted_elsewhere(job)
        if job.handle is not None and not job.handle.done() and self.script.random() < 0.8:
            return False
        if not self.tries:
            return False
        self.tries -= 1
        lease = self._lease(job, wait=False)
        try:
            await lease.__aenter__()
        except CacheFull:
            if len(self.jobs) == 1:
                self._end(job, "full")
            return False
        job.lease = lease
        self._entered(job)
        return True

    def _granted_elsewhere(self, job: Job) -> bool:
        """By the step, whatever has become of the task that waited."""
        assert job.lease is not None
        assert job.lease._waiting is not None
        entry = job.lease._waiting
        if entry.over and entry.entered.done() and not entry.entered.cancelled() and entry.entered.exception():
            self._end(job, "full")
            return False
        if not entry.over:
            return False
        assert job.lease._state.value == "held", "it was given up here alone"
        job.lease._handle, job.lease._arrival = entry.handle, entry.arrival
        self.met["granted in a step"] += 1
        self._entered(job)
        return True

    def _entered(self, job: Job) -> None:
        lease = job.lease
        assert lease is not None
        job.entered = True
        job.done = lease.cached
        for name in ("device", "host", "storage"):
            self.world.report.hits[name] += getattr(lease.hits, name)

    def _again(self, job: Job, lease: Lease) -> None:
        lease.release()
        self.world.report.ends["load failed"] += 1
        job.lease, job.entered, job.task, job.handle = None, False, None, None

    async def _compute(self, job: Job, lease: Lease) -> None:
        """A chunk: verify what was cached first, write, publish; release at the end."""
        if job.done == lease.cached:
            self.bytes.verify(lease, job.extra_key, job.tokens, lease.cached, state=True)
        end = min(job.total, job.done + self.script.randint(1, 5 * self.page))
        while len(job.tokens) < end:
            job.tokens.append(self.script.randrange(self.world.climate.alphabet))
        text = job.tokens[:end]
        self.bytes.write(lease, job.extra_key, text, job.done // self.page)
        checkpoint = self.bytes.checkpoint(lease, job.extra_key, text) if self.script.random() < 0.7 else None
        await lease.commit(text, ready=self._event(), checkpoint=checkpoint)
        lease.adopt(after=self._event())
        self.bytes.verify(lease, job.extra_key, text, end)
        job.done = end
        if end == job.total:
            lease.release(after=self._event(), ended=self.script.random() < 0.3)
            self.said.append(text)
            self._end(job, "served")

    def _event(self) -> SimulatedGate | None:
        """Sometimes the engine is not through yet; when it is differs by rank."""
        if self.script.random() < 0.85:
            return None
        gate = self.device.gate()
        if self.local.random() < 0.3:
            gate.open()
        else:
            self.world.loop.call_later(self.local.random() * 0.03, gate.open)
        self.met["engine's event"] += 1
        return gate

    def _abort(self, job: Job) -> None:
        waits = job.lease is not None and job.lease._waiting is not None and not job.lease._waiting.over
        self.met["abort while it waits" if waits else "abort"] += 1
        if job.lease is not None:
            job.lease.abort()
        self._end(job, "aborted")

    def _end(self, job: Job, how: str) -> None:
        if job.handle is not None:
            job.handle.cancel()
        if job.lease is not None:
            job.lease.abort()
        self.jobs.remove(job)
        self.world.report.ends[how] += 1

    # whatever else an embedder may do

    async def _disturb(self) -> None:
        dice = self.script.random()
        if dice < 0.02:
            await self.cache.invalidate(self.script.choice((None, "tenant")))
            self.met["invalidate"] += 1
        elif dice < 0.03:
            await self.cache.flush()
        elif dice < 0.06:
            kept = await self.cache.keep(self.script.choice(self.said) or [0], ttl=KEPT)
            self.met["kept"] += kept.tokens > 0
        elif dice < 0.08:
            await self.cache.match(self.script.choice(self.said) or [0])
        elif dice < 0.09:
            await self._reset()
        elif dice < 0.13 and self.world.has_host:
            await self._change_stores()
        elif dice < 0.15:
            await self._idle()

    async def _reset(self) -> None:
        await self.cache.reset()
        self.met["reset"] += 1

    async def _change_stores(self) -> None:
        """A second store, or a first one, comes or goes."""
        script = self.script
        if "guest" in self.cache.stores:
            await self.cache.detach_storage("guest", drain=script.random() < 0.5)
            self.met["detach"] += 1
            return
        options = {"write": script.choice(("yes", "yes", "no")), "promote": script.choice(("yes", "no"))}
        position, backfill = script.choice((None, 0)), script.random() < 0.5
        await self.cache.attach_storage(
            self.guest, options=options, name="guest", position=position, backfill=backfill
        )
        self.met["attach"] += 1

    async def _idle(self) -> None:
        """Nothing is in flight for longer than the time-out: no message, and nobody waits for one."""
        await self.cache.flush()
        lockstep = self.cache._opened().lockstep
        assert lockstep is not None
        if self.world.idles and not lockstep.in_flight():
            self.met["idle stretch"] += 1
            await asyncio.sleep(2 * TIMEOUT + self.local.random())


def _brisk(climate: Climate) -> Climate:
    """Everything takes some steps, and not hundreds of them."""
    hostility = replace(climate.hostility, delay=min(0.008, climate.hostility.delay))
    faults = replace(climate.faults, delay=(0.001, 0.015))
    return replace(climate, hostility=hostility, faults=faults, latency=min(0.002, climate.latency))


def config_of(climate: Climate, topology: Topology, rank: int) -> CacheConfig:
    """The world's settings with the layers of this rank's pipeline stage, and some sidecars the same on all ranks."""
    stage = topology.place(rank).pp
    config = climate.config

    def mine(part: Any) -> Any:
        return replace(part, covers=tuple(range(stage * part.layers, (stage + 1) * part.layers)))

    components: tuple[Component, ...] = tuple(map(mine, config.components))
    sidecars = tuple(
        replace(mine(sidecar), replicated=len(sidecar.name + sidecar.indices_from) % 2 == 0)
        for sidecar in config.sidecars
    )
    return replace(config, components=components, sidecars=sidecars)


