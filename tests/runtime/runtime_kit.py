"""A small cache on the threaded CPU device, and an engine whose KV is a function of what precedes each page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Container, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import wraps
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache, CacheConfig
from asynccache.core.audit import check
from asynccache.core.ledger import COMPUTE
from asynccache.core.plan import Status
from asynccache.hashes import extend_chain, namespace_digest
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.device import Device, Event
from asynccache.memory.signals import HostGate
from asynccache.runtime.core_calls import first_ended, holding
from asynccache.runtime.head import Head
from asynccache.runtime.lease import Lease
from asynccache.storage import CheckedStore, PageKey, Record, Result, StorageBackend
from asynccache.storage import settled as let_go
from asynccache.storage.checked import store_layout
from asynccache.testing.wrapped_backend import WrappedBackend
from asynccache.worker.local import LocalWorker
from tests.simulated.backend import Hostility, SimulatedBackend
from tests.simulated.device import SimulatedDevice
from tests.simulated.drawn import LAYERS as LAYERS
from tests.simulated.drawn import PAGE as PAGE
from tests.simulated.drawn import settings as settings
from tests.simulated.drawn import text as text
from tests.simulated.loop import simulate
from tests.waiting import turns as turns
from tests.waiting import until as until


def parts(cache: AsyncCache) -> Head:
    assert cache._head is not None
    return cache._head


def local(cache: AsyncCache) -> LocalWorker:
    """The worker of a cache that has one."""
    worker = parts(cache).worker
    assert isinstance(worker, LocalWorker)
    return worker


def gate(cache: AsyncCache) -> HostGate:
    """A new event of the cache's device, to be opened by hand."""
    device: Any = cache.device
    made: HostGate = device.gate()
    return made


def free(cache: AsyncCache) -> int:
    """Pages of FULL that are free on the device."""
    return cache.statistics().device["full"].free


def fence_all(cache: AsyncCache, event: Event) -> None:
    """From now on every copy into a page of the device waits for ``event``."""
    slots = {int(c.kind): np.arange(c.device, dtype=np.int32).tobytes() for c in cache.core.config.components}
    parts(cache).batches.fences.add(local(cache).batch(event), slots)


@contextmanager
def failing_loads(cache: AsyncCache) -> Iterator[None]:
    """Every copy from the host fails meanwhile."""
    stage = local(cache).load_back
    post, stage._ended = stage._ended, lambda _, ops: post(Status.FAILED, ops)
    yield
    stage._ended = post


@asynccontextmanager
async def opened(
    config: CacheConfig, *, device: Device | None = None, storage: StorageBackend | None = None, idle: bool = True,
    **more: Any,
) -> AsyncIterator[AsyncCache]:  # fmt: skip
    """An open cache. At the end: the audit passes, nothing leaked, no task is left."""
    own = CpuDevice() if device is None else None
    before = asyncio.all_tasks()
    try:
        async with AsyncCache(config, device=device or own, storage=storage, **more) as cache:
            yield cache
            if idle:
                parts(cache).prefetches.drop_claims()
                await settled(cache)
                await until(lambda: not parts(cache).core.world.ledger.count[COMPUTE])
                check(parts(cache).core, idle=True)
    finally:
        if own is not None:
            await own.aclose()
    assert asyncio.all_tasks() <= before, "a task outlived the cache"


async def settled(cache: AsyncCache) -> None:
    """Return when nothing is in flight."""
    driver = parts(cache).driver
    while True:
        async with holding(driver.lock):
            driver.apply_outcomes()
        if not len(driver.ops):
            return
        await first_ended(driver.ops, tuple(driver.ops)[:1])


async def enter(cache: AsyncCache, pages: int, seed: int = 0, extra: int = 0, **terms: Any) -> Lease:
    """A held lease of ``text(pages, seed, extra)``."""
    return await cache.lease(text(pages, seed, extra), **terms).__aenter__()


def entering(cache: AsyncCache, pages: int, seed: int = 0, extra: int = 0, **terms: Any) -> asyncio.Task[Lease]:
    """The same, in a task of its own."""
    return asyncio.create_task(enter(cache, pages, seed, extra, **terms))


