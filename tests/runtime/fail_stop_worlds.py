"""Small worlds whose calls together run every statement of the core; see ``test_fail_stop``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from msgspec import structs

from asynccache import (
    Adapter,
    AsyncCache,
    AsyncCacheError,
    CacheClosed,
    CacheConfig,
    CacheFull,
    ConfigError,
    LoadFailed,
    Mamba,
    PrefetchHandle,
    SlidingWindow,
)
from asynccache.core import eviction, ledger, policies
from asynccache.core.audit import check
from asynccache.core.ledger import COMPUTE
from asynccache.core.plan import Failing, Outcome, Status
from asynccache.core.policies import POLICIES, P2c
from asynccache.core.settings import CoreConfig
from asynccache.memory.host_copies import Faults
from asynccache.runtime import head as parts_module
from asynccache.runtime.driver import Driver
from asynccache.runtime.lease import Lease
from tests.runtime.fail_stop_kit import Injected, Injector, armed
from tests.runtime.runtime_kit import (
    PAGE,
    assert_cached_bytes,
    compute,
    local,
    page_hashes,
    parts,
    serve,
    settings,
    settled,
    text,
    until,
)
from tests.simulated.backend import HONEST, Hostility, SimulatedBackend
from tests.simulated.device import SimulatedDevice, SimulatedGate
from tests.simulated.leading import leading
from tests.simulated.loop import Order, SimulatedLoop, simulate

STEPS = 50_000


@dataclass(frozen=True)
class Here:
    """What a scenario has."""

    cache: AsyncCache
    config: CacheConfig
    device: SimulatedDevice
    backend: SimulatedBackend
    posts: Posts
    loop: SimulatedLoop
    random: Random

    @property
    def checked(self) -> tuple[str, ...]:
        """The pools whose bytes are compared."""
        return tuple(name for name in self.cache.pools if name != "mamba")

    @property
    def window(self) -> int:
        return next((c.window for c in self.config.components if isinstance(c, SlidingWindow)), 0)


Scenario = Callable[[Here], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Play:
    """What happens in a world, on which device, with which store and which settings. ``grain``: long calls have slices
    of so many steps, heaps are swept and runs of slots cut as early. ``late``: outcomes come in any order. ``leads``:
    its ``p2c`` is one that leads, see ``leading``."""

    scenario: Scenario
    shape: Mapping[str, Any]
    faults: Faults = field(default_factory=Faults)
    hostility: Hostility = HONEST
    stored: bool = True
    events: bool = False
    grain: int = 0
    late: bool = False
    leads: bool = False
    order: Order = Order.FIFO
    seed: int = 1


# what requests do


async def everybody(*work: Coroutine[Any, Any, object]) -> None:
    """Until all have ended; then the first error that is none of a cancellation."""
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome


async def ask(here: Here, tokens: list[int], **terms: Any) -> None:
    """A request that is served, if there is room."""
    pools = here.checked
    with suppress(CacheFull, LoadFailed, TimeoutError):
        async with here.cache.lease(tokens, **terms) as lease:
            await lease.loaded()
            assert_cached_bytes(here.cache, lease, tokens, pools, here.window)
            compute(here.cache, lease, tokens, pools)
            await lease.commit(tokens)


def prompt(random: Random, pages: int = 8) -> list[int]:
    """Few conversations, which part at any page."""
    books = random.choice((1, 2, 3))
    common = random.choice((random.randint(0, pages), pages - 1, pages))
    return text(common, books) + text(random.randint(0, pages - common), 10 + random.randrange(3), random.randint(1, 3))


async def request(here: Here) -> None:
    """A request with everything that a lease has calls for."""
    random, cache = here.random, here.cache
    tokens = prompt(random)
    pools = here.checked
    key: Any = random.choice((None, None, None, "tenant", Adapter("lora", "name", 3)))
    handle = cache.prefetch(tokens, namespace=key) if random.random() < 0.4 else None
    if handle is not None:
        if random.random() < 0.6:
            await asyncio.sleep(random.choice((0.0, 0.005, 0.03)))
        if random.random() < 0.2:
            handle.cancel()
    terms: dict[str, Any] = {"new_tokens": random.choice((0, PAGE, 3 * PAGE)), "namespace": key, "prefetch": handle}
    if random.random() < 0.3:
        terms[random.choice(("chunk", "swa_chunk"))] = random.choice((1, PAGE, 2 * PAGE))
    terms["wait"] = random.random() < 0.8
    terms["timeout"] = random.choice((None, 0.05, 1.0)) if terms["wait"] else None
    terms["shorter"] = random.random() < 0.8
    with suppress(CacheFull, LoadFailed, TimeoutError):
        async with cache.lease(tokens, **terms) as lease:
            if random.random() < 0.85:
                await lease.loaded()
                assert_cached_bytes(cache, lease, tokens, pools, here.window)
            else:
                await asyncio.sleep(0.001)
            await _run(here, lease, tokens, pools)


async def _run(here: Here, lease: Lease, tokens: list[int], pools: tuple[str, ...]) -> None:
    random = here.random
    for _ in range(random.randint(0, 3)):
        match random.randrange(8):
            case 0 | 1 | 2 | 3:
                await _commit(here, lease, tokens, pools)
            case 4:
                with suppress(CacheFull):
                    more = random.choice((PAGE, 4 * PAGE))
                    await lease.extend(more, states=random.choice((0, 1)) * bool(len(lease.states)), wait=False)
            case 5:
                lease.advance(random.randint(0, lease._core.reserved))
            case 6:
                lease.truncate(random.randint(lease._core.length, lease._core.length + 4 * PAGE))
            case _:
                await asyncio.sleep(random.choice((0.0, 0.002, 0.02)))
    if random.random() < 0.8:
        lease.release(after=gate(here), ended=random.random() < 0.4)


def gate(here: Here) -> SimulatedGate | None:
    """Sometimes the engine is not through yet."""
    if here.random.random() < 0.6:
        return None
    made = here.device.gate()
    here.loop.call_later(here.random.choice((0.002, 0.03, 0.1)) * here.random.random(), made.open)
    return made


async def _commit(here: Here, lease: Lease, tokens: list[int], pools: tuple[str, ...]) -> None:
    cache, random = here.cache, here.random
    if lease._core.loads and not lease._asked:
        with pytest.raises(RuntimeError, match="nobody has waited"):
            await lease.commit(tokens)
        await lease.loaded()
    reserved = len(lease.pages) * PAGE
    stop = min(len(tokens), reserved)
    if stop < lease._core.length or lease.cached > stop:
        return
    stop = random.randint(max(lease.cached, lease._core.length), stop)
    compute(cache, lease, tokens[:stop], pools)
    checkpoint = None
    if len(lease.states) > 1 and stop >= PAGE:
        checkpoint = (random.randint(1, stop // PAGE) * PAGE, int(lease.states[-1]))
        if random.random() < 0.1:
            for wrong in ((3, checkpoint[1]), (checkpoint[0], 99), (1, 2, 3)):
                with pytest.raises(ConfigError):
                    await lease.commit(tokens[:stop], checkpoint=wrong)  # type: ignore[arg-type]
    await lease.commit(tokens[:stop], after=gate(here), checkpoint=checkpoint)


async def anything(here: Here) -> None:
    """Requests, a few at a time, and whatever else an embedder may do."""
    random = here.random
    for _ in range(random.randint(3, 8)):
        tasks = [asyncio.ensure_future(request(here)) for _ in range(random.randint(2, 6))]
        tasks += [asyncio.ensure_future(disturb(here)) for _ in range(random.randint(0, 1))]
        for task in tasks:
            if random.random() < 0.1:
                here.loop.cancel_at(task, random.randint(1, 30))
        await everybody(*map(_await, tasks))
        if random.random() < 0.3:
            await asyncio.sleep(0.05)


async def _await(task: asyncio.Future[None]) -> None:
    await task


async def fetches(here: Here) -> None:
    """What storage has is wanted by several at once, while some of it comes from elsewhere or is forgotten."""
    cache, random = here.cache, here.random
    for _ in range(random.randint(2, 4)):
        wanted = [prompt(random) for _ in range(3)]
        for tokens in wanted:
            await ask(here, tokens)
        await cache.flush()
        if random.random() < 0.5:
            await cache.invalidate()
        else:
            await ask(here, text(8, 77))
        ends = [random.randint(1, 9) for _ in wanted]
        handles = [cache.prefetch((tokens + text(2, 33))[: pages * PAGE])
                   for tokens, pages in zip(wanted, ends, strict=True)]
        await asyncio.sleep(random.choice((0.0, 0.002, 0.01, 0.04)))
        if random.random() < 0.3:
            await cache.invalidate()
        work: list[Coroutine[Any, Any, object]] = [ask(here, tokens, prefetch=None) for tokens in wanted]
        work += [request(here) for _ in range(random.randint(0, 2))]
        work += [disturb(here) for _ in range(random.randint(0, 1))]
        work += [ask(here, tokens + text(1, 50), prefetch=handle if pages * PAGE <= len(tokens) else None)
                 for tokens, handle, pages in zip(wanted, handles, ends, strict=True)
                 if random.random() < 0.4]
        await everybody(*random.sample(work, len(work)))
        for handle in handles:
            handle.cancel()


class Posts:
    """How outcomes get to the core: at once, in any order (``late``), or when a scenario says so (``held``)."""

    def __init__(self, loop: SimulatedLoop, late: bool) -> None:
        self._loop = loop
        self._random = loop.entropy("outcomes")
        self._late = late
        self._post = Driver.post
        self.held: list[tuple[Driver, Outcome]] | None = None

    def take(self, driver: Driver, outcome: Outcome | Failing) -> None:
        """Instead of ``Driver.post``. What is known of the engine's batches is posted at once."""
        op = driver.core.world.ledger.ops.get(outcome.op)
        if isinstance(outcome, Failing) or (op is not None and op.kind is COMPUTE):
            self._post(driver, outcome)
        elif self.held is not None:
            self.held.append((driver, outcome))
        elif self._late:
            self._loop.call_later(self._random.choice((0.0, 0.0, 0.001, 0.02)), self._post, driver, outcome)
        else:
            self._post(driver, outcome)

    def let_go(self, count: int) -> None:
        """The first so many are posted, the very first one as a failure, and nothing if there are no more."""
        assert self.held is not None
        now, self.held = self.held[:count], self.held[count:]
        for driver, outcome in now:
            self._post(driver, outcome)

    def fail_one(self) -> None:
        assert self.held
        driver, outcome = self.held.pop(0)
        self._post(driver, outcome._replace(status=Status.FAILED))


