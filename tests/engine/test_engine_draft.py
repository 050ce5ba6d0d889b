"""A draft model beside its target: its KV is sidecars of the target's pools, and comes back with them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from asynccache_backends.memory import MemoryBackend
from asynccache_hf import PagedModel
from asynccache_hf.call import cache_name
from asynccache_hf.layout import Layout
from asynccache_shim.model import Chunk
from transformers.cache_utils import DynamicCache

from asynccache import AsyncCache, ConfigError, HitPolicy
from tests.engine.engine_kit import (
    CHUNK,
    LIMIT,
    PAGE,
    Generated,
    Heard,
    Served,
    layout_of,
    model_of,
    prompt,
    sound_at_the_end,
)

PAIRS = [("qwen3", "llama"), ("gemma3", "gemma3"), ("deepseek_v4", "qwen3"), ("falcon_h1", "qwen3")]
LENGTH = 45
CACHED = LENGTH // PAGE * PAGE
NEW = 4


class Both(Heard):
    """The target; the draft computes whatever it computes, in the same pages."""

    def __init__(self, model: Any, layout: Layout, draft: PagedModel, cache: AsyncCache) -> None:
        super().__init__(model, layout, cache.pools)
        self.draft = draft
        self.drafted: list[torch.Tensor] = []

    def compute_all(self, chunks: Sequence[Chunk], keep: int = 1) -> list[torch.Tensor]:
        self.drafted += self.draft.compute_all([chunk._replace(checkpoint=None) for chunk in chunks], keep)
        return super().compute_all(chunks, keep)


def layouts(target: str, draft: str) -> tuple[Layout, Layout]:
    return layout_of(target).with_draft(layout_of(draft))


@asynccontextmanager
async def served_with(target: str, draft: str, storage: MemoryBackend | None = None) -> AsyncIterator[Served]:
    both, drafts = layouts(target, draft)
    config = both.cache_config(device_tokens=32 * PAGE, host_tokens=64 * PAGE, host_states=32, prefetch_threshold=PAGE)
    async with AsyncCache(config, storage=storage) as cache:
        model = Both(model_of(target), both, PagedModel(model_of(draft, 1), drafts, cache.pools), cache)
        async with sound_at_the_end(Served(cache, target, model=model)) as served:
            yield served


async def checked(served: Served, draft: str, tokens: Sequence[int]) -> Generated:
    """Both models say what they say without a cache, in the same chunks."""
    model = served.model
    assert isinstance(model, Both)
    model.drafted.clear()
    made = await served.check(tokens, NEW)
    wanted = alone(draft, [*tokens, *made.tokens], made.cached, len(tokens))[-NEW:]
    error = max(float((a - b).abs().max()) for a, b in zip(model.drafted[-NEW:], wanted, strict=True))
    assert error <= LIMIT, f"the draft's logits differ by {error}, {made.cached} cached"
    return made


def alone(draft: str, text: list[int], cached: int, length: int) -> list[torch.Tensor]:
    """The last logits of each call of the draft without pages, decoding last."""
    model = model_of(draft, 1)
    state, made = DynamicCache(config=model.config), []
    cuts = sorted({0, cached, length, *range(0, length, CHUNK)})
    with torch.inference_mode():
        for start, stop in pairwise([*cuts, *range(length + 1, len(text))]):
            out = model(input_ids=torch.tensor([text[start:stop]]), **{cache_name(model): state}, use_cache=True)
            made.append(out.logits[0, -1:])
    return made


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@pytest.mark.asyncio
async def test_a_drafts_kv_comes_back_from_every_tier(target: str, draft: str) -> None:
    storage = MemoryBackend()
    async with served_with(target, draft, storage) as served:
        assert (await checked(served, draft, prompt(LENGTH))).cached == 0
        assert (await checked(served, draft, prompt(LENGTH))).hits == (CACHED, 0, 0)
        await served.empty_device()
        assert (await checked(served, draft, prompt(LENGTH))).hits == (0, CACHED, 0)
    async with served_with(target, draft, storage) as served:
        assert (await checked(served, draft, prompt(LENGTH))).hits == (0, 0, CACHED)
    await storage.aclose()


def test_a_drafts_pools_are_sidecars_of_the_targets() -> None:
    both, drafts = layouts("gemma3", "gemma3")
    sidecars = both.cache_config(device_tokens=256).sidecars
    assert {(s.name, s.indices_from, s.hit_policy) for s in sidecars} == {
        ("draft_full", "full", HitPolicy.ALL_PAGES),
        ("draft_swa", "swa", HitPolicy.TRAILING_PAGES),
    }
    assert {pool.name for pool in drafts.pools} == {"draft_full", "draft_swa"}
    assert {pool.name for pool in layout_of("gemma3").pools} == {"full", "swa"}
    assert both.model not in (layout_of("gemma3").model, drafts.model)


@pytest.mark.parametrize(
    ("target", "draft", "page", "reason"),
    [
        ("qwen3", "qwen3", 16, "page_size=16"),
        ("qwen3", "gemma3", PAGE, "window of 16 is longer"),
        ("falcon_h1", "falcon_h1", PAGE, "recurrent states"),
    ],
)
def test_a_draft_that_does_not_follow_is_refused(target: str, draft: str, page: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        layout_of(target).with_draft(layout_of(draft, page))
