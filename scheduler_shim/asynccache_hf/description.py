"""``describe``: from a model to the pools that its cache needs, or a refusal that says why.

The layers' data is read from their cache classes after a short run of the model; no model is known by its name. The
model is then tried on pages (``asynccache_hf.trial``). A model that computes other results there than in one call
without a cache is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
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
from asynccache_hf.call import VERSION, cache_name, run
from asynccache_hf.identity import ModelIdentity, parts_of, plain
from asynccache_hf.layout import Layout
from asynccache_hf.parts import (
    Compressed,
    IndexerKeys,
    KeysAndValues,
    LayerPart,
    LightningMatrix,
    Recurrent,
    has_matrices,
    is_compressed,
    matrix_of,
    with_length,
)
from asynccache_hf.trial import ExpectedLogits, tokens_for, tried

PROBE_TOKENS = 8


def describe(model: Any, page_size: int = 16, *, name: str | None = None) -> Layout:
    """The layout of a causal language model's cache in pages of ``page_size`` tokens. The model may be one of PEFT's,
    or compiled.

    ``name`` names the weights; without it a digest of all weights is computed, which reads them once. Adapters that are
    active are part of the name, too: what is computed after they, or the weights, have changed needs another layout, or
    a ``namespace``. The model is run several times, over a few pages or somewhat more than its longest window.

    Raises:
        ConfigError: the model keeps something that this engine does not understand, computes something else on pages
            than in one call without a cache, or is in ``train()`` mode.
    """
    identity, layout, _ = identified(model, page_size, name)
    now = identity.now()
    return replace(layout, model=f"{layout.model}+{now}") if now else layout


def identified(model: Any, page_size: int, name: str | None) -> tuple[ModelIdentity, Layout, ExpectedLogits]:
    """Return the model's identity, its layout, which has the name of the weights without adapters, and the logits that
    it was compared with. Raises the errors of ``describe``."""
    page_size = checks.integer("page_size", page_size, 1)
    if name is not None:
        checks.text("name", name, empty=False)
    model = plain(model)
    cache = _probe(model)
    parts_of(model)  # refuses train() mode, in which no trial can be passed
    parts = [_parts(cache, i, page_size) for i in range(len(cache.layers))]
    window = max((part.window or 0 for layer in parts for part in layer), default=0)
    layout = Layout.of("", page_size, window, parts)
    if not layout.pools:
        raise ConfigError(f"{type(model).__name__}: no layer keeps anything that could be cached")
    layout = replace(layout, kind=type(cache), limit=longest(model.config))
    rates = [int(getattr(layer, "compress_rate", 0)) for layer in cache.layers]
    expected = ExpectedLogits.of(model, layout, max(window, *rates))
    layout = tried(model, layout, expected)
    identity = ModelIdentity(model, name)
    return identity, replace(layout, model=identity.name), expected


def _probe(model: Any) -> Any:
    """The model's cache after a run over a few tokens, enough for every layer to show what it keeps."""
    who = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(f"{who}: an encoder's states are not a prefix of anything and cannot be cached by tokens")
    cache_name(model)
    cache = _empty(model)
    if type(cache) is DynamicCache and not cache.layers:
        raise ConfigError(f"{who}: its configuration does not say which layers keep a cache")
    tokens = max([PROBE_TOKENS, *(int(getattr(layer, "compress_rate", 0)) for layer in cache.layers)])
    try:
        with torch.inference_mode():
            run(model, tokens_for(model, tokens), cache)
    except ConfigError:
        raise
    except AttributeError as error:
        what = f"it wants a cache of a class of its own, which is not known ({error}; {VERSION})"
        raise ConfigError(f"{who}: {what}") from error
    except Exception as error:  # models raise whatever they like
        what = f"it does not run on a {type(cache).__name__}: {_sentence(error)}"
        raise ConfigError(f"{who}: {what} ({VERSION})") from error
    while has_matrices(cache) and len(cache.layers) < len(cache.linear_cache):
        cache.layers.append(DynamicLayer())
    return cache


