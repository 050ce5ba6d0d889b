"""One long prompt does not hold the loop, also over a store that answers without suspending: in one turn of the loop
so many pages are asked for, hashed, read and written, and no more."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache
from asynccache.memory.cpu import CpuDevice
from asynccache.storage import PageKey, Record, Result
from asynccache.worker.local import BATCH_PAGES
from tests.runtime.runtime_kit import PAGE, local, opened, settings, text

PAGES = 20 * BATCH_PAGES


class Counting(MemoryBackend):
    """Counts the pages of its calls, by verb and turn of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0
        self.pages = {verb: Counter[int]() for verb in ("exists", "get", "put", "key")}

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        self.pages["exists"][self.turn] += len(keys)
        return await super().exists(keys)

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        self.pages["get"][self.turn] += len(keys)
        return await super().get(keys, records)

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        self.pages["put"][self.turn] += len(keys)
        return await super().put(keys, records)


@contextmanager
def counted(cache: AsyncCache, storage: Counting) -> Iterator[None]:
    """Turns are counted, and keys that are hashed."""
    loop, mapped = asyncio.get_running_loop(), local(cache)._map
    usual, going = mapped.keys, True

    def turn() -> None:
        storage.turn += 1
        if going:
            loop.call_soon(turn)

    def keys(pool: str, hashes: bytes) -> list[PageKey]:
        storage.pages["key"][storage.turn] += len(hashes) // 32
        return usual(pool, hashes)

    mapped.keys = keys  # type: ignore[method-assign]
    turn()
    yield
    going = False
    mapped.keys = usual  # type: ignore[method-assign]


def most(storage: Counting, verb: str) -> int:
    return max(storage.pages[verb].values(), default=0)


@pytest.mark.parametrize("components", ["full", "full,swa", "full,mamba", "full,swa,mamba"])
async def test_a_long_prompt_is_saved_looked_up_and_read_in_many_turns(components: str) -> None:
    """Its states are not stored, so where there are any the look-up is all there is."""
    swa, mamba = 2 * PAGES * ("swa" in components), 4 * ("mamba" in components)
    config = settings(device=PAGES, host=PAGES, swa=swa, mamba=mamba, window=PAGES * PAGE // 2,
                      prefetch_policy="wait_complete", prefetch_quota=1.0)  # fmt: skip
    storage, device, prompt = Counting(), CpuDevice(), text(PAGES)
    async with opened(config, storage=storage, device=device) as cache:
        with counted(cache, storage):
            async with cache.lease(prompt, prefetch=None, wait=False) as lease:
                await lease.commit(prompt)
            assert await cache.flush() == (0, 0)
        assert sum(storage.pages["put"].values()) >= PAGES
        assert most(storage, "put") <= BATCH_PAGES
        assert most(storage, "key") <= 2 * BATCH_PAGES
    for counter in storage.pages.values():
        counter.clear()
    async with opened(config, storage=storage, device=device) as cache:
        with counted(cache, storage):
            result = await cache.prefetch([*prompt, 1])
        assert result.tokens == (0 if mamba else PAGES * PAGE)
        assert sum(storage.pages["exists"].values()) >= PAGES
        assert most(storage, "exists") <= BATCH_PAGES
        assert most(storage, "get") <= BATCH_PAGES
        assert most(storage, "key") <= 2 * BATCH_PAGES
    await storage.aclose()
    await device.aclose()