@asynccontextmanager
async def holding(here: Here) -> AsyncIterator[Posts]:
    """Outcomes are held meanwhile."""
    posts = here.posts
    posts.held = []
    try:
        yield posts
    finally:
        posts.let_go(len(posts.held))
        posts.held = None


async def copied() -> None:
    """Whatever can be copied now has been."""
    await asyncio.sleep(0.2)


async def doomed(here: Here) -> None:
    """What hangs below a copy that failed has not let go of its pages yet, to the host and back."""
    cache = here.cache
    async with cache.lease(text(6)) as lease, holding(here) as posts:
        compute(cache, lease, text(6))
        for pages in (2, 4):
            await lease.commit(text(pages))
            await copied()
        posts.fail_one()
        await lease.commit(text(6))
    for pages in (2, 6):
        await ask(here, text(pages, 3))
        await settled(cache)
    await ask(here, text(14, 7))
    await settled(cache)
    async with holding(here) as posts, cache.lease(text(2, 3) + text(1, 9)) as first:
        await copied()
        async with cache.lease(text(7, 3)) as second:
            await copied()
            posts.fail_one()
            await copied()
            await cache.explain(text(6, 3))
            posts.let_go(9)
            for each in (first, second):
                with suppress(LoadFailed):
                    await each.loaded()


