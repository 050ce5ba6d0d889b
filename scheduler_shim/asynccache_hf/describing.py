"""``describe``: from a model to the pools that its cache needs, or a refusal that says why.

What a layer keeps is asked of its cache class after a short run of the model; nothing is known by a model's name. The
model is then tried on pages (``asynccache_hf.trial``): one that computes anything else there than in one call without a
cache is refused.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import xxhash
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from asynccache import ConfigError, checks
from asynccache_hf import lightning
from asynccache_hf.call import cache_name, run
from asynccache_hf.compressed import Compressed, is_compressed
from asynccache_hf.layout import Layout
from asynccache_hf.limits import longest
from asynccache_hf.parts import Attention, IndexerKeys, LayerPart, Recurrent
from asynccache_hf.trial import ExpectedLogits, tokens_for, tried

SCHEMA = 1
"""Raise it when a page's bytes change their meaning."""

PROBE_TOKENS = 8

LayerParts = Callable[[Any, int], tuple[LayerPart, ...]]


def describe(model: Any, page_size: int = 16, *, name: str | None = None) -> Layout:
    """The layout of a causal language model's cache in pages of ``page_size`` tokens.

    ``name`` names the weights; without it they are digested, which reads all of them once. The model is run over a few
    pages, or somewhat more than its longest window, several times.

    Raises:
        ConfigError: the model keeps something that this engine does not understand, or computes something else on pages
            than in one call without a cache.
    """
    return described(model, page_size, name)[0]


def described(model: Any, page_size: int, name: str | None) -> tuple[Layout, ExpectedLogits]:
    """The same, and the logits that the model was held against. Raises as ``describe``."""
    page_size = checks.integer("page_size", page_size, 1)
    if name is not None:
        checks.text("name", name, empty=False)
    cache = _probe(model)
    parts = [_parts_of(cache, i, page_size) for i in range(len(cache.layers))]
    window = max((w for w in map(_window, cache.layers) if w), default=0)
    layout = Layout.of(name or weights_name(model), page_size, window, parts)
    if not layout.pools:
        raise ConfigError(f"{type(model).__name__}: no layer keeps anything that could be cached")
    layout = replace(layout, kind=type(cache), limit=longest(model.config))
    rates = [int(getattr(layer, "compress_rate", 0)) for layer in cache.layers]
    expected = ExpectedLogits.of(model, layout, max(window, *rates))
    return tried(model, layout, expected), expected


def weights_name(model: Any) -> str:
    """A name that differs when configuration or weights do."""
    digest = hashlib.sha256(f"{SCHEMA} {model.config.to_json_string()}".encode())
    for name, tensor in model.state_dict().items():
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)} ".encode())
        digest.update(xxhash.xxh3_128_digest(plain.reshape(-1).view(torch.uint8).numpy()))
    return f"{type(model).__name__}-{digest.hexdigest()[:24]}"


def _probe(model: Any) -> Any:
    """The model's cache after a run over so few tokens that every layer shows what it keeps."""
    who = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(f"{who}: an encoder's states are not a prefix of anything and cannot be cached by tokens")
    cache_name(model)
    own = _own(model)
    cache = _dynamic(model) if own is None else own
    if type(cache) is DynamicCache and not cache.layers:
        raise ConfigError(f"{who}: its configuration does not say which layers keep a cache")
    tokens = max([PROBE_TOKENS, *(int(getattr(layer, "compress_rate", 0)) for layer in cache.layers)])
    try:
        with torch.inference_mode():
            run(model, tokens_for(model, tokens), cache)
    except ConfigError:
        raise
    except AttributeError as error:
        raise ConfigError(f"{who}: it wants a cache of a class of its own, which is not known ({error})") from error
    except Exception as error:  # models raise whatever they like
        raise ConfigError(f"{who}: it does not run on a {type(cache).__name__}: {_sentence(error)}") from error
    while lightning.has_matrices(cache) and len(cache.layers) < len(cache.linear_cache):
        cache.layers.append(DynamicLayer())
    return cache


