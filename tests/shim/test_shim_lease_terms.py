"""The abilities of a lease that the scheduler needs: a chunk at a time, states on demand, waiting for backups and
nothing else."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache, CacheFull, ConfigError
from asynccache.core.audit import check
from asynccache.testing.slow_backend import SlowBackend
from tests.shim.shim_kit import PAGE, config, push_out, text
from tests.waiting import turns


async def put(cache: AsyncCache, tokens: list[int]) -> None:
    async with cache.lease(tokens) as lease:
        await lease.loaded()
        await lease.commit(tokens)
    await cache.flush()


async def test_a_chunk_is_counted_from_where_the_cache_ends() -> None:
    async with AsyncCache(config(32, swa=32, window=8)) as cache:
        await put(cache, text(5))
        async with cache.lease(text(20), new_tokens=8, chunk=6, swa_chunk=13) as lease:
            assert lease.cached == 5 * PAGE
            assert len(lease.pages) == 5 + 2
            before = cache.statistics().device
            assert len(await lease.extend(8)) == 5 + 4
            after = cache.statistics().device
            assert before["full"].free - after["full"].free == 2
            assert before["swa"].free == after["swa"].free  # four pages were there already
            assert (lease.page_table("swa")[5:] >= 0).all()
            await lease.commit(text(9))
        check(cache.core)


async def test_a_chunk_is_cut_to_what_is_asked_for_in_all() -> None:
    async with AsyncCache(config(32, swa=32)) as cache:
        async with cache.lease(text(3), new_tokens=2, chunk=100, swa_chunk=200) as lease:
            assert len(lease.pages) == 4
            assert cache.statistics().device["swa"].free == 32 - 4


async def test_prompt_and_output_must_fit_whatever_the_chunk() -> None:
    async with AsyncCache(config(8)) as cache:
        with pytest.raises(CacheFull):
            async with cache.lease(text(8), new_tokens=1, chunk=4):
                pass
        with pytest.raises(ConfigError):
            await cache.lease(text(1), chunk=0).__aenter__()


async def test_a_window_pool_smaller_than_the_prompt_serves_it_in_chunks() -> None:
    tokens = text(30)
    async with AsyncCache(config(32, swa=6, window=3 * PAGE)) as cache:
        async with cache.lease(tokens, chunk=2 * PAGE) as lease:
            for end in range(2 * PAGE, 31 * PAGE, 2 * PAGE):
                await lease.commit(tokens[:end])
                lease.advance(end)
                if end < 30 * PAGE:
                    await lease.extend(2 * PAGE)
            assert lease.cached == 0
        check(cache.core)


async def test_a_window_that_begins_inside_a_node_pins_no_more_than_itself() -> None:
    """One node of six pages, a window of three: matched in its middle, two pages of it must be free to go."""
    tokens = text(6)
    async with AsyncCache(config(32, swa=6, window=2 * PAGE)) as cache:
        await put(cache, tokens)
        async with cache.lease([*tokens[: 5 * PAGE], 1, 2], chunk=4 * PAGE, new_tokens=3 * PAGE, wait=False) as lease:
            assert lease.cached == 5 * PAGE
            assert (lease.page_table("swa") >= 0).tolist() == [False] * 3 + [True] * 6
        check(cache.core)


async def test_all_that_is_cached_or_nothing() -> None:
    async with AsyncCache(config(12, 64)) as cache:
        await put(cache, text(8))
        await push_out(cache)
        async with cache.lease(text(6, seed=1)):
            with pytest.raises(CacheFull):
                await cache.lease(text(8, extra=1), chunk=1, wait=False, shorter=False).__aenter__()
            async with cache.lease(text(8, extra=1), chunk=1, wait=False) as lease:
                assert lease.cached == 0
        async with cache.lease(text(8, extra=1), chunk=1, wait=False, shorter=False) as lease:
            assert lease.cached == 8 * PAGE


async def test_states_on_demand() -> None:
    async with AsyncCache(config(32, mamba=3)) as cache:
        async with cache.lease(text(2), states=1) as lease:
            assert len(lease.states) == 1
            await lease.extend(0, states=2)
            assert len(np.unique(lease.states)) == 3
            with pytest.raises(CacheFull):
                await lease.extend(0, states=1)
        assert cache.statistics().device["mamba"].free == 3
    async with AsyncCache(config(32)) as cache:
        async with cache.lease(text(2)) as lease:
            with pytest.raises(ConfigError):
                await lease.extend(0, states=1)


async def test_growing_waits_for_backups_only_if_told_to() -> None:
    async with AsyncCache(config(12, 64)) as cache:
        async with cache.lease(text(1), chunk=PAGE, new_tokens=8 * PAGE) as growing:
            async with cache.lease(text(10, seed=1)) as lease:
                await lease.commit(text(10, seed=1))  # its backup has begun, and pins its pages until it is done
            with pytest.raises(CacheFull):
                await growing.extend(4 * PAGE)
            assert len(await growing.extend(4 * PAGE, wait=True)) == 5
        assert cache.statistics().core.lost_pages == 0


async def test_growing_never_waits_for_another_lease() -> None:
    async with AsyncCache(config(12, 64)) as cache:
        async with cache.lease(text(1), new_tokens=PAGE) as growing:
            async with cache.lease(text(10, seed=1)):
                async with asyncio.timeout(5):
                    with pytest.raises(CacheFull):
                        await growing.extend(PAGE, wait=True)


async def test_growing_never_waits_for_storage_that_cannot_help() -> None:
    pages = MemoryBackend()
    async with AsyncCache(config(12, 64), storage=pages) as cache:
        await put(cache, text(8, seed=3))
    store = SlowBackend(pages, 0.0, bandwidth=1.0)
    async with AsyncCache(config(12, 64), storage=store) as cache:
        handle = cache.prefetch(text(8, seed=3))
        async with cache.lease(text(1), new_tokens=11 * PAGE, wait=False) as growing:
            await turns()
            assert cache.statistics().core.operations["prefetch"] == 1
            async with asyncio.timeout(5):
                with pytest.raises(CacheFull):
                    await growing.extend(PAGE, wait=True)
        handle.cancel()
        await cache.aclose(timeout=0.01)
    await store.aclose()


async def test_growing_gives_up_what_a_pin_covers_before_the_window() -> None:
    """Matched at the end of a node of four, with a window of two: two pages are pinned until somebody needs them."""
    async with AsyncCache(config(32, swa=6, window=2 * PAGE)) as cache:
        await put(cache, text(6))
        async with cache.lease([*text(4), 1, 2], chunk=2 * PAGE, new_tokens=6 * PAGE) as lease:
            assert (lease.page_table("swa") >= 0).tolist() == [True] * 6
            await lease.extend(2 * PAGE)
            assert (lease.page_table("swa") >= 0).tolist() == [False] * 2 + [True] * 6
            with pytest.raises(CacheFull):
                await lease.extend(PAGE)
        check(cache.core)


async def test_growing_gives_up_what_decoding_has_left_behind() -> None:
    async with AsyncCache(config(32, swa=6, window=2 * PAGE)) as cache:
        async with cache.lease(text(4), new_tokens=6 * PAGE, chunk=6 * PAGE, swa_chunk=6 * PAGE) as lease:
            await lease.commit(text(4))
            lease.advance(6 * PAGE)
            await lease.extend(3 * PAGE)
            assert (lease.page_table("swa") >= 0).tolist() == [False] * 3 + [True] * 6
        check(cache.core)
