"""A small cache on the threaded CPU device, and an engine whose KV is a function of what precedes each page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asynccache import AsyncCache, CacheConfig, Full, Mamba, SlidingWindow
from asynccache.core.audit import check
from asynccache.core.ledger import COMPUTE
from asynccache.hashes import extend_chain, namespace_digest
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.device import Device, Event
from asynccache.runtime.core_calls import first_ended, holding
from asynccache.runtime.head import Head
from asynccache.runtime.lease import Lease
from asynccache.storage import StorageBackend
from asynccache.worker.local import LocalWorker
from tests.waiting import turns as turns
from tests.waiting import until as until

PAGE = 4
LAYERS = 2


def settings(
    device: int = 16, host: int = 0, *, swa: int = 0, mamba: int = 0, window: int = 8, **more: Any
) -> CacheConfig:
    """Pages (of ``PAGE`` tokens) of FULL on each tier; SWA pages and MAMBA states, half of it on the device."""
    components: list[Any] = [
        Full(bytes_per_token=16, device_tokens=device * PAGE, host_tokens=host * PAGE, layers=LAYERS)
    ]
    if swa:
        components.append(
            SlidingWindow(window=window, bytes_per_token=8, device_tokens=swa * PAGE,
                          host_tokens=(host and 2 * swa) * PAGE, layers=LAYERS)
        )  # fmt: skip
    if mamba:
        components.append(Mamba(state_bytes=64, device_states=mamba, host_states=host and 2 * mamba, layers=LAYERS))
    more.setdefault("prefetch_threshold", PAGE)
    return CacheConfig(model="test", components=tuple(components), page_size=PAGE, **more)


def parts(cache: AsyncCache) -> Head:
    assert cache._head is not None
    return cache._head


def local(cache: AsyncCache) -> LocalWorker:
    """The worker of a cache that has one."""
    worker = parts(cache).worker
    assert isinstance(worker, LocalWorker)
    return worker


def fence_all(cache: AsyncCache, event: Event) -> None:
    """From now on every copy into a page of the device waits for ``event``."""
    slots = {int(c.kind): np.arange(c.device, dtype=np.int32).tobytes() for c in cache.core.config.components}
    parts(cache).batches.fences.add(local(cache).batch(event), slots)


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


def text(pages: int, seed: int = 0, extra: int = 0) -> list[int]:
    """Tokens of so many whole pages and ``extra`` more; different seeds share no page."""
    return [seed * 100_000 + i for i in range(pages * PAGE + extra)]


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
