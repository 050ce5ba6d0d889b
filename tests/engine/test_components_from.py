"""``components_from``: what transformers' configuration says must be what the model, run, is seen to keep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asynccache import CacheConfig, ConfigError, Full, SlidingWindow, components_from
from tests.engine.engine_kit import layout_of, model_of


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3", "mistral", "gpt_oss", "cohere2", "phi3", "gemma2"])
def test_components_are_those_that_the_model_is_seen_to_keep(family: str) -> None:
    config = model_of(family).config
    described = layout_of(family, 16).cache_config(device_tokens=4096, host_tokens=8192)
    made = CacheConfig(model="m", page_size=16, components=components_from(config, device=4096, host=8192))
    assert described.sidecars == ()
    for ours, theirs in zip(made.pools(), described.pools(), strict=True):
        for name in ("name", "bytes_per_page", "layers", "device_pages", "host_pages", "dtype", "model_layers"):
            assert getattr(ours, name) == getattr(theirs, name), (family, name)
    windows = [one.window for one in made.components if isinstance(one, SlidingWindow)]
    assert windows == [one.window for one in described.components if isinstance(one, SlidingWindow)]


@pytest.mark.parametrize(
    "family", ["falcon_h1", "qwen3_next", "deepseek_v3", "deepseek_v4", "gemma3n", "lfm2", "mamba2"]
)
def test_a_model_that_keeps_something_else_is_refused(family: str) -> None:
    """Attention beside states in one layer, states, latent vectors, compressed layers, shared layers."""
    with pytest.raises(ConfigError, match="describe"):
        components_from(model_of(family).config, device=4096)


def text_model(**more: Any) -> SimpleNamespace:
    given = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64,
             "dtype": torch.bfloat16}  # fmt: skip
    return SimpleNamespace(**{**given, **more})


def test_bytes_are_shared_by_all_layers_and_heads_by_the_ranks() -> None:
    (full,) = components_from(text_model(), device="1MiB", host="4MiB")
    assert (full.kv_heads, full.head_dim, full.dtype) == (2, 8, "bfloat16")
    assert (full.device_tokens, full.host_tokens) == (4096, 16384)  # 4 layers * 2 * 2 heads * 8 * 2 bytes = 256 a token
    (half,) = components_from(text_model(), device="1MiB", tp=2)
    assert (half.kv_heads, half.device_tokens) == (1, 8192)
    (copied,) = components_from(text_model(), device="1MiB", tp=8)  # each head is on four ranks
    assert copied.kv_heads == 1
    mixed = text_model(sliding_window=128, layer_types=["sliding_attention"] * 3 + ["full_attention"])
    components = components_from(mixed, device="1MiB")
    assert [one.device_tokens for one in components] == [4096, 4096]
    assert [one.bytes_per_token for one in components] == [64, 192]


def test_a_model_of_windows_alone_has_full_attention_without_bytes() -> None:
    full, swa = components_from(text_model(sliding_window=128), device=1024, dtype="float16")
    assert isinstance(full, Full)
    assert (full.bytes_per_token, swa.layers, swa.dtype) == (0, 4, "float16")
    (full,) = components_from(text_model(sliding_window=128, use_sliding_window=False), device=1024)
    assert full.layers == 4


@pytest.mark.parametrize(("changes", "given", "match"), [
    ({"dtype": None}, {}, "give the dtype"),
    ({"num_hidden_layers": None}, {}, "num_hidden_layers=None must be an integer"),
    ({"num_key_value_heads": [2, 4]}, {}, "num_key_value_heads"),
    ({"layer_types": ["sliding_attention"] * 4}, {}, "sliding_window=0 must be at least 1"),
    ({}, {"tp": 3}, "cannot be divided"),
    ({}, {"device": "1KiB"}, "less than 1024 tokens of 256 bytes"),
    ({}, {"device": "many"}, "device='many' is no size"),
    ({}, {"device": 1000}, "device_tokens=1000 is not a multiple"),
    ({}, {"dtype": "flaot32"}, "did you mean 'float32'"),
])  # fmt: skip
def test_what_cannot_be_used_is_refused_by_name(changes: dict[str, Any], given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        CacheConfig(model="m", components=components_from(text_model(**changes), **{"device": 4096, **given}))
