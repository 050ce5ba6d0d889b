"""Fail-stop holds for errors that only a compiled core raises: an argument of another type is the caller's error.
Modules that are compiled besides the core never wait, because compiled coroutines are not tested."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from asynccache import AsyncCache, CacheClosed, CacheFull, ConfigError, compiled
from tests.runtime.runtime_kit import parts, settings


async def test_an_argument_of_another_type_closes_the_cache() -> None:
    cache = await AsyncCache(settings()).__aenter__()
    driver = parts(cache).driver
    call: Any = driver.core.truncate
    with pytest.raises((TypeError, AttributeError)) as raised:
        driver.call_unlocked(call, None, "all")
    with pytest.raises(CacheClosed):
        async with cache.lease([1, 2, 3]):
            pass
    assert (await cache.aclose()).error is raised.value


@pytest.mark.parametrize("module", compiled.ALSO)
def test_what_is_compiled_besides_the_core_never_waits(module: str) -> None:
    tree = ast.parse(Path(compiled.source_of(module)).read_text("utf-8"))
    waiting = (ast.AsyncFunctionDef, ast.Await, ast.AsyncWith, ast.AsyncFor)
    assert [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, waiting)] == []


@pytest.mark.parametrize("number", [2**63, 2**80])
async def test_an_integer_beyond_a_machine_word_is_refused_or_works_on_both_cores(number: int) -> None:
    """Never an ``OverflowError``, which would close the cache of whoever asked."""
    async with AsyncCache(settings()) as cache:
        for wrong, options, error in (([1, number], {}, ConfigError), ([1], {"new_tokens": number}, CacheFull),
                                      ([1], {"states": number}, ConfigError)):  # fmt: skip
            given: Any = options
            with pytest.raises(error, match=str(number) if error is ConfigError else "are asked for"):
                await cache.lease(wrong, wait=False, **given).__aenter__()
        async with cache.lease([1, 2, 3], chunk=number, swa_chunk=number, shared_tokens=number) as lease:
            with pytest.raises(CacheFull):
                await lease.extend(number)
            with pytest.raises(ConfigError, match=str(number)):
                lease.advance(number)
            lease.truncate(number)
