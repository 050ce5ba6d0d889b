"""Calls of a lease that are handed over keep their order and are told how they ended: commits at once, a cache that is
closed meanwhile, a device that refuses a batch."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache import CacheClosed
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.host_copies import Faults
from asynccache.runtime.core_calls import acquire, holding
from asynccache.runtime.tokens import as_key
from tests.runtime.runtime_kit import (
    PAGE,
    compute,
    local,
    opened,
    page_hashes,
    parts,
    push_out,
    serve,
    settings,
    settled,
    text,
    turns,
    until,
)


async def test_two_commits_handed_over_at_once_hash_every_page_right() -> None:
    store, pages = MemoryBackend(), 1200
    async with opened(settings(2048, host=2048), storage=store) as cache:
        tokens, loop = text(pages), asyncio.get_running_loop()
        async with cache.lease(tokens, wait=False) as lease:
            compute(cache, lease, tokens)

            def engine() -> None:
                ends = (PAGE * (pages - 100), PAGE * pages)
                futures = [asyncio.run_coroutine_threadsafe(lease.commit(tokens[:end]), loop) for end in ends]
                for future in futures:
                    future.result(10)

            await asyncio.to_thread(engine)
            key, space = as_key(tokens), lease._ask.space
            assert parts(cache).core.known_hashes(space, key) == b"".join(page_hashes(tokens))


async def test_a_release_that_overtakes_a_commit_waits_for_the_commits_event() -> None:
    """Both are handed over, as by a thread. The commit has not begun when the release runs: it publishes nothing, and
    nobody gets the pages that the engine still writes."""
    device = CpuDevice()
    async with opened(settings(8), device=device) as cache:
        tokens, loop, gate = text(4), asyncio.get_running_loop(), device.gate()
        lease = await cache.lease(tokens).__aenter__()
        future = asyncio.run_coroutine_threadsafe(lease.commit(tokens, after=gate), loop)
        loop.call_soon_threadsafe(lease.release)  # it runs before the first step of the commit's task
        with pytest.raises(RuntimeError, match="the lease is released"):
            await asyncio.wrap_future(future)
        await turns()
        assert cache.statistics().leases == 0
        assert cache.statistics().device["full"].free == 4, "the engine still writes into the pages of the lease"
        assert (await cache.match(tokens)).device == 0
        gate.open()
        await until(lambda: cache.statistics().device["full"].free == 8)
    await device.aclose()


async def test_a_commit_that_nobody_awaits_does_not_free_the_pages_that_its_event_guards() -> None:
    device = CpuDevice()
    async with opened(settings(8), device=device) as cache:
        gate = device.gate()
        async with cache.lease(text(4)) as lease:
            lease.commit(text(4), after=gate).close()
        await turns()
        assert cache.statistics().device["full"].free == 4
        gate.open()
        await until(lambda: cache.statistics().device["full"].free == 8)
    await device.aclose()


async def test_a_release_during_a_commit_lets_it_publish_nothing() -> None:
    async with opened(settings()) as cache:
        tokens = text(2)
        lease = await cache.lease(tokens).__aenter__()
        compute(cache, lease, tokens)
        async with holding(parts(cache).driver.lock):
            committing = asyncio.ensure_future(lease.commit(tokens))
            await turns()
            lease.release()
        with pytest.raises(RuntimeError, match="the lease is released"):
            await committing
        assert (await cache.match(tokens)).device == 0


async def test_an_engine_that_gives_up_a_commit_does_not_close_the_cache() -> None:
    async with opened(settings()) as cache:
        tokens, loop = text(2), asyncio.get_running_loop()
        async with cache.lease(tokens) as lease:
            compute(cache, lease, tokens)
            await acquire(parts(cache).driver.lock)
            before, after = (asyncio.run_coroutine_threadsafe(lease.commit(tokens), loop) for _ in range(2))
            await turns(5)
            assert before.cancel()
            parts(cache).driver.lock.release()
            await asyncio.wrap_future(after)
        assert await serve(cache, [*tokens, 1]) == 2 * PAGE


async def test_loaded_does_not_say_yes_when_the_cache_died_under_it() -> None:
    device = CpuDevice(faults=Faults(delayed=1.0, delay=(0.3, 0.3)))

    async def die_under_a_lease() -> None:
        async with opened(settings(host=64), device=device, idle=False) as cache:
            await serve(cache, text(4))
            await settled(cache)
            await push_out(cache, 16)
            async with cache.lease(text(4, extra=1)) as lease:
                assert lease.cached == 4 * PAGE
                parts(cache).supervisor.fail(RuntimeError("a copy engine burnt"))
                with pytest.raises(CacheClosed):
                    await lease.loaded()
                with pytest.raises(CacheClosed):
                    await lease.layer(1)

    with pytest.raises(CacheClosed, match="a task of the cache died"):
        await die_under_a_lease()
    await device.aclose()


async def test_a_batch_that_the_device_refuses_hangs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CpuDevice()

    def refuse(*_: Any) -> None:
        raise RuntimeError("the device is gone")

    async def refuse_a_load() -> None:
        async with opened(settings(host=64), device=device, idle=False) as cache:
            await serve(cache, text(4))
            await settled(cache)
            await push_out(cache, 16)
            monkeypatch.setattr(local(cache).mover, "load", refuse)
            async with cache.lease(text(4, extra=1)) as lease:
                with pytest.raises(RuntimeError, match="the device is gone"):
                    lease.wait_layer(device.stream("engine"), 0)
                with pytest.raises(CacheClosed):
                    await lease.loaded()

    with pytest.raises(CacheClosed, match="a task of the cache died"):
        await refuse_a_load()
    await device.aclose()


async def test_two_extends_at_once_both_count() -> None:
    async with opened(settings()) as cache, cache.lease(text(2)) as lease:
        async with holding(parts(cache).driver.lock):
            both = [asyncio.ensure_future(lease.extend(PAGE)) for _ in range(2)]
            await turns(3)
        await asyncio.gather(*both)
        assert len(lease.pages) == 4
