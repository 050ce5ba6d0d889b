"""Seeded worlds over the real runtime: many requests, a hostile device, a lying store, cancellations at any await.

Law: one seed decides everything (settings, prompts, order, faults, who is cancelled where), so a world that fails is
played again by its number. What must hold: every page that an engine reads after ``loaded()`` has the right bytes; who
was not cancelled is served; at the end nothing is held, pinned or in flight, and the audit passes.

``Crowd`` and ``Asker`` are those who use the cache of a world. The cache of ``World`` has no workers of other
processes; those of ``tests.group.random_worlds`` have one to eight.

The engine of ``World`` is a stream in order: work that it put off (``ready`` and ``after`` events) is done before any
later read or write, as kernels on one stream would be.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from random import Random
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import structs

from asynccache import AsyncCache, BatchFailed, CacheFull, ConfigError, CopyFailed, LoadFailed, PrefetchHandle
from asynccache.config import EVICTION_POLICIES, POOL_NAME, CacheConfig
from asynccache.core import audit
from asynccache.core.cache import CacheCore
from asynccache.core.settings import ComponentKind
from asynccache.errors import AsyncCacheError, RankFailure
from asynccache.runtime.lease import Lease
from asynccache.storage import PageKey
from asynccache.worker import RankPlace, Topology
from tests.simulated.backend import HONEST, SimulatedBackend
from tests.simulated.device import SimulatedDevice, SimulatedGate
from tests.simulated.drawn import GUEST, PAGE, Climate, draw, text
from tests.simulated.leading import check_books, leading
from tests.simulated.loop import Order, SimulatedLoop, Strike, simulate

TRIES_OF_ROUGH_LOADS = 20  # where three of eight ranks fail half of their loads, thirty in a row may fail


# The bytes that an engine writes on one rank, and must find there when it reads. Every rank has bytes of its own,
# except in replicated pools. The bytes of a page are a function of everything up to the page's end.


CANNOT = "the model raised"
BAD = 0xEE
"""The byte that a failed batch leaves in its pages, and a batch that has read such a page in its own."""


class WrongBytes(AssertionError):
    """A page that was served as a hit does not hold what was computed for it."""


class BadBytes(WrongBytes):
    """A page that was read is one of a batch that failed."""


class Task(NamedTuple):
    """A batch's payload. ``tables``: page tables by component. ``cached``: tokens that must be there already; the
    pages of ``text`` from there on are written. ``state``: the slot that holds the state at ``cached``, or -1.
    ``checkpoint``: the slot to write the state of all of ``text`` to, or -1. ``unable``: the ranks whose engines
    fail at it."""

    space: str | None
    text: list[int]
    tables: dict[str, list[int]]
    cached: int
    state: int
    checkpoint: int
    unable: Sequence[int] = ()

    def payload(self) -> bytes:
        return json.dumps(self).encode()


def task_of(payload: bytes) -> Task:
    return Task(*json.loads(payload))


def tables_of(lease: Lease, names: Sequence[str]) -> dict[str, list[int]]:
    return {name: lease.page_table(name).tolist() for name in names if name != "mamba"}


def task_for(lease: Lease, space: str | None, text: list[int], names: Sequence[str], *, first: bool = True) -> Task:
    """The payload for ``lease``: the engine is to compute ``text`` from the cached end on."""
    states = [int(state) for state in lease.states]
    end = lease.cached if first else 0
    state, checkpoint = states[0] if states and end else -1, states[-1] if len(states) > 1 else -1
    return Task(space, text, tables_of(lease, names), end, state, checkpoint)


class EngineBytes:
    """The pages of one worker at ``place``. ``verified``: how many were compared."""

    def __init__(self, pools: Mapping[str, Any], config: CacheConfig, place: RankPlace) -> None:
        self.verified = 0
        self._place = place
        self._page = config.page_size
        self._pools = {spec.name: spec for spec in config.pools() if spec.bytes_per_page}
        self._window = max(component.window for component in config.core().components)
        self._rows: dict[str, list[npt.NDArray[np.uint8]]] = {
            name: [pools[name].layer(layer).numpy() for layer in range(spec.layers)]
            for name, spec in self._pools.items()
        }
        self._parts: dict[str, bytes] = {}
        for name, spec in self._pools.items():
            dims = [number for dim, number in (("tp", place.tp), ("cp", place.cp)) if dim not in spec.replicated]
            self._parts[name] = f"{name}/{dims}".encode()

    def verify(self, task: Task) -> None:
        """Check everything that an engine reads which goes on at ``task.cached``."""
        whole, low = task.cached // self._page, max(0, task.cached - self._window) // self._page
        for name, spec in self._pools.items():
            if spec.component is ComponentKind.MAMBA:
                if task.state >= 0:
                    self._check(name, task.state, self._content(task, whole - 1), "state")
                continue
            table = task.tables[POOL_NAME[spec.component]]
            for i in range(low if spec.component is ComponentKind.SWA else 0, whole):
                self._check(name, table[i], self._content(task, i), f"page {i}")

    def write(self, task: Task) -> None:
        """Write the pages of ``task.text`` beyond the cached ones, and the checkpoint."""
        for name, spec in self._pools.items():
            if spec.component is ComponentKind.MAMBA:
                if task.checkpoint >= 0 and task.text and len(task.text) % self._page == 0:
                    self._put(name, task.checkpoint, self._content(task, len(task.text) // self._page - 1))
                continue
            table = task.tables[POOL_NAME[spec.component]]
            for i in range(task.cached // self._page, -(-len(task.text) // self._page)):
                if table[i] >= 0:
                    self._put(name, table[i], self._content(task, i))

    def spoil(self, task: Task) -> None:
        """Write ``BAD`` to whatever ``write`` would write to."""
        for name, spec in self._pools.items():
            if spec.component is ComponentKind.MAMBA:
                slots = [task.checkpoint] if task.text and len(task.text) % self._page == 0 else []
            else:
                first, end = task.cached // self._page, -(-len(task.text) // self._page)
                slots = task.tables[POOL_NAME[spec.component]][first:end]
            for slot in slots:
                for rows in self._rows[name] if slot >= 0 else ():
                    rows[slot][:] = BAD

    def snapshot(self, task: Task) -> list[bytes]:
        """What the pages of ``task`` from ``task.cached`` on hold now."""
        return [
            rows[slot].tobytes()
            for name, spec in self._pools.items() if spec.component is not ComponentKind.MAMBA
            for slot in task.tables[POOL_NAME[spec.component]][task.cached // self._page :] if slot >= 0
            for rows in self._rows[name]
        ]  # fmt: skip

    def _content(self, task: Task, page: int) -> bytes:
        return f"{task.space}{task.text[: (page + 1) * self._page]}".encode()

    def _expected(self, pool: str, layer: int, content: bytes, size: int) -> bytes:
        seed = _seed(content, self._parts[pool])
        turn = self._pools[pool].model_layers[layer] % len(seed)
        return ((seed[turn:] + seed[:turn]) * (size // len(seed) + 1))[:size]

    def _put(self, pool: str, slot: int, content: bytes) -> None:
        for layer, rows in enumerate(self._rows[pool]):
            row = rows[slot]
            row[:] = np.frombuffer(self._expected(pool, layer, content, len(row)), np.uint8)

    def _check(self, pool: str, slot: int, content: bytes, what: str) -> None:
        self.verified += 1
        if slot < 0:
            raise WrongBytes(f"{pool} {what} has no slot")
        for layer, rows in enumerate(self._rows[pool]):
            row = rows[slot].tobytes()
            if row == bytes([BAD]) * len(row):
                raise BadBytes(f"{self._place}: {pool} {what}, slot {slot}, layer {layer} is of a failed batch")
            if row != self._expected(pool, layer, content, len(row)):
                raise WrongBytes(f"{self._place}: {pool} {what}, slot {slot}, layer {layer}: {row[:8].hex()}")


@lru_cache(1 << 14)
def _seed(content: bytes, part: bytes) -> bytes:
    return sha256(content + part).digest()


# those who use a cache


@dataclass(slots=True)
class Report:
    """The results of a world. ``verified``: pages of which the bytes were compared, on any rank. ``met``: everything
    that the world came across, by name."""

    climate: Climate
    verified: int = 0
    met: Counter[str] = field(default_factory=Counter)


def played(seed: int, leads: bool, world: Callable[[SimulatedLoop], Any], step_limit: int = 400_000) -> Report:
    """Run ``world(loop).run()`` in a loop of this seed.

    Raises:
        Exception: whatever went wrong; the seed is in its notes.
    """

    async def main(loop: SimulatedLoop) -> Report:
        report: Report = await world(loop).run()
        return report

    order = Random(f"{seed}/order").choice((Order.FIFO, Order.SHUFFLED, Order.SHUFFLED))
    with leading(seed) if leads else nullcontext(Counter[str]()) as choices:
        report = simulate(main, seed, order=order, step_limit=step_limit)
    report.met.update({f"p2c {what}": count for what, count in choices.items()})
    return report


def check_idle(core: CacheCore) -> None:
    """Nothing is held, and nothing in flight."""
    audit.check(core, idle=not core.world.ledger.ops)
    check_books(core)
    assert not core.active_leases()
    assert not core.active_fetches()


class Crowd:
    """Those who use the cache of a world. ``said``: texts that were served, which others begin like; ``guest``: a store
    that comes and goes. ``cancels_guests``: the share of its changes that are cancelled, at any await."""

    cache: AsyncCache
    guest: Any = GUEST
    guest_options: Mapping[str, str] = {}
    cancels_guests = 0.0

    def __init__(self, loop: SimulatedLoop, climate: Climate) -> None:
        self.loop = loop
        self.climate = climate
        self.random = loop.entropy("world")
        self.report = Report(climate)
        self.said: list[tuple[str | None, list[int]]] = [(None, [])]

    async def requests(self, count: int) -> None:
        """Make so many requests, some at a time; when one ends the next begins."""
        running: set[asyncio.Task[None]] = set()
        for number in range(count):
            if len(running) >= self.climate.concurrency:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                self._collect(done)
            running.add(self._begin(number))
            if self.random.random() < self.climate.disturb:
                running.add(self.loop.create_task(self.disturb(), name=f"disturbance {number}"))
            await asyncio.sleep(self.random.choice((0.0, 0.001, 0.02)))
        while running:
            done, running = await asyncio.wait(running)
            self._collect(done)

    def _begin(self, number: int) -> asyncio.Task[None]:
        random = self.loop.entropy(f"request {number} at {self.loop.time()}")
        task = self.loop.create_task(self.request(random).run(), name=f"request {number}")
        if self.random.random() < self.climate.cancel:
            self.loop.cancel_at(task, self.random.randint(1, 30))
        return task

    def request(self, random: Random) -> Asker:
        raise NotImplementedError

    def _collect(self, done: set[asyncio.Task[None]]) -> None:
        for task in done:
            if task.cancelled():
                self.report.met["cancelled"] += 1
            elif (error := task.exception()) is not None:
                self.failed(error)

    def failed(self, error: BaseException) -> None:
        """A request, or what was done beside it, has ended with this error."""
        raise error

    def check_idle(self) -> None:
        check_idle(self.cache.core)

    async def disturb(self) -> None:
        """Make other calls that a cache must take at any time."""
        cache, random = self.cache, self.random
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
                await self._look(text or [0], space)
            case "prefetch":
                await self._give_up_a_prefetch(text or [0], space)
            case "reset":
                await self._unless_unavailable(cache.reset())
            case "guest":
                if self.climate.config.pools()[0].host_pages:
                    draws, task = self.loop.entropy(f"guest at {self.loop.time()}"), asyncio.current_task()
                    if task is not None and draws.random() < self.cancels_guests:
                        self.loop.cancel_at(task, draws.randint(1, 4), draws.choice(list(Strike)))
                    await self._guest(random)

    async def _guest(self, random: Random) -> None:
        """A store comes, or goes; somebody else may be at it."""
        cache = self.cache
        try:
            if "guest" in cache.stores:
                await cache.detach_storage("guest", timeout=random.choice((None, 0)))
                self.report.met["detached"] += 1
            else:
                write, promote = random.choice(("yes", "yes", "no")), random.choice(("yes", "no"))
                options = {"name": "guest", "write": write, "promote": promote, **self.guest_options}
                await cache.attach_storage(self.guest, options=options, position=random.choice((None, 0)),
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

    async def _give_up_a_prefetch(self, text: list[int], space: str | None = None) -> None:
        handle = self.cache.prefetch(text, namespace=space)
        await asyncio.sleep(self.random.random() * 0.02)
        handle.cancel()
        await handle

    async def _look(self, text: list[int], space: str | None) -> None:
        await self.cache.match(text, namespace=space)
        self.cache.statistics()


class Asker:
    """One request, from its arrival to its end, as often as loads fail. ``awaits``: the share of prefetches that it
    waits for to their end."""

    attempts = 30
    awaits = 0.5

    def __init__(self, owner: Crowd, random: Random) -> None:
        self.cache = owner.cache
        self.random = random
        self.met = owner.report.met
        self.climate = owner.climate
        self.space, known = random.choice(owner.said[-5:])
        if random.random() < 0.2:
            self.space = random.choice((None, "tenant"))
        fresh = [random.randrange(3) for _ in range(random.randint(1, 4 * PAGE))]
        kept = random.choice((len(known), len(known), random.randint(0, len(known))))
        self.prompt = (known[:kept] + fresh)[: 5 * PAGE]
        self.new = random.choice((0, 0, random.randint(1, PAGE)))
        self.shared: int | None = None

    async def run(self) -> None:
        """Serve it.

        Raises:
            AsyncCacheError: the cache has failed.
            AssertionError: it was not served, or with wrong bytes.
        """
        handle = self.cache.prefetch(self.prompt, namespace=self.space) if self.random.random() < 0.5 else None
        try:
            for attempt in range(self.attempts):
                if attempt == TRIES_OF_ROUGH_LOADS:
                    self.mend()
                if await self._attempt(handle):
                    return
                handle = None
            raise AssertionError(f"not served in {self.attempts} attempts: {self.cache!r}")
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

    async def _attempt(self, handle: PrefetchHandle | None) -> bool:
        random = self.random
        if random.random() < self.climate.pressure:
            await self._empty_the_device()
        if handle is not None and random.random() < self.awaits:
            await handle
        lease = self.cache.lease(
            self.prompt, new_tokens=self.new, namespace=self.space, prefetch=handle, wait=random.random() < 0.9,
            timeout=random.choice((None, None, None, 1.0)), shared_tokens=self.shared,
        )  # fmt: skip
        async with lease:
            self.granted(lease)
            try:
                await self.serve(lease)
            except LoadFailed:
                self.met["load failed"] += 1
                self.void()
                return False
            finally:
                self.leave(lease)
        self.met["served"] += 1
        return True

    async def _empty_the_device(self) -> None:
        """Empty the device, as far as nothing on it is held."""
        pools = [pool for pool in self.climate.config.pools() if pool.component is not ComponentKind.MAMBA]
        with suppress(TimeoutError):
            async with self.cache.lease(text(min(pool.device_pages for pool in pools), seed=999), timeout=0.2):
                self.met["emptied"] += 1

    def granted(self, lease: Lease) -> None:
        hits = lease.hits
        self.met.update({"device hit": hits.device, "host hit": hits.host, "storage hit": hits.storage})

    async def serve(self, lease: Lease) -> None:
        """The prompt, and then perhaps some tokens more."""
        raise NotImplementedError

    def void(self) -> None:
        """A load of the lease has failed."""

    def leave(self, lease: Lease) -> None:
        """Release the lease, however it was served."""
        raise NotImplementedError

    def mend(self) -> None:
        """From now on no copy from the host fails."""


# worlds whose cache has no workers of other processes


def play(seed: int, pages: dict[PageKey, tuple[bytes, bytes]] | None = None, *, debug: bool = False) -> Report:
    """Run the world of this seed. ``pages``: a store that outlives worlds. ``debug``: as for ``AsyncCache``."""
    climate = draw_climate(seed)
    return played(seed, climate.leads, lambda loop: World(loop, climate, pages, debug=debug))


def draw_climate(seed: int) -> Climate:
    """Here more is asked for at a time, and fewer prefetches begin."""
    climate, random = draw(seed), Random(f"{seed}/alone")
    config = structs.replace(
        climate.config, write_back_watermark=random.choice((0.1, 0.6)), prefetch_quota=random.choice((0.2, 1.0)),
        prefetch_threshold=random.choice((1, 8)), eviction=random.choice(("p2c", *EVICTION_POLICIES)),
    )  # fmt: skip
    return climate._replace(
        config=config, disturb=0.0 if climate.calm else random.choice((0.0, 0.3, 0.6)), leads=random.random() < 0.9,
        requests=random.randint(4, 16), concurrency=random.randint(1, 8),
    )  # fmt: skip


class World(Crowd):
    """One cache, its engine, and those who use it. ``failures``: batches that the engine could not run."""

    cancels_guests = 0.4

    def __init__(
        self, loop: SimulatedLoop, climate: Climate, pages: dict[PageKey, tuple[bytes, bytes]] | None = None, *,
        debug: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(loop, climate)
        self.debug = debug
        latency, hostility = self.random.choice((0.0, 1e-5, 1e-3, 1e-2)), climate.hostility.get(0, HONEST)
        self.device = SimulatedDevice(seed=loop.seed, latency=(0.0, latency), faults=climate.faults.get(0))
        self.stores = {name: SimulatedBackend(loop.entropy(name), hostility) for name in ("backend", "guest")}
        if pages is not None:
            self.stores["backend"].pages = pages
        self.guest = self.stores["guest"]
        self.put_off: deque[SimulatedGate] = deque()
        self.unable = loop.entropy("batches that fail")
        self.failures = 0
        self.books: EngineBytes

    async def run(self) -> Report:
        """Run the world: twice if there is a store, which keeps the pages of the first life."""
        for _ in range(2 if self.climate.config.stores else 1):
            await self.live()
        for name, store in self.stores.items():
            await store.aclose()
            assert store.holding == 0, f"{name} still holds buffers"
        await self.device.aclose()
        return self.report

    async def live(self) -> None:
        self.cache = self.make()
        async with self.cache:
            await self.requests(self.climate.requests)
            await self.settle()
            statistics = self.cache.statistics()
            assert (statistics.leases, statistics.waiting, statistics.kept_tokens) == (0, 0, 0)
            self.check_idle()

    async def requests(self, count: int) -> None:
        self.books = EngineBytes(self.cache.pools, self.climate.config, Topology().place(0))
        await super().requests(count)
        self.report.verified += self.books.verified

    def make(self, **more: Any) -> AsyncCache:
        config = structs.replace(self.climate.config, storage=None)
        storage = self.stores["backend"] if self.climate.config.stores else None
        return AsyncCache(config, device=self.device, storage=storage, debug=self.debug, **more)

    async def settle(self) -> None:
        """Kept prefixes expire, and everything that can be saved is."""
        await asyncio.sleep(1.0)
        await self.engine()
        await self.cache.flush(timeout=600.0)

    def request(self, random: Random) -> Asker:
        return Request(self, random)

    async def _look(self, text: list[int], space: str | None) -> None:
        await super()._look(text, space)
        await self.cache.explain([*text, *text], namespace=space)

    # the engine's stream

    async def engine(self) -> None:
        """Wait until the engine has done what was put off."""
        while self.put_off:
            with suppress(CopyFailed):
                await self.put_off[-1].wait()

    def later(self, work: Callable[[], None], fails: bool = False) -> SimulatedGate:
        """Put ``work`` off; the event fires when it is done. ``fails``: it carries an error then."""
        gate = self.device.gate()
        before = self.put_off[-1] if self.put_off else None
        self.put_off.append(gate)

        def run() -> None:
            work()
            self.put_off.remove(gate)
            self.failures += fails
            if fails:
                gate.fire(RuntimeError("out of memory"))
            gate.open()

        def soon() -> None:
            self.loop.call_later(self.random.random() * 0.02, run)

        if before is None:
            soon()
        else:
            before.subscribe(soon)
        return gate

    def elsewhere(self, work: Callable[[], None]) -> SimulatedGate:
        """Put ``work`` off on a stream of its own; the event fires when it is done."""
        gate = self.device.gate()

        def run() -> None:
            work()
            gate.open()

        self.loop.call_later(self.random.random() * 0.1, run)
        return gate


class Request(Asker):
    """``grows``: before which share of its steps it extends its lease."""

    attempts = 60
    grows = 0.1

    def __init__(self, world: World, random: Random) -> None:
        super().__init__(world, random)
        self.world = world
        self.books = world.books
        self.new, self.shared = random.randint(0, 2 * PAGE), random.choice((None, None, PAGE, 3 * PAGE))
        self.names = [spec.name for spec in self.climate.config.pools() if spec.indices_from is None]

    def granted(self, lease: Lease) -> None:
        super().granted(lease)
        self.failures = self.world.failures
        self.served = False

    async def serve(self, lease: Lease) -> None:
        """Verify what was cached, compute the rest in chunks, decode."""
        if self.random.random() < 0.5:
            for layer in range(self.climate.config.components[0].layers):
                await lease.layer(layer)
        await lease.loaded()
        assert lease.cached < len(self.prompt)
        text, done = list(self.prompt), lease.cached
        await self._verify(lease, text[:done], state=True)
        while done < len(text):
            upto = min(len(text), done + self.random.randint(1, 20))
            await self._compute(lease, text[:upto], done)
            done = upto
        for _ in range(self.new):
            if self.random.random() < self.grows:
                await self._extend(lease)
            text.append(self.random.randrange(3))
            await self._compute(lease, text, len(text) - 1)
            lease.advance(len(text))
        if self.random.random() < 0.2:
            lease.truncate(len(text))
        self.world.said.append((self.space, text))
        self.served = True

    async def _extend(self, lease: Lease) -> None:
        try:
            await lease.extend(self.random.randint(1, 8))
        except CacheFull:
            self.met["extend full"] += 1

    def _task(self, lease: Lease, text: Sequence[int], cached: int, state: int = -1, checkpoint: int = -1) -> Task:
        return Task(self.space, [*text], tables_of(lease, self.names), cached, state, checkpoint)

    async def _compute(self, lease: Lease, text: Sequence[int], start: int) -> None:
        """Write KV for ``text[start:]``, sometimes late, and publish it."""
        await self.world.engine()
        slot = -1
        if len(lease.states) > 1 and len(text) % PAGE == 0 and self.random.random() < 0.7:
            slot = int(lease.states[-1])
        task, ready = self._task(lease, text, start, checkpoint=slot), None
        if self.random.random() < 0.3:
            fails = self.world.unable.random() < self.climate.unable
            ready = self.world.later(lambda: (self.books.spoil if fails else self.books.write)(task), fails)
        else:
            self.books.write(task)
        if len(text) >= len(self.prompt) or self.random.random() < 0.5 or ready is not None:
            await lease.commit(text, after=ready, checkpoint=(len(text), slot) if slot >= 0 else None)
            if self.random.random() < 0.5:
                lease.adopt(after=self.world.later(_nothing) if self.random.random() < 0.3 else None)
            await self._verify(lease, text)

    async def _verify(self, lease: Lease, text: Sequence[int], state: bool = False) -> None:
        """Every whole page of ``text`` that the engine would read holds what it must."""
        await self.world.engine()
        slot = int(lease.states[0]) if state and text and len(lease.states) else -1
        try:
            self.books.verify(self._task(lease, text, len(text), slot))
        except BadBytes:
            if self.world.failures == self.failures:
                raise
            raise LoadFailed(0) from None  # the batch has failed since the grant, of which the lease is just being told

    def leave(self, lease: Lease) -> None:
        """Sometimes the pages of who was served are still read when they are released: by the engine's stream, or, of
        the request's own pages, by a stream that nothing orders with the engine's."""
        ended, event = self.random.random() < 0.3, None
        if self.served and self.random.random() < 0.5:
            elsewhere = self.random.random() < 0.5
            task = self._task(lease, (), lease._core.length if elsewhere else 0)
            before = self.books.snapshot(task)

            def work() -> None:
                if self.books.snapshot(task) != before:
                    raise WrongBytes("a page was overwritten while the engine still read it")

            event = self.world.elsewhere(work) if elsewhere else self.world.later(work)
        lease.release(ended=ended, after=event)


def _nothing() -> None:
    """The engine has nothing left to do; only the event matters."""
