"""Seeded worlds over the real runtime: many requests, a hostile device, a lying store, cancellations at any await.

Law: one seed decides everything (settings, prompts, order, faults, who is cancelled where), so a world that fails is
played again by its number. What must hold: every page that an engine reads after ``loaded()`` has the right bytes; who
was not cancelled is served; at the end nothing is held, pinned or in flight, and the audit passes.

The engine here is a stream in order: work that it put off (``ready`` and ``after`` events) is done before any later
read or write, as kernels on one stream would be.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random
from typing import Any

from msgspec import structs

from asynccache.config import POOL_NAME, CacheConfig, Component, Full, Mamba, Sidecar, SlidingWindow
from asynccache.core import audit
from asynccache.core.settings import ComponentKind, PrefetchPolicy, WritePolicy
from asynccache.errors import CacheFull, CopyFailed, LoadFailed
from asynccache.memory.host_copies import Faults
from asynccache.runtime.cache import AsyncCache
from asynccache.runtime.lease import Lease
from asynccache.runtime.prefetch import PrefetchHandle
from asynccache.storage import PageKey
from tests.simulated.backend import HONEST, Guests, Hostility, SimulatedBackend
from tests.simulated.device import SimulatedDevice, SimulatedGate
from tests.simulated.leading import check_books, leading
from tests.simulated.loop import Order, SimulatedLoop, simulate

_ATTEMPTS = 60
_PATIENCE = 600.0


BAD = 0xEE
"""The byte that a batch which fails leaves in its pages."""


class WrongBytes(AssertionError):
    """A page that was served as a hit does not hold what was computed for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Climate:
    """The settings of a world. ``cancel``: the share of requests that are cancelled at a random await. ``leads``:
    whether its ``p2c`` is one that leads, see ``leading``."""

    config: CacheConfig
    order: Order
    faults: Faults
    latency: float
    hostility: Hostility
    requests: int
    concurrency: int
    cancel: float
    alphabet: int
    disturb: bool
    leads: bool


@dataclass(slots=True)
class Report:
    """The results of a world. ``verified``: pages whose bytes were compared. ``choices``: see ``Leading``."""

    seed: int
    climate: Climate
    verified: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    choices: Counter[str] = field(default_factory=Counter)


def play(seed: int, pages: dict[PageKey, tuple[bytes, bytes]] | None = None, *, debug: bool = False) -> Report:
    """Run the world of this seed. ``pages``: a store that outlives worlds. ``debug``: as for ``AsyncCache``.

    Raises:
        Exception: whatever went wrong; the seed is in its notes.
    """
    climate = draw_climate(seed)

    async def main(loop: SimulatedLoop) -> Report:
        return await _World(loop, seed, climate, {} if pages is None else pages, debug=debug).run()

    with leading(seed) if climate.leads else nullcontext(Counter[str]()) as choices:
        report = simulate(main, seed, order=climate.order)
    report.choices += choices
    return report


# the climate


def draw_climate(seed: int) -> Climate:
    """The settings of a world."""
    random = Random(f"{seed}/climate")
    calm = random.random() < 0.25
    return Climate(
        config=_with_sidecars(_draw_config(random), Random(f"{seed}/sidecars")),
        order=random.choice((Order.FIFO, Order.SHUFFLED, Order.SHUFFLED)),
        faults=Faults(seed=seed) if calm else Faults(seed=seed, delayed=0.1, failing=random.choice((0.0, 0.05, 0.2))),
        latency=random.choice((0.0, 1e-5, 1e-3, 1e-2)),
        hostility=HONEST if calm else _draw_hostility(random),
        requests=random.randint(4, 16),
        concurrency=random.randint(1, 8),
        cancel=random.choice((0.0, 0.2, 0.6)),
        alphabet=random.choice((1, 2, 3)),
        disturb=random.random() < 0.4,
        leads=Random(f"{seed}/eviction").random() < 0.9,
    )


def _draw_hostility(random: Random) -> Hostility:
    return Hostility(
        delay=random.choice((0.0, 0.001, 0.05)),
        **{name: random.choice((0.0, 0.0, 0.1)) for name in ("unavailable", "failed", "wrong", "short", "empty")},
        vanished=random.choice((0.0, 0.05)),
    )


