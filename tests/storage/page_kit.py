"""Pages of a checked store whose content is a function of their key: whatever comes back can be compared."""

from __future__ import annotations

from collections.abc import Sequence

from asynccache.storage import CheckedStore, PageKey, Result
from asynccache.testing.backend_suite import aligned, content


async def put(store: CheckedStore, keys: Sequence[PageKey]) -> list[Result]:
    """Store each key's own content."""
    sizes = store.layout.page_bytes
    return await store.put(keys, [memoryview(content(key, sizes[key.pool])) for key in keys])


async def fill(store: CheckedStore, keys: Sequence[PageKey]) -> None:
    """Store each key's own content; every page must be taken."""
    assert await put(store, keys) == [Result.HIT] * len(keys)


async def get(store: CheckedStore, keys: Sequence[PageKey]) -> list[Result]:
    """Read keys; every hit must be right."""
    pages = [aligned(store.layout.page_bytes[key.pool]) for key in keys]
    results = await store.get(keys, pages)
    for key, page, result in zip(keys, pages, results, strict=True):
        assert result is not Result.HIT or page == content(key, page.nbytes)
    return results
