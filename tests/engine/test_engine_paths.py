"""The logits are those of a model without a cache, whatever way the prefix took through the tree; with a draft beside
it, retracted, in random worlds."""

from __future__ import annotations

import asyncio
import random
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
from asynccache_shim import Finish, Limits, Request, Sampling, Scheduler, SchedulerConfig
from asynccache_shim.model import Chunk
from transformers.cache_utils import DynamicCache

from asynccache import AsyncCache, ConfigError, HitPolicy
from asynccache.memory.host_copies import Faults
from asynccache.testing.faulty_backend import FaultyBackend
from tests.engine.engine_kit import (
    CHUNK,
    LIMIT,
    PAGE,
    Generated,
    Heard,
    Served,
    judged,
    layout_of,
    model_of,
    prompt,
    served,
    settled,
    sound_at_the_end,
)
from tests.engine.engine_models import FAMILIES, WINDOW

# The logits are those of a model without a cache, whatever way the prefix took through the tree.


WINDOWED = ("gemma3", "deepseek_v4")
RECURRENT = ("falcon_h1", "qwen3_next")


@pytest.mark.slow(0.7)
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_prompt_shorter_than_the_window(family: str) -> None:
    storage = MemoryBackend()
    async with served(family, host=40, storage=storage) as engine:
        short = prompt(PAGE + 3)
        assert len(short) < WINDOW
        assert (await engine.check(short)).cached == 0
        assert (await engine.check(short)).cached == PAGE
        await engine.empty_device()
        assert (await engine.check(short)).hits == (0, PAGE, 0)
        await engine.empty_host()
        assert (await engine.check(short)).hits == (0, 0, PAGE)
    await storage.aclose()


@pytest.mark.slow(0.7)
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_conversation_goes_on_where_its_answer_ended(family: str) -> None:
    async with served(family) as engine:
        text = prompt(20)
        for turn in range(3):
            made = await engine.check(text, 11)
            assert turn == 0 or made.cached > len(text) - 11 - 2 * PAGE
            text = [*text, *made.tokens, *prompt(3, seed=turn)]


@pytest.mark.slow(0.7)
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_split_inside_the_shared_prefix(family: str) -> None:
    shared, whole, storage = prompt(37), 37 // PAGE * PAGE, MemoryBackend()
    async with served(family, device=64, host=80, storage=storage) as engine:
        await engine.check([*shared, *prompt(30, seed=1)])
        made = await engine.check([*shared, *prompt(30, seed=2)])
        assert made.cached == (CHUNK if family in RECURRENT else whole)  # what FULL alone matched ends within a chunk
        assert (await engine.check([*shared, *prompt(30, seed=3)])).cached == whole
        await engine.empty_device()
        assert (await engine.check([*shared, *prompt(30, seed=4)])).hits == (0, whole, 0)
        assert (await engine.check([*shared, *prompt(30, seed=1)])).cached == (37 + 30) // PAGE * PAGE
        await engine.empty_host()
        assert (await engine.check([*shared, *prompt(30, seed=5)])).hits == (0, 0, whole)
    await storage.aclose()


@pytest.mark.slow(0.7)
@pytest.mark.parametrize("family", WINDOWED)
async def test_tombstones_in_the_middle_of_the_path(family: str) -> None:
    """What a long answer left of its window is never published: FULL is there, SWA is not."""
    storage = MemoryBackend()
    async with served(family, device=64, host=80, storage=storage) as engine:
        text = prompt(30)
        made = await engine.check(text, 70)
        text = [*text, *made.tokens]
        inside = [*text[:67], *prompt(5, seed=1)]
        match = await engine.cache.match(inside)
        assert match.full == 64 > match.device
        assert (await engine.check(text)).cached == 96
        await engine.empty_device()
        assert (await engine.check([*text, *prompt(9, seed=2)])).hits == (0, 96, 0)
        assert (await engine.check(inside)).cached == match.device
        further = [*inside, *prompt(5, seed=3)]
        assert (await engine.check(further)).cached == len(inside)
        await engine.empty_device()
        assert (await engine.check(further)).hits == (0, len(inside), 0)
        assert (await engine.check(text)).cached == 96
        await engine.empty_host()
        assert (await engine.check([*further, 1])).hits == (0, 0, len(inside))
        assert (await engine.check([*text, 1, 2])).hits.storage > 0
    await storage.aclose()


