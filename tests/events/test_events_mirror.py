"""A mirror that follows the events alone has the blocks of tree and stores, tier by tier, after every step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from asynccache_backends import memory, page_index
from asynccache_backends.file import FileBackend
from asynccache_backends.memory import MemoryBackend
from asynccache_backends.page_index import PageIndex

from asynccache import AsyncCache, CacheFull, LoadFailed
from asynccache.config import CacheConfig
from asynccache.core.plan import Medium, Publish
from asynccache.core.tree import PRESENT, Node
from asynccache.events import Mirror, Notice, Opened, StorageReport
from asynccache.events.announcer import Announcer, block_hash
from asynccache.memory.cpu import CpuDevice
from asynccache.runtime import announcer as naming
from asynccache.runtime.core_calls import holding
from asynccache.storage import PageKey, Record, Result, StorageBackend, parse_url
from asynccache.storage.checked import store_layout
from asynccache.testing.backend_suite import keys_of, record_of
from asynccache.testing.faulty_backend import FaultyBackend
from asynccache.testing.wrapped_backend import WrappedBackend
from tests.runtime.runtime_kit import PAGE, compute, local, parts, serve, settings, settled, text, turns, until
from tests.runtime.runtime_kit import opened as opened_cache

STORAGE = Medium.STORAGE.value
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
async def opened(
    storage: StorageBackend | None = None, device: int = 14, host: int = 24
) -> AsyncIterator[tuple[AsyncCache, Reader]]:
    reader, cpu = Reader(), CpuDevice()
    config, told = settings(device=device, host=host), reader.notices.append
    async with AsyncCache(config, device=cpu, storage=storage, on_event=told) as cache:
        yield cache, reader
    await cpu.aclose()


@asynccontextmanager
async def playing(folder: Path, open_: Opening, seed: int) -> AsyncIterator[tuple[World, Reader, StorageBackend]]:
    backend = await open_(settings(device=14, host=24), folder)
    async with opened(backend) as (cache, reader):
        yield World(cache, seed), reader, backend
    await backend.aclose()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("open_", [in_memory, in_files, roomy, failing])
async def test_the_mirror_equals_tree_and_store_after_every_step(open_: Opening, seed: int, tmp_path: Path) -> None:
    async with playing(tmp_path, open_, seed) as (world, reader, backend):
        most = removed = 0
        for _ in range(60):
            before = set(reader.mirror.blocks[STORAGE])
            await world.step()
            on_both_tiers(world, reader)
            await settled(world.cache)
            blocks = equal(world, reader, backend)
            removed += len(before - blocks[STORAGE])
            most = max(most, len(blocks[STORAGE]))
        assert most > 10, "it was never put to the test"
        assert removed > 10 or open_ in (roomy, failing), "the store evicts nothing"


def on_both_tiers(world: World, reader: Reader) -> Blocks:
    """The blocks that the mirror has; those of device and host are the tree's."""
    world.keys(set())
    blocks = reader.read(world.cache)
    assert blocks[Medium.GPU.value] == on_tier(world.cache, 0)
    assert blocks[Medium.CPU.value] == on_tier(world.cache, 1)
    return blocks


def equal(world: World, reader: Reader, backend: StorageBackend) -> Blocks:
    """The blocks that the mirror has, which are those of the tree and of the store."""
    blocks = on_both_tiers(world, reader)
    assert world.keys(blocks[STORAGE]) == stored_keys(backend)
    return blocks


class Picky(WrappedBackend):
    """Stores all of a call but its last page, now and then."""

    picky = False

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        if not self.picky:
            return await super().put(keys, records)
        return [*await super().put(keys[:-1], records[:-1]), Result.FAILED]


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
            equal(world, reader, backend)
        await settled(cache)
        assert len(equal(world, reader, backend)[Medium.GPU.value]) == 4


async def test_what_was_stored_of_a_backup_that_failed_is_told(tmp_path: Path) -> None:
    async def picky(config: CacheConfig, folder: Path) -> StorageBackend:
        return Picky(MemoryBackend())

    async with playing(tmp_path, picky, 0) as (world, reader, backend):
        backend.picky = True  # type: ignore[attr-defined]
        await serve(world.cache, text(4))
        await settled(world.cache)
        assert len(equal(world, reader, backend)[STORAGE]) == 3
        backend.picky = False  # type: ignore[attr-defined]
        await world.cache.flush()
        assert len(equal(world, reader, backend)[STORAGE]) == 4


async def test_what_is_left_of_an_earlier_life_is_told_when_it_is_read() -> None:
    backend = MemoryBackend()
    for life in range(2):
        async with opened(backend, host=16) as (cache, reader):
            assert not reader.read(cache)[STORAGE]
            await serve(cache, text(4, extra=1))
            await cache.flush()
            assert len(reader.read(cache)[STORAGE]) == 4, life
            if life:
                assert cache.statistics().prefetches["complete"] == 1
            await backend.delete([PageKey("full", key) for key in stored_keys(backend)])
            assert not reader.read(cache)[STORAGE]
            if not life:
                await cache.reset()
                await serve(cache, text(4, extra=1))
                await cache.flush()
    await backend.aclose()