def _draw_config(random: Random) -> CacheConfig:
    page, layers = 4, random.randint(1, 3)
    host = random.choice((0, 16, 40)) * page
    token_bytes = 8 * layers
    components: list[Component] = [
        Full(bytes_per_token=token_bytes, device_tokens=random.choice((16, 24, 40)) * page, host_tokens=host,
             layers=layers)
    ]  # fmt: skip
    if random.random() < 0.5:
        components.append(
            SlidingWindow(window=random.choice((1, 6, 10, 40)), bytes_per_token=token_bytes, layers=layers,
                          device_tokens=random.choice((16, 24, 40)) * page, host_tokens=host)
        )  # fmt: skip
    if random.random() < 0.5:
        components.append(
            Mamba(state_bytes=24 * layers, device_states=random.choice((4, 8, 20)), layers=layers,
                  host_states=random.choice((2, 8)) if host else 0)
        )  # fmt: skip
    return CacheConfig(
        model="simulated", components=tuple(components), page_size=page,
        write_policy=random.choice(list(WritePolicy)), prefetch_policy=random.choice(list(PrefetchPolicy)),
        prefetch_threshold=random.choice((1, 8)), prefetch_quota=random.choice((0.2, 1.0)),
        load_back_threshold=random.choice((0, 0, 12)), max_backup_ops=random.choice((1, 4, 256)),
        write_back_watermark=random.choice((0.1, 0.6)), close_timeout=60.0, prefetch_timeout_base=0.05,
    )  # fmt: skip


def _with_sidecars(config: CacheConfig, random: Random) -> CacheConfig:
    """Half of the worlds have pools that hang on others, in any order, and then FULL itself may be logical."""
    if random.random() < 0.5:
        return config
    sources = [POOL_NAME[kind] for kind in (spec.component for spec in config.pools())]
    sidecars: list[Sidecar] = []
    for number in range(random.randint(1, 5)):
        layers = random.randint(1, 4)
        sidecar = Sidecar(name=f"side{number}", indices_from=random.choice(sources),
                          bytes_per_page=random.randint(1, 12) * layers, layers=layers)  # fmt: skip
        sources.append(sidecar.name)
        sidecars.append(sidecar)
    random.shuffle(sidecars)
    full, *others = config.components
    if isinstance(full, Full) and random.random() < 0.4:
        full = structs.replace(full, bytes_per_token=0, layers=1)
    return structs.replace(config, components=(full, *others), sidecars=tuple(sidecars))


# the world


