"""Pages that come back from storage have, byte for byte, what was computed: pages of FULL and SWA, states of MAMBA, in
a cache that never computed them. However many requests want a page, it is read once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache, CacheConfig, LoadFailed
from asynccache.core.plan import Clone, Copy
from asynccache.memory.cpu import CpuDevice, CpuEvent
from asynccache.memory.device import PageCopy, Stream
from asynccache.memory.host_copies import Fates, Faults
from asynccache.runtime.lease import Lease
from asynccache.storage import PageKey, Record, Result
from asynccache.testing.wrapped_backend import WrappedBackend
from tests.runtime.runtime_kit import (
    PAGE,
    compute,
    holds,
    opened,
    page_hashes,
    parts,
    push_out,
    settings,
    settled,
    text,
    write,
)

WINDOW = 8
TABLES = ("full", "swa")


class Reads(WrappedBackend):
    """Counts how often each page is read, and each read call."""

    def __init__(self, inner: MemoryBackend) -> None:
        super().__init__(inner)
        self.read: Counter[PageKey] = Counter()

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        self.read.update(keys)
        await asyncio.sleep(0)  # others come meanwhile
        return await super().get(keys, records)


def all_three(**more: object) -> CacheConfig:
    options = {"device": 32, "host": 64, "swa": 24, "mamba": 36, "window": WINDOW} | more
    return settings(**options)  # type: ignore[arg-type]


def assert_everything(cache: AsyncCache, lease: Lease, tokens: Sequence[int]) -> None:
    """FULL up to the end, SWA over the whole window, the request's own copy of the state at the end."""
    hashes, end = page_hashes(tokens), lease.cached // PAGE
    full, swa = lease.page_table("full"), lease.page_table("swa")
    for i in range(end):
        assert holds(cache, "full", int(full[i]), hashes[i]), f"full page {i}"
    for i in range(max(0, lease.cached - WINDOW) // PAGE, end):
        assert swa[i] >= 0, f"swa page {i} is missing"
        assert holds(cache, "swa", int(swa[i]), hashes[i]), f"swa page {i}"
    assert holds(cache, "mamba", int(lease.states[0]), hashes[end - 1]), "the state"


async def serve_all(cache: AsyncCache, tokens: Sequence[int]) -> int:
    """One request that takes a checkpoint at its last whole page; how much was cached, every byte of it verified."""
    hashes = page_hashes(tokens)
    async with cache.lease(tokens, states=2) as lease:
        await lease.loaded()
        if lease.cached:
            assert_everything(cache, lease, tokens)
        compute(cache, lease, tokens, TABLES)
        for slot in lease.states[:2]:
            write(cache, "mamba", int(slot), hashes[-1])
        if lease.cached < len(hashes) * PAGE:
            await lease.commit(tokens, checkpoint=(len(hashes) * PAGE, int(lease.states[1])))
        return lease.cached


@pytest.mark.parametrize("where", ["memory", "file"])
async def test_pages_and_states_come_back_from_storage_in_a_cache_that_never_computed_them(
    where: str, tmp_path: Path
) -> None:
    memory = MemoryBackend() if where == "memory" else None
    config = all_three(storage=None if memory else f"file:{tmp_path}/kv?capacity=16MiB")
    async with opened(config, storage=memory) as cache:
        for seed in range(3):
            assert await serve_all(cache, text(6, seed, extra=1)) == 0
        assert await cache.flush() == (0, 0)
    async with opened(config, storage=memory) as cache:
        for seed in range(3):
            async with cache.lease(text(6, seed, extra=1)) as lease:
                await lease.loaded()
                assert lease.hits == (0, 0, 6 * PAGE)
                assert_everything(cache, lease, text(6, seed))
        stages = cache.statistics().stages
        for name in ("prefetch", "load_back"):
            assert stages[name].pages == 3 * (6 + WINDOW // PAGE + 1), name
    if memory is not None:
        await memory.aclose()


async def test_pages_and_states_come_back_from_the_host() -> None:
    async with opened(all_three(device=12, swa=12, mamba=4)) as cache:
        for seed in range(4):
            await serve_all(cache, text(6, seed, extra=1))
            await settled(cache)
        await push_out(cache, 12)
        assert (await cache.match(text(6, 0))).device == 0
        async with cache.lease(text(6, 0, extra=1)) as lease:
            await lease.loaded()
            assert lease.hits == (0, 6 * PAGE, 0)
            assert_everything(cache, lease, text(6, 0))


async def test_what_a_request_makes_of_its_state_is_not_what_the_next_one_gets() -> None:
    async with opened(all_three()) as cache:
        await serve_all(cache, text(4, extra=1))
        for seed in (8, 9):  # each decodes on from the state, in the copy that is its own
            async with cache.lease(text(4, extra=1)) as lease:
                await lease.loaded()
                assert_everything(cache, lease, text(4))
                write(cache, "mamba", int(lease.states[0]), page_hashes(text(1, seed))[0])


async def test_a_conversation_goes_on_after_a_restart_and_the_next_restart_has_all_of_it() -> None:
    storage = MemoryBackend()
    for turn in range(1, 4):
        async with opened(all_three(), storage=storage) as cache:
            assert await serve_all(cache, text(4 * turn, extra=1)) == 4 * (turn - 1) * PAGE
            assert await cache.flush() == (0, 0)
    assert storage.stats()["pages"] == 12 + 12 + 3  # every page of FULL and SWA, and a state a turn; none twice
    await storage.aclose()


@pytest.mark.parametrize("own", [0, 1])
async def test_ten_requests_for_a_stored_prefix_read_each_page_and_state_once(own: int) -> None:
    """``own``: pages that each of them has behind the shared ones, which nothing has stored."""
    storage = Reads(MemoryBackend())
    async with opened(all_three(), storage=storage) as cache:
        await serve_all(cache, text(6, extra=1))
        assert await cache.flush() == (0, 0)
    storage.read.clear()
    async with opened(all_three(device=64, swa=64), storage=storage) as cache:
        clones = spy_on_clones(cache)

        async def one(seed: int) -> tuple[int, ...]:
            prompt = text(6) + text(own, seed, extra=1)
            async with cache.lease(prompt) as lease:
                await lease.loaded()
                assert_everything(cache, lease, prompt)
                await everybody.wait()
                return tuple(lease.hits)

        everybody = asyncio.Barrier(10)
        assert await asyncio.gather(*(one(seed) for seed in range(1, 11))) == [(0, 0, 6 * PAGE)] * 10
        needed = {"full": 6, "swa": WINDOW // PAGE, "mamba": 1}
        assert Counter(key.pool for key in storage.read) == needed
        assert set(storage.read.values()) == {1}
        stages = cache.statistics().stages
        assert stages["prefetch"].pages == 9
        assert own or stages["prefetch"].ops == 1
        assert (stages["load_back"].ops, stages["load_back"].pages) == (1, 9)
        assert len(clones) == 10, "everybody has a state of their own"
    await storage.inner.aclose()


async def test_ten_requests_for_an_evicted_prefix_load_each_page_and_state_once() -> None:
    async with opened(all_three(device=24, swa=24)) as cache:
        await serve_all(cache, text(6, extra=1))
        await settled(cache)
        await push_out(cache, 24)
        assert (await cache.match(text(6))).device == 0
        everybody = asyncio.Barrier(10)

        async def one(seed: int) -> int:
            prompt = [*text(6), seed]
            async with cache.lease(prompt) as lease:
                await lease.loaded()
                assert_everything(cache, lease, prompt)
                await everybody.wait()
                return lease.cached

        assert await asyncio.gather(*(one(seed) for seed in range(10))) == [6 * PAGE] * 10
        load_back = cache.statistics().stages["load_back"]
        assert (load_back.ops, load_back.pages) == (1, 6 + WINDOW // PAGE + 1)


class FailingLoads(CpuDevice):
    """A device whose copies from the host fail while ``failing``."""

    failing = False

    def load(self, stream: Stream, copies: Sequence[PageCopy], layers: int) -> Sequence[CpuEvent]:
        others = self._fates
        try:
            if self.failing:
                self._fates = Fates(Faults(failing=1.0))
            return super().load(stream, copies, layers)
        finally:
            self._fates = others


async def test_load_back_counts_what_came_from_the_host_and_no_private_copy() -> None:
    device = FailingLoads()
    async with opened(all_three(device=24, swa=24), device=device) as cache:

        def counted() -> tuple[int, int, int, int]:
            load_back = cache.statistics().stages["load_back"]
            return load_back.ops, load_back.pages, load_back.errors, load_back.latency_ms.samples

        clones = spy_on_clones(cache)
        await serve_all(cache, text(6, extra=1))
        assert await serve_all(cache, text(6, extra=2)) == 6 * PAGE
        assert clones
        assert counted() == (0, 0, 0, 0)
        await settled(cache)
        await push_out(cache, 24)
        device.failing = True
        async with cache.lease(text(6, extra=1)) as lease:
            with pytest.raises(LoadFailed):
                await lease.loaded()
        await settled(cache)
        assert counted() == (0, 0, 1, 1)
        device.failing = False
        assert await serve_all(cache, text(6, extra=1)) == 6 * PAGE
        assert counted() == (1, 6 + WINDOW // PAGE + 1, 1, 2)
    await device.aclose()


def spy_on_clones(cache: AsyncCache) -> list[Clone]:
    """The private copies that are started from now on."""
    clones: list[Clone] = []
    head = parts(cache)
    copy = head.copy

    def spy(copies: Sequence[Copy]) -> None:
        clones.extend(effect for effect in copies if isinstance(effect, Clone))
        copy(copies)

    head.copy = spy  # type: ignore[method-assign]
    return clones
