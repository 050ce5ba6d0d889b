"""Fail-stop holds for what only a compiled core raises: an argument of another type is an error of whoever called. What
is compiled besides the core never waits, for compiled coroutines are not tested."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from asynccache import AsyncCache, CacheClosed, compiled
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


@pytest.mark.parametrize("module", compiled.ALSO)
def test_what_is_compiled_besides_the_core_never_waits(module: str) -> None:
    tree = ast.parse(Path(compiled.source_of(module)).read_text("utf-8"))
    waiting = (ast.AsyncFunctionDef, ast.Await, ast.AsyncWith, ast.AsyncFor)
    assert [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, waiting)] == []