async def loading(here: Here) -> None:
    """Pages are committed that are being loaded for somebody else."""
    cache = here.cache
    async with cache.lease(text(4) + text(1, 8)) as mine:
        await ask(here, text(4))
        await settled(cache)
        await ask(here, text(9, 7))
        await settled(cache)
        async with holding(here) as posts, cache.lease(text(4) + text(1, 9)):
            await copied()
            compute(cache, mine, text(4))
            commit = asyncio.ensure_future(mine.commit(text(4)))
            await copied()
            posts.let_go(9)
            await commit


async def forgotten(here: Here) -> None:
    """Namespaces are forgotten one after another, while leases hold something of them; one is given back twice."""
    cache = here.cache
    driver, core = parts(cache).driver, parts(cache).core
    async with cache.lease(text(3), namespace="tenant") as first, cache.lease(text(3)) as second:
        for lease in (first, second):
            compute(cache, lease, text(3))
            await lease.commit(text(3))
        await cache.explain(text(3))
        await cache.invalidate("tenant")
        await cache.reset()
        driver.perform(driver.give_back(core.release, first._core))
    await settled(cache)


async def push_away(here: Here) -> None:
    """What was cached is in storage alone."""
    for seed in (60, 61, 62):
        await ask(here, text(9, seed))
        await here.cache.flush()


