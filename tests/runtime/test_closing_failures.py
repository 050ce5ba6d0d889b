"""Closing goes through to the end, whatever fails on the way."""

from __future__ import annotations

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache
from asynccache.memory.cpu import CpuDevice
from asynccache.runtime import head as head_module
from asynccache.storage import CheckedStore
from asynccache.worker import local
from tests.runtime.runtime_kit import settings


async def test_a_store_that_cannot_be_closed_does_not_keep_the_device_open(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    device = CpuDevice()
    close_device, close_store = device.aclose, CheckedStore.aclose

    async def closing() -> None:
        closed.append(device)
        await close_device()

    async def failing(store: CheckedStore) -> None:
        await close_store(store)
        raise OSError("the disk is gone")

    monkeypatch.setattr(device, "aclose", closing)
    monkeypatch.setattr(CheckedStore, "aclose", failing)
    monkeypatch.setattr(local, "open_device", lambda name: device)
    cache = AsyncCache(settings(host=16), storage=MemoryBackend())
    await cache.__aenter__()
    with pytest.raises(OSError, match="the disk is gone"):
        await cache.aclose()
    assert closed == [device]


async def test_an_unexpected_error_while_saving_leaves_no_worker_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(driver: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(head_module, "drain", failing)
    cache = AsyncCache(settings(host=16))
    await cache.__aenter__()
    with pytest.raises(ValueError, match="a bug"):
        await cache.aclose()
    assert cache.statistics().tasks == 0
