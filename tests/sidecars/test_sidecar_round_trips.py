"""Every byte of every pool of a stack, where the engine reads it: after the device was emptied, and in a cache that
never computed anything."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from asynccache_backends.memory import MemoryBackend
from msgspec.structs import replace

from asynccache import AsyncCache, CacheConfig, SlidingWindow
from asynccache.core.settings import ComponentKind
from tests.runtime.runtime_kit import settled
from tests.sidecars.sidecar_kit import (
    STACKS,
    deepseek,
    needed,
    opened,
    push_out,
    serve,
    solid,
    spoil_device,
    text,
    verify,
)

PAGES = 6


def pages_read(config: CacheConfig, end: int) -> Counter[str]:
    return Counter(spec.name for spec, _ in needed(config, end))


def bytes_read(config: CacheConfig, end: int) -> int:
    return sum(spec.bytes_per_page for spec, _ in needed(config, end))


@pytest.mark.parametrize("stack", STACKS)
async def test_every_pool_comes_back_from_the_host(stack: str) -> None:
    config = STACKS[stack]()
    async with opened(config) as cache:
        for seed in range(2):
            assert await serve(cache, text(config, PAGES, seed, extra=1), chunk=1 + seed) == 0
            await settled(cache)
        await push_out(cache)
        for seed in range(2):
            before = cache.statistics().stages["load_back"].bytes
            async with cache.lease(text(config, PAGES, seed, extra=1)) as lease:
                await lease.loaded()
                end = PAGES * config.page_size
                assert lease.hits == (0, end, 0)
                assert verify(cache, lease, text(config, PAGES, seed)) == pages_read(config, end)
            assert cache.statistics().stages["load_back"].bytes - before == bytes_read(config, end)


@pytest.mark.parametrize("where", ["memory", "file"])
@pytest.mark.parametrize("stack", STACKS)
async def test_every_pool_comes_back_from_storage_in_a_cache_that_never_computed_it(
    stack: str, where: str, tmp_path: Path
) -> None:
    memory = MemoryBackend() if where == "memory" else None
    config = STACKS[stack](storage=None if memory else f"file:{tmp_path}/kv?capacity=16MiB")
    end = PAGES * config.page_size
    async with opened(config, storage=memory) as cache:
        for seed in range(2):
            assert await serve(cache, text(config, PAGES, seed, extra=1), chunk=1 + seed) == 0
        assert await cache.flush() == (0, 0)
    async with opened(config, storage=memory) as cache:
        spoil_device(cache)
        for seed in range(2):
            before = cache.statistics().stages["prefetch"].bytes
            async with cache.lease(text(config, PAGES, seed, extra=1)) as lease:
                await lease.loaded()
                assert lease.hits == (0, 0, end)
                assert verify(cache, lease, text(config, PAGES, seed)) == pages_read(config, end)
            assert cache.statistics().stages["prefetch"].bytes - before == bytes_read(config, end)
    if memory is not None:
        await memory.aclose()


@pytest.mark.parametrize("stack", STACKS)
async def test_a_longer_prompt_goes_on_from_the_host_and_the_next_process_has_all_of_it(stack: str) -> None:
    config = STACKS[stack]()
    storage = MemoryBackend()
    for turn in range(1, 4):
        async with opened(config, storage=storage) as cache:
            spoil_device(cache)
            tokens = text(config, 3 * turn, extra=1)
            assert await serve(cache, tokens) == 3 * (turn - 1) * config.page_size
            await settled(cache)
            await push_out(cache)
            async with cache.lease(tokens) as lease:
                await lease.loaded()
                assert lease.hits == (0, 3 * turn * config.page_size, 0)
                verify(cache, lease, tokens[:-1])
            assert await cache.flush() == (0, 0)
    await storage.aclose()


async def test_a_split_inside_the_shared_prefix_divides_every_pool() -> None:
    config = deepseek()
    storage = MemoryBackend()
    shared = text(config, 5)
    prompts = [[*shared, *text(config, 3, seed, extra=1)] for seed in (1, 2)]
    async with opened(config, storage=storage) as cache:
        assert await serve(cache, prompts[0]) == 0
        assert await serve(cache, prompts[1]) in (0, 5 * config.page_size)
        await settled(cache)
        await push_out(cache)
        for prompt in prompts:
            assert await served(cache, prompt) == 8 * config.page_size
        assert await cache.flush() == (0, 0)
    async with opened(config, storage=storage) as cache:
        for prompt in prompts:
            spoil_device(cache)
            assert await served(cache, prompt) == 8 * config.page_size
            await settled(cache)
            await push_out(cache)
    await storage.aclose()


async def served(cache: AsyncCache, prompt: list[int]) -> int:
    async with cache.lease(prompt) as lease:
        await lease.loaded()
        verify(cache, lease, prompt[:-1])
        return lease.cached


async def test_a_prompt_shorter_than_the_window_needs_all_of_it() -> None:
    config = deepseek(window=40)
    storage = MemoryBackend()
    async with opened(config, storage=storage) as cache:
        await serve(cache, text(config, 3, extra=1))
        await cache.flush()
    async with opened(config, storage=storage) as cache:
        spoil_device(cache)
        async with cache.lease(text(config, 3, extra=1)) as lease:
            await lease.loaded()
            assert verify(cache, lease, text(config, 3)) == {spec.name: 3 for spec in solid(config)}
    await storage.aclose()


async def test_a_window_that_the_device_gave_up_comes_back_with_its_states_and_nothing_else() -> None:
    """FULL stayed on the device, so none of what hangs on it moves."""
    config = deepseek(device=40)
    full, swa = config.components
    assert isinstance(swa, SlidingWindow)
    config = replace(config, components=(full, replace(swa, device_tokens=14 * config.page_size)))
    async with opened(config) as cache:
        for pages, seed in ((6, 0), (12, 0), (12, 1)):
            await serve(cache, text(config, pages, seed, extra=1))
            await settled(cache)
        before = cache.statistics().stages["load_back"].bytes
        hanging = {spec.name for spec in solid(config) if spec.component is ComponentKind.SWA}
        assert hanging == {"swa", "c4_state", "c4_indexer_state", "c128_state"}
        spoil_device(cache, hanging)
        match = await cache.match(text(config, 6))
        assert match.device < match.host == 6 * config.page_size
        async with cache.lease(text(config, 6, extra=1)) as lease:
            await lease.loaded()
            assert lease.cached == 6 * config.page_size
            verify(cache, lease, text(config, 6))
        moved = cache.statistics().stages["load_back"].bytes - before
        assert moved == sum(spec.bytes_per_page for spec, _ in needed(config, lease.cached) if spec.name in hanging)


@pytest.mark.parametrize("page", [4, 16, 128, 256])
def test_the_state_of_the_coarse_compressor_is_registered_where_pages_do_not_end_with_its_blocks(page: int) -> None:
    names = {spec.name for spec in deepseek(page, 128).pools()}
    assert ("c128_state" in names) == (page % 128 != 0)
