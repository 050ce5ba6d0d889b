"""A handle of ``prefetch`` serves one lease of the same tokens. One of other tokens, or of another namespace, is
refused by name; one that has had its lease, or was cancelled, counts as none."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from asynccache import AsyncCache, CacheFull, ConfigError, PrefetchHandle
from tests.runtime.runtime_kit import PAGE, compute, opened, serve, settings, text

PAGES = 63
PROMPT = text(PAGES, extra=1)


@asynccontextmanager
async def stored(folder: Path, namespace: str | None = None, **more: int) -> AsyncIterator[AsyncCache]:
    """A new cache over a file store that has the prompt's pages."""
    config = settings(
        device=2 * PAGES, host=2 * PAGES, storage=f"file:{folder}/kv?capacity=16MiB", prefetch_policy="wait_complete",
        **more,
    )
    async with opened(config) as cache:
        async with cache.lease(PROMPT, namespace=namespace) as lease:
            await lease.loaded()
            compute(cache, lease, PROMPT)
            await lease.commit(PROMPT)
        await cache.flush()
    async with opened(config) as cache:
        yield cache


async def _found(cache: AsyncCache, handle: PrefetchHandle | None, namespace: str | None = None) -> int:
    async with cache.lease(PROMPT, prefetch=handle, namespace=namespace) as lease:
        await lease.loaded()
        return lease.cached


@pytest.mark.parametrize("swa", [0, 2 * PAGES], ids=["full", "full+swa"])
@pytest.mark.parametrize(
    ("what", "make"),
    [("other tokens", lambda cache: cache.prefetch(text(PAGES, seed=1))),
     ("other tokens", lambda cache: cache.prefetch(text(0, seed=1, extra=2))),
     ("other tokens", lambda cache: cache.prefetch([*PROMPT[:-5], 7, 7, 7])),
     ("another namespace", lambda cache: cache.prefetch(PROMPT, namespace="a")),
     ("another namespace", lambda cache: cache.prefetch(PROMPT, namespace=b""))],
    ids=["another prompt", "a short one", "a fork", "of a", "of bytes"],
)  # fmt: skip
async def test_a_handle_that_cannot_be_of_use_is_refused_by_name(
    what: str, make: Callable[[AsyncCache], PrefetchHandle], swa: int
) -> None:
    async with opened(settings(2 * PAGES, host=2 * PAGES, swa=swa, storage="memory:")) as cache:
        handle = make(cache)
        with pytest.raises(ConfigError, match=f"^prefetch=PrefetchHandle.* is a handle of {what}"):
            cache.lease(PROMPT, prefetch=handle)
        assert cache.statistics().leases == 0
        await handle
        async with cache.lease(PROMPT) as lease:
            assert lease.cached == 0


async def test_without_the_handle_all_is_found(tmp_path: Path) -> None:
    async with stored(tmp_path) as cache:
        assert await _found(cache, None) == PAGES * PAGE


@pytest.mark.parametrize("awaited", [False, True])
async def test_a_handle_that_was_cancelled_counts_as_none(awaited: bool, tmp_path: Path) -> None:
    async with stored(tmp_path) as cache:
        handle = cache.prefetch(PROMPT)
        if awaited:
            await handle
        handle.cancel()
        assert await _found(cache, handle) == PAGES * PAGE


async def test_a_handle_that_has_had_its_lease_counts_as_none(tmp_path: Path) -> None:
    async with stored(tmp_path) as cache:
        handle = cache.prefetch(PROMPT)
        assert await _found(cache, handle) == PAGES * PAGE
        for _ in range(2):  # everything leaves the device and the host, but not storage
            async with cache.lease(text(2 * PAGES, seed=9)) as lease:
                compute(cache, lease, text(2 * PAGES, seed=9))
                await lease.commit(text(2 * PAGES, seed=9))
            await cache.flush()
        assert (await cache.match(PROMPT)).host < PAGES * PAGE
        assert await _found(cache, handle) == PAGES * PAGE


async def test_a_handle_that_a_lease_was_refused_with_still_counts(tmp_path: Path) -> None:
    async with stored(tmp_path) as cache:
        handle = cache.prefetch(PROMPT)
        await handle
        async with cache.lease(text(2 * PAGES, seed=9)):
            with pytest.raises(CacheFull):
                await cache.lease(PROMPT, prefetch=handle, wait=False).__aenter__()
        assert cache.statistics().prefetches["complete"] == 1
        assert await _found(cache, handle) == PAGES * PAGE
        assert cache.statistics().prefetches["complete"] == 1, "no second prefetch of the same pages"


async def test_a_handle_of_a_namespace_that_was_invalidated_counts_as_none(tmp_path: Path) -> None:
    async with stored(tmp_path, "a") as cache:
        handle = cache.prefetch(PROMPT, namespace="a")
        lease = cache.lease(PROMPT, namespace="a", prefetch=handle)
        await cache.invalidate("a")
        for one in (lease, cache.lease(PROMPT, namespace="a", prefetch=handle)):
            async with one:
                assert one.cached == 0
        assert await serve(cache, PROMPT) == 0


@pytest.mark.parametrize("tokens", [PROMPT[: 8 * PAGE], [*PROMPT, *text(4, seed=3)]], ids=["shorter", "longer"])
async def test_a_handle_of_the_prompts_beginning_or_of_what_begins_with_it_is_taken(
    tokens: list[int], tmp_path: Path
) -> None:
    async with stored(tmp_path) as cache:
        handle = cache.prefetch(tokens)
        await handle
        assert await _found(cache, handle) == min(len(tokens), len(PROMPT)) // PAGE * PAGE