def begun(cache: AsyncCache, handle: PrefetchHandle) -> bool:
    """Whether a fetch is under way, or nothing is to be waited for any more."""
    return handle.done() or bool(parts(cache).prefetches.operations())


async def fetching(here: Here) -> None:
    """Pages are fetched that come from elsewhere meanwhile, while they are read or asked for; that are forgotten; and
    whose store goes."""
    cache = here.cache
    for seed in (1, 2, 3):
        await ask(here, text(4, seed))
    await cache.flush()
    await push_away(here)
    for seed in (1, 3, 2):
        async with holding(here) as posts:
            async with cache.lease(text(7, seed), wait=False) as lease:
                handle = cache.prefetch(text(3, seed) + text(2, 9))
                await until(partial(begun, cache, handle))
                compute(cache, lease, text(7, seed), here.checked)
                lease.advance(7 * PAGE)
                await lease.commit(text(7, seed))
                await copied()
                forget = asyncio.ensure_future(cache.invalidate()) if seed == 2 else None
                await copied()
            if seed == 1:
                posts.fail_one()
            posts.let_go(9)
            await handle
            if forget is not None:
                await forget
    await ask(here, text(4, 4))
    await cache.flush()
    await push_away(here)
    asked = cache.prefetch(text(4, 4))
    await asyncio.sleep(0)  # its task asks
    async with cache.lease(text(4, 4), wait=False) as lease:
        compute(cache, lease, text(4, 4), here.checked)
        await lease.commit(text(4, 4))
    await asked
    await push_away(here)
    gone = cache.prefetch(text(4, 1) + text(1, 9))
    await asyncio.sleep(0.001)
    late = cache.prefetch(text(4, 2) + text(1, 9))
    await cache.detach_storage(timeout=0)
    for each in (gone, late):
        with suppress(AsyncCacheError):
            await each


def spoil(here: Here, page: int) -> None:
    """The store has lost what is in this page of the window of ``text(6, 1)``."""
    key = local(here.cache)._map.key("swa", page_hashes(text(6, 1))[page])
    here.backend.pages[key] = here.backend.pages[key][0], b""


async def windows(here: Here) -> None:
    """A window is fetched slot by slot; a page of it is spoilt, so that an earlier one is fetched; and there is no room
    for another one."""
    cache = here.cache
    for seed in (1, 2):
        for pages in (2, 4):
            await ask(here, text(pages, seed))
            await cache.flush()
    stored = dict(here.backend.pages)
    await cache.reset()
    here.backend.pages.update(stored)
    spoil(here, 3)
    for seed in range(60, 66):
        await ask(here, text(1, seed))
        await cache.flush()
    await cache.prefetch(text(4, 1) + text(1, 9))
    async with cache.lease(text(5, 5)) as lease, holding(here):
        compute(cache, lease, text(5, 5), here.checked)
        for pages in (3, 5):
            await lease.commit(text(pages, 5))
            await copied()
        await cache.prefetch(text(4, 2) + text(1, 9))


async def shorter(here: Here) -> None:
    """A window is fetched for a prompt that ends inside of what the host has without one; a page of it is spoilt, so
    that the one of an earlier end is fetched."""
    cache = here.cache
    for pages in (3, 6):
        await ask(here, text(pages, 1))
        await cache.flush()
    stored = dict(here.backend.pages)
    await cache.reset()
    here.backend.pages.update(stored)
    await cache.prefetch(text(6, 1) + text(1, 9))
    spoil(here, 3)
    await cache.prefetch(text(5, 1) + text(1, 9))


