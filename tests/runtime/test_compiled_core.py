"""Fail-stop holds for what only a compiled core raises: an argument of another type is an error of whoever called."""

from __future__ import annotations

from typing import Any

import pytest

from asynccache import AsyncCache, CacheClosed
from tests.runtime.runtime_kit import parts, settings


@pytest.mark.asyncio
async def test_an_argument_of_another_type_closes_the_cache() -> None:
    cache = await AsyncCache(settings()).__aenter__()
    driver = parts(cache).driver
    call: Any = driver.core.truncate
    with pytest.raises((TypeError, AttributeError)) as raised:
        driver.unlocked(call, None, "all")
    with pytest.raises(CacheClosed):
        async with cache.lease([1, 2, 3]):
            pass
    assert (await cache.aclose()).error is raised.value
