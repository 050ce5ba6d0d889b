"""``describe``: what is found in a model's cache, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from asynccache_hf import describe
from asynccache_hf.call import cache_name
from asynccache_hf.trial import MORE
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from asynccache import CacheConfig
from asynccache.core.settings import HitPolicy
from asynccache.errors import ConfigError
from tests.engine.engine_kit import layout_of, model_of
from tests.engine.engine_models import WINDOW, make


def config(family: str, page_size: int) -> CacheConfig:
    return layout_of(family, page_size).cache_config(device_tokens=256, host_tokens=256)


def test_deepseek_v4_in_pages_that_its_rates_divide() -> None:
    """FULL is logical; entries take FULL's slots and are needed everywhere, states the window's, where it ends."""
    settings = config("deepseek_v4", 16)
    assert settings.components[0].bytes_per_token == 0  # type: ignore[union-attr]
    policies = {s.name: (s.indices_from, s.hit_policy) for s in settings.sidecars}
    assert policies == {
        "c16": ("full", HitPolicy.ALL_PAGES),
        "c4": ("full", HitPolicy.ALL_PAGES),
        "c4_indexer": ("full", HitPolicy.ALL_PAGES),
        "c4_state": ("swa", HitPolicy.TRAILING_PAGES),
        "c4_indexer_state": ("swa", HitPolicy.TRAILING_PAGES),
    }


def test_a_state_between_pages_is_a_pool_where_a_page_is_smaller_than_the_rate() -> None:
    assert "c16_state" in {s.name for s in config("deepseek_v4", 8).sidecars}
    assert "c16_state" not in {s.name for s in config("deepseek_v4", 32).sidecars}


@pytest.mark.parametrize(("page_size", "rate"), [(6, 16), (12, 16), (24, 16), (3, 16)])
def test_a_page_size_that_does_not_fit_the_rates_is_refused(page_size: int, rate: int) -> None:
    with pytest.raises(ConfigError, match=f"page_size={page_size} is neither a multiple nor a divisor .* {rate}"):
        describe(model_of("deepseek_v4"), page_size)


@pytest.mark.parametrize("family", ["qwen3", "falcon_h1"])
def test_the_name_follows_weights_and_configuration(family: str) -> None:
    name = layout_of(family).model
    assert describe(make(family), 8).model == name
    assert describe(make(family, seed=1), 8).model != name
    assert describe(make(family, initializer_range=0.1), 8).model != name


def test_windows_come_from_the_cache_classes() -> None:
    assert layout_of("gemma3").window == layout_of("deepseek_v4").window == WINDOW
    assert layout_of("qwen3").window == 0


def test_states_of_different_dtypes_share_a_slot() -> None:
    """The trial has put them back: in half precision the recurrent state stays float32 and the convolution's is not."""
    layout = describe(make("falcon_h1").to(torch.bfloat16), 8)
    assert {pool.name: pool.dtype for pool in layout.pools} == {"mamba": "bfloat16+float32", "full": "bfloat16"}


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "lfm2", "nemotron_h"])
def test_only_the_logits_that_are_compared_are_computed(family: str) -> None:
    """Those of a whole window are GiB: 4096 tokens of a vocabulary of 256000."""
    model, size, rows = make(family), 4, []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    try:
        describe(model, size, name=family)
    finally:
        hook.remove()
    most = size + MORE  # of each request, a page and what follows the last one
    assert max(rows) == (2 * most if family in ("llama", "gpt_oss") else most + 1)


# refusals


def test_a_cache_class_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(DynamicLayer):  # type: ignore[misc]
        pass

    monkeypatch.setitem(transformers.cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "full_attention", Odd)
    with pytest.raises(ConfigError, match="layer 0: Odd is no cache class"):
        describe(model_of("qwen3"), 8)


def test_a_window_that_keeps_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class More(DynamicSlidingWindowLayer):  # type: ignore[misc]
        def __init__(self, sliding_window: int, **options: Any) -> None:
            super().__init__(sliding_window, **options)
            self.compress_rate = 4

    monkeypatch.setitem(transformers.cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "sliding_attention", More)
    with pytest.raises(ConfigError, match="layer 0: More is no cache class"):
        describe(model_of("gemma3"), 8)


def test_a_model_that_keeps_something_elsewhere_is_refused() -> None:
    """The trial finds it: its output is not a function of its cache's layers."""
    model = make("qwen3")
    last = {"hidden": torch.zeros(32)}

    def leak(module: Any, args: Any, hidden: torch.Tensor) -> torch.Tensor:
        mixed = hidden + last["hidden"]
        last["hidden"] = hidden[0, -1]
        return mixed

    model.model.embed_tokens.register_forward_hook(leak)
    with pytest.raises(ConfigError, match="its logits differ"):
        describe(model, 8)


def test_a_layer_may_be_updated_twice_in_a_call() -> None:
    """What all updates of a call were given goes to pages, in their order."""
    model = make("qwen3")
    block = model.model.layers[0].self_attn
    forward = block.forward

    class Halves:
        def __init__(self, cache: Any) -> None:
            self._cache = cache

        def update(self, keys: Any, values: Any, layer: int, *more: Any, **options: Any) -> Any:
            self._cache.update(keys[:, :, :1], values[:, :, :1], layer, *more, **options)
            return self._cache.update(keys[:, :, 1:], values[:, :, 1:], layer, *more, **options)

    name = cache_name(model)

    def halved(*args: Any, **options: Any) -> Any:
        cache = options.pop(name)
        return forward(*args, **{name: cache and Halves(cache)}, **options)

    block.forward = halved
    assert [pool.name for pool in describe(model, 8).pools] == ["full"]


def test_a_model_with_a_cache_of_its_own_is_refused() -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "context_length": 64}
    model = transformers.AutoModelForCausalLM.from_config(transformers.RwkvConfig(**small))
    with pytest.raises(ConfigError, match="takes no cache"):
        describe(model.eval(), 8)


@pytest.mark.parametrize("page_size", [0, -8])
def test_a_page_has_a_size(page_size: int) -> None:
    with pytest.raises(ConfigError, match="page_size"):
        describe(model_of("qwen3"), page_size)