class _World:
    """One cache, its engine, and those who use it."""

    def __init__(
        self, loop: SimulatedLoop, seed: int, climate: Climate, pages: dict[PageKey, tuple[bytes, bytes]], *,
        debug: bool = False,
    ) -> None:  # fmt: skip
        self.loop = loop
        self.debug = debug
        self.climate = climate
        self.random = loop.entropy("world")
        self.report = Report(seed, climate)
        self.device = SimulatedDevice(seed=seed, latency=(0.0, climate.latency), faults=climate.faults)
        has_host = climate.config.pools()[0].host_pages > 0
        self.backend = (
            SimulatedBackend(loop.entropy("backend"), climate.hostility, pages)
            if has_host and self.random.random() < 0.8
            else None
        )
        self.guests = Guests(loop, climate.hostility) if has_host else None
        self.put_off: deque[SimulatedGate] = deque()
        self.said: list[list[int]] = [[]]
        self.unable = loop.entropy("batches that fail")
        self.failures = 0
        self.cache: AsyncCache

    async def run(self) -> Report:
        """Run the world: twice if there is a store, which keeps the pages of the first life."""
        await self._live()
        if self.backend is not None:
            await self._live()
        if self.guests is not None:
            await self.guests.aclose()
        if self.backend is not None:
            await self.backend.aclose()
            assert self.backend.holding == 0, "the store still holds buffers"
        await self.device.aclose()
        return self.report

    async def _live(self) -> None:
        self.cache = self._cache()
        async with self.cache:
            over = asyncio.Event()
            coming = self.guests.come_and_go(self.cache, over) if self.guests is not None else asyncio.sleep(0)
            guests = self.loop.create_task(coming, name="guests")
            await self._requests()
            over.set()
            await guests
            await self._disturb_last()
            await self._settle()
            self._nothing_is_left()

    def _cache(self) -> AsyncCache:
        return AsyncCache(self.climate.config, device=self.device, storage=self.backend, debug=self.debug)

    async def _requests(self) -> None:
        """Make the requests, some at a time; when one ends the next begins."""
        running: set[asyncio.Task[Any]] = set()
        for number in range(self.climate.requests):
            if len(running) >= self.climate.concurrency:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                self._collect(done)
            running.add(self._begin(number))
            if self.climate.disturb and self.random.random() < 0.3:
                running.add(self.loop.create_task(self._disturb(), name=f"disturbance {number}"))
            await asyncio.sleep(self.random.choice((0.0, 0.0, 0.001, 0.05)))
        while running:
            done, running = await asyncio.wait(running)
            self._collect(done)

    def _begin(self, number: int) -> asyncio.Task[None]:
        request = self._request(self.loop.entropy(f"request {number} at {self.loop.time()}"))
        task = self.loop.create_task(request.run(), name=f"request {number}")
        if self.random.random() < self.climate.cancel:
            self.loop.cancel_at(task, self.random.randint(1, 40))
        return task

    def _request(self, random: Random) -> Request:
        return Request(self, random)

    def _collect(self, done: set[asyncio.Task[Any]]) -> None:
        for task in done:
            if task.cancelled():
                self.report.ends["cancelled"] += 1
            elif (error := task.exception()) is not None:
                raise error

    async def _disturb(self) -> None:
        """Do other things that an embedder may do at any time."""
        random = self.random
        match random.randrange(7):
            case 0:
                await self.cache.invalidate(random.choice((None, "tenant")))
            case 1:
                await self.cache.flush()
            case 2:
                kept = await self.cache.keep(self.prompt(random), ttl=0.5)
                assert kept.tokens >= 0
            case 3:
                await self.cache.match(self.prompt(random))
            case 4:
                handle = self.cache.prefetch(self.prompt(random))
                await asyncio.sleep(random.random() * 0.02)
                handle.cancel()
                await handle
            case 5:
                self.cache.statistics()
            case _:
                await self.cache.flush()

    async def _disturb_last(self) -> None:
        if self.climate.disturb and self.random.random() < 0.3 and not self.climate.hostility.unavailable:
            await self.cache.reset()

    async def _settle(self) -> None:
        """Kept prefixes expire, and everything that can be saved is."""
        await asyncio.sleep(1.0)
        await self.engine()
        await self.cache.flush(timeout=_PATIENCE)

    def _nothing_is_left(self) -> None:
        core = self.cache._opened().core
        if not core.world.ledger.ops:
            audit.check(core, idle=True)
        audit.check(core)
        check_books(core)
        statistics = self.cache.statistics()
        assert (statistics.leases, statistics.waiting, statistics.kept_tokens) == (0, 0, 0)
        assert not core.active_leases()
        assert not core.active_fetches()

    # what requests are made of

    def prompt(self, random: Random) -> list[int]:
        """A new prompt that begins like an earlier one."""
        page = self.climate.config.page_size
        known = random.choice(self.said[-8:])
        kept = known[: random.randint(0, len(known))]
        fresh = [random.randrange(self.climate.alphabet) for _ in range(random.randint(1, 8 * page))]
        return (kept + fresh)[: 12 * page]

    # the engine's stream

    async def engine(self) -> None:
        """Wait until the engine has done what was put off."""
        while self.put_off:
            with suppress(CopyFailed):
                await self.put_off[-1].wait()

    def fails(self) -> bool:
        """Whether the engine will not be able to run a batch; never in a calm world."""
        return self.climate.hostility is not HONEST and self.unable.random() < 0.08

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


