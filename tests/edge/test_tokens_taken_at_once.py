"""What a caller hands to a public call counts as it is when the call is made. The caller may go on writing into its
buffer at once, before anything is awaited, as an engine does that has one buffer of tokens for each request."""

from __future__ import annotations

import asyncio
import inspect
from array import array
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import torch
from asynccache_shim import Request

from asynccache import AsyncCache, Lease
from asynccache.runtime.tokens import as_key
from tests.edge.edge_kit import Depends, Tokens
from tests.edge.public_calls import CALLS
from tests.runtime.runtime_kit import PAGE, compute, holds, opened, page_hashes, serve, settings, text, write

CACHED = text(3)
OTHER = text(3, seed=5)
BUFFERS: list[Callable[[list[int]], Any]] = [
    list, lambda tokens: array("i", tokens), lambda tokens: bytearray(as_key(tokens)),
    lambda tokens: memoryview(bytearray(as_key(tokens))), lambda tokens: np.array(tokens, np.int32),
    lambda tokens: np.array(tokens, np.int64), torch.tensor,
]  # fmt: skip
IDS = ["list", "array", "bytearray", "memoryview", "int32", "int64", "tensor"]


def overwrite(buffer: Any) -> None:
    """Write other tokens into the buffer."""
    if isinstance(buffer, (bytearray, memoryview)):
        buffer[:] = as_key(OTHER)
    elif isinstance(buffer, torch.Tensor):
        buffer.copy_(torch.tensor(OTHER))
    elif isinstance(buffer, array):
        buffer[:] = array("i", OTHER)
    else:
        buffer[:] = OTHER


Call = Callable[[AsyncCache, Any], Any]
Check = Callable[[AsyncCache, Any], Awaitable[object]]


async def _match(cache: AsyncCache, match: Any) -> object:
    return match.device


async def _explained(cache: AsyncCache, explained: Any) -> object:
    return explained.device


async def _kept(cache: AsyncCache, kept: Any) -> object:
    kept.release()
    return kept.tokens


async def _leased(cache: AsyncCache, lease: Lease) -> object:
    async with lease:
        return lease.cached + PAGE  # a lease leaves a page to be computed


async def _prefetched(cache: AsyncCache, handle: Any) -> object:
    lease = cache.lease(CACHED, prefetch=handle)  # it would be refused if it were of other tokens
    assert await handle
    async with lease:
        return lease.cached + PAGE


TAKING: dict[str, tuple[Call, Check]] = {
    "asynccache.AsyncCache.match": (lambda cache, tokens: cache.match(tokens), _match),
    "asynccache.AsyncCache.explain": (lambda cache, tokens: cache.explain(tokens), _explained),
    "asynccache.AsyncCache.keep": (lambda cache, tokens: cache.keep(tokens), _kept),
    "asynccache.AsyncCache.lease": (lambda cache, tokens: cache.lease(tokens), _leased),
    "asynccache.AsyncCache.prefetch": (lambda cache, tokens: cache.prefetch(tokens), _prefetched),
}


async def test_every_public_call_that_takes_tokens_is_tried() -> None:
    """A new one is entered here, or has a test of its own, below."""
    takes = {name for name, case in CALLS.items() if isinstance(case.params.get("tokens"), (Tokens, Depends))}
    own = {"asynccache.Lease.commit", "asynccache_shim.Request", "asynccache_shim.Request (attributes)"}
    assert takes - TAKING.keys() == own


@pytest.mark.parametrize("make", BUFFERS, ids=IDS)
@pytest.mark.parametrize("name", TAKING)
async def test_tokens_count_as_they_are_when_the_call_is_made(name: str, make: Callable[[list[int]], Any]) -> None:
    call, check = TAKING[name]
    async with opened(settings(host=32)) as cache:
        await serve(cache, CACHED)
        tokens = make(CACHED)
        answer = call(cache, tokens)
        overwrite(tokens)
        found = await answer if inspect.iscoroutine(answer) else answer
        assert await check(cache, found) == 3 * PAGE


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
async def test_a_request_has_the_tokens_that_it_was_made_with_and_submits_those_that_it_has(
    make: Callable[[list[int]], Any],
) -> None:
    tokens, late = make(CACHED), make(CACHED)
    request = Request(tokens)
    overwrite(tokens)
    assert request.terms.tokens.tolist() == CACHED
    request.tokens = late
    terms = request.terms
    overwrite(late)
    assert terms.tokens.tolist() == CACHED


@pytest.mark.parametrize("task", [False, True], ids=["awaited", "in a task"])
@pytest.mark.parametrize("make", BUFFERS, ids=IDS)
async def test_a_commit_publishes_the_tokens_that_it_was_called_with(
    make: Callable[[list[int]], Any], task: bool
) -> None:
    prompt = CACHED[:PAGE]
    async with opened(settings()) as cache:
        async with cache.lease(prompt, new_tokens=2 * PAGE) as lease:
            compute(cache, lease, CACHED)
            tokens = make(CACHED)
            commit = asyncio.ensure_future(lease.commit(tokens)) if task else lease.commit(tokens)
            overwrite(tokens)
            await commit
        assert (await cache.match(CACHED)).device == 3 * PAGE
        assert (await cache.match(prompt + OTHER[PAGE:])).device == PAGE


async def test_a_commit_takes_its_checkpoint_when_it_is_called() -> None:
    state = page_hashes(CACHED)[-1]
    async with opened(settings(mamba=8)) as cache:
        async with cache.lease(CACHED) as lease:
            compute(cache, lease, CACHED)
            for slot in lease.states:
                write(cache, "mamba", int(slot), state)
            checkpoint: list[Any] = [np.array(3 * PAGE), np.array(lease.states[1])]
            commit = lease.commit(CACHED, checkpoint=checkpoint)  # type: ignore[arg-type]
            for value in checkpoint:
                value.fill(0)
            checkpoint.clear()
            await commit
        async with cache.lease([*CACHED, 1]) as lease:
            await lease.loaded()
            assert lease.cached == 3 * PAGE
            assert holds(cache, "mamba", int(lease.states[0]), state)
