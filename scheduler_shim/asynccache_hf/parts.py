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
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

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
    """One kind of data of one layer."""

    tracks: tuple[Track, ...]
    """Where the data is kept; the methods get the ``TrackMemory`` of each track, in this order."""
    window: int | None = None
    """The tokens of a sliding window; None: there is none."""
    has_tail = False
    """True if a request that goes on within a page needs data that is not in the page."""

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


# Compressed attention: beside its window a layer keeps one entry per `compress_rate` tokens, for the whole prefix.
#
# This is written for these attributes of transformers' cache class, each a dict by the compressor's name:
# `compressed_kv` has the entries; `buffer_kv` and `buffer_gate` have the tokens that do not fill an entry yet. If
# entries overlap, `overlap_kv` and `overlap_gate` have the tokens of the last entry, which the next entry needs too.
#
# An entry belongs to the page of its last token. The state with which a compressor goes on from a page's end is
# in the window's page, so it is evicted and loaded with that page. In the middle of a page this state is only in the
# request that computes there (its tail).

_KEEPS = {"compress_rate", "compressed_kv", "buffer_kv", "buffer_gate", "entry_count"}
_MAY_KEEP = {"overlap_kv", "overlap_gate"}
_METHODS = ("store_compression_weights", "update_compressor_states")
_OVERLAP = "update_overlap_state"


def is_compressed(layer: Any) -> bool:
    """Return True if the layer's class keeps compressed entries beside its window, and nothing else."""
    if not isinstance(layer, DynamicSlidingWindowLayer):
        return False
    more = vars(layer).keys() - vars(DynamicSlidingWindowLayer(layer.sliding_window)).keys() - {"dtype", "device"}
    methods = (*_METHODS, _OVERLAP) if more & _MAY_KEEP else _METHODS
    return _KEEPS <= more <= _KEEPS | _MAY_KEEP and all(hasattr(layer, method) for method in methods)


class CompressorState(NamedTuple):
    """The state that one compressor needs to go on: each field is ``[1, tokens, width]``, or None where there is
    nothing."""

    overlap_kv: torch.Tensor | None
    overlap_gate: torch.Tensor | None
    buffer_kv: torch.Tensor | None
    buffer_gate: torch.Tensor | None


Tail = Mapping[str, CompressorState]


class CompressorInput(NamedTuple):
    """The input of one compressor in one call."""

    before: Tail
    """The state at the start of the call."""
    raw: Calls
    entries: Calls
    overlaps: Calls