def _empty(model: Any) -> Any:
    """Return an empty cache. If the model's module defines a cache class with a list of matrices (see ``parts``), the
    cache is of that class; otherwise it is transformers' own for the model's configuration.

    Raises:
        ConfigError: transformers cannot make one.
    """
    who, module = type(model).__name__, inspect.getmodule(type(model))
    for _, kind in inspect.getmembers(module, inspect.isclass):
        own = kind.__module__ == type(model).__module__ and issubclass(kind, DynamicCache)
        if own and hasattr(kind, "set_linear_cache"):
            return with_length(kind)()
    try:
        return DynamicCache(config=model.config)
    except KeyError as error:
        raise ConfigError(f"{who}: transformers has no cache class for layers of type {error}") from error
    except Exception as error:
        raise ConfigError(f"{who}: transformers cannot make a DynamicCache for it: {_sentence(error)}") from error


def _sentence(error: Exception) -> str:
    """Return the first line of the error's message, with the error's class if the message alone says too little."""
    line = next(iter(str(error).splitlines()), "")
    return line if isinstance(error, ValueError) and line else f"{type(error).__name__}: {line}".rstrip(": ")


def _parts(cache: Any, index: int, page_size: int) -> tuple[LayerPart, ...]:
    """The parts of one layer of the model.

    Raises:
        ConfigError: the layer is of a class that is not understood, or keeps its cache elsewhere.
    """
    if has_matrices(cache) and (matrix := matrix_of(cache, index)) is not None:
        return (LightningMatrix(matrix, page_size, index),)
    layer = cache.layers[index]
    kind = type(layer)
    if is_compressed(layer):
        return (KeysAndValues(layer, page_size), Compressed(layer, page_size))
    if kind not in _PARTS:
        raise ConfigError(f"layer {index}: {kind.__name__} is no cache class that this engine understands")
    ready = [getattr(layer, f"is_{states}_states_initialized", {}) for states in ("conv", "recurrent")]
    used = getattr(layer, "is_initialized", False) or any(any(each.values()) for each in ready)
    if kind is not DummyLayer and not used:
        raise ConfigError(f"layer {index}: the model left its {kind.__name__} empty and keeps its cache elsewhere")
    if kind is DynamicIndexedLayer and layer.indexer_position_ids is not None:
        raise ConfigError("DynamicIndexedLayer: indexers with positions of their own are not understood")
    indexes = getattr(layer, "is_indexer_initialized", False)
    return tuple(part(layer, page_size) for part in _PARTS[kind] if part is not IndexerKeys or indexes)


_PARTS: dict[type, tuple[Callable[[Any, int], LayerPart], ...]] = {
    DummyLayer: (),
    DynamicLayer: (KeysAndValues,),
    DynamicSlidingWindowLayer: (KeysAndValues,),
    DynamicIndexedLayer: (KeysAndValues, IndexerKeys),
    LinearAttentionLayer: (Recurrent,),
    LinearAttentionAndFullAttentionLayer: (Recurrent, KeysAndValues),
    LinearAttentionAndSlidingWindowAttentionLayer: (Recurrent, KeysAndValues),
}
"""The parts of a layer, by its cache class."""


def longest(config: Any) -> int | None:
    """The number of tokens up to which a prefix's keys do not depend on what follows; None: any number.

    Two kinds of rotary embedding turn every position's key by an angle that depends on how long the whole sequence is:
    ``longrope`` has one set of angles up to a length and another one beyond, ``dynamic`` changes them with each token
    beyond. Up to that length a prefix is a prefix; beyond, its keys would have to be computed anew, and transformers
    does that. So pages serve requests up to that length, and longer requests are refused.
    """
    text = config.get_text_config(decoder=True)
    given, most = getattr(text, "rope_parameters", None), int(getattr(text, "max_position_embeddings", 0) or 0)
    given = given if isinstance(given, Mapping) else {}
    limits = []
    for rope in (given,) if "rope_type" in given else given.values():  # of all layers, or of each type
        kind = str(rope.get("rope_type", "default")) if isinstance(rope, Mapping) else "default"
        if kind == "longrope":
            limits.append(int(rope.get("original_max_position_embeddings") or most))
        elif "dynamic" in kind:  # after a longer sequence, only one of fewer than ``most`` tokens restores the angles
            limits.append((most or 1) - 1)
    return min(filter(None, limits), default=None)
