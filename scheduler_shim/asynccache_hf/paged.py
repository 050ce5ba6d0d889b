"""``PagedModel``: forward calls of a transformers model whose cache lives in pages.

The pages are the only truth. Every call builds the model's cache from pages and writes the new data back. From one
call to the next a request carries over only the data that a page has not before it is whole (its tails). So any request
that has whole pages can go on from their end.

There are two ways to make a call. ``FilledCache`` is for any model: transformers' own cache for one request, filled
from pages, and what the model adds to it is written back. ``PackedRows`` is for models whose layers all keep keys and
values by token: the tokens of several requests stand in one row, and ``asynccache_hf.attention`` reads and writes the
pages where they are. ``describe`` tries both.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from asynccache_shim.model import NO_TOKEN, Batch, Chunk, Pages

from asynccache import ConfigError
from asynccache_hf.attention import (
    KEYWORD,
    PagedAttention,
    StepRow,
    eager_layers,
    named_eager,
    replace_attention,
)
from asynccache_hf.call import parameters, run
from asynccache_hf.identity import plain
from asynccache_hf.layout import Layout
from asynccache_hf.memory import TrackMemory
from asynccache_hf.parts import CallSpan, LayerPart
from asynccache_hf.sampling import draw


class ModelPool(Protocol):
    """A pool's device memory: uint8 ``[pages, bytes]`` per layer."""

    def layer(self, i: int) -> torch.Tensor: ...

    def leave_gaps(self) -> None: ...


class BoundPart(NamedTuple):
    """A part of one layer of the model, and where its tracks are."""

    layer: int
    part: LayerPart
    slots: tuple[TrackMemory, ...]


Tails = Sequence[Any]
"""The tails of one request that stopped within a page: for each part, the data that it takes to go on there."""


class FilledCache:
    """transformers' cache of one request (``cache``), filled with what precedes ``start``. Whatever a model adds to it,
    in one call or in many, ``save`` writes to the pages."""

    def __init__(self, cache: Any, bound: Sequence[BoundPart], tables: Mapping[str, Pages], start: int, tails: Tails,
                 page_size: int) -> None:  # fmt: skip
        self.cache = cache
        self._span = span = CallSpan(tables, start, start, page_size)
        self._kept = [(each, each.part.of(cache, each.layer)) for each in bound]
        if start:
            for (each, layer), tail in zip(self._kept, tails, strict=True):
                each.part.load(layer, each.slots, span, tail)
        self._heard = [each.part.watch(layer) for each, layer in self._kept]

    def save(self, stop: int) -> None:
        """Write the data that was added, up to token ``stop``, where the cache now ends, to the pages."""
        for (each, layer), calls in zip(self._kept, self._heard, strict=True):
            each.part.save(layer, each.slots, self._span._replace(stop=stop), calls)

    def tails(self) -> Tails:
        """Return for each part the data that it takes to go on within a page and that is not in the page."""
        return [each.part.tail(layer) for each, layer in self._kept]


