"""The parts of a cached layer: for each kind of data that this package understands, how it is written to pages and read
back.

A part is written for a cache class of transformers, never for a model. It restores data from the pages through the
class's own methods, and overhears the arguments that a forward call passes to these. Parts keep nothing between calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from asynccache_shim.model import Pages
from transformers.cache_utils import DynamicLayer

from asynccache import ConfigError
from asynccache_hf.memory import Track, TrackMemory

Calls = list[tuple[Any, ...]]
"""The arguments of each call that was overheard."""


class CallSpan(NamedTuple):
    """The span that a forward call reads and writes: the page tables by component, and the tokens that it computes."""

    tables: Mapping[str, Pages]
    start: int
    stop: int
    page_size: int


class LayerPart(ABC):
    """One kind of data of one layer. ``tracks``: where it is kept; the methods get their ``TrackMemory``, in that
    order. ``window``: the tokens of a sliding window; None: there is none. ``has_tail``: True if a request that goes on
    within a page needs data that is not in the page."""

    tracks: tuple[Track, ...]
    window: int | None = None
    has_tail = False

    def of(self, cache: Any, index: int) -> Any:
        """Return the object that the other methods are given as ``layer``: the cache's layer number ``index``, which is
        made if the cache does not have it yet."""
        while len(cache.layers) <= index:
            cache.layers.append(DynamicLayer())
        return cache.layers[index]

    @abstractmethod
    def load(self, layer: Any, slots: Sequence[TrackMemory], span: CallSpan, tail: Any) -> None:
        """Put the data before ``span.start`` (not 0) into a fresh cache layer. ``tail`` is None if a page begins at
        ``span.start``."""

    def tail(self, layer: Any) -> Any:
        """Return the data that a request needs to go on within a page and that is not in the page; None if it needs
        none."""
        return None

    def watch(self, layer: Any) -> Any:
        """Begin to overhear the layer's calls, and return the object that ``save`` takes as ``heard``; None if there is
        nothing to overhear, since all is read afterwards."""
        return None

    @abstractmethod
    def save(self, layer: Any, slots: Sequence[TrackMemory], span: CallSpan, heard: Any) -> None:
        """Write the data that the forward call has added into the pages."""


def overhear(layer: Any, method: str) -> Calls:
    """Return a list to which the arguments of every later call of ``method`` are appended."""
    calls: Calls = []
    original = getattr(layer, method)

    def heard(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return original(*args, **options)

    setattr(layer, method, heard)
    return calls


def joined(calls: Calls, at: int, dim: int, what: str) -> torch.Tensor:
    """Return the tensors that all calls were given as argument ``at``, joined: one after the other along ``dim``, where
    tokens are.

    Raises:
        ConfigError: there was no call.
    """
    if not calls:
        raise ConfigError(f"a layer's {what} took no update in a forward call: the model keeps them elsewhere")
    return torch.cat([call[at] for call in calls], dim) if len(calls) > 1 else torch.as_tensor(calls[0][at])


class KeysAndValues(LayerPart):
    """Keys and values, token by token: of the whole prefix, or of a sliding window."""

    def __init__(self, layer: Any, page_size: int) -> None:
        self.window = window = getattr(layer, "sliding_window", None)
        self._shared = layer.values is layer.keys
        self._values = "keys" if self._shared else "values"
        samples = {"keys": layer.keys[0, :, 0], self._values: layer.values[0, :, 0]}
        pool = "full" if window is None else "swa"
        self.tracks = (Track.of(pool, pool, 1, samples),)

    def load(self, layer: Any, slots: Sequence[TrackMemory], span: CallSpan, tail: None) -> None:
        first = 0 if self.window is None else max(0, span.start - self.window + 1)
        found = slots[0].read(span.tables[self.tracks[0].source], first, span.start)
        keys, values = (found[name].transpose(0, 1).unsqueeze(0) for name in ("keys", self._values))
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, keys if self._shared else values
        if self.window is not None:
            layer.cumulative_length = span.start

    def watch(self, layer: Any) -> Calls:
        return overhear(layer, "update")

    def save(self, layer: Any, slots: Sequence[TrackMemory], span: CallSpan, heard: Calls) -> None:
        keys, values = (joined(heard, at, -2, "keys and values") for at in range(2))
        made = {"keys": keys[0].transpose(0, 1), self._values: values[0].transpose(0, 1)}
        slots[0].write(span.tables[self.tracks[0].source], span.start, made)


class IndexerKeys(LayerPart):
    """The keys of a sparse-attention indexer: one more pool beside FULL's."""

    def __init__(self, layer: Any, page_size: int) -> None:
        self.tracks = (Track.of("indexer", "full", 1, {"keys": layer.indexer_keys[0, 0]}),)

    def load(self, layer: Any, slots: Sequence[TrackMemory], span: CallSpan, tail: None) -> None:
        layer.update_indexer(slots[0].read(span.tables["full"], 0, span.start)["keys"].unsqueeze(0))

    def watch(self, layer: Any) -> Calls:
        return overhear(layer, "update_indexer")

    def save(self, layer: Any, slots: Sequence[TrackMemory], span: CallSpan, heard: Calls) -> None:
        keys = joined(heard, 0, 1, "indexer")
        slots[0].write(span.tables["full"], span.start, {"keys": keys[0]})


