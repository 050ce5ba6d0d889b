"""Worlds of whole caches, one per rank, in lockstep: what is late, fails, lies or is cancelled differs by rank.

One seed decides everything. ``Member`` is a rank: its cache, its scheduler, and requests that arrive, are admitted,
computed, published, aborted and released by a script that all ranks share. Must hold: equal digests after every step,
audits, the right bytes on every rank, and at the end nothing held and nothing in flight.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from hashlib import sha256
from random import Random
from typing import Any

from asynccache.config import POOL_NAME, CacheConfig, Component
from asynccache.core import audit
from asynccache.core.settings import ComponentKind
from asynccache.errors import CacheFull, LoadFailed, RankDivergence, RankFailure
from asynccache.ranks import Topology
from asynccache.runtime.cache import AsyncCache
from asynccache.runtime.lease import Lease
from asynccache.runtime.prefetch import PrefetchHandle
from asynccache.storage import PageKey
from asynccache.testing.simulated_backend import SimulatedBackend
from asynccache.testing.simulated_device import SimulatedDevice
from asynccache.testing.simulated_loop import SimulatedLoop
from asynccache.testing.simulated_ranks import Fate, SimulatedRanks
from asynccache.testing.simulated_world import Climate, WrongBytes, draw_climate

TIMEOUT = 30.0
AUDIT_EVERY = 8


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
    errors: dict[int, Exception] = field(default_factory=dict)
    told: float = 0.0


class CacheWorld:
    """``iterations``: of each scheduler, before everything that is left is finished. ``climate``: instead of the
    seed's."""

    def __init__(
        self, loop: SimulatedLoop, seed: int, topology: Topology, iterations: int = 40, climate: Climate | None = None
    ) -> None:
        self.loop = loop
        self.seed = seed
        self.topology = topology
        self.iterations = iterations
        self.climate = climate or draw_climate(seed)
        self.net = SimulatedRanks(topology, Random(f"{seed}/net"), timeout=TIMEOUT)
        self.pages: dict[PageKey, tuple[bytes, bytes]] = {}
        self.digests: dict[int, int] = {}
        self.report = Report()
        self.has_store = Random(f"{seed}/store").random() < 0.8 and self.climate.config.pools()[0].host_pages > 0
        self.members = [Member(self, rank) for rank in range(topology.ranks)]

    async def lose(self, victim: int, fate: Fate, after: float) -> Report:
        """``victim`` is killed or hangs; the others are told, each within the time-out, and close. Then a new group of
        all begins, with empty caches and what storage has."""
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
        lives[victim].cancel()
        await asyncio.wait([lives[victim]])
        self.net.reconnect()
        self.net.fates[victim] = Fate.ALIVE
        self.digests.clear()
        await asyncio.gather(*(member.live(1) for member in self.members))
        for member in self.members:
            await member.close()
        return self.report

    async def run(self, lives: int = 2) -> Report:
        """Every rank, to the end; with a store a second time, which finds what the first one stored."""
        for life in range(lives if self.has_store else 1):
            self.digests.clear()
            await asyncio.gather(*(member.live(life) for member in self.members))
            self.net.reconnect()
        for member in self.members:
            await member.close()
        return self.report


