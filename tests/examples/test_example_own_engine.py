"""The smallest embedding: right, and clean when a request is cancelled in the middle of a step."""

from __future__ import annotations

import asyncio

import own_engine
import pytest

from asynccache import AsyncCache
from asynccache.core.audit import check

PROMPT = list(range(300))


@pytest.mark.asyncio
async def test_a_hit_changes_nothing_but_the_work() -> None:
    async with AsyncCache(own_engine.CONFIG) as cache:
        engine = own_engine.OwnEngine(cache)
        first, again = [await engine.generate(PROMPT, 8) for _ in range(2)]
        assert again == (first[0], 288)
        assert first[1] == 0


@pytest.mark.asyncio
async def test_what_is_in_the_pages_decides() -> None:
    """So that the same answer means the same KV."""
    async with AsyncCache(own_engine.CONFIG) as cache:
        engine = own_engine.OwnEngine(cache)
        first = await engine.generate(PROMPT, 8)
        for layer in range(own_engine.LAYERS):
            cache.pools["full"].layer(layer)[:] = 0
        again = await engine.generate(PROMPT, 8)
        assert again[1] == 288
        assert again[0] != first[0]


@pytest.mark.asyncio
async def test_a_request_that_is_cancelled_leaves_nothing_behind() -> None:
    async with AsyncCache(own_engine.CONFIG) as cache:
        engine = own_engine.OwnEngine(cache)
        expected = await engine.generate(PROMPT, 8, tenant="undisturbed")
        for hops in (1, 3, 10, 30):
            task = asyncio.create_task(engine.generate(PROMPT, 100))
            for _ in range(hops):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await cache.flush()
        check(cache.core, idle=True)
        assert (await engine.generate(PROMPT, 8))[0] == expected[0]
