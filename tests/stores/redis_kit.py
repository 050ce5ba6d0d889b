"""Redis backends and checked stores over them, and pages whose content is a function of their key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from asynccache_backends.redis import RedisBackend

from asynccache.storage import CheckedStore, StoreLayout, parse_url
from asynccache.testing.backend_suite import LAYOUT


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
