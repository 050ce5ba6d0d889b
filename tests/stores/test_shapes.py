"""Pools of every shape on every store: a prompt of which a page is missing, in any pool, is a hit up to the longest
prefix that is whole in all pools, and every byte of it is right.

DeepSeek-V4's shape (FULL without bytes, compressed KV on it, compressor states on SWA), all three components with
sidecars, and the three alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from asynccache import CacheConfig, Full, Mamba, SlidingWindow
from asynccache.config import PoolSpec
from asynccache.core.settings import ComponentKind
from asynccache.storage import PageKey, Result, open_store
from asynccache.storage.checked import store_layout
from asynccache.worker.pool_layout import PoolMap
from tests.sidecars.sidecar_kit import deepseek, everything, needed, opened, page_hashes, serve, solid, stack, text
from tests.stores.each import KINDS, fresh_seed, store_url

PAGES = 6
CHECKPOINTS = (2, 4, 6)


class Gone(NamedTuple):
    """A page that is deleted in the store itself: of which pool, and its place."""

    pool: str
    page: int


def plain(host: int, **more: Any) -> CacheConfig:
    """The three components, and nothing that hangs on them."""
    tokens: dict[str, Any] = {"device_tokens": 64, "host_tokens": host * 4}
    return stack(
        Full(bytes_per_token=8, layers=2, **tokens),
        SlidingWindow(window=6, bytes_per_token=4, layers=2, **tokens),
        Mamba(state_bytes=32, layers=2, device_states=16, host_states=host),
        sidecars=(), page_size=4, **more,
    )  # fmt: skip


SHAPES: Mapping[str, Callable[..., CacheConfig]] = {"plain": plain, "deepseek": deepseek, "everything": everything}


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return store_url(request.param, request, tmp_path, monkeypatch)


def losses(config: CacheConfig) -> Iterator[tuple[Gone, ...]]:
    """Nothing; one page of each pool, near the end and in the middle; of several pools at once."""
    yield ()
    for spec in solid(config):
        yield (Gone(spec.name, PAGES - 1),)
    of_full = [spec.name for spec in solid(config) if spec.component is ComponentKind.FULL]
    others = [spec.name for spec in solid(config) if spec.component is not ComponentKind.FULL]
    yield tuple(Gone(name, 3) for name in of_full)
    yield (Gone(of_full[-1], 1),)
    yield (Gone(of_full[0], PAGES - 1), Gone(others[-1], 3))
    yield tuple(Gone(name, page) for name in others for page in (3, PAGES - 1))
    yield (Gone(of_full[0], 0),)


def longest(config: CacheConfig, gone: tuple[Gone, ...]) -> int:
    """The end of the longest prefix that lacks nothing, in tokens; straight from what a prefix needs."""
    has_states = any(spec.component is ComponentKind.MAMBA for spec in solid(config))

    def stored(spec: PoolSpec, page: int) -> bool:
        made = spec.component is not ComponentKind.MAMBA or page + 1 in CHECKPOINTS
        return made and Gone(spec.name, page) not in gone

    ends = [
        pages for pages in range(1, PAGES + 1)
        if all(stored(spec, page) for spec, page in needed(config, pages * config.page_size))
    ]  # fmt: skip
    assert has_states or ends or gone
    return max(ends, default=0) * config.page_size


async def fill(config: CacheConfig, prompts: Iterable[list[int]]) -> None:
    """Store the prompts, and states at their checkpoints."""
    async with opened(config) as cache:
        for tokens in prompts:
            for pages in CHECKPOINTS:
                await serve(cache, tokens[: pages * config.page_size])
        assert await cache.flush() == (0, 0)


async def lose(config: CacheConfig, losses: Iterable[tuple[list[int], tuple[Gone, ...]]]) -> None:
    """Delete pages of each prompt behind everybody's back."""
    assert isinstance(config.storage, str)
    store = await open_store(config.storage, store_layout(config.pools()))
    assert store is not None
    pools, keys = PoolMap(config.pools(), config.page_size, {}), list[PageKey]()
    for tokens, gone in losses:
        hashes = page_hashes(config, tokens)
        keys += [pools.key(pool, hashes[page]) for pool, page in gone]
    try:
        assert set(await store.exists(keys)) == {Result.HIT}
        await store.delete(keys)
        assert set(await store.exists(keys)) == {Result.MISS}
        await store.flush()
    finally:
        await store.aclose()


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
async def test_what_lacks_a_page_is_a_hit_up_to_there(shape: str, url: str) -> None:
    config = SHAPES[shape](host=256, storage=url, prefetch_policy="wait_complete")
    cases = [(text(config, PAGES, seed=fresh_seed(), extra=1), gone) for gone in losses(config)]
    await fill(config, [tokens[:-1] for tokens, _ in cases])
    await lose(config, cases)
    ends = set()
    async with opened(config) as cache:
        for tokens, gone in cases:
            assert await serve(cache, tokens) == longest(config, gone), gone
            ends.add(longest(config, gone))
    assert len(ends) >= 3, "the losses are to have different ends"
