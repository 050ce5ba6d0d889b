"""The logits are those of a model without a cache, whatever way the prefix took through the tree; with a draft beside
it, retracted, in random worlds; and call by call."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from asynccache_backends.memory import MemoryBackend
from asynccache_hf import PagedModel
from asynccache_hf.call import cache_name
from asynccache_hf.layout import Layout
from asynccache_hf.memory import Track, TrackMemory
from asynccache_hf.sampling import draw
from asynccache_shim import Finish, Limits, Request, Sampling, Scheduler, SchedulerConfig
from asynccache_shim.model import NO_TOKEN, Batch, Checkpoint, Chunk, Pages
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
    alone,
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


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_conversation_goes_on_where_its_answer_ended(family: str) -> None:
    async with served(family) as engine:
        text = prompt(20)
        for turn in range(3):
            made = await engine.check(text, 11)
            assert turn == 0 or made.cached > len(text) - 11 - 2 * PAGE
            text = [*text, *made.tokens, *prompt(3, seed=turn)]


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


async def test_a_byte_that_is_wrong_shows_in_the_logits() -> None:
    """Every other test of this folder compares logits; so this is what they would see."""
    async with served("qwen3") as engine:
        await engine.check(prompt(40))
        async with engine.cache.lease(prompt(40)) as lease:
            page = engine.cache.pools["full"].layer(1)[int(lease.pages[2])]
            page += 1
        with pytest.raises(AssertionError, match="qwen3: "):
            await engine.check(prompt(40))


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


# ``PagedModel`` as a scheduler uses it: values in, tokens out, nothing kept but the tail of a page.


class Memory:
    """A pool without a cache."""

    def __init__(self, layers: int, pages: int, size: int) -> None:
        self._layers = torch.zeros((layers, pages, size), dtype=torch.uint8)

    def layer(self, i: int) -> torch.Tensor:
        return self._layers[i]

    def leave_gaps(self) -> None:
        """Nobody looks for them."""


def paged(family: str, pages: int = 16) -> PagedModel:
    layout = layout_of(family)
    return PagedModel(model_of(family), layout, {p.name: Memory(p.layers, pages, p.layer_bytes) for p in layout.pools})


def numbers(*values: int) -> Pages:
    return np.array(values, np.int32)


def chunk(who: int, tokens: list[int], start: int, stop: int, pages: Pages, **more: object) -> Chunk:
    terms: dict[str, object] = {"states": numbers(who, who + 8), "checkpoint": None, "sample": True} | more
    return Chunk(who, numbers(*tokens), start, stop, pages, pages, **terms)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_of_one_batch_do_not_meet(family: str) -> None:
    model = paged(family)
    one, two = prompt(21), prompt(13, seed=1)
    first, second = numbers(3, 1, 7, 4), numbers(0, 9, 2)
    made = [list(one), list(two)]
    for start, stop in ((0, 11), (11, 13)):
        chunks = chunk(0, one, start, stop, first, sample=False), chunk(1, two, start, stop, second, sample=stop == 13)
        answer = model.forward(Batch(chunks))
        assert answer[0] == NO_TOKEN
    made[1].append(answer[1])
    at = 13
    for stop in (21, 22, 23):
        answer = model.forward(
            Batch(
                (chunk(0, made[0], at if stop == 21 else stop - 1, stop, first), chunk(1, made[1], at, at + 1, second))
            )
        )
        at += 1
        made[0].append(answer[0])
        made[1].append(answer[1])
    assert made[0][21:] == judged(family, one, made[0][21:])[1]
    assert made[1][13:] == judged(family, two, made[1][13:])[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_whoever_has_whole_pages_and_a_checkpoint_goes_on(family: str) -> None:
    model = paged(family)
    tokens = prompt(30)
    model.compute(chunk(0, tokens, 0, 16, numbers(0, 1, 2, 3), checkpoint=Checkpoint(16, 8)))
    model.compute(chunk(0, tokens, 16, 30, numbers(0, 1, 2, 3)))
    logits = model.compute(chunk(5, tokens, 16, 30, numbers(0, 1, 4, 5), states=numbers(8)))
    assert float((logits - alone(family, 0, tuple(tokens))[-1:]).abs().max()) <= LIMIT


def test_a_request_goes_on_within_a_page_only_where_it_stopped() -> None:
    model = paged("deepseek_v4")
    tokens, pages = prompt(30), numbers(0, 1, 2, 3)
    model.compute(chunk(0, tokens, 0, 13, pages))
    with pytest.raises(RuntimeError, match="stopped at 13 and cannot go on at 12"):
        model.compute(chunk(0, tokens, 12, 20, pages))
    model.forward(Batch((), ended=(0,)))
    with pytest.raises(RuntimeError, match="cannot go on at 13"):
        model.compute(chunk(0, tokens, 13, 20, pages))


def test_a_page_that_is_missing_is_no_silent_zero() -> None:
    model = paged("gemma3")
    tokens = prompt(30)
    model.compute(chunk(0, tokens, 0, 24, numbers(0, 1, 2, 3)))
    with pytest.raises(IndexError, match="no page"):
        model.compute(chunk(0, tokens, 24, 30, numbers(0, -1, 2, 3)))


def test_every_logit_on_request() -> None:
    logits = paged("qwen3").compute(chunk(0, prompt(9), 0, 9, numbers(0, 1)), keep=0)
    assert logits.shape == (9, model_of("qwen3").config.vocab_size)


def test_a_cache_without_the_pools_is_refused() -> None:
    with pytest.raises(ConfigError, match="no pool called 'full'"):
        PagedModel(model_of("qwen3"), layout_of("qwen3"), {})


# memory


@pytest.mark.parametrize(("stride", "units"), [(1, 24), (4, 6), (8, 3), (16, 1)])
def test_units_of_any_stride_come_back(stride: int, units: int) -> None:
    sample = {"a": torch.empty(3, 2), "b": torch.empty(5, dtype=torch.float64)}
    track = Track.of("p", "full", stride, sample)
    more = 32 * track.per_page(PAGE)  # another layer of the pool keeps more
    memory = torch.zeros((7, track.page_bytes(PAGE) + more), dtype=torch.uint8)
    slots, table = TrackMemory(track, memory, PAGE), numbers(4, 0, 6)
    values = {name: torch.randn(units, *t.shape).to(t.dtype) for name, t in sample.items()}
    half = units // 2
    slots.write(table, 0, {name: v[:half] for name, v in values.items()})
    slots.write(table, half, {name: v[half:] for name, v in values.items()})
    for first in range(units):
        found = slots.read(table, first, units)
        assert all(torch.equal(found[name], values[name][first:]) for name in values)
    assert not memory[[1, 2, 3, 5]].any()
    assert not memory.view(7 * track.per_page(PAGE), -1)[:, track.unit_bytes :].any()


def test_units_without_a_page_are_left_out() -> None:
    track = Track.of("p", "swa", 1, {"a": torch.empty(4)})
    memory = torch.zeros((4, track.page_bytes(PAGE)), dtype=torch.uint8)
    slots = TrackMemory(track, memory, PAGE)
    values = torch.randn(3 * PAGE, 4)
    slots.write(numbers(-1, 2, 0), 0, {"a": values})
    assert torch.equal(slots.read(numbers(-1, 2, 0), PAGE, 3 * PAGE)["a"], values[PAGE:])
    assert not memory[[1, 3]].any()
    with pytest.raises(IndexError, match="no page"):
        slots.read(numbers(-1, 2, 0), PAGE - 1, 3 * PAGE)


# sampling


def drawn_of(logits: torch.Tensor, sampling: Sampling, position: int) -> int:
    """Drawn beside others, which change nothing."""
    others = [Sampling(), Sampling(0.7, 0.5, 3), Sampling(2.0, seed=1, top_k=2)]
    rows = torch.stack([logits, logits * 0, logits.flip(0), logits])
    alone = draw(logits[None], [sampling], [position])
    together = draw(rows, [sampling, *others], [position, 0, 1, 2])
    assert together[0] == alone[0]
    return alone[0]


def kept_by_transformers(logits: torch.Tensor, sampling: Sampling) -> set[int]:
    """The tokens that transformers' own processors leave."""
    settings = transformers.GenerationConfig(
        do_sample=True, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
    )
    processors = model_of("llama")._get_logits_processor(settings)
    return set(processors(torch.zeros(1, 1, dtype=torch.long), logits[None])[0].isfinite().nonzero()[:, 0].tolist())