class Member:
    """One rank."""

    def __init__(self, world: CacheWorld, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.place = world.topology.place(rank)
        self.local = Random(f"{world.seed}/local {rank}")
        self.config = config_of(world.climate, world.topology, rank)
        climate = world.climate
        faults = climate.faults if climate.faults.failing == 0 else replace(climate.faults, seed=world.seed + rank)
        self.device = SimulatedDevice(seed=world.seed + rank, latency=(0.0, climate.latency), faults=faults)
        self.backend = (
            SimulatedBackend(Random(f"{world.seed}/backend {rank}"), climate.hostility, world.pages)
            if world.has_store else None
        )  # fmt: skip
        self.pools = {spec.name: spec for spec in self.config.pools() if spec.bytes_per_page}
        self.states = [name for name, spec in self.pools.items() if spec.component is ComponentKind.MAMBA]
        self.window = max(component.window for component in climate.config.core().components)
        self.page = self.config.page_size
        self.said: list[list[int]] = [[]]
        self.cache: AsyncCache

    async def close(self) -> None:
        if self.backend is not None:
            await self.backend.aclose()
            assert self.backend.holding == 0, "the store still holds buffers"
        await self.device.aclose()

    # the scheduler

    async def live(self, life: int) -> None:
        """One cache from open to close. A rank that is told of another's end is done."""
        self.begin(life)
        try:
            async with self.cache:
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

    def begin(self, life: int) -> None:
        """A new cache, not open yet."""
        self.script = Random(f"{self.world.seed}/script {life}")
        self.jobs: list[Job] = []
        ranks = self.world.net.member(self.rank)
        self.cache = AsyncCache(self.config, device=self.device, storage=self.backend, ranks=ranks)

    def digest(self) -> int:
        """Of all that this rank has done; alone it keeps none."""
        lockstep = self.cache._opened().lockstep
        return lockstep.chain.digest if lockstep is not None else 0

    async def _iterate(self) -> None:
        for number in range(self.world.iterations):
            await asyncio.sleep(self.local.random() * 0.01)
            await self.act(number)
            await self._step()

    async def act(self, number: int) -> None:
        """What the script says for one iteration: the same calls on all ranks."""
        if self.script.random() < 0.5:
            self._arrive(number)
        for job in list(self.jobs):
            await self._advance(job)
        if self.jobs and self.script.random() < 0.05:
            self._abort(self.script.choice(self.jobs))
        await self._disturb()

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
        if step % AUDIT_EVERY == 0:
            audit.check(self.cache.core)

    async def _finish(self) -> None:
        """Until every request has ended, and everything that can be saved is."""
        patience = 4000
        while self.jobs:
            for job in list(self.jobs):
                await self._advance(job)
            await self._step()
            await asyncio.sleep(self.local.random() * 0.01)
            patience -= 1
            assert patience, f"requests do not end: {self.jobs}, {self.cache!r}"
        for _ in range(200):  # what was kept or claimed for a while expires by steps
            await self._step()
        await self.cache.flush()
        await self._step()
        self._nothing_is_held()

    def _nothing_is_held(self) -> None:
        core = self.cache.core
        audit.check(core)
        assert not core.active_leases()
        assert not core.active_fetches()
        assert self.cache.statistics().waiting == 0

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
        known = script.choice(self.said[-8:])
        fresh = [script.randrange(alphabet) for _ in range(script.randint(1, 8 * self.page))]
        tokens = (known[: script.randint(0, len(known))] + fresh)[: 12 * self.page]
        extra_key = script.choice((None, None, "tenant"))
        handle = self.cache.prefetch(tokens, extra_key=extra_key) if script.random() < 0.5 else None
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
            self.world.loop.call_later(self.local.random() * 0.05, job.task.cancel)

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
        if job.handle is not None and not job.handle.done() and self.script.random() < 0.5:
            return False
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
        job.lease._handle, job.lease._arrival = entry.handle, entry.arrival
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
            self._verify(job, lease, lease.cached, state=True)
        end = min(job.total, job.done + self.script.randint(1, 3 * self.page))
        while len(job.tokens) < end:
            job.tokens.append(self.script.randrange(self.world.climate.alphabet))
        text = job.tokens[:end]
        self._write(job, lease, text, job.done // self.page)
        checkpoint = self._checkpoint(job, lease, text) if self.script.random() < 0.7 else None
        await lease.commit(text, checkpoint=checkpoint)
        lease.adopt()
        self._verify(job, lease, end)
        job.done = end
        if end == job.total:
            lease.release(ended=self.script.random() < 0.3)
            self.said.append(text)
            self._end(job, "served")

    async def compute_all(self, job: Job) -> None:
        """Verify what was cached, and publish the rest; it is released by whoever entered it."""
        lease, text = job.lease, job.tokens
        assert lease is not None
        self._verify(job, lease, lease.cached, state=True)
        self._write(job, lease, text, lease.cached // self.page)
        whole = text[: len(text) // self.page * self.page]
        await lease.commit(whole, checkpoint=self._checkpoint(job, lease, whole))
        await lease.commit(text)
        lease.adopt()
        self._verify(job, lease, len(text))

    def _abort(self, job: Job) -> None:
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

    async def _disturb(self) -> None:
        dice = self.script.random()
        if dice < 0.02:
            await self.cache.invalidate(self.script.choice((None, "tenant")))
        elif dice < 0.05:
            await self.cache.flush()
        elif dice < 0.08:
            await self.cache.keep(self.script.choice(self.said) or [0], ttl=0.5)
        elif dice < 0.1:
            await self.cache.match(self.script.choice(self.said) or [0])

    # bytes

    def _tables(self, lease: Lease) -> dict[str, list[int]]:
        return {
            name: lease.page_table(POOL_NAME[spec.component]).tolist()
            for name, spec in self.pools.items() if spec.component is not ComponentKind.MAMBA
        }  # fmt: skip

    def _checkpoint(self, job: Job, lease: Lease, text: list[int]) -> tuple[int, int] | None:
        if ComponentKind.MAMBA not in {c.kind for c in self.cache.core.config.components}:
            return None
        if len(lease.states) < 2 or len(text) % self.page:
            return None
        slot = int(lease.states[-1])
        for name in self.states:
            self._put(name, slot, self._content(job, text, len(text) // self.page - 1))
        return len(text), slot

    def _write(self, job: Job, lease: Lease, text: list[int], first: int) -> None:
        for name, table in self._tables(lease).items():
            for i in range(first, -(-len(text) // self.page)):
                if table[i] >= 0:
                    self._put(name, table[i], self._content(job, text, i))

    def _content(self, job: Job, text: list[int], page: int) -> bytes:
        return sha256(repr((job.extra_key, text[: (page + 1) * self.page])).encode()).digest()

    def _verify(self, job: Job, lease: Lease, end: int, state: bool = False) -> None:
        whole = end // self.page
        for name, table in self._tables(lease).items():
            low = 0 if self.pools[name].component is ComponentKind.FULL else max(0, end - self.window) // self.page
            for i in range(low, whole):
                self._check(name, table[i], self._content(job, job.tokens, i), f"page {i}")
        for name in self.states if state and end else ():
            self._check(name, int(lease.states[0]), self._content(job, job.tokens, whole - 1), "state")

    def _row(self, content: bytes, pool: str, layer: int, size: int) -> bytes:
        """Every rank has bytes of its own, but for what is replicated."""
        spec = self.pools[pool]
        part = (0, 0) if spec.replicated else (self.place.tp, self.place.cp)
        seed = sha256(content + f"{pool}/{spec.model_layers[layer]}/{part}".encode()).digest()
        return (seed * (size // len(seed) + 1))[:size]

    def _put(self, pool: str, slot: int, content: bytes) -> None:
        for layer in range(self.pools[pool].layers):
            row = self.cache.pools[pool].layer(layer)[slot]
            row.copy_(row.new_tensor(list(self._row(content, pool, layer, len(row)))))

    def _check(self, pool: str, slot: int, content: bytes, what: str) -> None:
        self.world.report.verified += 1
        if slot < 0:
            raise WrongBytes(f"{pool} {what} has no slot")
        for layer in range(self.pools[pool].layers):
            row = bytes(self.cache.pools[pool].layer(layer)[slot].tolist())
            if row != self._row(content, pool, layer, len(row)):
                raise WrongBytes(f"rank {self.rank}: {pool} {what}, slot {slot}, layer {layer}: {row[:8].hex()}")


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