class PackedRows:
    """Several requests of one model in one call, on the pages themselves."""

    def __init__(self, model: Any, layout: Layout, slots: Sequence[TrackMemory]) -> None:
        """``slots``: the memory of each layer's keys and values."""
        replace_attention()
        self._model = model
        self._layout = layout
        self._pages = PagedAttention(layout, slots)
        self._keeps = "logits_to_keep" in parameters(model)
        self._eager = eager_layers(model)

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
        self._pages.plan([self._row(chunk) for chunk in chunks], device)
        kept = [min(keep or chunk.stop, chunk.stop - chunk.start) for chunk in chunks]
        ends = np.cumsum([chunk.stop - chunk.start for chunk in chunks])
        wanted = np.concatenate([np.arange(end - count, end) for count, end in zip(kept, ends, strict=True)])
        options: dict[str, Any] = {"logits_to_keep": torch.from_numpy(wanted).to(device)} if self._keeps else {}
        with named_eager(self._eager):
            out = self._model(
                input_ids=torch.from_numpy(tokens).to(device).unsqueeze(0),
                position_ids=torch.from_numpy(places).to(device).unsqueeze(0),
                attention_mask=self._pages.mask, use_cache=False, **{KEYWORD: self._pages}, **options,
            )  # fmt: skip
        logits = out.logits[0] if self._keeps else out.logits[0, wanted]
        return list(torch.split(logits, kept))

    def _row(self, chunk: Chunk) -> StepRow:
        size, tables = self._layout.page_size, tables_of(chunk)
        for component, window in self._pages.windows.items():
            first = 0 if window is None else max(0, chunk.start - window + 1)
            read = tables[component][first // size : -(-chunk.stop // size)]
            if len(read) < -(-chunk.stop // size) - first // size or (read < 0).any():
                who = f"pool {component!r}: request {chunk.request_id}"
                raise IndexError(f"{who} has no page for a token that it reads")
        return StepRow(tables, chunk.start, chunk.stop)


class PagedModel:
    """A model on the device pools of one cache. Used by one thread at a time."""

    def __init__(self, model: Any, layout: Layout, pools: Mapping[str, ModelPool]) -> None:
        """``pools``: ``AsyncCache.pools`` of a cache that was made from ``layout.cache_config``.

        Raises:
            ConfigError: the cache has no such pools.
        """
        self.layout = layout
        self._model = model = plain(model)
        self._empty = layout.new_cache(model.config)
        self._bound = bind(layout, pools)
        kept = [bound.slots[0] for bound in self._bound]
        self._packed = PackedRows(model, layout, kept) if layout.packed else None
        self._has_tails = any(bound.part.has_tail for bound in self._bound)
        self._tails: dict[int, tuple[int, Tails]] = {}

    def __repr__(self) -> str:
        return f"<PagedModel {self.layout.model!r}: {len(self.layout.layers)} layers>"

    @torch.inference_mode()
    def forward(self, batch: Batch) -> list[int]:
        """Compute one step of a scheduler. See ``asynccache_shim.model``. Requests are computed together where the
        model allows it (``layout.packed``), else one after the other."""
        for request_id in batch.ended:
            self._tails.pop(request_id, None)
        made = self.compute_all(batch.chunks)
        sampled = [i for i, chunk in enumerate(batch.chunks) if chunk.sample]
        tokens = [NO_TOKEN] * len(made)
        if sampled:
            asked = [batch.chunks[i] for i in sampled]
            last = torch.stack([made[i][-1] for i in sampled])
            drawn = draw(last, [chunk.sampling for chunk in asked], [chunk.stop for chunk in asked])
            for i, token in zip(sampled, drawn, strict=True):
                tokens[i] = token
        return tokens

    def compute(self, chunk: Chunk, keep: int = 1) -> torch.Tensor:
        """Run the model over ``chunk``, write the chunk's data to the pages, and return the logits of the last ``keep``
        tokens (0: of all). Blocks the thread.

        Raises:
            ConfigError: the chunk reaches beyond ``layout.limit``.
        """
        return self.compute_all([chunk], keep)[0]

    def open(self, tables: Mapping[str, Pages], start: int, tails: Tails | None = None) -> FilledCache:
        """Return transformers' cache, filled with the tokens before ``start`` from the pages. ``tables``: the page
        tables, by component. ``tails``: the data that is not in a page; None: ``start`` is a page's end."""
        tails = [None] * len(self._bound) if tails is None else tails
        return FilledCache(copy.deepcopy(self._empty), self._bound, tables, start, tails, self.layout.page_size)

    def synchronize(self) -> None:
        """Return when all that this thread has asked of the model and of the pages is done. Copies of pages run on
        other streams, so this comes before what was written is published."""
        if self._model.device.type == "cuda":
            torch.cuda.current_stream(self._model.device).synchronize()

    @torch.inference_mode()
    def compute_all(self, chunks: Sequence[Chunk], keep: int = 1) -> list[torch.Tensor]:
        """Do what ``compute`` does for chunks of several requests, together if the model allows it. Returns the logits
        of each."""
        if self._packed is not None and chunks:
            made = self._packed.compute(chunks, keep)
        else:
            made = [self._alone(chunk, keep) for chunk in chunks]
        self.synchronize()
        return made

    def _alone(self, chunk: Chunk, keep: int) -> torch.Tensor:
        """Compute one request, through transformers' own cache."""
        self.layout.check_length(chunk.stop)
        opened = self.open(tables_of(chunk), chunk.start, self._tails_of(chunk))
        logits = self._run(opened.cache, chunk, keep)
        opened.save(chunk.stop)
        if chunk.stop % self.layout.page_size == 0 or not self._has_tails:
            self._tails.pop(chunk.request_id, None)
        else:
            self._tails[chunk.request_id] = chunk.stop, opened.tails()
        if chunk.checkpoint is not None:  # copy the states of all layers from one slot to another
            for bound in self._bound:
                for track, slots in zip(bound.part.tracks, bound.slots, strict=True):
                    if track.source == "mamba":
                        slots.copy(int(chunk.states[0]), chunk.checkpoint.slot)
        return logits

    def _run(self, cache: Any, chunk: Chunk, keep: int) -> torch.Tensor:
        """Run the model over all tokens of ``chunk`` in one call. A model that can go on from a recurrent state only by
        single tokens (``Layout.one_by_one``) gets them one by one."""
        ids = torch.as_tensor(chunk.tokens[chunk.start : chunk.stop].astype(np.int64), device=self._model.device)
        if not (self.layout.one_by_one and chunk.start):
            return run(self._model, ids, cache, keep, chunk.start)
        logits = [run(self._model, ids[i : i + 1], cache, 1, chunk.start + i) for i in range(len(ids))]
        return torch.cat(logits[-keep:])

    def _tails_of(self, chunk: Chunk) -> Tails | None:
        """Return the tails that were kept where the request stopped; None if a page ended there.

        Raises:
            RuntimeError: the request's previous chunk did not stop where this one begins.
        """
        if chunk.start % self.layout.page_size == 0 or not self._has_tails:
            return None
        stop, tails = self._tails.get(chunk.request_id, (0, ()))
        if stop != chunk.start:
            raise RuntimeError(f"request {chunk.request_id} stopped at {stop} and cannot go on at {chunk.start}")
        return tails


def tables_of(chunk: Chunk) -> Mapping[str, Pages]:
    """The page tables of a chunk, by component; of states the working copy."""
    return {"full": chunk.pages, "swa": chunk.swa_pages, "mamba": chunk.states[:1]}


def bind(layout: Layout, pools: Mapping[str, ModelPool]) -> list[BoundPart]:
    """Every part of every layer, with the memory of its tracks in ``pools``.

    Raises:
        ConfigError: there is no such pool.
    """
    if missing := [pool.name for pool in layout.pools if pool.name not in pools]:
        raise ConfigError(f"pools: the cache has no pool called {missing[0]!r}; make it from layout.cache_config()")
    bound, sizes = [], {pool.name: pool.layer_bytes for pool in layout.pools}
    for index, plan in enumerate(layout.layers):
        for part, places in zip(plan.parts, plan.places, strict=True):
            where = zip(part.tracks, places, strict=True)
            slots = tuple(TrackMemory(t, pools[t.pool].layer(place), layout.page_size) for t, place in where)
            for track in part.tracks:
                if track.has_gaps(layout.page_size) or track.page_bytes(layout.page_size) < sizes[track.pool]:
                    pools[track.pool].leave_gaps()
            bound.append(BoundPart(index, part, slots))
    return bound