async def states(here: Here) -> None:
    """A commit finds nothing on the device that the host lacks. Then a state is fetched, with the pages before it."""
    cache = here.cache
    async with cache.lease(text(4)) as lease:
        compute(cache, lease, text(4), here.checked)
        await lease.commit(text(4), checkpoint=(3 * PAGE, int(lease.states[-1])))
        await settled(cache)
        await lease.commit(text(4))
    await cache.flush()
    stored = dict(here.backend.pages)
    await cache.reset()
    here.backend.pages.update(stored)
    await cache.prefetch(text(4))
    await ask(here, text(4) + text(1, 9))


async def given_up(here: Here) -> None:
    """What nobody will ask for again is condemned without a copy. Then comes a store, which is to have it."""
    cache = here.cache
    for seed in range(6):
        await ask(here, text(4, seed))
        await settled(cache)
    async with cache.lease(text(4, 6)) as lease:
        compute(cache, lease, text(4, 6), here.checked)
        await lease.commit(text(4, 6))
        lease.release(ended=True)
    for seed in (7, 8):
        await settled(cache)
        await ask(here, text(4, seed))
        if seed == 7:
            await cache.attach_storage("memory:", name="other")


async def small(here: Here) -> None:
    """A host that is smaller than a request, a checkpoint where no window is, and backups of what is forgotten."""
    cache = here.cache
    async with cache.lease(text(6)) as lease:
        compute(cache, lease, text(6), here.checked)
        lease.advance(5 * PAGE)
        await lease.commit(text(6), checkpoint=(PAGE, int(lease.states[-1])))
    async with cache.lease(text(2, 1)) as lease:
        compute(cache, lease, text(2, 1), here.checked)
        await lease.commit(text(1, 1))
        await cache.invalidate()
        await lease.commit(text(2, 1))
    await settled(cache)
    await ask(here, text(6, 5))
    async with cache.lease(text(2, 1)) as lease, holding(here):
        compute(cache, lease, text(2, 1), here.checked)
        for pages in (1, 2):
            await lease.commit(text(pages, 1))
        forget = asyncio.ensure_future(cache.invalidate())
        await copied()
    await forget


async def over(here: Here) -> None:
    """Conversations end, whether they say what of them is shared or not; one of them is a hit, and one forks."""
    cache = here.cache
    for tokens, shared in ((text(2), None), (text(5), PAGE), (text(6), 3 * PAGE), (text(3) + text(2, 1), None),
                           (text(4, 2), 2 * PAGE), (text(3) + text(3, 1), 4 * PAGE)):  # fmt: skip
        async with cache.lease(tokens, shared_tokens=shared) as lease:
            await lease.loaded()
            compute(cache, lease, tokens, here.checked)
            await lease.commit(tokens)
            lease.release(ended=True)
        await settled(cache)


async def filling(here: Here) -> None:
    """A store is attached, and what it is to be told of splits meanwhile; another is, and that is forgotten."""
    for seed in range(3):
        await ask(here, text(4, seed))
    await everybody(
        here.cache.attach_storage("memory:", name="other", backfill=True),
        *(ask(here, text(2, seed) + text(1, 9)) for seed in range(3)),
    )
    await everybody(here.cache.attach_storage("memory:", name="third", backfill=True), here.cache.invalidate())


async def claimed(here: Here) -> None:
    """What was fetched for requests that do not come has all the room on the host, until somebody else wants it."""
    for seed in range(5):
        await ask(here, text(5, seed))
    await here.cache.flush()
    await push_away(here)
    handles = [here.cache.prefetch(text(5, seed)) for seed in range(5)]
    for handle in handles:
        await handle


