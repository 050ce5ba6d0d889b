"""The names of namespaces are kept as long as they matter and no longer, because callers bring new ones for ever."""

from __future__ import annotations

import pytest

from asynccache.events import Notice, Opened
from asynccache.runtime import announcer
from tests.runtime.runtime_kit import opened, parts, serve, settings, text, until

LIMIT = 16


@pytest.mark.asyncio
async def test_names_of_namespaces_do_not_pile_up_and_those_with_pages_keep_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(announcer, "NAMES", LIMIT)
    told: list[Notice] = []
    async with opened(settings(device=64), on_event=told.append) as cache:
        for tenant in ("first", "second"):
            await serve(cache, text(4), namespace=tenant)
        for number in range(20 * LIMIT):
            await cache.explain(text(1), namespace=f"passing {number}")
        await until(lambda: bool(told))
        found = parts(cache).announcer
        assert found is not None
        assert len(found._named) + len(found._named_before) <= 2 * LIMIT + 2
        (begun,) = [notice for notice in told if isinstance(notice, Opened)]
        assert {begun.namespace_of(space) for space in parts(cache).core.world.roots} == {"first", "second"}
        last = parts(cache).namespaces.space(f"passing {20 * LIMIT - 1}")
        assert begun.namespace_of(last) == f"passing {20 * LIMIT - 1}"