def _dynamic(model: Any) -> DynamicCache:
    who = type(model).__name__
    try:
        return DynamicCache(config=model.config)
    except KeyError as error:
        raise ConfigError(f"{who}: transformers has no cache class for layers of type {error}") from error
    except Exception as error:
        raise ConfigError(f"{who}: transformers cannot make a DynamicCache for it: {_sentence(error)}") from error


def _own(model: Any) -> Any:
    """An empty cache of a class of the model's own that is understood, as it makes one where it is given none."""
    module = inspect.getmodule(type(model))
    kinds = [kind for _, kind in inspect.getmembers(module, inspect.isclass) if kind.__module__ == module.__name__] \
        if module else []  # fmt: skip
    own = [kind for kind in kinds if issubclass(kind, DynamicCache) and hasattr(kind, "set_linear_cache")]
    if not own:
        return None
    return own[0]()


def _sentence(error: Exception) -> str:
    """The first line of what it says, with its class where that says more."""
    line = next(iter(str(error).splitlines()), "")
    return line if isinstance(error, ValueError) and line else f"{type(error).__name__}: {line}".rstrip(": ")


def _parts_of(cache: Any, index: int, page_size: int) -> tuple[LayerPart, ...]:
    if lightning.has_matrices(cache) and (matrix := lightning.matrix_of(cache, index)) is not None:
        return (lightning.LightningMatrix(matrix, page_size, index),)
    return _parts(index, cache.layers[index], page_size)


def _parts(index: int, layer: Any, page_size: int) -> tuple[LayerPart, ...]:
    kind = type(layer)
    if is_compressed(layer):
        return (*_sliding(layer, page_size), Compressed(layer, page_size))
    if kind not in _KINDS:
        raise ConfigError(f"layer {index}: {kind.__name__} is no cache class that this engine understands")
    if kind is not DummyLayer and not _used(layer):
        raise ConfigError(f"layer {index}: the model left its {kind.__name__} empty and keeps its cache elsewhere")
    return _KINDS[kind](layer, page_size)


def _used(layer: Any) -> bool:
    states = [getattr(layer, f"is_{kind}_states_initialized", {}) for kind in ("conv", "recurrent")]
    return any(any(ready.values()) for ready in states) or bool(getattr(layer, "is_initialized", False))


def _window(layer: Any) -> int:
    return int(getattr(layer, "sliding_window", None) or 0)


def _full(layer: Any, page_size: int) -> tuple[LayerPart, ...]:
    return (Attention(layer, None),)


def _sliding(layer: Any, page_size: int) -> tuple[LayerPart, ...]:
    return (Attention(layer, _window(layer)),)


def _indexed(layer: Any, page_size: int) -> tuple[LayerPart, ...]:
    if layer.indexer_position_ids is not None:
        raise ConfigError("DynamicIndexedLayer: indexers with positions of their own are not understood")
    if not layer.is_indexer_initialized:
        return _full(layer, page_size)
    return (*_full(layer, page_size), IndexerKeys(layer))


def _recurrent(layer: Any, page_size: int) -> tuple[LayerPart, ...]:
    return (Recurrent(layer, page_size),)


_KINDS: dict[type, LayerParts] = {
    DummyLayer: lambda layer, page_size: (),
    DynamicLayer: _full,
    DynamicSlidingWindowLayer: _sliding,
    DynamicIndexedLayer: _indexed,
    LinearAttentionLayer: _recurrent,
    LinearAttentionAndFullAttentionLayer: lambda layer, size: (*_recurrent(layer, size), *_full(layer, size)),
    LinearAttentionAndSlidingWindowAttentionLayer: lambda layer, size: (
        *_recurrent(layer, size), *_sliding(layer, size)
    ),
}  # fmt: skip
