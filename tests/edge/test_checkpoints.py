"""A checkpoint is a position where a page ends and one of the lease's own states, each handed in once; anything else is
refused before anything has changed, and the same commit with a good one succeeds and serves the right bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch

from asynccache import AsyncCache, ConfigError, Lease
from asynccache.core.audit import check
from tests.runtime.runtime_kit import (
    PAGE,
    assert_cached_bytes,
    compute,
    holds,
    opened,
    page_hashes,
    settings,
    text,
    write,
)

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
        assert_cached_bytes(cache, lease, prompt)
        if lease.cached:
            assert holds(cache, "mamba", int(lease.states[0]), page_hashes(prompt)[lease.cached // PAGE - 1])
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
    "no slot": lambda lease, other: (END, 1 << 20),
    "a negative slot": lambda lease, other: (END, -1),
    "a float": lambda lease, other: (END, float(lease.states[1])),
    "a position off its page": lambda lease, other: (END - 1, lease.states[1]),
    "a position beyond what is committed": lambda lease, other: (END + PAGE, lease.states[1]),
    "no position": lambda lease, other: (0, lease.states[1]),
    "a negative position": lambda lease, other: (-PAGE, lease.states[1]),
    "a position that is no integer": lambda lease, other: (float(END), lease.states[1]),
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