@pytest.mark.slow(0.7)
@pytest.mark.parametrize("family", FAMILIES)
async def test_namespaces_are_never_mixed(family: str) -> None:
    """Two sets of weights, as adapters would be, each under its own key, at the same time on the same tokens."""
    async with served(family, device=64) as engine:
        async with Served(engine.cache, family, weights=1) as other:
            for round_ in range(2):
                one, two, three = await asyncio.gather(
                    engine.check(prompt(40), namespace="one"),
                    other.check(prompt(40), namespace="two"),
                    engine.check(prompt(30)),
                )
                assert (one.cached, two.cached, three.cached) == ((32, 32, 24) if round_ else (0, 0, 0))


@pytest.mark.slow(0.7)
@pytest.mark.parametrize("family", FAMILIES)
async def test_failing_storage_and_copies_make_it_slower_never_different(family: str) -> None:
    inner = MemoryBackend()
    storage = FaultyBackend(inner, 0.0, seed=7)
    faults = Faults(seed=7, delayed=0.1, failing=0.1, delay=(0.001, 0.003))
    async with served(family, device=24, host=40, storage=storage, faults=faults) as engine:
        for seed in range(10):
            await engine.check(prompt(45, seed), 1)
        await settled(engine.cache)
        storage.rate, stored = 0.5, 0
        for i in range(80):
            made = await engine.check([*prompt(45, seed=i % 10), *prompt(5, seed=i)], 2)
            stored += made.hits.storage
            if i > 10 and stored and storage.faults["failed"] and storage.faults["corrupted"]:
                break
        else:
            pytest.fail(f"no fault struck: {storage.faults}")
    await inner.aclose()


@pytest.mark.slow(0.7)
async def test_a_byte_that_is_wrong_shows_in_the_logits() -> None:
    """Every other test of this folder compares logits; so this is what they would see."""
    async with served("qwen3") as engine:
        await engine.check(prompt(40))
        async with engine.cache.lease(prompt(40)) as lease:
            page = engine.cache.pools["full"].layer(1)[int(lease.pages[2])]
            page += 1
        with pytest.raises(AssertionError, match="qwen3: "):
            await engine.check(prompt(40))


@pytest.mark.slow(0.7)
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_request_that_was_retracted_goes_on_as_it_would_have(family: str) -> None:
    """Also one that is drawn."""
    new = 5 * PAGE
    async with served(family, device=14, host=64) as engine:
        async with Scheduler(engine.cache, engine.model, SchedulerConfig(step_tokens=24, max_running=4)) as scheduler:

            def ask(seed: int) -> Request:
                drawn = Sampling(temperature=0.8, top_p=0.9, seed=11)
                return scheduler.submit(Request(prompt(2 * PAGE + 3, seed), Limits(new), sampling=drawn))

            crowd = [ask(seed) for seed in range(3)]
            outputs = await asyncio.gather(*(request.done() for request in crowd))
            assert crowd[-1].retractions >= 1
            for seed, output in enumerate(outputs):
                await engine.cache.reset()
                assert await ask(seed).done() == output
                assert len(output) == new


# random worlds around real models: every policy, small pools, failing storage and copies, retractions, aborts


REQUESTS = 24