class Request:
    """One request, from its arrival to its release, as often as loads fail. ``grows``: before which share of its steps
    it extends its lease."""

    grows = 0.1

    def __init__(self, world: _World, random: Random) -> None:
        self.world = world
        self.random = random
        self.cache = world.cache
        self.page = world.climate.config.page_size
        self.tokens = world.prompt(random)
        self.namespace = random.choice((None, None, "tenant"))
        self.pools = {spec.name: spec for spec in world.climate.config.pools() if spec.bytes_per_page}
        self.states = [name for name, spec in self.pools.items() if spec.component is ComponentKind.MAMBA]
        self.window = next((c.window for c in world.climate.config.components if isinstance(c, SlidingWindow)), 0)

    async def run(self) -> None:
        """Serve it.

        Raises:
            AssertionError: it was not served, or with wrong bytes.
        """
        handle = self._prefetch()
        try:
            await self._serve_with(handle)
        finally:
            if handle is not None:
                handle.cancel()

    async def _serve_with(self, handle: PrefetchHandle | None) -> None:
        for _ in range(_ATTEMPTS):
            try:
                if await self._attempt(handle):
                    return
            except CacheFull:
                self.world.report.ends["full"] += 1
                return
            except TimeoutError:
                self.world.report.ends["timeout"] += 1
                return
            handle = None
        raise AssertionError(f"not served in {_ATTEMPTS} attempts: {self.world.cache!r}")

    def _prefetch(self) -> PrefetchHandle | None:
        if self.random.random() < 0.5:
            return None
        handle = self.cache.prefetch(self.tokens, namespace=self.namespace)
        if self.random.random() < 0.1:
            handle.cancel()
        return handle

    async def _attempt(self, handle: PrefetchHandle | None) -> bool:
        random = self.random
        new = random.randint(0, 3 * self.page)
        lease = self.cache.lease(
            self.tokens, new_tokens=new, namespace=self.namespace, prefetch=handle,
            wait=random.random() < 0.9, timeout=random.choice((None, None, None, 0.05, 5.0)),
        )  # fmt: skip
        async with lease:
            self.failures = self.world.failures
            try:
                await self._loaded(lease)
                await self._serve(lease, new)
            except LoadFailed:
                self.world.report.ends["load failed"] += 1
                return False
            lease.release(ended=random.random() < 0.3, after=self._after(lease))
        return True

    async def _loaded(self, lease: Lease) -> None:
        for name in ("device", "host", "storage"):
            self.world.report.hits[name] += getattr(lease.hits, name)
        if self.random.random() < 0.5:
            for layer in range(self.world.climate.config.components[0].layers):
                await lease.layer(layer)
        await lease.loaded()

    async def _serve(self, lease: Lease, new: int) -> None:
        """Verify what was cached, compute the rest in chunks, decode."""
        assert lease.cached < len(self.tokens)
        await self._verify(lease, lease.cached, state=True)
        text = list(self.tokens)
        done = lease.cached
        while done < len(text):
            upto = min(len(text), done + self.random.randint(1, 20))
            await self._compute(lease, text, done, upto)
            done = upto
        for _ in range(new):
            if self.random.random() < self.grows:
                await self._extend(lease)
            text.append(self.random.randrange(self.world.climate.alphabet))
            await self._compute(lease, text, len(text) - 1, len(text))
            lease.advance(len(text))
        self.world.said.append(text)
        self.world.report.ends["served"] += 1

    async def _extend(self, lease: Lease) -> None:
        try:
            await lease.extend(self.random.randint(1, 8))
        except CacheFull:
            self.world.report.ends["extend full"] += 1

    async def _compute(self, lease: Lease, text: Sequence[int], start: int, end: int) -> None:
        """Write KV for ``text[start:end]``, sometimes late, and publish it."""
        await self.world.engine()
        tables = self._tables(lease)
        checkpoint = self._checkpoint(lease, end)
        held, fails = text[:end], False

        def work() -> None:
            self._write(tables, held, start // self.page, bad=fails)
            if checkpoint is not None:
                for name in self.states:
                    content = self._content(held, checkpoint[0] // self.page - 1)
                    self._put(name, checkpoint[1], content, bad=fails)

        ready = None
        if self.random.random() < 0.3:
            fails = self.world.fails()
            ready = self.world.later(work, fails)
        else:
            work()
        if end == len(text) or self.random.random() < 0.5 or ready is not None:
            await lease.commit(held, after=ready, checkpoint=checkpoint)
            if self.random.random() < 0.5:
                lease.adopt(after=self.world.later(_nothing) if self.random.random() < 0.3 else None)
            await self._verify(lease, end)

    def _tables(self, lease: Lease) -> dict[str, list[int]]:
        """Where each pool's pages are: a pool has the table of the component that it hangs on."""
        return {
            name: lease.page_table(POOL_NAME[spec.component]).tolist()
            for name, spec in self.pools.items() if spec.component is not ComponentKind.MAMBA
        }  # fmt: skip

    def _checkpoint(self, lease: Lease, end: int) -> tuple[int, int] | None:
        whole = end // self.page * self.page
        if not self.states or len(lease.states) < 2 or whole != end or self.random.random() < 0.3:
            return None
        return whole, int(lease.states[-1])

    def _write(self, tables: dict[str, list[int]], text: Sequence[int], first: int, *, bad: bool = False) -> None:
        for name, table in tables.items():
            for i in range(first, -(-len(text) // self.page)):
                if table[i] >= 0:
                    self._put(name, table[i], self._content(text, i), bad=bad)

    def _content(self, text: Sequence[int], page: int) -> bytes:
        """The content of a page, which is a function of everything up to the page's end."""
        end = min(len(text), (page + 1) * self.page)
        return sha256(repr((self.namespace, list(text[:end]))).encode()).digest()

    def _put(self, pool: str, slot: int, content: bytes, *, bad: bool = False) -> None:
        for layer in range(self._layers(pool)):
            row = self.cache.pools[pool].layer(layer)[slot]
            row.copy_(row.new_tensor([BAD] * len(row) if bad else list(_row(content, pool, layer, len(row)))))

    def _layers(self, pool: str) -> int:
        return self.pools[pool].layers

    async def _verify(self, lease: Lease, end: int, state: bool = False) -> None:
        """Every whole page up to ``end`` that the engine would read holds what it must."""
        await self.world.engine()
        text = self.tokens if end <= len(self.tokens) else None
        if text is None:
            return
        whole = end // self.page
        for name, table in self._tables(lease).items():
            low = 0 if self.pools[name].component is ComponentKind.FULL else max(0, end - self.window) // self.page
            for i in range(low, whole):
                self._check(name, table[i], self._content(text, i), f"page {i}")
        for name in self.states if state and end else ():
            self._check(name, int(lease.states[0]), self._content(text, whole - 1), "state")

    def _check(self, pool: str, slot: int, content: bytes, what: str) -> None:
        self.world.report.verified += 1
        if slot < 0:
            raise WrongBytes(f"{pool} {what} has no slot")
        for layer in range(self._layers(pool)):
            row = bytes(self.cache.pools[pool].layer(layer)[slot].tolist())
            if row == bytes([BAD]) * len(row) and self.world.failures > self.failures:
                raise LoadFailed(0)  # the batch has failed since the lease was granted, of which it is just being told
            if row != _row(content, pool, layer, len(row)):
                raise WrongBytes(f"{pool} {what}, slot {slot}, layer {layer}: {row[:8].hex()} is not what was computed")

    def _after(self, lease: Lease) -> SimulatedGate | None:
        """Sometimes the pages are still read when they are released: by the engine's stream, or, of the request's own
        pages, by a stream that nothing orders with the engine's."""
        if self.random.random() < 0.5:
            return None
        elsewhere = self.random.random() < 0.5
        first = lease._core.length // self.page if elsewhere else 0
        places = [(name, slot) for name, table in self._tables(lease).items() for slot in table[first:] if slot >= 0]
        before = {place: self._read(*place) for place in places}

        def work() -> None:
            for (name, slot), bytes_then in before.items():
                if self._read(name, slot) != bytes_then:
                    raise WrongBytes(f"{name} slot {slot} was overwritten while the engine still read it")

        return self.world.elsewhere(work) if elsewhere else self.world.later(work)

    def _read(self, pool: str, slot: int) -> bytes:
        return b"".join(bytes(self.cache.pools[pool].layer(i)[slot].tolist()) for i in range(self._layers(pool)))


def _row(content: bytes, pool: str, layer: int, size: int) -> bytes:
    seed = sha256(content + f"{pool}/{layer}".encode()).digest()
    return (seed * (size // len(seed) + 1))[:size]


def _nothing() -> None:
    """The engine has nothing left to do; only the event matters."""
