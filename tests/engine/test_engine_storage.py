"""Pages that storage has lost shorten a hit, in whichever pool they were, and never change a logit."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache.storage import PageKey, Record, Result
from asynccache.testing.wrapped_backend import WrappedBackend
from tests.engine.engine_kit import CHUNK, PAGE, layout_of, prompt, served
from tests.engine.engine_models import FAMILIES

LENGTH = 61
PAGES = LENGTH // PAGE
POOLS = [(family, "full") for family in ("qwen3", "gemma3", "falcon_h1", "qwen3_next")]
POOLS += [("gemma3", "swa"), ("deepseek_v4", "swa")]
POOLS += [("deepseek_v4", pool) for pool in ("c4", "c4_indexer", "c4_state", "c4_indexer_state", "c16", "c16_state")]


class Remembering(WrappedBackend):
    """Knows which pages it was given, by pool, in order."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.given: dict[str, list[PageKey]] = {}

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        for key in keys:
            self.given.setdefault(key.pool, []).append(key)
        return await self.inner.put(keys, records)


async def stored(family: str) -> Remembering:
    """A store with one prompt."""
    storage = Remembering()
    async with served(family, storage=storage) as engine:
        await engine.check(prompt(LENGTH), 1)
    return storage


@pytest.mark.parametrize(("family", "pool"), POOLS)
@pytest.mark.asyncio
async def test_a_page_that_one_pool_has_lost_ends_the_hit_before_it(family: str, pool: str) -> None:
    """The last page; and one in the middle, where every page is needed."""
    storage = await stored(family)
    everywhere = next(p for p in layout_of(family).pools if p.name == pool).source == "full"
    for lost in (PAGES - 1, 3):
        await storage.delete([storage.given[pool][lost]])
        async with served(family, storage=storage) as engine:
            made = await engine.check(prompt(LENGTH), 1)
            if everywhere or lost == PAGES - 1:
                unit = CHUNK if family in ("falcon_h1", "qwen3_next") else PAGE  # where there is a state
                assert made.hits == (0, 0, lost * PAGE // unit * unit)
    await storage.inner.aclose()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.asyncio
async def test_whatever_is_lost_the_logits_stay(family: str) -> None:
    rng = random.Random(f"lost {family}")
    storage, hits = await stored(family), []
    for _ in range(8):
        every = [key for keys in storage.given.values() for key in keys]
        await storage.delete(rng.sample(every, rng.randrange(3)))
        async with served(family, storage=storage) as engine:  # what is computed anew is stored anew
            hits.append((await engine.check(prompt(LENGTH), 1)).hits.storage)
    assert len(set(hits)) > 1, hits
    await storage.inner.aclose()
