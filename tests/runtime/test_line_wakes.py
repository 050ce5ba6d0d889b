"""A prefetch that ends and gives nothing back also wakes the first in line, which may try loads then."""

from __future__ import annotations

import asyncio

from tests.runtime.runtime_kit import compute, opened, parts, settings, settled, text, turns
from tests.runtime.test_prefetching import HeldBackend


async def test_a_prefetch_that_ends_without_a_fetch_wakes_the_head() -> None:
    storage = HeldBackend()
    config = settings(device=12, host=4, mamba=3, prefetch_policy="best_effort")
    async with opened(config, storage=storage) as cache:
        prefix = text(6)
        holder = await cache.lease(prefix, states=2).__aenter__()
        compute(cache, holder, prefix)
        await holder.commit(prefix[:12], checkpoint=(12, int(holder.states[-1])))
        await holder.commit(prefix)
        await settled(cache)
        async with cache.lease(text(1, seed=1), states=2, wait=False):  # the prefix's state is on the host alone now
            pass
        match = await cache.match(prefix)
        assert (match.device, match.host) == (0, 12)
        # With the state loaded it shares three pages with the holder; without, as long as its prefetch runs, it needs
        # more than is free. The prefetch ends at once: the host is too small for its anchor.
        waiting = asyncio.create_task(cache.lease(text(8), states=1).__aenter__())
        async with asyncio.timeout(60):
            lease = await waiting
        assert lease.cached == 12
        await lease.loaded()
        lease.release()
        holder.release()
        await turns()
        assert not parts(cache).driver.line
    await storage.aclose()
