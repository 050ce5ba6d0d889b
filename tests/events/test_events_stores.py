"""Several stores, and stores that come and go: a block is on STORAGE while one of those attached has it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache
from asynccache.core.plan import Medium
from asynccache.events import StorageReport
from asynccache.memory.cpu import CpuDevice
from asynccache.storage import PageKey, StorageBackend
from asynccache.testing.faulty_backend import FaultyBackend
from tests.events.test_events_mirror import (
    Opening,
    Reader,
    Untold,
    World,
    failing,
    hashes_of,
    in_files,
    in_memory,
    nodes,
    on_tier,
    roomy,
    stored_keys,
)
from tests.runtime.runtime_kit import local, parts, serve, settings, settled, text, turns

STORAGE = Medium.STORAGE.value


@asynccontextmanager
async def opened(device: int = 14, host: int = 24) -> AsyncIterator[tuple[AsyncCache, Reader]]:
    reader, cpu = Reader(), CpuDevice()
    async with AsyncCache(settings(device=device, host=host), device=cpu, on_event=reader.notices.append) as cache:
        yield cache, reader
    await cpu.aclose()


def there(backends: dict[str, StorageBackend], cache: AsyncCache) -> set[bytes]:
    return {key for name in cache.stores for key in stored_keys(backends[name])}


def known_to_the_tree(cache: AsyncCache) -> set[bytes]:
    pools = local(cache)._map
    return {pools.key("full", page).key for node in nodes(cache) for page in hashes_of(node)}


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kinds", [(in_memory, in_files), (in_files, roomy), (failing, in_memory)])
async def test_the_mirror_equals_the_stores_as_they_come_and_go(
    kinds: tuple[Opening, Opening], seed: int, tmp_path: Path
) -> None:
    async with opened() as (cache, reader):
        backends = {name: await kind(cache.config, tmp_path) for name, kind in zip("ab", kinds, strict=True)}
        world, random, most = World(cache, seed), Random(seed), 0
        for _ in range(50):
            if random.random() < 0.3:
                await change(cache, backends, random)
            await world.step()
            world.keys(set())
            await settled(cache)
            await turns()
            await settled(cache)
            world.keys(set())
            blocks = reader.read(cache)
            told = world.keys(blocks[STORAGE])
            assert blocks[Medium.GPU.value] == on_tier(cache, 0)
            assert told <= there(backends, cache), "a block that no store has"
            watched = {key for name in cache.stores for key in stored_keys(backends[name])
                       if not isinstance(backends[name], (Untold, FaultyBackend))}  # fmt: skip
            assert watched & known_to_the_tree(cache) <= told, "a block that nobody was told of"
            most = max(most, len(told))
        assert most > 10, "it was never put to the test"
    for backend in backends.values():
        await backend.aclose()


async def change(cache: AsyncCache, backends: dict[str, StorageBackend], random: Random) -> None:
    name = random.choice("ab")
    if name in cache.stores:
        await cache.detach_storage(name, timeout=None if random.random() < 0.5 else 0)
    else:
        await cache.attach_storage(backends[name], name=name, backfill=random.random() < 0.5)


@pytest.mark.asyncio
async def test_what_a_store_has_that_is_attached_is_told_at_once_and_taken_back_when_it_goes() -> None:
    backend = MemoryBackend()
    async with opened(host=16) as (cache, _):
        await cache.attach_storage(backend)
        await serve(cache, text(4))
        await cache.flush()
    async with opened(host=16) as (cache, reader):
        await serve(cache, text(4))
        await settled(cache)
        assert not reader.read(cache)[STORAGE]
        await cache.attach_storage(backend, backfill=False)
        await turns()
        assert len(reader.read(cache)[STORAGE]) == 4
        await cache.detach_storage()
        assert not reader.read(cache)[STORAGE]
        assert backend._tell is None
        told = len(reader.notices)
        await backend.clear()
        assert len(reader.notices) == told
    await backend.aclose()


@pytest.mark.asyncio
async def test_a_block_is_gone_when_the_last_store_has_lost_it() -> None:
    first, second = MemoryBackend(), MemoryBackend()
    async with opened(host=16) as (cache, reader):
        await cache.attach_storage(first, name="first")
        await cache.attach_storage(second, name="second")
        await serve(cache, text(4))
        await cache.flush()
        assert len(reader.read(cache)[STORAGE]) == 4
        for backend, left in ((first, 4), (second, 0)):
            await backend.delete([PageKey("full", key) for key in stored_keys(backend)])
            assert len(reader.read(cache)[STORAGE]) == left
        await cache.flush()
        await serve(cache, text(6))
        await cache.flush()
        assert len(reader.read(cache)[STORAGE]) == 2
        await cache.detach_storage("first")
        assert len(reader.read(cache)[STORAGE]) == 2, "the other one has them"
        await cache.detach_storage("second")
        assert not reader.read(cache)[STORAGE]
    await first.aclose()
    await second.aclose()


@pytest.mark.asyncio
async def test_many_keys_that_leave_are_told_in_slices() -> None:
    backend = MemoryBackend()
    async with opened(device=16, host=32) as (cache, reader):
        await cache.attach_storage(backend)
        keys = next(iter(parts(cache).announcer._keys.values()))  # type: ignore[union-attr]
        keys.update(i.to_bytes(32, "big") for i in range(10_000))
        reader.notices.clear()
        await cache.detach_storage(timeout=0)
        sizes = [len(notice.keys) for notice in reader.notices if isinstance(notice, StorageReport)]
        assert sum(sizes) == 10_000
        assert max(sizes) <= 4096
    await backend.aclose()