@pytest.mark.parametrize("top_k", [0, 1, 2, 3, 4, 6, 99])
@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_it_is_drawn_among_the_tokens_that_transformers_leaves(temperature: float, top_p: float, top_k: int) -> None:
    """The same order of the filters, and the same tokens where several are equally likely."""
    logits = torch.tensor([0.5, 2.0, 1.0, 1.0, -torch.inf, 1.0, 1.7])
    sampling = Sampling(temperature, top_p, None, top_k)
    drawn = set(draw(logits.expand(3000, 7), [sampling._replace(seed=i) for i in range(3000)], [0] * 3000))
    kept = kept_by_transformers(logits, sampling)
    equal = {2, 3, 5}  # of these top_p may leave any
    assert (drawn - equal, len(drawn)) == (kept - equal, len(kept))


def test_a_row_that_is_no_numbers_does_not_disturb_the_others() -> None:
    rows = torch.tensor([[1.0, 2.0, 3.0], [torch.nan, 2.0, 3.0], [torch.inf, torch.inf, 0.0], [-torch.inf] * 3])
    sampling = Sampling(1.0, 0.9, 7, 2)
    drawn = draw(rows, [sampling] * 4, range(4))
    assert drawn[0] == drawn_of(rows[0], sampling, 0)
    assert all(0 <= token < 3 for token in drawn)


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    chances = torch.tensor([0.5, 0.3, 0.15, 0.05])
    rows = torch.log(chances).expand(4000, 4)
    drawn = draw(rows, [Sampling(1.0, 1.0, 5)] * 4000, range(4000))
    assert (torch.bincount(torch.tensor(drawn)) / 4000 - chances).abs().max() < 0.03


def test_temperature_zero_takes_the_likeliest() -> None:
    assert drawn_of(torch.tensor([0.1, 3.0, 2.9]), Sampling(), 5) == 1


def test_the_same_seed_draws_the_same_and_positions_differ() -> None:
    logits = torch.zeros(1000)
    sampling = Sampling(temperature=1.0, seed=3)
    drawn = [drawn_of(logits, sampling, position) for position in range(20)]
    assert drawn == [drawn_of(logits, sampling, position) for position in range(20)]
    assert len(set(drawn)) > 15
    assert drawn != [drawn_of(logits, Sampling(temperature=1.0, seed=4), position) for position in range(20)]