async def failing(here: Here) -> None:
    """A batch fails of which others hold pages. Its checkpoint had split what it published."""
    cache, ready, tokens = here.cache, here.device.gate(), text(4, 1)
    await ask(here, text(1, 1))
    async with cache.lease(tokens) as lease:
        await lease.loaded()
        compute(cache, lease, tokens, here.checked)
        await lease.commit(tokens, after=ready, checkpoint=(3 * PAGE, int(lease.states[-1])))
    longer = text(3, 1) + text(2, 5, 1)
    async with cache.lease(longer, wait=False, states=0) as holder:  # a copy of a state would wait for ``ready``
        await holder.loaded()
        compute(cache, holder, longer, here.checked)
        await holder.commit(longer)
        ready.fire(RuntimeError("out of memory"))
        await asyncio.sleep(0.1)
        with suppress(LoadFailed):
            await holder.commit(longer)
    hostless = not here.config.pools()[0].host_pages
    for evicted in (False, hostless):  # before it fails, where no backup waits for it
        ready = here.device.gate()
        async with cache.lease(tokens) as lease:
            await lease.loaded()
            compute(cache, lease, tokens, here.checked)
            await lease.commit(tokens, after=ready)
        if evicted:
            await push_away(here)
        ready.fire(RuntimeError("out of memory"))
        await asyncio.sleep(0.1)
    await ask(here, tokens)


async def learning(here: Here) -> None:
    """More prompts than there is room for come back, after a short while or a long one, and go other ways then."""
    for turn in range(6):
        for seed in range(8):
            await ask(here, text(1 + seed % 2, seed))
            await asyncio.sleep(0.3 + seed % 3)
        await ask(here, text(2, 1) + text(1, 100 + turn))
        await ask(here, text(2, 3) + text(2, 100))
        async with here.cache.lease(text(1, 0)):
            await asyncio.sleep(1.0)
    await here.cache.invalidate()


async def returning(here: Here) -> None:
    """A few prompts come back at once and again, among others that never do: then what was used last may go first."""
    for turn in range(10):
        for seed in range(8):
            await ask(here, text(1 + seed % 2, seed))
            for _ in range(2):
                await ask(here, text(1 + seed % 2, seed % 3))
            await asyncio.sleep(0.02 + seed % 3)
        for extra in range(3):
            await ask(here, text(1, 200 + 10 * turn + extra))
        await ask(here, text(2, 1) + text(1, 100 + turn))
    await here.cache.invalidate()


async def scanned(here: Here) -> None:
    """A few prompts come back at once and again, among many that never do, some of which are as long as there is room:
    so what was learned leads, and says what is not worth a copy."""
    random = here.random
    for turn in range(6):
        for seed in (0, 1, 0, 1):
            await ask(here, text(2, seed))
        for extra in range(4):
            await ask(here, text(random.randint(1, 4), 200 + 10 * turn + extra))
            await asyncio.sleep(0.3 * random.random())
        if turn % 3 == 2:
            await ask(here, text(14, 700 + turn))
            await everybody(*(ask(here, prompt(random), timeout=0.5) for _ in range(5)))


async def disturb(here: Here) -> None:
    cache, random = here.cache, here.random
    await asyncio.sleep(random.random() * 0.02)
    match random.randrange(9):
        case 0 | 1:
            await cache.invalidate(random.choice((None, "tenant")))
        case 2:
            await cache.flush()
        case 3:
            kept = await cache.keep(prompt(random), ttl=0.02)
            await asyncio.sleep(0.03)
            kept.release()
        case 4 | 5:
            for _ in range(4):
                await cache.explain(prompt(random))
                assert (await cache.match(prompt(random))).needs_load_back in (False, True)
                await asyncio.sleep(0.001)
        case 6 | 7:
            if "other" in cache.stores:
                await cache.detach_storage("other", timeout=random.choice((None, 0)))
            elif here.config.pools()[0].host_pages:
                await cache.attach_storage("memory:", name="other", options={"write": random.choice(("yes", "no"))},
                                           backfill=random.random() < 0.7)
        case _:
            cache.statistics()
            await cache.reset()


