"""Several requests in one forward call, on the pages themselves: for models whose layers all keep keys and values by
token.

The tokens of all requests stand in one row. Each layer hands its new keys and values to ``update``, which writes them
to their pages and reads, through one index of all requests' tokens, what the row's tokens attend to; a mask keeps
requests apart. It is the way of transformers' continuous batching, and uses its seam: an attention function that is
given a ``PagedAttentionCache`` asks that for keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from asynccache_shim.model import Work
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from asynccache_hf.call import parameters
from asynccache_hf.layout import Layout
from asynccache_hf.memory import Slots
from asynccache_hf.parts import Attention

TOGETHER = 32
"""A work of more tokens than this is a call of its own: a row's tokens are held against all that the row attends to,
whosever it is, and for many tokens that costs more than a call."""

IMPLEMENTATION = "sdpa"
"""The attention function that takes part; ``eager`` takes another one's place for it."""

LAYER_TYPES = {"full": "full_attention", "swa": "sliding_attention"}

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


class Table(NamedTuple):
    """One component of a row: ``write``, where each new token goes; ``read``, what the row attends to, request after
    request, in the order of their tokens; ``mask``: ``[1, 1, tokens, read]``, true where a token attends."""

    write: torch.Tensor
    read: torch.Tensor
    mask: torch.Tensor


class _Rows(PagedAttentionCache):  # type: ignore[misc]
    """What the model's attention asks for keys and values. transformers' own constructor is not called: it would
    allocate a cache."""

    def __init__(self, slots: Sequence[Slots], components: Sequence[str]) -> None:
        self._slots = slots
        self._components = components
        self.tables: Mapping[str, Table] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[1, heads, tokens, width]`` of one layer; keys and values of all that the row attends to."""
        table, slots = self.tables[self._components[layer_idx]], self._slots[layer_idx]
        made = {"keys": key_states[0].transpose(0, 1), "values": value_states[0].transpose(0, 1)}
        slots.put(table.write, made)
        found = slots.take(table.read)
        keys, values = found["keys"], found.get("values", found["keys"])
        return keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)


class Packed:
    """Rows of requests on one model's pages."""

    def __init__(self, model: Any, layout: Layout, slots: Sequence[Slots]) -> None:
        """``slots``: of each layer's keys and values."""
        self._model = model
        self._layout = layout
        parts = [layer.parts[0] for layer in layout.layers]
        components = [part.tracks[0].source for part in parts]
        self._windows = {c: p.window for c, p in zip(components, parts, strict=True) if isinstance(p, Attention)}
        self._rows = _Rows(slots, components)
        self._keeps = "logits_to_keep" in parameters(model)

    def groups(self, works: Sequence[Work]) -> Iterator[list[int]]:
        """Which of them are computed together, by their places."""
        few = [i for i, work in enumerate(works) if work.stop - work.start <= TOGETHER]
        if few:
            yield few
        yield from ([i] for i, work in enumerate(works) if work.stop - work.start > TOGETHER)

    def compute(self, works: Sequence[Work], keep: int) -> list[torch.Tensor]:
        """One call; for each work the logits of its last ``keep`` tokens (0: of all).

        Raises:
            ConfigError: a work reaches further than the layout's limit.
        """
        for work in works:
            self._layout.check_length(work.stop)
        device = self._model.device
        tokens = np.concatenate([work.tokens[work.start : work.stop] for work in works]).astype(np.int64)
        places = np.concatenate([np.arange(work.start, work.stop) for work in works])
        self._rows.tables = {c: self._table(works, c, window, device) for c, window in self._windows.items()}
        masks = {LAYER_TYPES[c]: table.mask for c, table in self._rows.tables.items()}
        wanted = _wanted(works, keep)
        options: dict[str, Any] = {"logits_to_keep": torch.from_numpy(wanted).to(device)} if self._keeps else {}
        out = self._model(
            input_ids=torch.from_numpy(tokens).to(device).unsqueeze(0),
            position_ids=torch.from_numpy(places).to(device).unsqueeze(0),
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            cache=self._rows, use_cache=False, is_causal=False, **options,
        )  # fmt: skip
        logits = out.logits[0] if self._keeps else out.logits[0, wanted]
        return list(torch.split(logits, [_kept(work, keep) for work in works]))

    def _table(self, works: Sequence[Work], component: str, window: int | None, device: torch.device) -> Table:
        size = self._layout.page_size
        write, read, masks = [], [], []
        for work in works:
            pages = (work.pages if component == "full" else work.swa_pages).astype(np.int64)
            first = 0 if window is None else max(0, work.start - window + 1)
            seen = np.arange(first, work.stop)
            where = pages[seen // size] * size + seen % size
            if (pages[seen // size] < 0).any():
                raise IndexError(f"pool {component!r}: request {work.request_id} has no page for a token that it reads")
            write.append(where[work.start - first :])
            read.append(where)
            masks.append(_mask(work, seen, window))
        mask = np.zeros((sum(map(len, write)), sum(map(len, read))), np.bool_)
        row = column = 0
        for own in masks:
            mask[row : row + own.shape[0], column : column + own.shape[1]] = own
            row, column = row + own.shape[0], column + own.shape[1]
        to, of = (torch.from_numpy(np.concatenate(each)).to(device) for each in (write, read))
        return Table(to, of, torch.from_numpy(mask).to(device)[None, None])


def _mask(work: Work, seen: Numbers, window: int | None) -> npt.NDArray[np.bool_]:
    """Which of the tokens ``seen`` each new token attends to."""
    new = np.arange(work.start, work.stop)[:, None]
    attends = seen[None, :] <= new
    return attends if window is None else attends & (seen[None, :] > new - window)


def _kept(work: Work, keep: int) -> int:
    count = work.stop - work.start
    return min(keep, count) if keep else count


def _wanted(works: Sequence[Work], keep: int) -> Numbers:
    """Where the tokens stand in the row whose logits are asked for."""
    ends = np.cumsum([work.stop - work.start for work in works])
    return np.concatenate([np.arange(end - _kept(work, keep), end) for work, end in zip(works, ends, strict=True)])