class Compressed(LayerPart):
    """All compressors of one layer."""

    has_tail = True

    def __init__(self, layer: Any, page_size: int) -> None:
        """Raise ``ConfigError`` if the page size is neither a multiple nor a divisor of the compress rate."""
        self._rate = rate = int(layer.compress_rate)
        if page_size % rate and rate % page_size:
            raise ConfigError(f"page_size={page_size} is neither a multiple nor a divisor of the compress rate {rate}")
        self._overlaps = hasattr(layer, "overlap_kv")
        self._buffered = rate - page_size if page_size % rate else 0
        self._blank = {name: torch.zeros_like(kv) for name, kv in layer.overlap_kv.items()} if self._overlaps else {}
        self._compressors = {name: self._compressor(layer, name, page_size) for name in layer.compressed_kv}
        self.tracks = tuple(track for tracks in self._compressors.values() for track in tracks)

    def _compressor(self, layer: Any, name: str, page_size: int) -> tuple[Track, ...]:
        """The track of the entries, and one of the state at a page's end if there is any."""
        pool = f"c{self._rate}" if name == "compressor" else f"c{self._rate}_{name}"
        entries = Track.of(pool, "full", self._rate, {"kv": layer.compressed_kv[name][0, 0]})
        state: dict[str, torch.Tensor] = {}
        if self._overlaps:
            state |= {"overlap_kv": layer.overlap_kv[name][0], "overlap_gate": layer.overlap_gate[name][0]}
        if self._buffered:
            for field, kept in (("buffer_kv", layer.buffer_kv), ("buffer_gate", layer.buffer_gate)):
                state[field] = kept[name].new_empty((self._buffered, kept[name].shape[-1]))
        return (entries, Track.of(f"{pool}_state", "swa", page_size, state)) if state else (entries,)

    def _own(self, slots: Sequence[TrackMemory]) -> dict[str, tuple[TrackMemory, TrackMemory | None]]:
        """The memory of the tracks by compressor: of its entries, and of its state."""
        left = iter(slots)
        return {name: (next(left), next(left) if len(t) > 1 else None) for name, t in self._compressors.items()}

    # putting back

    def load(self, layer: Any, slots: Sequence[TrackMemory], span: CallSpan, tail: Tail | None) -> None:
        for name, (entries, states) in self._own(slots).items():
            count = span.start // self._rate
            if count:
                found = entries.read(span.tables["full"], 0, count)["kv"]
                layer.update_compressor_states(name, found.unsqueeze(0))
            state = tail[name] if tail is not None else self._stored(states, span)
            if state.overlap_kv is not None and state.overlap_gate is not None:
                width = state.overlap_kv.shape[-1]
                layer.update_overlap_state(name, state.overlap_kv[:, None], state.overlap_gate[:, None], width)
            if state.buffer_kv is not None:
                layer.store_compression_weights(name, state.buffer_kv, state.buffer_gate)

    def _stored(self, slots: TrackMemory | None, span: CallSpan) -> CompressorState:
        """The state at the end of the page before ``span.start``."""
        if slots is None:
            return CompressorState(None, None, None, None)
        page = span.start // span.page_size - 1
        found = slots.read(span.tables["swa"], page, page + 1)
        has_overlap = self._overlaps and span.start >= self._rate
        buffered = span.start % self._rate
        overlap = [found[field] if has_overlap else None for field in ("overlap_kv", "overlap_gate")]
        buffer = [found[field][:, :buffered] if buffered else None for field in ("buffer_kv", "buffer_gate")]
        return CompressorState(*overlap, *buffer)

    # taking away

    def tail(self, layer: Any) -> Tail:
        nothing: dict[str, None] = dict.fromkeys(self._compressors)
        overlap_kv = layer.overlap_kv if self._overlaps else nothing
        overlap_gate = layer.overlap_gate if self._overlaps else nothing
        return {
            name: CompressorState(overlap_kv[name], overlap_gate[name], layer.buffer_kv[name], layer.buffer_gate[name])
            for name in self._compressors
        }

    def watch(self, layer: Any) -> CompressorInput:
        raw, entries = (overhear(layer, method) for method in _METHODS)
        return CompressorInput(self.tail(layer), raw, entries, overhear(layer, _OVERLAP) if self._overlaps else [])

    def save(self, layer: Any, slots: Sequence[TrackMemory], span: CallSpan, heard: CompressorInput) -> None:
        for name, (entries, states) in self._own(slots).items():
            made = [compressed[0] for who, compressed in heard.entries if who == name]
            entries.write(span.tables["full"], span.start // self._rate, {"kv": torch.cat(made)})
            first, stop = span.start // span.page_size, span.stop // span.page_size
            if states is not None and stop > first:
                values = self._overlaps_at(name, span, heard) | self._buffers_at(name, span, heard)
                states.write(span.tables["swa"], first, values)

    def _ends(self, span: CallSpan) -> range:
        """Return the ends of the pages in the span."""
        size = span.page_size
        return range((span.start // size + 1) * size, span.stop + 1, size)

    def _overlaps_at(self, name: str, span: CallSpan, heard: CompressorInput) -> dict[str, torch.Tensor]:
        """The overlap at each page's end: that of the last entry that was complete there."""
        if not self._overlaps:
            return {}
        made = [(kv[0, ..., :width], gate[0, ..., :width]) for who, kv, gate, width in heard.overlaps if who == name]
        before = heard.before[name]
        if before.overlap_kv is not None and before.overlap_gate is not None:
            made.insert(0, (before.overlap_kv, before.overlap_gate))
        else:
            made.insert(0, (self._blank[name], self._blank[name]))
        kv, gate = (torch.cat([pair[i] for pair in made]) for i in range(2))
        last = span.stop // self._rate
        back = [end // self._rate - last - 1 for end in self._ends(span)]
        return {"overlap_kv": kv[back], "overlap_gate": gate[back]}

    def _buffers_at(self, name: str, span: CallSpan, heard: CompressorInput) -> dict[str, torch.Tensor]:
        """The tokens at each page's end that did not fill an entry."""
        if not self._buffered:
            return {}
        own = [call for call in heard.raw if call[0] == name]
        kv, gate = (joined(own, at, 1, name) for at in (1, 2))
        before = heard.before[name]
        if before.buffer_kv is not None and before.buffer_gate is not None:
            kv, gate = torch.cat([before.buffer_kv, kv], 1), torch.cat([before.buffer_gate, gate], 1)
        return {"buffer_kv": self._cut(kv[0], span), "buffer_gate": self._cut(gate[0], span)}

    def _cut(self, raw: torch.Tensor, span: CallSpan) -> torch.Tensor:
        """Return the buffer at each page's end, ``[ends, tokens, width]``, filled up with zeros. ``raw``: the tokens
        from the start of the entry that ``span.start`` is in."""
        base = span.start // self._rate * self._rate
        cut = raw.new_zeros((len(self._ends(span)), self._buffered, raw.shape[-1]))
        for row, end in zip(cut, self._ends(span), strict=True):
            tokens = raw[end // self._rate * self._rate - base : end - base]
            row[: len(tokens)] = tokens
        return cut
