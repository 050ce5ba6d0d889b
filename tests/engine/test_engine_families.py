"""Every family of models that the engine takes computes the same as one call without a cache, from whatever tier its
prefix came. Other models are refused in a sentence.

Every kind of layer of transformers is there: full, sliding and chunked attention, latent attention, experts, shared
layers, Mamba 1 and 2, linear attention, and rotary embeddings that change with the length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from asynccache_backends.memory import MemoryBackend
from asynccache_hf import describe
from asynccache_hf.trial import planned
from asynccache_shim import Limits, Request, Scheduler, SchedulerConfig

from asynccache.errors import ConfigError
from asynccache.storage import PageKey, Record, Result
from asynccache.testing.wrapped_backend import WrappedBackend
from tests.engine.engine_kit import (
    CHUNK,
    LIMITS,
    PAGE,
    Served,
    judged,
    layout_of,
    model_of,
    own_decoding,
    prompt,
    run_child,
    served,
)
from tests.engine.engine_models import FAMILIES, MORE, OTHERS, WINDOW, even, make

ALL = (*FAMILIES, *OTHERS, *MORE)
LENGTH = 46
ONE_BY_ONE = {"jamba", "mamba", "falcon_mamba"}
LONGEST = {"llama_dynamic": 95, "phi3_longrope": 96}
PACKED = {
    "cohere2", "gemma2", "glm4_moe", "gpt2", "gpt_neox", "llama_dynamic", "mimo_v2", "mixtral", "olmo3", "opt", "phi3",
    "phi3_longrope", "qwen3_moe", "smollm3",
}  # fmt: skip
KINDS = ("bloom", "mixtral", "llama4", "deepseek_v3", "gemma2", "qwen3_5", "mamba", "mamba2", "minimax", "zamba2")
"""One family for each kind of layer: what is kept in one way comes back in one way."""


def fitting(family: str) -> tuple[int, ...]:
    """The sizes of pages that a family can be tried with: compressed entries want multiples or divisors of a rate."""
    return (8, 16) if family == "deepseek_v4" else (5, 8, 16)


def test_there_are_enough_of_them() -> None:
    assert len(set(ALL)) >= 25


@pytest.mark.parametrize("family", MORE)
def test_how_each_family_may_be_called(family: str) -> None:
    layout = layout_of(family)
    assert (layout.one_by_one, layout.limit, layout.packed) == (
        family in ONE_BY_ONE, LONGEST.get(family), family in PACKED,
    )  # fmt: skip


async def six_at_once(engine: Served, page_size: int) -> None:
    """Three share a prefix, under the scheduler."""
    async with Scheduler(engine.cache, engine.model, SchedulerConfig(step_tokens=40, max_running=8)) as scheduler:
        texts = [[*prompt(LENGTH - 10 * (i % 2), seed=i % 2), *prompt(1 + i, seed=10 + i)] for i in range(6)]
        asked = [scheduler.submit(Request(text, Limits(4))) for text in texts]
        outputs = await asyncio.gather(*(request.done() for request in asked))
    for text, output in zip(texts, outputs, strict=True):
        assert output == judged(engine.family, text, output)[1]
        assert len(output) == 4


@pytest.mark.parametrize("family", ALL)
async def test_from_every_tier_and_six_at_once(family: str, tmp_path: Path) -> None:
    size = fitting(family)[ALL.index(family) % len(fitting(family))]
    whole, url = LENGTH // size * size, f"file:{tmp_path}?capacity=64MiB&segment=8MiB"
    async with served(family, page_size=size, storage_url=url) as engine:
        assert (await engine.check(prompt(LENGTH), 7)).cached == 0
        assert (await engine.check(prompt(LENGTH))).hits == (whole, 0, 0)
        await engine.empty_device()
        assert (await engine.check(prompt(LENGTH))).hits == (0, whole, 0)
        await six_at_once(engine, size)
    async with served(family, page_size=size, storage_url=url) as engine:
        assert (await engine.check(prompt(LENGTH))).hits == (0, 0, whole)


SMALL = {"deepseek_v4": (4, 16, 32), "qwen3": (1, 2), "gemma3": (1, 2), "falcon_h1": (1, 2)}


@pytest.mark.parametrize(("family", "sizes"), [
    *SMALL.items(), *(pytest.param(family, fitting(family), marks=pytest.mark.soak) for family in ALL),
])  # fmt: skip
async def test_pages_of_every_size(family: str, sizes: tuple[int, ...]) -> None:
    for size in sizes:
        async with served(family, page_size=size) as engine:
            for length in (11, 23, 45, 46, 70) if size > 2 else (11, 23):  # there are as many states as pages
                await engine.check(prompt(length), 9)
                await engine.empty_device()
                kept = length - 1 if engine.model.layout.recurrent else length  # a state, where the same prompt hits
                assert (await engine.check(prompt(length + 3))).cached >= kept // size * size


def store(folder: Path, families: Sequence[str]) -> list[str]:
    """Store a prompt of each family; what a child is to say of it."""

    async def store_all() -> None:
        for family in families:
            async with served(family, storage_url=f"file:{folder / family}?capacity=64MiB&segment=8MiB") as engine:
                await engine.check(prompt(61), 1)

    asyncio.run(store_all())
    return [f"{family} (0, 0, 56)" for family in families]


@pytest.mark.parametrize(
    "families", [FAMILIES + KINDS, pytest.param(OTHERS + MORE, marks=pytest.mark.soak)], ids=["kinds", "all"]
)
def test_a_new_process_finds_what_this_one_stored(tmp_path: Path, families: tuple[str, ...]) -> None:
    told = store(tmp_path, families)
    assert run_child(tmp_path, *families) == told


@pytest.mark.skipif(Path(transformers.__file__).parents[1] == Path(torch.__file__).parents[1],
                    reason="needs two versions of transformers: make test-transformers")  # fmt: skip
def test_another_version_of_transformers_finds_what_this_one_stored(tmp_path: Path) -> None:
    """An upgrade does not begin with an empty store. Here the child is the version of the gate."""
    told = store(tmp_path, FAMILIES)
    assert run_child(tmp_path, inherit=False) == told


# pages that storage has lost shorten a hit, in whichever pool they were, and never change a logit


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


@pytest.mark.parametrize(("family", "pool"), POOLS)
async def test_a_page_that_one_pool_has_lost_ends_the_hit_before_it(family: str, pool: str) -> None:
    """The last page; and one in the middle, where every page is needed."""
    storage, pages = Remembering(), 61 // PAGE
    async with served(family, storage=storage) as engine:
        await engine.check(prompt(61), 1)
    everywhere = next(p for p in layout_of(family).pools if p.name == pool).source == "full"
    for lost in (pages - 1, 3):
        await storage.delete([storage.given[pool][lost]])
        async with served(family, storage=storage) as engine:
            made = await engine.check(prompt(61), 1)
            if everywhere or lost == pages - 1:
                unit = CHUNK if family in ("falcon_h1", "qwen3_next") else PAGE  # where there is a state
                assert made.hits == (0, 0, lost * PAGE // unit * unit)
    await storage.inner.aclose()


# refusals


@pytest.mark.parametrize("family", LONGEST)
async def test_what_is_longer_than_a_prefix_keeps_its_meaning_is_refused(family: str) -> None:
    """The reference is right there; a key of the shorter regime in it would not be."""
    limit = LONGEST[family]
    async with served(family, device=64) as engine:
        await engine.check(prompt(limit - 10), 10)
        with pytest.raises(ConfigError, match=rf"{limit + 1} tokens: .* at most {limit} tokens"):
            await engine.generate(prompt(limit - 10), 12)


def test_a_model_that_forgets_its_state_is_refused_with_the_layer() -> None:
    """Mamba, called with several tokens after a state as if that were right."""
    from asynccache_hf import trial

    model = make("jamba")
    layout = layout_of("jamba")
    said = trial._blame(model, replace(layout, one_by_one=False), trial.ExpectedLogits.of(model, layout, 0))
    assert said == "the first layer that differs is 0, a JambaMambaDecoderLayer"


@pytest.mark.parametrize("family", LIMITS)
def test_only_where_transformers_itself_is_no_nearer_a_family_may_differ_more(family: str) -> None:
    assert own_decoding(family, prompt(LENGTH)) > LIMITS[family]


def test_the_trial_crosses_the_longest_window_and_a_page() -> None:
    for family in ("gemma2", "cohere2", "mixtral"):
        plan = planned(model_of(family), layout_of(family), WINDOW)
        assert plan.late > WINDOW
        assert plan.stop > plan.late + 8


def test_a_window_that_a_model_does_not_keep_is_found() -> None:
    """Its layers say one window to the cache and use another: the logits differ as soon as that is crossed."""
    model = make("gemma2")
    config = model.config
    for layer in model.model.layers:
        if layer.self_attn.sliding_window:
            layer.self_attn.sliding_window = 2 * WINDOW
    config.sliding_window = WINDOW
    mask = transformers.models.gemma2.modeling_gemma2.create_sliding_window_causal_mask

    def wider(*args: object, **options: object) -> object:
        config.sliding_window = 2 * WINDOW
        try:
            return mask(*args, **options)
        finally:
            config.sliding_window = WINDOW

    transformers.models.gemma2.modeling_gemma2.create_sliding_window_causal_mask = wider
    try:
        with pytest.raises(ConfigError, match=r"differ by .* the first layer that differs is 0, a Gemma2"):
            describe(model, 8, name="x")
    finally:
        transformers.models.gemma2.modeling_gemma2.create_sliding_window_causal_mask = mask


@pytest.mark.parametrize("family", ["mamba", "jamba", "mixtral", "nemotron_h"])
def test_in_half_precision_rounding_hides_no_lost_state(family: str) -> None:
    """Nor are experts that are nearly even taken for an error."""
    layout = describe(make(family).to(torch.bfloat16), 8, name="half")
    assert layout.one_by_one >= (family in ONE_BY_ONE)


def test_a_model_that_raises_on_pages_is_refused() -> None:
    model = make("deepseek_v3")

    def raises(module: Any, args: Any, options: Any) -> None:
        if options.get("past_key_values", options.get("cache")) is not None and options["position_ids"].min() > 0:
            raise RuntimeError("not from here")

    model.register_forward_pre_hook(raises, with_kwargs=True)
    with pytest.raises(ConfigError, match="DeepseekV3ForCausalLM: on pages it raises RuntimeError: not from here"):
        describe(model, 8, name="x")


@pytest.mark.parametrize(("kind", "settings", "said"), [
    ("xLSTMConfig", {"hidden_size": 32, "num_heads": 4, "num_blocks": 2, "vocab_size": 64},
     "xLSTMForCausalLM: it wants a cache of a class of its own, which is not known"),
    ("RecurrentGemmaConfig", {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 64,
                              "num_attention_heads": 2, "lru_width": 32, "attention_window_size": 16},
     "layer 0: the model left its LinearAttentionLayer empty and keeps its cache elsewhere"),
    ("OpenAIGPTConfig", {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64}, "its forward.. takes no cache"),
])  # fmt: skip
def test_what_cannot_be_cached_is_refused_in_a_sentence(kind: str, settings: dict[str, object], said: str) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**settings)
    model = even(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())
    with pytest.raises(ConfigError, match=said):
        describe(model, 8, name="x")


def test_an_encoder_with_a_decoder_is_refused() -> None:
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=64)
    with pytest.raises(ConfigError, match=r"T5ForConditionalGeneration: an encoder's states are not a prefix"):
        describe(transformers.T5ForConditionalGeneration(config), 8, name="x")