def drawn(seed: int) -> Play:
    """A world that this seed decides all about."""
    random = Random(seed)
    host = random.choice((0, 4, 6, 8, 12, 20))
    shape: dict[str, Any] = {
        "device": random.choice((8, 10, 14)), "host": host,
        "swa": random.choice((0, 5, 10)), "window": random.choice((1, 6, 8, 20)), "mamba": random.choice((0, 4, 8)),
        "write_policy": random.choice(("write_through", "write_through", "write_back", "write_through_selective")),
        "max_backup_ops": random.choice((1, 2, 256)), "load_back_threshold": random.choice((0, 0, 12)),
        "write_back_watermark": random.choice((0.1, 0.6)), "prefetch_quota": random.choice((0.3, 1.0)),
        "prefetch_policy": random.choice(("best_effort", "wait_complete", "timeout")),
        "prefetch_timeout_base": 0.02, "aux_host": random.choice((0.3, 1, 2)), "eviction": ("lru", "p2c")[seed % 2],
    }  # fmt: skip
    faults = Faults(seed=seed, failing=random.choice((0.0, 0.0, 0.1, 0.4, 0.7)), delayed=0.2)
    hostility = Hostility(delay=random.choice((0.0, 0.001, 0.01, 0.05)), failed=random.choice((0.0, 0.1, 0.4)),
                          vanished=random.choice((0.0, 0.1)), unavailable=random.choice((0.0, 0.1)))
    return Play(scenario=random.choice((anything, fetches)), late=random.random() < 0.3, shape=shape, faults=faults,
                hostility=hostility, stored=bool(host) and random.random() < 0.8,
                events=random.random() < 0.5, grain=random.choice((0, 1, 2)),
                order=random.choice((Order.FIFO, Order.SHUFFLED)), seed=seed)


SEEDS = (340, 421, 438, 10543, 21404, 30265, 31468, 32227, 50035, 51, 70443, 70457)
PLAIN = {"device": 14, "host": 20}
PLAYS: dict[str, Play] = {
    "loading": Play(scenario=loading, shape=PLAIN),
    "doomed": Play(scenario=doomed, shape={"device": 14, "host": 40}),
    "forgotten": Play(scenario=forgotten, shape=PLAIN, events=True),
    "fetching": Play(scenario=fetching, shape={**PLAIN, "swa": 10}),
    "windows": Play(scenario=windows, shape={"device": 14, "host": 12, "swa": 10, "aux_host": 0.5}, grain=1),
    "shorter": Play(scenario=shorter, shape={**PLAIN, "swa": 10}),
    "states": Play(scenario=states, shape={**PLAIN, "mamba": 8}),
    "given up": Play(scenario=given_up, shape={"device": 12, "host": 8, "write_policy": "write_back",
                                               "write_back_watermark": 0.5, "eviction": "lru"}, stored=False),
    "small": Play(scenario=small, shape={"device": 14, "host": 4, "swa": 10, "window": 4, "mamba": 8,
                                         "max_backup_ops": 1}),
    "over": Play(scenario=over, shape={"device": 14, "host": 4, "swa": 10, "window": 4}),
    "filling": Play(scenario=filling, shape=PLAIN, grain=1),
    "claimed": Play(scenario=claimed, shape=PLAIN),
    "failing": Play(scenario=failing, shape={**PLAIN, "swa": 10, "mamba": 8}, events=True),
    "failing hostless": Play(scenario=failing, shape={"device": 14, "swa": 10, "mamba": 8}, stored=False),
    "late": Play(scenario=claimed, shape=PLAIN, hostility=Hostility(delay=0.15)),
    "learning": Play(scenario=learning, shape={"device": 14, "eviction": "p2c"}, stored=False, grain=1),
    "learning windows": Play(scenario=learning, shape={"device": 14, "host": 8, "swa": 10, "eviction": "p2c"}, grain=1),
    "returning": Play(scenario=returning, shape={"device": 14, "host": 8, "swa": 10, "eviction": "p2c"}, grain=1),
    **{f"scanned {seed}": Play(scenario=scanned, shape={"device": 14, "host": 8, "eviction": "p2c"}, stored=False,
                               grain=1, seed=seed) for seed in (1, 12)},
    "scanned and drawn": Play(scenario=scanned, shape={"device": 14, "host": 12, "eviction": "p2c"}, stored=False,
                              grain=1, seed=2),
    "scanned hostless": Play(scenario=scanned, shape={"device": 10, "eviction": "p2c"}, stored=False, grain=1, seed=1),
    "hostless": Play(scenario=forgotten, shape={"device": 14}, stored=False),
    **{f"drawn {seed}": drawn(seed) for seed in SEEDS},
}


# a world