def page_hashes(tokens: Sequence[int], namespace: str | bytes | None = None) -> list[bytes]:
    key = np.array(tokens, "<i4").tobytes()
    space = namespace_digest("test", PAGE, namespace)
    stop = len(tokens) // PAGE * PAGE * 4
    hashes = extend_chain(space, key, 0, stop, PAGE * 4)
    return [hashes[i : i + 32] for i in range(0, len(hashes), 32)]


def value(page_hash: bytes, pool: str, layer: int, size: int) -> npt.NDArray[np.uint8]:
    """The bytes that the engine computes for one layer of a page."""
    seed = [*page_hash[:8], *pool.encode(), layer]
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def compute(cache: AsyncCache, lease: Lease, tokens: Sequence[int], pools: Iterable[str] = ("full",)) -> None:
    """Write the KV of every whole page after ``lease.cached``."""
    hashes = page_hashes(tokens)
    for name in pools:
        table = lease.page_table(name)
        for i in range(lease.cached // PAGE, len(hashes)):
            if table[i] >= 0:
                write(cache, name, int(table[i]), hashes[i])


def write(cache: AsyncCache, name: str, slot: int, page_hash: bytes) -> None:
    pool = cache.pools[name]
    for layer in range(LAYERS):
        tensor = pool.layer(layer)
        tensor[slot] = torch.from_numpy(value(page_hash, name, layer, tensor.shape[1]))


def holds(cache: AsyncCache, name: str, slot: int, page_hash: bytes) -> bool:
    """Whether a device page has the bytes that belong there."""
    pool = cache.pools[name]
    return all(
        np.array_equal(pool.layer(layer)[slot].cpu().numpy(), value(page_hash, name, layer, pool.layer(layer).shape[1]))
        for layer in range(LAYERS)
    )


def assert_cached_bytes(
    cache: AsyncCache, lease: Lease, tokens: Sequence[int], pools: Iterable[str] = ("full",), window: int = 8
) -> None:
    """Every page that the lease calls cached holds the right bytes."""
    hashes = page_hashes(tokens)
    last = lease.cached // PAGE
    for name in pools:
        first = max(0, lease.cached - window) // PAGE if name == "swa" else 0
        table = lease.page_table(name)
        for i in range(first, last):
            assert holds(cache, name, int(table[i]), hashes[i]), f"{name} page {i} has wrong bytes"


async def serve(cache: AsyncCache, tokens: Sequence[int], pools: Sequence[str] = ("full",), **terms: Any) -> int:
    """Serve one request: lease, check what is cached, compute the rest, commit. Returns how many tokens were cached."""
    async with cache.lease(tokens, **terms) as lease:
        await lease.loaded()
        assert_cached_bytes(cache, lease, tokens, pools)
        compute(cache, lease, tokens, pools)
        await lease.commit(tokens)
        return lease.cached


async def push_out(cache: AsyncCache, pages: int) -> None:
    """Take ``pages`` device pages for a moment, so that what is cached leaves the device."""
    async with cache.lease(text(pages, seed=999), prefetch=None):
        pass


async def on_the_host(cache: AsyncCache, *texts: Sequence[int], pools: Sequence[str] = ("full",)) -> None:
    """Serve ``texts``; afterwards their pages are on the host alone."""
    for tokens in texts:
        await serve(cache, tokens, pools)
        await settled(cache)
    await push_out(cache, cache.statistics().device["full"].capacity)
    assert [(await cache.match(tokens)).device for tokens in texts] == [0] * len(texts)


class Attended(WrappedBackend):
    """``before`` is awaited before each call, with its verb and its keys."""

    def __init__(self, inner: StorageBackend | None = None) -> None:
        super().__init__(MemoryBackend() if inner is None else inner)

    async def before(self, verb: str, keys: Sequence[PageKey] = ()) -> None:
        raise NotImplementedError

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        await self.before("exists", keys)
        return await super().exists(keys)

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        await self.before("get", keys)
        return await super().get(keys, records)

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        await self.before("put", keys)
        return await super().put(keys, records)

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        await self.before("delete", keys)
        return await super().delete(keys)

    async def clear(self) -> None:
        await self.before("clear")
        await super().clear()

    async def flush(self) -> None:
        await self.before("flush")
        await super().flush()


class HeldBackend(Attended):
    """Calls of one verb wait until they are let through, one a permit. ``corrupt``: the n-th pages read are wrong.
    ``asked``, ``waiting``: how many questions there were, how many calls wait."""

    def __init__(self, verb: str = "get", held: bool = False) -> None:
        super().__init__()
        self.verb = verb
        self.permits = asyncio.Semaphore(0 if held else 1 << 20)
        self.asked = self.waiting = self._read = 0
        self.corrupt: Container[int] = ()

    def hold(self) -> None:
        self.permits = asyncio.Semaphore(0)

    def let(self, calls: int = 1000) -> None:
        for _ in range(calls):
            self.permits.release()

    async def before(self, verb: str, keys: Sequence[PageKey] = ()) -> None:
        self.asked += verb == "exists"
        if verb == self.verb:
            self.waiting += 1
            try:
                await self.permits.acquire()
            finally:
                self.waiting -= 1

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        results = await super().get(keys, records)
        for i, record in enumerate(records, self._read):
            if i in self.corrupt:
                record.payload[0] ^= 1
        self._read += len(keys)
        return results


def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make slices so short that a few pages need several."""
    usual = CacheConfig.core
    monkeypatch.setattr(CacheConfig, "core", lambda config: replace(usual(config), slice_steps=4))


# In simulated time, over stores that hang.


def simulated(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """``test`` runs in a simulated world: its time is virtual, and no task may be left."""

    @wraps(test)
    def run(*given: Any, **named: Any) -> None:
        simulate(lambda loop: test(*given, **named), 1)

    return run


def now() -> float:
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def cache_over(
    backend: Any, config: CacheConfig, attached: dict[str, str] | None = None, **store: Any
) -> AsyncIterator[AsyncCache]:
    """A cache of a simulated world, over a store that is made of ``backend`` with the options ``store``. ``attached``:
    the store is attached with these options."""
    device = SimulatedDevice(seed=1, latency=(0.0, 0.001))
    checked = CheckedStore(backend, store_layout(config.pools()), threads=0, **store)
    async with AsyncCache(config, device=device, storage=checked if attached is None else None) as cache:
        if attached is not None:
            await cache.attach_storage(checked, options=attached)
        yield cache
    await checked.aclose()
    await device.aclose()


class Hangs(Attended):
    """From ``hung.set()`` on, ``verb`` does not answer before ``answers.set()`` or for ``deaf`` seconds, nor does
    ``put`` unless ``alone``, and they cannot be cancelled till then: as a client whose buffers somebody else writes
    to."""

    def __init__(self, verb: str, deaf: float = 1e6, *, alone: bool = False) -> None:
        super().__init__(SimulatedBackend(Random(1), Hostility(delay=0.0)))
        self.verbs = (verb,) if alone else (verb, "put")
        self.deaf = deaf
        self.hung = asyncio.Event()
        self.answers = asyncio.Event()
        self.holding = 0

    async def before(self, verb: str, keys: Sequence[PageKey] = ()) -> None:
        if self.hung.is_set() and verb in self.verbs:
            self.holding += 1
            try:
                await let_go([asyncio.ensure_future(self._answer())])
            finally:
                self.holding -= 1

    async def _answer(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self.deaf):
                await self.answers.wait()


async def publish(cache: AsyncCache, tokens: list[int], **terms: Any) -> int:
    """A request that writes nothing into its pages. Returns how many tokens were cached."""
    async with cache.lease(tokens, **terms) as lease:
        await lease.loaded()
        await lease.commit(tokens)
        return lease.cached


async def store_only(cache: AsyncCache, *texts: list[int], others: Sequence[int] = range(200, 216)) -> None:
    """Have them in storage and nowhere else: as many ``others`` push them out of device and host."""
    for tokens in texts:
        await publish(cache, tokens)
    await cache.flush()
    for seed in others:
        await publish(cache, text(10, seed=seed))
    await cache.flush()
