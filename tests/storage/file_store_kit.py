"""A file store in a folder, and pages whose content is a function of their key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asynccache_backends.file import FileBackend

from asynccache.storage import CheckedStore, PageKey, Result, parse_url
from asynccache.testing.backend_suite import LAYOUT, aligned, content


async def open_at(folder: Path, options: str = "capacity=16MiB&segment=1MiB") -> CheckedStore:
    return CheckedStore(await FileBackend.open(parse_url(f"file:{folder}?{options}"), LAYOUT), LAYOUT)


async def put(store: CheckedStore, keys: Sequence[PageKey]) -> list[Result]:
    return await store.put(keys, [memoryview(content(key, LAYOUT.page_bytes[key.pool])) for key in keys])


async def fill(store: CheckedStore, keys: Sequence[PageKey]) -> None:
    """Put, and every page is taken."""
    assert await put(store, keys) == [Result.HIT] * len(keys)


async def get(store: CheckedStore, keys: Sequence[PageKey]) -> list[Result]:
    """Read keys; every hit must be right."""
    pages = [aligned(LAYOUT.page_bytes[key.pool]) for key in keys]
    results = await store.get(keys, pages)
    for key, page, result in zip(keys, pages, results, strict=True):
        assert result is not Result.HIT or page == content(key, page.nbytes)
    return results
