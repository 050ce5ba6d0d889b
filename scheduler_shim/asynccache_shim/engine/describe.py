"""``describe``: from a model to the pools that its cache needs, or a refusal that says why.

What a layer keeps is asked of its cache class after a short run of the model; nothing is known by a model's name. The
model is then tried on pages: one whose output changes when its cache comes back from there is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
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
from asynccache_shim.engine.call import run
from asynccache_shim.engine.compressed import Compressed, is_compressed
from asynccache_shim.engine.layout import Layout
from asynccache_shim.engine.paged import PagedModel
from asynccache_shim.engine.parts import Attention, IndexerKeys, Part, Recurrent
from asynccache_shim.model import Checkpoint, Pages, Work

SCHEMA = 1
"""Raise it when a page's bytes change their meaning."""

PROBE_TOKENS = 8

TOLERANCE = 1e-3
"""What logits may differ by in the trial, relative to the largest: more than rounding, less than a lost state."""

Parts = Callable[[Any, int], tuple[Part, ...]]


def describe(model: Any, page_size: int = 16, *, name: str | None = None) -> Layout:
    """The layout of a causal language model's cache in pages of ``page_size`` tokens.

    ``name`` names the weights; without it they are digested, which reads all of them once.

    Raises:
        ConfigError: the model keeps something that this engine does not understand.
    """
    page_size = checks.integer("page_size", page_size, 1)
    if name is not None:
        checks.text("name", name, empty=False)
    cache = _probe(model)
    parts = [_parts(i, layer, page_size) for i, layer in enumerate(cache.layers)]
    window = max((w for w in map(_window, cache.layers) if w), default=0)
    layout = Layout.of(name or weights_name(model), page_size, window, parts)
    if not layout.pools:
        raise ConfigError(f"{type(model).__name__}: no layer keeps anything that could be cached")
    _try(model, layout)
    return layout


def weights_name(model: Any) -> str:
    """A name that differs when configuration or weights do."""
    digest = hashlib.sha256(f"{SCHEMA} {model.config.to_json_string()}".encode())
    for name, tensor in model.state_dict().items():
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)} ".encode())
        digest.update(xxhash.xxh3_128_digest(plain.reshape(-1).view(torch.uint8).numpy()))
    return f"{type(model).__name__}-{digest.hexdigest()[:24]}"


def _probe(model: Any) -> DynamicCache:
    """The model's cache after a run over so few tokens that every layer shows what it keeps."""
    who = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(f"{who}: an encoder's states are not a prefix of anything and cannot be cached by tokens")
    try:
        cache = DynamicCache(config=model.config)
    except KeyError as error:
        raise ConfigError(f"{who}: transformers has no cache class for layers of type {error}") from error
    if not cache.layers:
        raise ConfigError(f"{who}: its configuration does not say which layers keep a cache")
    tokens = max([PROBE_TOKENS, *(int(getattr(layer, "compress_rate", 0)) for layer in cache.layers)])
    try:
        with torch.inference_mode():
            run(model, _ids(model, tokens), cache)
    except ConfigError:
        raise
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(f"{who}: it does not run on a DynamicCache: {error}") from error
    return cache


def _ids(model: Any, count: int) -> torch.Tensor:
    """Any tokens, no two neighbours alike."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids: torch.Tensor = torch.arange(count, device=model.device) * 7 % vocabulary
    return ids


def _parts(index: int, layer: Any, page_size: int) -> tuple[Part, ...]:
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


def _full(layer: Any, page_size: int) -> tuple[Part, ...]:
    return (Attention(layer, None),)


def _sliding(layer: Any, page_size: int) -> tuple[Part, ...]:
    return (Attention(layer, _window(layer)),)


def _indexed(layer: Any, page_size: int) -> tuple[Part, ...]:
    if layer.indexer_position_ids is not None:
        raise ConfigError("DynamicIndexedLayer: indexers with positions of their own are not understood")
    if not layer.is_indexer_initialized:
        return _full(layer, page_size)
    return (*_full(layer, page_size), IndexerKeys(layer))


def _recurrent(layer: Any, page_size: int) -> tuple[Part, ...]:
    return (Recurrent(layer, page_size),)


_KINDS: dict[type, Parts] = {
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


# the trial


class _Memory:
    """A pool of the trial."""

    def __init__(self, layers: int, pages: int, size: int, device: torch.device) -> None:
        self._layers = torch.zeros((layers, pages, size), dtype=torch.uint8, device=device)

    def layer(self, i: int) -> torch.Tensor:
        return self._layers[i]


def _try(model: Any, layout: Layout) -> None:
    """Run a page and a bit; go on from the whole page alone, as a second request that shares it would."""
    size = layout.page_size
    ids = _ids(model, size + 3)
    more = -(-3 // size)  # pages after the first
    first = _Request(1, np.arange(1 + more, dtype=np.int32), np.array([0], np.int32))
    second = _Request(2, np.array([0, *range(1 + more, 1 + 2 * more)], np.int32), np.array([1], np.int32))
    memory = {p.name: _Memory(p.layers, 1 + 2 * more, p.layer_bytes, model.device) for p in layout.pools}
    paged = PagedModel(model, layout, memory)
    tokens = ids.cpu().numpy().astype(np.int32)
    paged.compute(_work(tokens, 0, size, first, Checkpoint(size, 1)))
    paged.compute(_work(tokens, size, size + 2, first))
    found = [paged.compute(_work(tokens, size + 2, size + 3, first))]
    found += [paged.compute(_work(tokens, size, size + 3, second))]
    expected = _straight(model, ids, (0, size, size + 2, size + 3)), _straight(model, ids, (0, size, size + 3))
    for seen, wanted in zip(found, expected, strict=True):
        error = float((seen - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))
        if not error <= TOLERANCE:
            raise ConfigError(
                f"{type(model).__name__}: with its cache put back from pages its logits differ by {error:.2g}: it "
                f"keeps something beside its cache's layers, or needs more than a page of {size} tokens holds"
            )


class _Request(NamedTuple):
    """Pages and state of one of the trial's two requests."""

    id: int
    pages: Pages
    states: Pages


def _work(tokens: Pages, start: int, stop: int, who: _Request, checkpoint: Checkpoint | None = None) -> Work:
    return Work(who.id, tokens, start, stop, who.pages, who.pages, who.states, checkpoint, sample=False)


def _straight(model: Any, ids: torch.Tensor, cuts: tuple[int, ...]) -> torch.Tensor:
    """The last logits without pages, in the same calls."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        for start, stop in pairwise(cuts):
            logits = run(model, ids[start:stop], cache)
    return logits
