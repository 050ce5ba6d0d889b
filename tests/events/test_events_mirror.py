"""A mirror that follows the events alone has the blocks of tree and store, tier by tier, after every step."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from asynccache_backends.file import FileBackend
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache, CacheFull, LoadFailed
from asynccache.config import CacheConfig
from asynccache.core.plan import Medium
from asynccache.core.tree import PRESENT, Node
from asynccache.events import Mirror, Notice, StorageReport
from asynccache.events.announcer import Announcer, block_hash
from asynccache.memory.cpu import CpuDevice
from asynccache.storage import PageKey, Record, Result, StorageBackend, parse_url
from asynccache.storage.checked import store_layout
from asynccache.testing.faulty_backend import FaultyBackend
from asynccache.testing.wrapped_backend import WrappedBackend
from tests.runtime.runtime_kit import PAGE, compute, local, parts, serve, settings, settled, text

Blocks = dict[str, set[int]]
Opening = Callable[[CacheConfig, Path], Awaitable[StorageBackend]]


class Untold(WrappedBackend):
    """A backend that cannot be watched."""

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner)
        del self.watch


async def in_memory(config: CacheConfig, folder: Path) -> StorageBackend:
    return MemoryBackend(capacity=40 * (64 + 64))


async def roomy(config: CacheConfig, folder: Path) -> StorageBackend:
    return Untold(MemoryBackend())


async def failing(config: CacheConfig, folder: Path) -> StorageBackend:
    return FaultyBackend(MemoryBackend(capacity=40 * (64 + 64)), 0.3)


async def in_files(config: CacheConfig, folder: Path) -> StorageBackend:
    """Segments of a few groups, so that the oldest are reclaimed while pages come."""
    return await FileBackend.open(parse_url(f"file:{folder}/store?capacity=96KiB&segment=32KiB"),
                                  store_layout(config.pools()))


def nodes(cache: AsyncCache) -> Iterator[Node]:
    world = parts(cache).core.world
    stack: list[Node] = [*world.roots.values(), *(root for root in world.dead_roots if not root.mute)]
    while stack:
        node = stack.pop()
        stack.extend((node.children or {}).values())
        if node.parent is not None:
            yield node


def hashes_of(node: Node) -> list[bytes]:
    return [node.hashes[at : at + 32] for at in range(0, len(node.hashes), 32)]


def on_tier(cache: AsyncCache, tier: int) -> set[int]:
    place = tier * parts(cache).core.world.count
    return {block_hash(page) for node in nodes(cache) if node.state[place] == PRESENT for page in hashes_of(node)}


def stored_keys(backend: Any) -> set[bytes]:
    while hasattr(backend, "inner"):
        backend = backend.inner
    if isinstance(backend, MemoryBackend):
        return set(backend._stored)
    assert isinstance(backend, FileBackend)
    return set(backend._log.index._locations)


class Reader:
    """A subscriber without a wire, and all hashes that it was ever told, by the key that FULL has for them."""

    def __init__(self) -> None:
        self.mirror = Mirror()
        self.announcer = Announcer()
        self.notices: list[Notice] = []

    def read(self, cache: AsyncCache) -> Blocks:
        events = parts(cache).announcer
        assert events is not None
        events.hand_on()
        for event in self.announcer.announce(self.notices):
            self.mirror.note(event)
        self.notices.clear()
        return self.mirror.blocks


class World:
    """Random steps over a few conversations and two namespaces."""

    def __init__(self, cache: AsyncCache, seed: int) -> None:
        self.cache = cache
        self.random = Random(seed)
        self.said: list[list[int]] = [[]]
        self.hashes: dict[bytes, int] = {}

    def prompt(self) -> list[int]:
        kept = self.random.choice(self.said[-6:])
        kept = kept[: self.random.randint(0, len(kept))]
        fresh = [self.random.randrange(3) for _ in range(self.random.randint(PAGE, 6 * PAGE))]
        self.said.append((kept + fresh)[: 12 * PAGE])
        return self.said[-1]

    async def step(self) -> None:
        match self.random.randrange(12):
            case 0:
                await self.cache.invalidate(self.random.choice((None, "tenant")))
            case 1:
                await self.cache.reset()
            case 2:
                await self.cache.flush()
            case 3:
                await self.cache.prefetch(self.prompt())
            case _:
                await self.serve()

    async def serve(self) -> None:
        tokens = self.prompt()
        try:
            async with self.cache.lease(tokens, namespace=self.random.choice((None, None, "tenant"))) as lease:
                await lease.loaded()
                compute(self.cache, lease, tokens)
                await lease.commit(tokens)
        except (CacheFull, LoadFailed):
            pass

    def keys(self, blocks: set[int]) -> set[bytes]:
        """The storage keys of these blocks, of those that were ever in the tree."""
        pools = local(self.cache)._map
        for node in nodes(self.cache):
            for page in hashes_of(node):
                self.hashes[pools.key("full", page).key] = block_hash(page)
        return {key for key, block in self.hashes.items() if block in blocks}


@asynccontextmanager
async def playing(folder: Path, open_: Opening, seed: int) -> AsyncIterator[tuple[World, Reader, StorageBackend]]:
    config = settings(device=14, host=24)
    backend = await open_(config, folder)
    reader = Reader()
    device = CpuDevice()
    async with AsyncCache(config, device=device, storage=backend, on_event=reader.notices.append) as cache:
        yield World(cache, seed), reader, backend
    await device.aclose()
    await backend.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("open_", [in_memory, in_files, roomy, failing])
async def test_the_mirror_equals_tree_and_store_after_every_step(open_: Opening, seed: int, tmp_path: Path) -> None:
    async with playing(tmp_path, open_, seed) as (world, reader, backend):
        most = 0
        for _ in range(60):
            await world.step()
            world.keys(set())
            blocks = reader.read(world.cache)
            assert blocks[Medium.GPU.value] == on_tier(world.cache, 0)
            assert blocks[Medium.CPU.value] == on_tier(world.cache, 1)
            await settled(world.cache)
            blocks = reader.read(world.cache)
            assert blocks[Medium.GPU.value] == on_tier(world.cache, 0)
            assert blocks[Medium.CPU.value] == on_tier(world.cache, 1)
            assert world.keys(blocks[Medium.STORAGE.value]) == stored_keys(backend)
            most = max(most, len(blocks[Medium.STORAGE.value]))
        assert most > 10, "it was never put to the test"


@pytest.mark.asyncio
@pytest.mark.parametrize("open_", [in_memory, in_files])
async def test_the_stores_here_do_evict(open_: Opening, tmp_path: Path) -> None:
    """Else the test above would say nothing of BlockRemoved on STORAGE."""
    async with playing(tmp_path, open_, 0) as (world, reader, _):
        removed = 0
        for _ in range(40):
            await world.serve()
            await settled(world.cache)
            before = set(reader.mirror.blocks[Medium.STORAGE.value])
            removed += len(before - reader.read(world.cache)[Medium.STORAGE.value])
        assert removed > 20


class Picky(WrappedBackend):
    """Stores all of a call but its last page, now and then."""

    picky = False

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        if not self.picky:
            return await super().put(keys, records)
        return [*await super().put(keys[:-1], records[:-1]), Result.FAILED]


def equal(world: World, reader: Reader, backend: StorageBackend) -> bool:
    world.keys(set())
    blocks = reader.read(world.cache)
    tiers = [blocks[Medium.GPU.value] == on_tier(world.cache, 0), blocks[Medium.CPU.value] == on_tier(world.cache, 1)]
    return all(tiers) and world.keys(blocks[Medium.STORAGE.value]) == stored_keys(backend)


@pytest.mark.asyncio
async def test_what_a_lease_holds_beyond_a_reset_takes_nothing_with_it(tmp_path: Path) -> None:
    """The same pages are there twice then: those that nobody matches any more are none of the subscribers' business."""
    async with playing(tmp_path, roomy, 0) as (world, reader, backend):
        cache = world.cache
        await serve(cache, text(4))
        async with cache.lease(text(4, extra=1)):
            await settled(cache)
            await cache.reset()
            assert not any(reader.read(cache).values())
            await serve(cache, text(4))
            await settled(cache)
            assert equal(world, reader, backend)
        await settled(cache)
        assert len(reader.read(cache)[Medium.GPU.value]) == 4
        assert equal(world, reader, backend)


