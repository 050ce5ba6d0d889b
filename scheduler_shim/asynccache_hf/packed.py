"""Several requests in one forward call, on the pages themselves: for models whose layers all keep keys and values by
token.

The tokens of all requests stand in one row. Each layer's attention function hands its keys and values to
``asynccache_hf.attending``, which writes them to their pages and holds each request's tokens against its own past.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from asynccache_shim.model import Chunk

from asynccache_hf.attending import LAYER_TYPES, PagedAttention, StepRow, places_of, take_part
from asynccache_hf.call import parameters
from asynccache_hf.layout import Layout
from asynccache_hf.memory import TrackMemory
from asynccache_hf.parts import Attention

IMPLEMENTATION = "sdpa"
"""The attention function that takes part; ``eager`` takes another one's place for it."""

Numbers = npt.NDArray[np.int64]


def can_be_packed(model: Any, layout: Layout) -> bool:
    """Return True if there is reason to try: each layer has keys and values and nothing else, all windows are equal,
    and the model's attention asks a cache for them."""
    parts = [layer.parts for layer in layout.layers]
    if not all(len(own) == 1 and isinstance(own[0], Attention) for own in parts):
        return False
    windows = {own[0].window for own in parts if isinstance(own[0], Attention)} - {None}
    types = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())
    sizes = {pool.name: pool.layer_bytes for pool in layout.pools}
    return (
        len(windows) <= 1
        and all(t.page_bytes(layout.page_size) == sizes[t.pool] for own in parts for t in own[0].tracks)
        and types <= set(LAYER_TYPES.values())
        and getattr(model.config, "_attn_implementation", None) == IMPLEMENTATION
        and "position_ids" in parameters(model)
    )


class PackedRows:
    """Rows of requests on one model's pages."""

    def __init__(self, model: Any, layout: Layout, slots: Sequence[TrackMemory]) -> None:
        """``slots``: of each layer's keys and values."""
        take_part()
        self._model = model
        self._layout = layout
        self._pages = PagedAttention(layout, slots)
        self._keeps = "logits_to_keep" in parameters(model)

    def compute(self, chunks: Sequence[Chunk], keep: int) -> list[torch.Tensor]:
        """Make one call, and return for each chunk the logits of its last ``keep`` tokens (0: of all).

        Raises:
            ConfigError: a chunk reaches further than the layout's limit.
            IndexError: a chunk has no page for a token that it reads or writes.
        """
        for chunk in chunks:
            self._layout.check_length(chunk.stop)
        device = self._model.device
        tokens = np.concatenate([chunk.tokens[chunk.start : chunk.stop] for chunk in chunks]).astype(np.int64)
        places = np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks])
        self._pages.plan([self._row(chunk, device) for chunk in chunks])
        wanted = _wanted(chunks, keep)
        options: dict[str, Any] = {"logits_to_keep": torch.from_numpy(wanted).to(device)} if self._keeps else {}
        out = self._model(
            input_ids=torch.from_numpy(tokens).to(device).unsqueeze(0),
            position_ids=torch.from_numpy(places).to(device).unsqueeze(0),
            attention_mask=self._pages.mask, cache=self._pages, use_cache=False, **options,
        )  # fmt: skip
        logits = out.logits[0] if self._keeps else out.logits[0, wanted]
        return list(torch.split(logits, [_kept(chunk, keep) for chunk in chunks]))

    def _row(self, chunk: Chunk, device: torch.device) -> StepRow:
        size = self._layout.page_size
        for component, window in self._pages.windows.items():
            pages = chunk.pages if component == "full" else chunk.swa_pages
            first = 0 if window is None else max(0, chunk.start - window + 1)
            read = pages[first // size : -(-chunk.stop // size)]
            if len(read) < -(-chunk.stop // size) - first // size or (read < 0).any():
                who = f"pool {component!r}: request {chunk.request_id}"
                raise IndexError(f"{who} has no page for a token that it reads")
        return StepRow(places_of(self._layout, chunk.pages, chunk.swa_pages, device), chunk.start, chunk.stop)


def _kept(chunk: Chunk, keep: int) -> int:
    count = chunk.stop - chunk.start
    return min(keep, count) if keep else count


def _wanted(chunks: Sequence[Chunk], keep: int) -> Numbers:
    """Return the places in the row of the tokens whose logits are asked for."""
    ends = np.cumsum([chunk.stop - chunk.start for chunk in chunks])
    return np.concatenate([np.arange(end - _kept(chunk, keep), end) for chunk, end in zip(chunks, ends, strict=True)])
