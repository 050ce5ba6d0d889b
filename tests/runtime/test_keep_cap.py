"""The cap on kept prefixes holds for all of them together."""

from __future__ import annotations

import asyncio

from asynccache.runtime.core_calls import holding
from tests.runtime.runtime_kit import PAGE, opened, parts, serve, settings, text, turns


async def test_keeps_that_wait_for_the_lock_together_stay_within_the_cap() -> None:
    async with opened(settings(device=16, kept_fraction=0.25)) as cache:
        await serve(cache, text(8))
        async with holding(parts(cache).driver.lock):
            keeping = [asyncio.create_task(cache.keep(text(8))) for _ in range(3)]
            await turns()
        kept = await asyncio.gather(*keeping)
        assert sum(one.tokens for one in kept) == 4 * PAGE
        for one in kept:
            one.release()
