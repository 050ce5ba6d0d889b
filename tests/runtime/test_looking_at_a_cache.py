"""What a cache tells people: its log, its ``repr``, its statistics as a table, and what is too long."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from asynccache import AsyncCache, CacheConfig, CacheFull, ConfigError, Full, Mamba
from asynccache.memory.cpu import CpuDevice

FULL = Full.attention(layers=2, kv_heads=2, head_dim=8, dtype="float32", device="1MiB", host="2MiB")
ROOMS = "full: 2 layers, 256 bytes a token; device 1 MiB for 4,096 tokens, host 2 MiB for 8,192 tokens"
PROMPT = list(range(500))


def config(folder: Path) -> CacheConfig:
    return CacheConfig(model="m", components=(FULL,), storage=f"file:{folder / 'kv'}?capacity=64MiB")


async def use(cache: AsyncCache) -> None:
    async with cache.lease(PROMPT) as lease:
        await lease.loaded()
        await lease.commit(PROMPT)


async def test_the_log_says_what_was_opened_and_what_was_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "asynccache")
    for pages in (0, 31):
        caplog.clear()
        async with AsyncCache(config(tmp_path)) as cache:
            await use(cache)
            await cache.flush()
        assert caplog.messages == [f"open: {ROOMS}; stores: file ({pages} pages)", "closed"]


async def test_what_a_closed_cache_could_not_save_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncCache(config(tmp_path)) as cache:
        await use(cache)
        report = await cache.aclose(0)
    assert sum(report[:2])
    told = [record for record in caplog.records if record.name == "asynccache"]
    assert [record.levelname for record in told] == ["WARNING"]
    assert told[0].getMessage() == (
        f"closed; lost: {report.unsaved_host} pages neither on the host nor stored, {report.unsaved_storage} not stored"
    )


async def test_leases_that_nobody_has_left_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncCache(config(tmp_path)) as cache:
        lease = await cache.lease(PROMPT).__aenter__()
        await cache.keep(list(range(40)))
    assert lease.cached == 0
    assert "leases still held when the cache was closed: 1; leave every lease" in caplog.messages


async def test_statistics_read_as_a_table_with_the_hit_ratio(tmp_path: Path) -> None:
    async with AsyncCache(config(tmp_path)) as cache:
        assert cache.statistics().lookups.hit_ratio == 0
        await use(cache)
        await use(cache)
        await cache.flush()
        found = cache.statistics()
        assert found.lookups.hit_ratio == 0.5
        lines = str(found).splitlines()
        assert lines[0] == "requests 2, tokens 992: 50.0% cached (device 50.0%, host 0.0%, storage 0.0%)"
        assert max(map(len, lines)) <= 80
        assert [line.split()[0] for line in lines if line] == [
            "requests", "leases", "slots", "full", "stage", *found.stages, "store", "file",
        ]  # fmt: skip
        assert repr(cache) == f"AsyncCache('m', 0 leases; {ROOMS})"
    assert repr(AsyncCache(config(tmp_path))) == "AsyncCache('m', not open)"


async def test_too_long_a_prompt_is_refused_by_the_call_in_tokens() -> None:
    async with AsyncCache(CacheConfig(model="m", components=(FULL,))) as cache:
        cache.lease(list(range(4096)))
        with pytest.raises(CacheFull, match=r"^full: 4097 tokens are asked for, the device has room for 4096$"):
            cache.lease(list(range(4000)), new_tokens=97)
    components = (FULL, Mamba(state_bytes=16, device_states=4, host_states=4))
    async with AsyncCache(CacheConfig(model="m", components=components)) as cache:
        with pytest.raises(CacheFull, match=r"^mamba: 5 states are asked for, the device has room for 4$"):
            cache.lease(PROMPT, states=5)


async def test_a_cache_shows_its_device_and_the_block_table_of_a_step() -> None:
    async with AsyncCache(CacheConfig(model="m", components=(FULL,))) as cache:
        assert isinstance(cache.device, CpuDevice)
        async with cache.lease(PROMPT, new_tokens=20) as one, cache.lease(PROMPT[:40], namespace="a") as other:
            table = cache.block_table([one, other], [501, 40])
            assert table.pages.shape == (2, 32)
            assert table.pages[0].tolist() == one.pages[:32].tolist()
            assert table.pages[1].tolist() == [*other.pages[:3].tolist(), *[4096 // 16] * 29]
            with pytest.raises(ConfigError, match="'ful' is no pool; did you mean 'full'"):
                cache.block_table([one], [1], pool="ful")
            with pytest.raises(ConfigError, match="need 34 pages, the page table has 33"):
                cache.block_table([one], [529])
        with pytest.raises(RuntimeError, match="is released"):
            cache.block_table([one], [1])