async def play(engine: Served, rng: random.Random) -> list[Request]:
    """Requests that share prefixes, some at once and some one after the other; some are aborted."""
    asked: list[Request] = []
    settings = SchedulerConfig(step_tokens=rng.choice([16, 40]), max_running=8, checkpoint_every=8)
    async with Scheduler(engine.cache, engine.model, settings) as scheduler:
        for i in range(REQUESTS):
            text = [*prompt(rng.randrange(1, 70), seed=rng.randrange(4)), *prompt(rng.randrange(1, 5), seed=i + 10)]
            request = Request(text, Limits(rng.randrange(1, 24)), priority=rng.randrange(2),
                              namespace=rng.choice([None, "other"]))  # fmt: skip
            asked.append(scheduler.submit(request))
            for _ in range(rng.randrange(200)):
                await asyncio.sleep(0)
            if rng.random() < 0.2:
                rng.choice(asked).abort()
            if rng.random() < 0.5:
                await request.done()
        await asyncio.gather(*(request.done() for request in asked))
    return asked


@pytest.mark.slow(0.7)
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_world_changes_no_token(family: str) -> None:
    await changes_no_token(family, 0)


async def changes_no_token(family: str, seed: int) -> None:
    """Every request that was not aborted says what the model says alone, whatever else happens in this world."""
    rng = random.Random(f"world {family} {seed}")
    inner = MemoryBackend()
    storage = FaultyBackend(inner, rng.choice([0.0, 0.3, 0.8]), seed)
    faults = Faults(seed=seed, delayed=0.2, failing=rng.choice([0.0, 0.1]), delay=(0.001, 0.003))
    options: dict[str, Any] = {
        "device": rng.choice([16, 28]),
        "host": rng.choice([20, 40, 64]),
        "prefetch_policy": rng.choice(["timeout", "best_effort", "wait_complete"]),
        "write_policy": rng.choice(["write_through", "write_back", "write_through_selective"]),
    }
    async with served(family, storage=storage, faults=faults, **options) as engine:
        asked = await play(engine, rng)
    served_tokens = 0
    for request in asked:
        if request.finish is not Finish.ABORTED:
            assert len(request.output) == request.limits.max_new_tokens
            wanted = judged(family, request.tokens.tolist(), request.output)[1]
            assert request.output == wanted, f"{request}, {request.retractions} retractions, {request.hits}"
            served_tokens += sum(request.hits) if request.hits is not None else 0
    assert served_tokens > 0
    await inner.aclose()


# A draft model beside its target: its KV is sidecars of the target's pools, and comes back with them.


PAIRS = [("qwen3", "llama"), ("gemma3", "gemma3"), ("deepseek_v4", "qwen3"), ("falcon_h1", "qwen3")]
DRAFT_LENGTH = 45
DRAFT_CACHED = DRAFT_LENGTH // PAGE * PAGE
DRAFT_NEW = 4


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
    made = await served.check(tokens, DRAFT_NEW)
    wanted = draft_alone(draft, [*tokens, *made.tokens], made.cached, len(tokens))[-DRAFT_NEW:]
    error = max(float((a - b).abs().max()) for a, b in zip(model.drafted[-DRAFT_NEW:], wanted, strict=True))
    assert error <= LIMIT, f"the draft's logits differ by {error}, {made.cached} cached"
    return made


def draft_alone(draft: str, text: list[int], cached: int, length: int) -> list[torch.Tensor]:
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
async def test_a_drafts_kv_comes_back_from_every_tier(target: str, draft: str) -> None:
    storage = MemoryBackend()
    async with served_with(target, draft, storage) as served:
        assert (await checked(served, draft, prompt(DRAFT_LENGTH))).cached == 0
        assert (await checked(served, draft, prompt(DRAFT_LENGTH))).hits == (DRAFT_CACHED, 0, 0)
        await served.empty_device()
        assert (await checked(served, draft, prompt(DRAFT_LENGTH))).hits == (0, DRAFT_CACHED, 0)
    async with served_with(target, draft, storage) as served:
        assert (await checked(served, draft, prompt(DRAFT_LENGTH))).hits == (0, 0, DRAFT_CACHED)
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