def configured(shape: Mapping[str, Any]) -> CacheConfig:
    """Of these ``settings``. ``aux_host``: how much the host has of what is not FULL, as a share of the device's."""
    terms = {"close_timeout": 5.0, **shape}
    share = terms.pop("aux_host", 2)
    config = settings(**terms)
    components: list[Any] = [config.components[0]]
    for component in config.components[1:]:
        if isinstance(component, SlidingWindow) and component.host_tokens:
            component = structs.replace(component, host_tokens=max(1, int(share * terms["swa"])) * PAGE)
        elif isinstance(component, Mamba) and component.host_states:
            component = structs.replace(component, host_states=max(1, int(share * terms["mamba"])))
        components.append(component)
    return structs.replace(config, components=tuple(components))


async def world(loop: SimulatedLoop, play: Play, injector: Injector) -> str:
    """Play a world; what became of the cache, in a word: ``closed``, ``whole``, or what is wrong with it."""
    injector.clock = lambda: loop.steps
    backend = SimulatedBackend(loop.entropy("backend"), play.hostility, {})
    device = SimulatedDevice(seed=play.seed, latency=(0.0, 0.001), faults=play.faults)
    config = configured(play.shape)
    heard: list[object] = []
    posts = Posts(loop, play.late)
    verdict = "it never ended"
    cache = AsyncCache(config, device=device, storage=backend if play.stored else None,
                       on_event=heard.append if play.events else None)  # fmt: skip
    arming = ExitStack()
    try:
        arming.enter_context(armed(injector))
        arming.enter_context(patch.object(Driver, "post", lambda driver, outcome: posts.take(driver, outcome)))
        async with asyncio.timeout(600), cache:
            arming.callback(setattr, posts, "held", None)
            try:
                await play.scenario(Here(cache, config, device, backend, posts, loop, loop.entropy("scenario")))
            except (Injected, AsyncCacheError):
                if not injector.fired:
                    raise
            arming.close()
            verdict = await look(cache, play.grain)
    except Injected:
        verdict = "whole" if verdict == "it never ended" else "it went on with what it raised"
    except CacheClosed as error:
        if not isinstance(error.__cause__, Injected):
            verdict = f"closed by {error.__cause__!r}"
    except TimeoutError:
        pass
    finally:
        arming.close()
    await backend.aclose()
    await device.aclose()
    return verdict


async def look(cache: AsyncCache, grains: int) -> str:
    if cache.closed is not None:
        with pytest.raises(CacheClosed):
            await serve(cache, text(2, 70))
        return "closed" if "Injected" in cache.closed else f"closed without a reason: {cache.closed}"
    try:
        await settled(cache)  # what is being fetched may be claimed then
        parts(cache).prefetches.drop_claims()
        await settled(cache)
        while parts(cache).core.world.ledger.count[COMPUTE]:  # nothing else tells that the engine's last batch is over
            await asyncio.sleep(0.01)
            await settled(cache)
        while parts(cache).core.world.dead_roots and grains:
            parts(cache).core.follow_up()  # a slice
        check(parts(cache).core, idle=True)
        for _ in range(2):
            await serve(cache, text(4, 70))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "whole"


@contextmanager
def grained(steps: int) -> Iterator[None]:
    """The core's limits are so small that small worlds reach them."""
    if not steps:
        yield
        return

    def small(config: CacheConfig) -> CoreConfig:
        return replace(usual(config), slice_steps=steps)

    usual = CacheConfig.core
    with (
        patch.object(CacheConfig, "core", small),
        patch.object(eviction, "_SLICE", 2), patch.dict(POLICIES, {"p2c": lambda config: P2c(config, learn_every=2)}),
        patch.object(policies, "_COHORTS", 2), patch.object(policies, "_MOST_GHOSTS", 4),
        patch.object(policies, "_PRIOR_BLOCKS", 0.01), patch.object(policies, "_MOST_PAGES", 24),
        patch.object(policies, "_FEWEST", 4), patch.object(policies, "_ALARM", 4.0),
        patch.object(ledger, "_SHORT", 4), patch.object(parts_module, "REMEMBERED", 4),
    ):  # fmt: skip
        yield


def run(play: Play, injector: Injector) -> str:
    with grained(play.grain), leading(play.seed) if play.leads else nullcontext():
        return simulate(lambda loop: world(loop, play, injector), play.seed, order=play.order, step_limit=STEPS)
