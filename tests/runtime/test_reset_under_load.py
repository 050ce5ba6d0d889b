"""Requests go on while storage is cleared: what they publish is stored afterwards, and nothing older is."""

from __future__ import annotations

import asyncio

from asynccache_backends.memory import MemoryBackend

from asynccache import PrefetchStatus
from asynccache.memory.cpu import CpuDevice
from asynccache.runtime.core_calls import holding
from tests.runtime.runtime_kit import local, opened, parts, serve, settings, settled, text, turns, until


class SlowClears(MemoryBackend):
    """Clearing waits for a permit first."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = asyncio.Semaphore(0)
        self.clearing = 0

    async def clear(self) -> None:
        self.clearing += 1
        await self.permits.acquire()
        await super().clear()


async def test_what_is_published_while_storage_is_cleared_is_stored_afterwards() -> None:
    storage = SlowClears()
    async with opened(settings(host=32), storage=storage) as cache:
        await serve(cache, text(2))
        await cache.flush()
        resetting = asyncio.create_task(cache.reset())
        await until(lambda: storage.clearing == 1)
        await serve(cache, text(4, seed=1))
        flushing = asyncio.create_task(cache.flush())
        await until(lambda: local(cache).backup_host.meter.ops > 1)
        await turns()
        assert not flushing.done()
        storage.permits.release()
        await resetting
        assert await flushing == (0, 0)
    assert storage.stats()["pages"] == 4
    storage.permits.release()  # closing clears
    await storage.aclose()


async def test_the_first_of_two_resets_to_finish_does_not_end_the_other() -> None:
    storage = SlowClears()
    async with opened(settings(host=32), storage=storage) as cache:
        resets = [asyncio.create_task(cache.reset()) for _ in range(2)]
        await until(lambda: storage.clearing == 2)
        await serve(cache, text(4))
        storage.permits.release()
        await asyncio.wait(resets, return_when=asyncio.FIRST_COMPLETED)
        await turns()
        assert cache.prefetch(text(6)).result == (PrefetchStatus.SKIPPED, 0, "storage is being cleared")
        assert storage.stats()["pages"] == 0
        storage.permits.release()
        await asyncio.gather(*resets)
        assert await cache.flush() == (0, 0)
        assert storage.stats()["pages"] == 4
    storage.permits.release()  # closing clears
    await storage.aclose()


async def test_a_backup_held_back_before_the_tree_is_forgotten_is_never_stored() -> None:
    storage, device = SlowClears(), CpuDevice()
    storage.permits.release()
    async with opened(settings(host=32), device=device, storage=storage) as cache:
        driver, ready = parts(cache).driver, device.gate()
        async with cache.lease(text(4)) as lease:
            await lease.commit(text(4), after=ready)
        async with holding(driver.lock):
            resetting = asyncio.create_task(cache.reset())
            await turns()
            ready.open()
            await until(lambda: driver.unapplied > 0)
            driver.apply_outcomes()
            assert driver.saving, "the ack began a backup_storage"
        await resetting
        await settled(cache)
        assert storage.stats()["pages"] == 0
        assert cache.statistics().host["full"].free == 32
    storage.permits.release()  # closing clears
    await storage.aclose()
    await device.aclose()
