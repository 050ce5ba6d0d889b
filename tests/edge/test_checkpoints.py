"""A checkpoint is a position where a page ends and one of the lease's own states; tokens count as they are when the
call is made; slots can be numbered."""

from __future__ import annotations

import asyncio
import inspect
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch
from asynccache_shim import Request

from asynccache import AsyncCache, CacheConfig, ConfigError, Full, Lease
from asynccache.core.audit import check
from asynccache.runtime.tokens import as_key
from tests.edge.edge_kit import Kind
from tests.edge.odd_values import Odd
from tests.edge.public_calls import CALLS
from tests.runtime.runtime_kit import PAGE, compute, holds, opened, page_hashes, serve, settings, text, write
from tests.sidecars.sidecar_kit import verify

# A checkpoint is a position where a page ends and one of the lease's own states, each handed in once; anything else is
# refused before anything has changed, and the same commit with a good one succeeds and serves the right bytes.


PROMPT = text(4, extra=1)
END = 4 * PAGE


@asynccontextmanager
async def computed(cache: AsyncCache, prompt: list[int] = PROMPT, states: int = 4) -> AsyncIterator[Lease]:
    """A lease of ``prompt``, computed, with the state at its end in each of the lease's states."""
    async with cache.lease(prompt, states=states) as lease:
        await lease.loaded()
        compute(cache, lease, prompt)
        for slot in lease.states:
            write(cache, "mamba", int(slot), page_hashes(prompt)[END // PAGE - 1])
        yield lease


async def hits(cache: AsyncCache, prompt: list[int] = PROMPT) -> int:
    """How much of ``prompt`` is cached; its bytes and its state are right."""
    async with cache.lease(prompt) as lease:
        await lease.loaded()
        verify(cache, lease, prompt)
        return lease.cached


@pytest.mark.parametrize("of", [np.int32, int, np.int64, torch.tensor], ids=["states", "int", "int64", "torch"])
async def test_a_slot_is_any_integer_and_what_states_gives_first_of_all(of: Callable[[Any], Any]) -> None:
    async with opened(settings(16, mamba=8)) as cache:
        async with computed(cache) as lease:
            assert isinstance(lease.states[1], np.int32)
            await lease.commit(PROMPT, checkpoint=(of(END), of(lease.states[1])))
            assert len(lease.states) == 3
        assert await hits(cache) == END


BAD: dict[str, Callable[[Lease, Lease], Any]] = {
    "a foreign slot": lambda lease, other: (END, other.states[1]),
    "a position off its page": lambda lease, other: (END - 1, lease.states[1]),
    "a position beyond what is committed": lambda lease, other: (END + PAGE, lease.states[1]),
    "no position": lambda lease, other: (0, lease.states[1]),
    "three": lambda lease, other: (END, lease.states[1], 0),
    "a dictionary": lambda lease, other: {END: 0, int(lease.states[1]): 0},
    "an array": lambda lease, other: np.array([END, lease.states[1]]),
}


@pytest.mark.parametrize("name", BAD)
async def test_what_is_no_checkpoint_of_the_lease_is_refused_and_changes_nothing(name: str) -> None:
    async with opened(settings(24, mamba=8)) as cache:
        async with computed(cache) as lease:
            async with computed(cache, text(4, seed=1, extra=1)) as other:
                before, states = cache.core.statistics(), lease.states.tolist()
                with pytest.raises(ConfigError, match="checkpoint"):
                    await lease.commit(PROMPT, checkpoint=BAD[name](lease, other))
                assert cache.core.statistics() == before
                assert lease.states.tolist() == states
                check(cache.core)
            await lease.commit(PROMPT, checkpoint=(END, lease.states[1]))
        assert await hits(cache) == END


async def test_a_slot_that_was_given_to_the_tree_is_refused_by_name() -> None:
    longer = text(6, extra=1)
    async with opened(settings(24, mamba=8)) as cache:
        async with computed(cache, longer) as lease:
            slot = lease.states[1].copy()
            await lease.commit(longer[: END + 1], checkpoint=(END, slot))
            with pytest.raises(ConfigError, match=f"checkpoint: slot={slot} is not one of the lease's states"):
                await lease.commit(longer, checkpoint=(6 * PAGE, slot))
            check(cache.core)
            write(cache, "mamba", int(lease.states[1]), page_hashes(longer)[5])
            await lease.commit(longer, checkpoint=(6 * PAGE, lease.states[1]))
        assert await hits(cache, longer) == 6 * PAGE


async def test_of_two_commits_at_once_with_one_slot_the_second_is_refused() -> None:
    longer = text(6, extra=1)
    async with opened(settings(24, mamba=8)) as cache:
        async with computed(cache, longer) as lease:
            slot = int(lease.states[1])
            answers = await asyncio.gather(
                lease.commit(longer[: END + 1], checkpoint=(END, slot)),
                lease.commit(longer, checkpoint=(6 * PAGE, slot)), return_exceptions=True,
            )  # fmt: skip
            assert [isinstance(answer, ConfigError) for answer in answers] == [False, True]
            check(cache.core)
        assert await hits(cache, longer) == END


# What a caller hands to a public call counts as it is when the call is made. The caller may go on writing into its
# buffer at once, before anything is awaited, as an engine does that has one buffer of tokens for each request.


CACHED = text(3)
OTHER = text(3, seed=5)
BUFFERS: list[Callable[[list[int]], Any]] = [
    list, lambda tokens: array("i", tokens), lambda tokens: bytearray(as_key(tokens)),
    lambda tokens: memoryview(bytearray(as_key(tokens))), lambda tokens: np.array(tokens, np.int32),
    lambda tokens: np.array(tokens, np.int64), torch.tensor,
]  # fmt: skip
IDS = ["list", "array", "bytearray", "memoryview", "int32", "int64", "tensor"]


Call = Callable[[AsyncCache, Any], Any]
Check = Callable[[AsyncCache, Any], Awaitable[object]]


async def _match(cache: AsyncCache, match: Any) -> object:
    return match.device


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
    "asynccache.AsyncCache.explain": (lambda cache, tokens: cache.explain(tokens), _match),
    "asynccache.AsyncCache.keep": (lambda cache, tokens: cache.keep(tokens), _kept),
    "asynccache.AsyncCache.lease": (lambda cache, tokens: cache.lease(tokens), _leased),
    "asynccache.AsyncCache.prefetch": (lambda cache, tokens: cache.prefetch(tokens), _prefetched),
}


async def test_every_public_call_that_takes_tokens_is_tried() -> None:
    """A new one is entered here, or has a test of its own, below."""
    row = Odd("[8]", list, row=[8] * 100)
    takes = {name for name, case in CALLS.items()
             if isinstance(kind := case.params.get("tokens"), Kind) and kind.takes(row) is not False}  # fmt: skip
    own = {"asynccache.Lease.commit", "asynccache.events.prompt_blocks",  # which has done with them when it returns
           "asynccache_shim.Request", "asynccache_shim.Request (attributes)"}  # fmt: skip
    assert takes - TAKING.keys() == own


@pytest.mark.parametrize("make", BUFFERS, ids=IDS)
@pytest.mark.parametrize("name", TAKING)
async def test_tokens_count_as_they_are_when_the_call_is_made(name: str, make: Callable[[list[int]], Any]) -> None:
    call, check = TAKING[name]
    async with opened(settings(host=32)) as cache:
        await serve(cache, CACHED)
        tokens = make(CACHED)
        answer = call(cache, tokens)
        tokens[:] = make(OTHER)
        found = await answer if inspect.iscoroutine(answer) else answer
        assert await check(cache, found) == 3 * PAGE


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
async def test_a_request_has_the_tokens_that_it_was_made_with_and_submits_those_that_it_has(
    make: Callable[[list[int]], Any],
) -> None:
    tokens, late = make(CACHED), make(CACHED)
    request = Request(tokens)
    tokens[:] = make(OTHER)
    assert request.terms.tokens.tolist() == CACHED
    request.tokens = late
    terms = request.terms
    late[:] = make(OTHER)
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
            tokens[:] = make(OTHER)
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


# A pool without bytes fits into any memory; but its slots are int32.


@pytest.mark.parametrize("tier", ["device", "host"])
async def test_more_slots_than_can_be_numbered_are_refused(tier: str) -> None:
    tokens: dict[str, Any] = {"device_tokens": 16, "host_tokens": 16, f"{tier}_tokens": 16 << 31}
    config = CacheConfig(model="m", components=(Full(bytes_per_token=0, **tokens),))
    cache = AsyncCache(config)
    with pytest.raises(ConfigError, match=f"full: 2147483648 slots on the {tier}"):
        async with cache:
            pass
    assert cache.closed == "the cache is not open"
