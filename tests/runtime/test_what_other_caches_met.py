"""Situations in which SGLang, whose cache has these tiers, too, lost hits or served what it should not have. The issue
or change there that tells of one stands at its test. Bytes are compared wherever pages come back."""

from __future__ import annotations

from typing import Any

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache
from tests.runtime.runtime_kit import (
    PAGE,
    assert_cached_bytes,
    compute,
    opened,
    page_hashes,
    push_out,
    serve,
    settings,
    settled,
    text,
    write,
)
from tests.runtime.test_round_trips import TABLES, all_three, assert_everything, serve_all


async def ends_at(cache: AsyncCache, tokens: list[int], *ends: int) -> None:
    """Serve one request that takes a checkpoint at each of ``ends``, in pages."""
    hashes = page_hashes(tokens)
    async with cache.lease(tokens, states=1 + len(ends)) as lease:
        await lease.loaded()
        compute(cache, lease, tokens, TABLES)
        for end, slot in zip(ends, lease.states[1:], strict=True):
            write(cache, "mamba", int(slot), hashes[end - 1])
            await lease.commit(tokens[: end * PAGE], checkpoint=(end * PAGE, int(slot)))


@pytest.mark.parametrize("components", ["full", "full+swa", "full+swa+mamba"])
async def test_a_prompt_of_exactly_n_pages_that_only_storage_has_hits_all_but_the_page_that_it_computes(
    components: str,
) -> None:
    """SGLang#27291: the length that was prefetched was not the length that could match, so a full hit became none."""
    config = {"full": settings(32, 64), "full+swa": settings(32, 64, swa=24), "full+swa+mamba": all_three()}[components]
    storage, whole = MemoryBackend(), text(6)
    async with opened(config, storage=storage) as cache:
        if components == "full+swa+mamba":
            await ends_at(cache, whole, 5, 6)
        else:
            await serve(cache, whole, ("full", "swa") if "swa" in components else ("full",))
        assert await cache.flush() == (0, 0)
    async with opened(config, storage=storage) as cache:
        async with cache.lease(whole) as lease:
            await lease.loaded()
            assert (lease.cached, lease.hits) == (5 * PAGE, (0, 0, 5 * PAGE))
            if components == "full+swa+mamba":
                assert_everything(cache, lease, whole)
            else:
                assert_cached_bytes(cache, lease, whole, ("full", "swa") if "swa" in components else ("full",))
    await storage.aclose()


async def test_of_a_first_seen_prompt_that_leaves_between_two_chunks_every_chunk_so_far_is_found_on_each_tier() -> None:
    """SGLang#39444: prefixes of a prompt in chunks were written when the prompt ended, and it never did."""
    storage, prompt = MemoryBackend(), text(9)
    async with opened(settings(12, 32), storage=storage) as cache:
        async with cache.lease(prompt, chunk=4 * PAGE) as lease:
            compute(cache, lease, prompt[: 4 * PAGE])
            await lease.commit(prompt[: 4 * PAGE])
            await lease.extend(2 * PAGE)
            compute(cache, lease, prompt[: 6 * PAGE])
            await lease.commit(prompt[: 6 * PAGE])     # and before the last chunk it has to give way
        await settled(cache)
        await push_out(cache, 12)
        assert (await cache.match(prompt)).device == 0
        async with cache.lease(prompt) as lease:
            await lease.loaded()
            assert lease.hits == (0, 6 * PAGE, 0)
            assert_cached_bytes(cache, lease, prompt)
        assert await cache.flush() == (0, 0)
    async with opened(settings(12, 32), storage=storage) as cache:
        async with cache.lease(prompt) as lease:
            await lease.loaded()
            assert lease.hits == (0, 0, 6 * PAGE)
            assert_cached_bytes(cache, lease, prompt)
    await storage.aclose()


async def test_state_and_kv_of_one_end_are_those_of_that_end_after_the_host_and_after_storage() -> None:
    """SGLang#39830: a state of one end beside the KV of another. Two ends on one path, each through L2, then L3."""
    storage, long = MemoryBackend(), text(8, extra=1)
    async with opened(all_three(device=12, swa=12, mamba=4), storage=storage) as cache:
        await ends_at(cache, long, 4, 8)
        await settled(cache)
        for pages in (4, 8):
            await push_out(cache, 12)
            async with cache.lease(text(pages, extra=1)) as lease:
                await lease.loaded()
                assert lease.hits == (0, pages * PAGE, 0)
                assert_everything(cache, lease, text(pages, extra=1))
        assert await cache.flush() == (0, 0)
    for pages in (4, 8):
        async with opened(all_three(), storage=storage) as cache:
            async with cache.lease(text(pages, extra=1)) as lease:
                await lease.loaded()
                assert lease.hits == (0, 0, pages * PAGE)
                assert_everything(cache, lease, text(pages, extra=1))
    await storage.aclose()


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
async def test_an_inner_state_that_the_device_gave_up_while_its_kv_stayed_comes_from_the_host(policy: str) -> None:
    """SGLang#40680: an inner state was dropped under write_back, and nothing below it could be served any more."""
    more: dict[str, Any] = {"device": 64, "swa": 64, "mamba": 6, "write_policy": policy}
    async with opened(all_three(**more)) as cache:
        await ends_at(cache, text(8, extra=1), 4, 8)
        await ends_at(cache, text(10, extra=1), 10)    # write_through_selective copies what two have committed
        for seed in range(1, 5):
            await serve_all(cache, text(2, seed, extra=1))
            await settled(cache)
        match = await cache.match(text(4, extra=1))
        assert (match.device, match.host_hit_length) == (0, 0), "the state is on the device, or its KV is not"
        assert match.mamba_host_hit_length == 1
        for pages in (4, 8):
            async with cache.lease(text(pages, extra=1)) as lease:
                await lease.loaded()
                assert lease.cached == pages * PAGE
                assert_everything(cache, lease, text(pages, extra=1))
