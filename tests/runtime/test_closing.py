"""Saving, forgetting and closing: what is promised about all pages at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from asynccache_backends.memory import MemoryBackend
from msgspec.structs import replace

from asynccache import AsyncCache, CacheClosed, ConfigError
from asynccache.core.plan import Publish
from asynccache.events import Notice, Opened
from asynccache.memory.cpu import CpuDevice
from asynccache.storage import PageKey, Record, Result
from tests.runtime.runtime_kit import (
    PAGE,
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


class SlowPuts(MemoryBackend):
    """Writes wait until ``gate`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.writing = 0

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        self.writing += 1
        try:
            await self.gate.wait()
            return await super().put(keys, records)
        finally:
            self.writing -= 1


async def test_aclose_says_what_it_could_not_save_within_the_deadline() -> None:
    storage = SlowPuts()
    async with opened(settings(host=32), storage=storage, idle=False) as cache:
        await serve(cache, text(6))
        await until(lambda: storage.writing == 1)
        report = await cache.aclose(timeout=0.01)
        assert (report.unsaved_host, report.unsaved_storage, report.error) == (0, 6, None)
        assert storage.writing == 0, "closing returns after the store has let go"
    await storage.aclose()


async def test_aclose_waits_for_the_store_within_the_deadline() -> None:
    storage = SlowPuts()
    async with opened(settings(host=32), storage=storage, idle=False) as cache:
        await serve(cache, text(6))
        await until(lambda: storage.writing == 1)
        closing = asyncio.create_task(cache.aclose())
        await turns()
        assert not closing.done()
        with pytest.raises(CacheClosed):
            await cache.match(text(1))
        storage.gate.set()
        assert await closing == (0, 0, None)
    await storage.aclose()


async def test_closing_tells_those_who_wait_in_line() -> None:
    async with opened(settings(device=4), idle=False) as cache:
        holder = await cache.lease(text(4)).__aenter__()
        waits = asyncio.create_task(cache.lease(text(1, seed=1)).__aenter__())
        await turns()
        await cache.aclose()
        with pytest.raises(CacheClosed):
            await waits
        holder.release()


async def test_flush_has_a_timeout_and_flushing_goes_on() -> None:
    storage = SlowPuts()
    async with opened(settings(host=32), storage=storage) as cache:
        await serve(cache, text(6))
        with pytest.raises(TimeoutError):
            await cache.flush(timeout=0.01)
        storage.gate.set()
        assert await cache.flush() == (0, 0)
    await storage.aclose()


async def test_flush_under_write_back_saves_everything() -> None:
    storage = MemoryBackend()
    async with opened(settings(host=32, write_policy="write_back"), storage=storage) as cache:
        await serve(cache, text(6))
        await settled(cache)
        assert (await cache.match(text(6))).device == 24
        assert storage.stats()["pages"] == 0
        assert await cache.flush() == (0, 0)
        assert storage.stats()["pages"] == 6
    await storage.aclose()


async def test_invalidate_forgets_a_namespace_on_every_tier() -> None:
    storage = MemoryBackend()
    async with opened(settings(host=32), storage=storage) as cache:
        await serve(cache, text(4))
        await serve_in(cache, "tenant")
        await cache.flush()
        await cache.invalidate("tenant")
        assert (await cache.match(text(4), "tenant")).host == 0
        assert (await cache.prefetch(text(4), "tenant")).tokens == 0
        assert (await cache.match(text(4))).device == 16
        assert storage.stats()["pages"] == 4
    async with opened(settings(host=32), storage=storage) as cache:
        assert (await cache.prefetch(text(4), "tenant")).tokens == 0
        assert (await cache.prefetch(text(4))).tokens == 16
    await storage.aclose()


async def serve_in(cache: AsyncCache, namespace: str) -> None:
    async with cache.lease(text(4), namespace=namespace) as lease:
        await lease.commit(text(4))


async def test_a_lease_in_flight_finishes_undisturbed_and_publishes_nothing() -> None:
    async with opened(settings()) as cache:
        await serve(cache, text(2))
        async with cache.lease(text(4)) as lease:
            pages = lease.pages.tolist()
            await cache.invalidate()
            assert lease.pages.tolist() == pages
            await lease.commit(text(4))
            assert (await cache.match(text(4))).device == 0
        await settled(cache)  # whoever takes the tree lock next drops what was left
        assert cache.statistics().device["full"].free == 16


async def test_reset_forgets_everything_in_storage_too() -> None:
    storage = MemoryBackend()
    async with opened(settings(host=32), storage=storage) as cache:
        await serve(cache, text(4))
        await serve_in(cache, "tenant")
        await cache.reset()
        assert storage.stats()["pages"] == 0
        assert await serve(cache, text(4, extra=1)) == 0
        await cache.flush()
    async with opened(settings(host=32), storage=storage) as cache:
        assert await serve(cache, text(4, extra=1)) == 16, "what was stored after the reset is found"
    await storage.aclose()


async def test_another_namespace_never_hits() -> None:
    storage = MemoryBackend()
    async with opened(settings(host=32), storage=storage) as cache:
        await serve(cache, text(4))
        await cache.flush()
        for other in ("", "a", b"a"):
            assert (await cache.match(text(4), other)).host == 0
            assert (await cache.prefetch(text(4), other)).tokens == 0
    await storage.aclose()


async def test_keep_pins_a_prefix_within_the_cap_until_released() -> None:
    async with opened(settings(device=16, kept_fraction=0.25)) as cache:
        await serve(cache, text(8))
        kept = await cache.keep(text(8))
        assert kept.tokens == 4 * PAGE
        assert (await cache.keep(text(8))).tokens == 0
        async with cache.lease(text(12, seed=1)):
            assert (await cache.match(text(8))).device == 4 * PAGE
        kept.release()
        kept.release()
        async with cache.lease(text(16, seed=1)):
            assert (await cache.match(text(8))).device == 0
        with pytest.raises(ConfigError, match="ttl=0"):
            await cache.keep(text(1), ttl=0)


async def test_what_is_kept_goes_when_its_time_is_over() -> None:
    async with opened(settings()) as cache:
        await serve(cache, text(4))
        kept = await cache.keep(text(4), ttl=0.005)
        assert kept.tokens == 16
        await until(lambda: cache.statistics().kept_tokens == 0)


async def test_events_are_told_in_order_and_host_events_after_their_ack() -> None:
    heard: list[Notice] = []
    events: list[Publish] = []

    def hear(notice: Notice) -> None:
        heard.append(notice)
        if isinstance(notice, Publish):
            events.append(notice)

    device = CpuDevice()
    async with opened(settings(host=16), device=device, on_event=hear) as cache:
        ready = device.gate()
        async with cache.lease(text(3)) as lease:
            await lease.commit(text(3), after=ready)
        await turns()
        assert isinstance(heard[0], Opened)
        assert [event.medium.value for event in events] == ["GPU"]
        assert events[0].hashes == b"".join(page_hashes(text(3)))
        ready.open()
        await settled(cache)
        await turns()
        assert [event.medium.value for event in events] == ["GPU", "CPU"]
        await push_out(cache, 16)
        await turns()
        assert (events[-1].medium.value, events[-1].stored) == ("GPU", False)
    await device.aclose()


async def test_a_pool_that_does_not_fit_and_an_unknown_device_say_so() -> None:
    with pytest.raises(ConfigError, match="full"):
        async with AsyncCache(settings(device=1 << 50)):
            pass
    with pytest.raises(ConfigError, match="tpu"):
        async with AsyncCache(replace(settings(), device="tpu")):
            pass
    with pytest.raises(RuntimeError, match="not open"):
        await AsyncCache(settings()).match(text(1))
    storage = MemoryBackend()
    with pytest.raises(ConfigError, match="host tier"):
        async with AsyncCache(settings(), storage=storage):
            pass
    await storage.aclose()


async def test_it_says_what_it_is() -> None:
    async with opened(settings(host=16)) as cache:
        assert "0 leases" in repr(cache)
        async with cache.lease(text(2)) as lease:
            assert "reserved" in repr(lease)
            assert "1 leases" in repr(cache)
        assert "released" in repr(lease)
        statistics = cache.statistics()
        assert set(statistics.stages) == {"backup_host", "load_back", "backup_storage", "prefetch"}
        assert parts(cache).supervisor.running
