"""Pages go out and come back with the bytes that they left with, once for everybody who wants them."""

from __future__ import annotations

import asyncio

from asynccache_backends.memory import MemoryBackend

from asynccache.core.audit import check
from asynccache.memory.cpu import CpuDevice
from tests.runtime.runtime_kit import (
    PAGE,
    assert_cached_bytes,
    fence_all,
    opened,
    parts,
    push_out,
    serve,
    settings,
    settled,
    text,
)


async def test_what_is_on_the_device_is_a_hit() -> None:
    async with opened(settings()) as cache:
        assert await serve(cache, text(4)) == 0
        assert await serve(cache, text(4, extra=1)) == 4 * PAGE
        assert (await cache.match(text(4))).device == 4 * PAGE


async def test_at_least_one_token_of_a_prompt_is_computed() -> None:
    async with opened(settings()) as cache:
        await serve(cache, text(4))
        assert await serve(cache, text(4)) == 3 * PAGE


async def test_pages_come_back_from_the_host() -> None:
    async with opened(settings(device=8, host=64)) as cache:
        for seed in range(6):
            await serve(cache, text(6, seed))
        await settled(cache)
        for seed in range(5):
            assert await serve(cache, text(6, seed, extra=1)) == 6 * PAGE, seed
        assert cache.statistics().stages["load_back"].pages >= 5 * 6


async def test_pages_come_back_from_storage_in_a_fresh_cache() -> None:
    storage = MemoryBackend()
    async with opened(settings(device=16, host=32), storage=storage) as cache:
        for seed in range(3):
            await serve(cache, text(6, seed))
        assert await cache.flush() == (0, 0)
    async with opened(settings(device=16, host=32), storage=storage) as cache:
        for seed in range(3):
            async with cache.lease(text(6, seed, extra=1)) as lease:
                await lease.loaded()
                assert lease.cached == 6 * PAGE
                assert lease.hits == (0, 0, 6 * PAGE)
                assert_cached_bytes(cache, lease, text(6, seed))
        assert cache.statistics().prefetches["complete"] == 3
    await storage.aclose()


async def test_closing_saves_everything() -> None:
    storage = MemoryBackend()
    async with opened(settings(host=32), storage=storage, idle=False) as cache:
        await serve(cache, text(6))
        report = await cache.aclose()
    assert report == (0, 0, None)
    assert storage.stats()["pages"] == 6
    await storage.aclose()


POOLS = ("full", "swa")


async def test_sliding_window_pages_come_back_from_host_and_storage() -> None:
    storage = MemoryBackend()
    async with opened(settings(device=16, host=64, swa=16), storage=storage) as cache:
        for seed in range(4):
            await serve(cache, text(6, seed), POOLS)
            await settled(cache)
        assert await serve(cache, text(6, 0, extra=1), POOLS) == 6 * PAGE
        await cache.flush()
    async with opened(settings(device=16, host=64, swa=16), storage=storage) as cache:
        for seed in range(4):
            assert await serve(cache, text(6, seed, extra=1), POOLS) == 6 * PAGE, seed
    await storage.aclose()


async def test_ten_requests_for_an_evicted_prefix_cause_one_load() -> None:
    async with opened(settings(device=24, host=32)) as cache:
        await serve(cache, text(6))
        await settled(cache)
        await push_out(cache, 24)
        assert (await cache.match(text(6))).device == 0
        all_in = asyncio.Barrier(10)

        async def one() -> int:
            async with cache.lease(text(6, extra=1)) as lease:
                await lease.loaded()
                assert_cached_bytes(cache, lease, text(6))
                await all_in.wait()
                return lease.cached

        assert await asyncio.gather(*(one() for _ in range(10))) == [24] * 10
        load_back = cache.statistics().stages["load_back"]
        assert (load_back.ops, load_back.pages) == (1, 6)


async def test_ten_requests_for_a_stored_prefix_cause_one_fetch() -> None:
    storage = MemoryBackend()
    async with opened(settings(device=24, host=32), storage=storage) as cache:
        await serve(cache, text(6))
        await cache.flush()
    async with opened(settings(device=24, host=32), storage=storage) as cache:

        async def one() -> tuple[int, int, int]:
            async with cache.lease(text(6, extra=1)) as lease:
                await lease.loaded()
                assert_cached_bytes(cache, lease, text(6))
                return lease.hits

        assert set(await asyncio.gather(*(one() for _ in range(10)))) == {(0, 0, 24)}
        stages = cache.statistics().stages
        assert (stages["prefetch"].ops, stages["prefetch"].pages) == (1, 6)
        assert (stages["load_back"].ops, stages["load_back"].pages) == (1, 6)
    await storage.aclose()


async def test_an_engine_waits_layer_by_layer() -> None:
    device = CpuDevice()
    async with opened(settings(device=8, host=16), device=device) as cache:
        await serve(cache, text(4))
        await settled(cache)
        await push_out(cache, 8)
        gate = device.gate()
        fence_all(cache, gate)
        engine = device.stream("engine")
        async with cache.lease(text(4, extra=1)) as lease:
            lease.wait_layer(engine, 0)
            computed = engine.record()
            layer = asyncio.create_task(lease.layer(1))
            await asyncio.sleep(0)
            assert not computed.done()
            assert not layer.done()
            gate.open()
            await computed.wait()
            await layer
            assert_cached_bytes(cache, lease, text(4))
            await lease.loaded()
            await lease.layer(0)
        check(parts(cache).core)
    await device.aclose()
