"""Each token that a request missed counts for one reason, and every token is counted once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from asynccache_backends.memory import MemoryBackend
from msgspec.structs import replace

from asynccache import AsyncCache, SlidingWindow
from asynccache.runtime.lookups import LookupStats, Miss
from asynccache.storage import PageKey, Record, Result
from asynccache.testing.wrapped_backend import WrappedBackend
from tests.runtime.runtime_kit import PAGE, opened, serve, settings, settled, text, turns, until
from tests.runtime.test_prefetching import HeldBackend


class Hostile(WrappedBackend):
    """Fails or rots when told to."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.down = self.rotten = self.forgetful = False

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        if self.forgetful:
            return [Result.MISS] * len(keys)
        return [Result.FAILED] * len(keys) if self.down else await super().exists(keys)

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        results = await super().get(keys, records)
        if self.rotten:
            for record in records:
                record.payload[0] ^= 1
        return results


def stats(cache: AsyncCache) -> LookupStats:
    found = cache.statistics().lookups
    assert sum(found.hits.values()) + sum(found.misses.values()) == found.tokens
    return found


def missed(cache: AsyncCache) -> dict[str, int]:
    return {reason: tokens for reason, tokens in stats(cache).misses.items() if tokens}


def prompt(pages: int, seed: int = 0) -> list[int]:
    """A page's worth and a token more, so that all of the pages are wanted."""
    return text(pages, seed=seed, extra=1)


async def test_what_was_never_here_and_what_is() -> None:
    async with opened(settings()) as cache:
        await serve(cache, prompt(4))
        assert missed(cache) == {"never_stored": 4 * PAGE}
        await serve(cache, prompt(4))
        assert missed(cache) == {"never_stored": 4 * PAGE}
        found = stats(cache)
        assert (found.requests, found.tokens) == (2, 8 * PAGE)
        assert dict(found.hits) == {"device": 4 * PAGE, "host": 0, "storage": 0}
        assert found.missed_requests["never_stored"] == 1


async def test_evicted_from_the_device() -> None:
    async with opened(settings(device=6)) as cache:
        await serve(cache, prompt(4))
        await serve(cache, prompt(4, seed=1))
        await serve(cache, prompt(4))
        assert missed(cache) == {"never_stored": 8 * PAGE, "evicted_device": 4 * PAGE}


async def test_evicted_from_the_host() -> None:
    async with opened(settings(device=6, host=6)) as cache:
        for seed in (0, 1, 2, 3, 0):
            await serve(cache, prompt(4, seed=seed))
            await settled(cache)
        assert missed(cache) == {"never_stored": 16 * PAGE, "evicted_host": 4 * PAGE}


async def fill_and_push_out(cache: AsyncCache) -> None:
    """Prompt 0 is in storage alone."""
    for seed in (0, 1, 2):
        await serve(cache, prompt(4, seed=seed))
        await settled(cache)


@pytest.mark.parametrize(
    ("trouble", "reason"), [("down", "backend_down"), ("rotten", "checksum"), ("forgetful", "evicted_storage")]
)
async def test_what_storage_did_not_give(trouble: str, reason: str) -> None:
    backend = Hostile()
    async with opened(settings(device=6, host=6), storage=backend) as cache:
        await fill_and_push_out(cache)
        before = missed(cache)
        assert set(before) == {"never_stored"}
        setattr(backend, trouble, True)
        await serve(cache, prompt(4))
        after = missed(cache)
        assert {name: tokens - before.get(name, 0) for name, tokens in after.items()} == {"never_stored": 0, reason: 16}
        setattr(backend, trouble, False)
    await backend.aclose()


async def test_what_storage_gives_is_a_hit_of_its_own() -> None:
    backend = MemoryBackend()
    async with opened(settings(device=6, host=6, prefetch_quota=1.0), storage=backend) as cache:
        await fill_and_push_out(cache)
        assert await serve(cache, prompt(4)) == 4 * PAGE
        assert stats(cache).hits["storage"] == 4 * PAGE
    await backend.aclose()