async def test_nothing_is_told_of_a_store_after_the_cache_is_closed() -> None:
    backend = MemoryBackend()
    async with opened(backend, host=16) as (cache, reader):
        await serve(cache, text(4))
    told = len(reader.notices)
    assert any(isinstance(notice, StorageReport) for notice in reader.notices)
    await backend.clear()
    assert len(reader.notices) == told
    assert backend._tell is None
    await backend.aclose()


# Several stores, and stores that come and go: a block is on STORAGE while one of those attached has it.


def there(backends: dict[str, StorageBackend], cache: AsyncCache) -> set[bytes]:
    return {key for name in cache.stores for key in stored_keys(backends[name])}


def known_to_the_tree(cache: AsyncCache) -> set[bytes]:
    pools = local(cache)._map
    return {pools.key("full", page).key for node in nodes(cache) for page in hashes_of(node)}


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
            told = world.keys(on_both_tiers(world, reader)[STORAGE])
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


# A store with many keys hands them over in parts, a turn of the loop for each, before it is used; and what changes
# meanwhile is right in the end.


KEYS = 40


class Holder:
    def __init__(self, keys: Sequence[bytes]) -> None:
        self._all = list(keys)

    def keys(self) -> list[bytes]:
        return self._all


class Index(PageIndex[Holder]):
    position_bits = 6

    def put(self, *keys: bytes) -> None:
        number = self._hold(Holder(keys))
        self._locations.update({key: (number << self.position_bits) + at for at, key in enumerate(keys)})
        self._changed(True, keys)

    def drop(self, key: bytes) -> None:
        del self._locations[key]
        self._changed(False, [key])


def test_the_keys_of_an_index_come_in_parts_though_pages_come_go_and_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_index, "PART", 3)
    index, told = Index(), set[bytes]()
    pages = [bytes([i]) for i in range(12)]
    for at in range(0, 12, 4):
        index.put(*pages[at : at + 4])
    rest = iter(index.watched(lambda there, keys: (told.update if there else told.difference_update)(keys)))
    told.update(part := next(rest))
    assert len(part) == 3
    index.drop(pages[0])   # told before
    index.drop(pages[11])  # not yet
    index.tell, tell = None, index.tell
    index.put(pages[9])    # it moves, of which nobody hears, to where nobody has looked
    index.tell = tell
    index.put(b"new")
    sizes = []
    for part in rest:
        told.update(part)
        sizes.append(len(part))
    assert told == {*pages[1:11], b"new"}
    assert max(sizes) <= 3


async def test_attaching_a_store_tells_its_keys_in_parts_outside_the_tree_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LISTED", 4)
    backend = MemoryBackend()
    keys = keys_of(KEYS, "odd")
    records: list[Record] = [record_of(key) for key in keys]
    await backend.put(keys, records)
    notices: list[tuple[int, Notice]] = []
    turn, locked = 0, list[bool]()

    def heard(notice: Notice) -> None:
        notices.append((turn, notice))
        locked.append(parts(cache).driver.lock.locked())

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    cache = AsyncCache(settings(host=32), on_event=heard)
    async with cache:
        counting = asyncio.create_task(count())
        await cache.attach_storage(backend)
        counting.cancel()
        reports = [(turn, notice) for turn, notice in notices if isinstance(notice, StorageReport)]
        assert sum(len(report.keys) for _, report in reports) == KEYS
        assert max(len(report.keys) for _, report in reports) == 4
        assert len({turn for turn, _ in reports}) >= KEYS // 4 // 2
        assert not any(locked)
        assert not [notice for _, notice in notices if isinstance(notice, Publish)]
    await backend.aclose()


async def test_the_keys_of_a_store_whose_attaching_is_cancelled_are_told_to_be_gone() -> None:
    backend, keys = MemoryBackend(), keys_of(8, "odd")
    await backend.put(keys, [record_of(key) for key in keys])
    told: list[Notice] = []
    async with opened_cache(settings(host=32), on_event=told.append) as cache:
        async with holding(parts(cache).driver.lock):
            attaching = asyncio.create_task(cache.attach_storage(backend))
            await until(lambda: any(isinstance(notice, StorageReport) for notice in told))
            attaching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attaching
        await settled(cache)
    reports = [notice for notice in told if isinstance(notice, StorageReport)]
    assert sum(len(report.keys) for report in reports if report.there) == len(keys)
    assert sum(len(report.keys) for report in reports if not report.there) == len(keys)
    await backend.aclose()


# The names of namespaces are kept as long as they matter and no longer, because callers bring new ones for ever.


LIMIT = 16


async def test_names_of_namespaces_do_not_pile_up_and_those_with_pages_keep_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(naming, "NAMES", LIMIT)
    told: list[Notice] = []
    async with opened_cache(settings(device=64), on_event=told.append) as cache:
        for tenant in ("first", "second"):
            await serve(cache, text(4), namespace=tenant)
        for number in range(20 * LIMIT):
            await cache.explain(text(1), namespace=f"passing {number}")
        await until(lambda: bool(told))
        found = parts(cache).announcer
        assert found is not None
        assert len(found._named) + len(found._named_before) <= 2 * LIMIT + 2
        (begun,) = [notice for notice in told if isinstance(notice, Opened)]
        assert {begun.namespace_of(space) for space in parts(cache).core.world.roots} == {"first", "second"}
        last = parts(cache).namespaces.space(f"passing {20 * LIMIT - 1}")
        assert begun.namespace_of(last) == f"passing {20 * LIMIT - 1}"
