"""Compressed attention: beside its window a layer keeps one entry per ``compress_rate`` tokens, for the whole prefix.

The module is written for these attributes of transformers' cache class, each a dict by the compressor's name:
``compressed_kv`` has the entries; ``buffer_kv`` and ``buffer_gate`` have the tokens that do not fill an entry yet. If
entries overlap, ``overlap_kv`` and ``overlap_gate`` have the tokens of the last entry, which the next entry needs too.

Laws. An entry belongs to the page of its last token. The state with which a compressor goes on from a page's end is in
the window's page, so it is evicted and loaded with that page. In the middle of a page this state is only in the request
that computes there (its *tail*).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from asynccache import ConfigError
from asynccache_hf.memory import Track, TrackMemory
from asynccache_hf.parts import Calls, CallSpan, LayerPart, joined, overhear

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
    """The input of one compressor in one call. ``before``: the state at the start of the call."""

    before: Tail
    raw: Calls
    entries: Calls
    overlaps: Calls


class Compressed(LayerPart):
    """All compressors of one layer."""

    has_tail = True

    def __init__(self, layer: Any, page_size: int) -> None:
        """
        Raises:
            ConfigError: the page size is neither a multiple nor a divisor of the compress rate.
        """
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
            self._go_on(layer, name, tail[name] if tail is not None else self._stored(states, span))

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

    def _go_on(self, layer: Any, name: str, state: CompressorState) -> None:
        if state.overlap_kv is not None and state.overlap_gate is not None:
            width = state.overlap_kv.shape[-1]
            layer.update_overlap_state(name, state.overlap_kv[:, None], state.overlap_gate[:, None], width)
        if state.buffer_kv is not None:
            layer.store_compression_weights(name, state.buffer_kv, state.buffer_gate)

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