async def test_what_the_quota_of_the_host_leaves_out() -> None:
    backend = MemoryBackend()
    async with opened(settings(device=6, host=6, prefetch_quota=0.5), storage=backend) as cache:
        await fill_and_push_out(cache)
        assert await serve(cache, prompt(4)) == 3 * PAGE
        assert missed(cache)["no_host_room"] == PAGE
    await backend.aclose()


async def test_a_host_without_room_for_a_window_is_the_reason_of_a_miss() -> None:
    """Pages of the window that storage has, and for which the host has no slots."""
    backend = MemoryBackend()
    config = settings(device=6, host=6, swa=6)
    async with opened(config, storage=backend) as cache:
        await serve(cache, prompt(4), pools=("full", "swa"))
        assert (await cache.flush()).storage == 0
    full, swa = config.components
    assert isinstance(swa, SlidingWindow)
    small = replace(config, components=(full, replace(swa, host_tokens=PAGE)))  # a match ends in two pages of it
    async with opened(small, storage=backend) as cache:
        assert await serve(cache, prompt(4), pools=("full", "swa")) == PAGE
        assert missed(cache) == {"no_host_room": 3 * PAGE}
    await backend.aclose()


async def test_too_short_to_be_fetched() -> None:
    backend = MemoryBackend()
    async with opened(settings(device=6, host=6, prefetch_threshold=100), storage=backend) as cache:
        await fill_and_push_out(cache)
        await serve(cache, prompt(4))
        assert missed(cache) == {"never_stored": 12 * PAGE, "prefetch_too_short": 4 * PAGE}
    await backend.aclose()


async def test_too_late() -> None:
    backend = HeldBackend()
    async with opened(settings(device=6, host=6), storage=backend) as cache:
        await fill_and_push_out(cache)
        backend.hold()
        handle = cache.prefetch(prompt(4))
        await until(lambda: backend.waiting == 1)
        entering = asyncio.create_task(cache.lease(prompt(4), prefetch=handle).__aenter__())
        await turns()
        handle.cancel()
        backend.let()
        (await entering).release()
        assert missed(cache)["prefetch_too_late"] == 4 * PAGE
    await backend.aclose()


async def test_no_state_was_kept() -> None:
    async with opened(settings(mamba=8)) as cache:
        await serve(cache, prompt(4))
        await serve(cache, prompt(4))
        assert missed(cache) == {"never_stored": 4 * PAGE, "no_state": 4 * PAGE}


def test_every_reason_has_a_name_of_its_own() -> None:
    assert len({reason.name for reason in Miss}) == len(Miss) == 12


async def test_what_a_prefetch_has_brought_counts_once_however_many_leases_come_with_it() -> None:
    """One after the other, or at the same time: the others find it on the host."""
    backend = MemoryBackend()
    async with opened(settings(16, 32), storage=backend) as cache:
        await serve(cache, prompt(4))
        await cache.flush()
    config = settings(32, 32, prefetch_policy="wait_complete")
    async with opened(config, storage=backend) as cache:
        handle = cache.prefetch(prompt(4))
        leases = [cache.lease(prompt(4), prefetch=handle) for _ in range(3)]
        await asyncio.gather(*(lease.__aenter__() for lease in leases))
        late = await cache.lease(prompt(4), prefetch=handle).__aenter__()
        assert [lease.cached for lease in (*leases, late)] == [4 * PAGE] * 4
        assert sorted(lease.hits.storage for lease in (*leases, late)) == [0, 0, 0, 4 * PAGE]
        found = stats(cache)
        assert (found.hits["storage"], found.tokens) == (4 * PAGE, 4 * 4 * PAGE)
        for lease in (*leases, late):
            lease.release()
    await backend.aclose()
