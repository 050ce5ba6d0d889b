"""MiniMax's cache: beside its layers of keys and values it has a list of matrices, one per layer of linear attention.

Written against what that class offers (``set_linear_cache``, ``get_linear_cache``), as parts are against cache layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from asynccache_hf.memory import Track, TrackMemory
from asynccache_hf.parts import CallSpan, LayerPart


def has_matrices(cache: Any) -> bool:
    """Return True if the cache's class keeps matrices beside its layers."""
    return all(hasattr(cache, name) for name in ("linear_cache", "set_linear_cache", "get_linear_cache"))


def matrix_of(cache: Any, index: int) -> torch.Tensor | None:
    """Return the matrix that the layer keeps, ``[1, heads, width, width]``; None if it is none of linear attention."""
    kept = cache.linear_cache[index] if index < len(cache.linear_cache) else None
    return kept if isinstance(kept, torch.Tensor) else None


class LightningMatrix(LayerPart):
    """The matrix of one layer: it stands for the whole prefix, and is seen at the end of a call only."""

    keeps = "a matrix of linear attention"

    def __init__(self, matrix: torch.Tensor, page_size: int, index: int) -> None:
        self._index = index
        self.tracks = (Track.of("mamba", "mamba", page_size, {"matrix": matrix[0]}),)

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

    def watch(self, layer: Any) -> None:
        """Return nothing, for there is nothing to overhear: the matrix is read afterwards."""

    def save(self, layer: Any, slots: Sequence[TrackMemory], span: CallSpan, heard: None) -> None:
        slots[0].write(span.tables["mamba"], 0, {"matrix": layer.linear_cache[self._index]})