class Recurrent(LayerPart):
    """Convolution and recurrent states: they stand for the whole prefix, so they are seen at the end of a call only."""

    def __init__(self, layer: Any, page_size: int) -> None:
        self._conv = [i for i, ready in layer.is_conv_states_initialized.items() if ready]
        self._recurrent = [i for i, ready in layer.is_recurrent_states_initialized.items() if ready]
        self.tracks = (Track.of("mamba", "mamba", page_size, self._states(layer)),)

    def _states(self, layer: Any) -> dict[str, torch.Tensor]:
        return {f"conv{i}": layer.conv_states[i][0] for i in self._conv} | {
            f"recurrent{i}": layer.recurrent_states[i][0] for i in self._recurrent
        }

    def load(self, layer: Any, slots: Sequence[TrackMemory], span: CallSpan, tail: None) -> None:
        found = slots[0].read(span.tables["mamba"], 0, 1)
        for i in self._conv:
            layer.update_conv_state(found[f"conv{i}"], state_idx=i)
        for i in self._recurrent:
            layer.update_recurrent_state(found[f"recurrent{i}"], state_idx=i)

    def save(self, layer: Any, slots: Sequence[TrackMemory], span: CallSpan, heard: None) -> None:
        states = {name: state.unsqueeze(0) for name, state in self._states(layer).items()}
        slots[0].write(span.tables["mamba"], 0, states)


# MiniMax's cache: beside its layers of keys and values it has a list of matrices, one per layer of linear attention


def has_matrices(cache: Any) -> bool:
    """Return True if the cache's class keeps matrices beside its layers."""
    return all(hasattr(cache, name) for name in ("linear_cache", "set_linear_cache", "get_linear_cache"))


def matrix_of(cache: Any, index: int) -> torch.Tensor | None:
    """Return the matrix that the layer keeps, ``[1, heads, width, width]``; None if it is none of linear attention."""
    kept = cache.linear_cache[index] if index < len(cache.linear_cache) else None
    return kept if isinstance(kept, torch.Tensor) else None


def with_length(kind: type) -> type:
    """Return a subclass of MiniMax's cache class that knows its length also if its first layers keep matrices: where
    such a layer is asked for the length, the first layer that has keys answers."""

    class CacheWithLength(kind):  # type: ignore[misc]
        def _keyed(self, index: int) -> int:
            own = [at for at, layer in enumerate(self.layers) if layer.is_initialized]
            return index if index in own or not own else own[0]

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return int(super().get_seq_length(self._keyed(layer_idx)))

        def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
            return super().get_mask_sizes(query_length, self._keyed(layer_idx))  # type: ignore[no-any-return]

    return CacheWithLength


class LightningMatrix(Recurrent):
    """The matrix of one layer: it stands for the whole prefix, and is seen at the end of a call only."""

    def __init__(self, matrix: torch.Tensor, page_size: int, index: int) -> None:
        self._index = index
        self.tracks = (Track.of("mamba", "mamba", page_size, {"matrix": matrix[0]}),)

    def _states(self, layer: Any) -> dict[str, torch.Tensor]:
        return {"matrix": layer.linear_cache[self._index][0]}

    def of(self, cache: Any, index: int) -> Any:
        """The whole cache: the matrix is no part of a layer. Where the layer has none yet, its place is made: the class
        looks there as soon as any layer of keys and values exists."""
        kept = cache.linear_cache
        kept.extend([] for _ in range(len(kept), index + 1))
        if not isinstance(kept[index], torch.Tensor):
            kept[index] = None
        return cache

    def load(self, layer: Any, slots: Sequence[TrackMemory], span: CallSpan, tail: None) -> None:
        layer.set_linear_cache(self._index, slots[0].read(span.tables["mamba"], 0, 1)["matrix"])
