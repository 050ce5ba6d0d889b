"""Redis backends and checked stores over them, and pages whose content is a function of their key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from asynccache_backends.redis import RedisBackend

from asynccache.storage import CheckedStore, PageKey, Result, StoreLayout, parse_url
from asynccache.testing.backend_suite import LAYOUT, aligned, content


@asynccontextmanager
async def opened(url: str, layout: StoreLayout = LAYOUT) -> AsyncIterator[RedisBackend]:
    backend = await RedisBackend.open(parse_url(url), layout)
    try:
        yield backend
    finally:
        await backend.aclose()


@asynccontextmanager
async def checked(url: str, *, timeout: float = 30.0, layout: StoreLayout = LAYOUT) -> AsyncIterator[CheckedStore]:
    store = CheckedStore(await RedisBackend.open(parse_url(url), layout), layout, timeout=timeout)
    try:
        yield store
    finally:
        await store.aclose()


async def put(store: CheckedStore, keys: Sequence[PageKey]) -> list[Result]:
    sizes = store.layout.page_bytes
    return await store.put(keys, [memoryview(content(key, sizes[key.pool])) for key in keys])


async def get(store: CheckedStore, keys: Sequence[PageKey]) -> list[Result]:
    """Read keys; every hit must be right."""
    sizes = store.layout.page_bytes
    pages = [aligned(sizes[key.pool]) for key in keys]
    results = await store.get(keys, pages)
    for key, page, result in zip(keys, pages, results, strict=True):
        assert result is not Result.HIT or page == content(key, page.nbytes)
    return results
