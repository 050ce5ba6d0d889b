"""Calls that go over the whole tree hold the tree lock for one slice at a time, so that requests go on between two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache
from asynccache.config import CacheConfig
from asynccache.core.plan import More
from asynccache.core.settings import CoreConfig
from asynccache.runtime.driver import TreeLock
from tests.runtime.runtime_kit import opened, parts, serve, settings, settled, text

NODES = 40


def take_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make slices so short that a few pages need several."""
    usual = CacheConfig.core

    def few(config: CacheConfig) -> CoreConfig:
        return replace(usual(config), slice_steps=4)

    monkeypatch.setattr(CacheConfig, "core", few)


async def close(cache: AsyncCache) -> None:
    await cache.aclose()


async def detach(cache: AsyncCache) -> None:
    await cache.detach_storage()


async def flush(cache: AsyncCache) -> None:
    await cache.flush()


async def invalidate(cache: AsyncCache) -> None:
    await cache.invalidate()


async def reset(cache: AsyncCache) -> None:
    await cache.reset()


@pytest.mark.source
@pytest.mark.parametrize("call", [close, detach, flush, invalidate, reset])
async def test_between_two_slices_the_lock_is_free(
    call: Callable[[AsyncCache], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_few_steps(monkeypatch)
    storage = MemoryBackend()
    async with opened(settings(device=2 * NODES, host=2 * NODES), storage=storage, idle=False) as cache:
        for seed in range(NODES):
            await serve(cache, text(1, seed))
        await settled(cache)
        driver, holds, slices = parts(cache).driver, 0, Counter[int]()
        locked, release = driver.call_locked, TreeLock.release

        def counted(*arguments: Any, **more: Any) -> Any:
            answer = locked(*arguments, **more)
            slices[holds] += isinstance(answer, More)
            return answer

        def released(lock: TreeLock) -> None:
            nonlocal holds
            holds += 1
            release(lock)

        driver.call_locked = counted  # type: ignore[method-assign]
        monkeypatch.setattr(TreeLock, "release", released)
        await call(cache)
        assert slices.total() >= NODES // 4 - 1
        assert max(slices.values()) == 1
    await storage.aclose()


@pytest.mark.source
async def test_an_invalidation_deletes_what_was_published_or_left_the_tree_while_it_went_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take_few_steps(monkeypatch)
    storage = MemoryBackend()
    async with opened(settings(device=2 * NODES, host=2 * NODES), storage=storage) as cache:
        for seed in range(NODES):
            await serve(cache, text(1, seed), namespace="gone")
        holder = await cache.lease(text(1, NODES - 1), namespace="gone").__aenter__()
        await cache.flush()
        assert storage.stats()["pages"] == NODES
        await cache.invalidate("gone")
        assert storage.stats()["pages"] == 0
        holder.release()
    await storage.aclose()
