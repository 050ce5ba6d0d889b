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
from asynccache_shim.model import Work

from asynccache_hf.attending import LAYER_TYPES, Attended, Row, places_of, take_part
from asynccache_hf.call import parameters
from asynccache_hf.layout import Layout
from asynccache_hf.memory import Slots
from asynccache_hf.parts import Attention

IMPLEMENTATION = "sdpa"
"""The attention function that takes part; ``eager`` takes another one's place for it."""

Numbers = npt.NDArray[np.int64]


def can_be_packed(model: Any, layout: Layout) -> bool:
    """Whether there is reason to try: each layer has keys and values and nothing else, all windows are equal, and the
    model's attention asks a cache for them."""
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


class Packed:
    """Rows of requests on one model's pages."""

    def __init__(self, model: Any, layout: Layout, slots: Sequence[Slots]) -> None:
        """``slots``: of each layer's keys and values."""
        take_part()
        self._model = model
        self._layout = layout
        self._pages = Attended(layout, slots)
        self._keeps = "logits_to_keep" in parameters(model)

    def compute(self, works: Sequence[Work], keep: int) -> list[torch.Tensor]:
        """One call; for each work the logits of its last ``keep`` tokens (0: of all).

        Raises:
            ConfigError: a work reaches further than the layout's limit.
            IndexError: a work has no page for a token that it reads or writes.
        """
        for work in works:
            self._layout.check_length(work.stop)
        device = self._model.device
        tokens = np.concatenate([work.tokens[work.start : work.stop] for work in works]).astype(np.int64)
        places = np.concatenate([np.arange(work.start, work.stop) for work in works])
        self._pages.plan([self._row(work, device) for work in works])
        wanted = _wanted(works, keep)
        options: dict[str, Any] = {"logits_to_keep": torch.from_numpy(wanted).to(device)} if self._keeps else {}
        out = self._model(
            input_ids=torch.from_numpy(tokens).to(device).unsqueeze(0),
            position_ids=torch.from_numpy(places).to(device).unsqueeze(0),
            attention_mask=self._pages.mask, cache=self._pages, use_cache=False, **options,
        )  # fmt: skip
        logits = out.logits[0] if self._keeps else out.logits[0, wanted]
        return list(torch.split(logits, [_kept(work, keep) for work in works]))

    def _row(self, work: Work, device: torch.device) -> Row:
        size = self._layout.page_size
        for component, window in self._pages.windows.items():
            pages = work.pages if component == "full" else work.swa_pages
            first = 0 if window is None else max(0, work.start - window + 1)
            read = pages[first // size : -(-work.stop // size)]
            if len(read) < -(-work.stop // size) - first // size or (read < 0).any():
                raise IndexError(f"pool {component!r}: request {work.request_id} has no page for a token that it reads")
        return Row(places_of(self._layout, work.pages, work.swa_pages, device), work.start, work.stop)


def _kept(work: Work, keep: int) -> int:
    count = work.stop - work.start
    return min(keep, count) if keep else count


def _wanted(works: Sequence[Work], keep: int) -> Numbers:
    """Where the tokens stand in the row whose logits are asked for."""
    ends = np.cumsum([work.stop - work.start for work in works])
    return np.concatenate([np.arange(end - _kept(work, keep), end) for work, end in zip(works, ends, strict=True)])