@pytest.mark.asyncio
async def test_what_was_stored_of_a_backup_that_failed_is_told(tmp_path: Path) -> None:
    async def picky(config: CacheConfig, folder: Path) -> StorageBackend:
        return Picky(MemoryBackend())

    async with playing(tmp_path, picky, 0) as (world, reader, backend):
        backend.picky = True  # type: ignore[attr-defined]
        await serve(world.cache, text(4))
        await settled(world.cache)
        assert len(reader.read(world.cache)[Medium.STORAGE.value]) == 3
        assert equal(world, reader, backend)
        backend.picky = False  # type: ignore[attr-defined]
        await world.cache.flush()
        assert len(reader.read(world.cache)[Medium.STORAGE.value]) == 4
        assert equal(world, reader, backend)


@pytest.mark.asyncio
async def test_what_is_left_of_an_earlier_life_is_told_when_it_is_read() -> None:
    backend, device = MemoryBackend(), CpuDevice()
    for life in range(2):
        reader = Reader()
        config, told = settings(host=16), reader.notices.append
        async with AsyncCache(config, device=device, storage=backend, on_event=told) as cache:
            assert not reader.read(cache)[Medium.STORAGE.value]
            await serve(cache, text(4, extra=1))
            await cache.flush()
            assert len(reader.read(cache)[Medium.STORAGE.value]) == 4, life
            if life:
                assert cache.statistics().prefetches["complete"] == 1
            await backend.delete([PageKey("full", key) for key in stored_keys(backend)])
            assert not reader.read(cache)[Medium.STORAGE.value]
            if not life:
                await cache.reset()
                await serve(cache, text(4, extra=1))
                await cache.flush()
    await backend.aclose()
    await device.aclose()


@pytest.mark.asyncio
async def test_nothing_is_told_of_a_store_after_the_cache_is_closed() -> None:
    backend, device = MemoryBackend(), CpuDevice()
    reader = Reader()
    async with AsyncCache(settings(host=16), device=device, storage=backend, on_event=reader.notices.append) as cache:
        await serve(cache, text(4))
    told = len(reader.notices)
    assert any(isinstance(notice, StorageReport) for notice in reader.notices)
    await backend.clear()
    assert len(reader.notices) == told
    assert backend._tell is None
    await backend.aclose()
    await device.aclose()
