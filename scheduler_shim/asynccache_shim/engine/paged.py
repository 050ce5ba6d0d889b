"""``PagedModel``: one forward call of a transformers model whose cache lives in pages.

Law: the pages are the only truth. Every call builds the model's cache from pages and writes what is new back. From one
call to the next a request carries over what cannot be in a page that is not whole yet, and nothing else; so whoever has
whole pages can go on from there.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from asynccache import ConfigError
from asynccache_shim.engine.call import run
from asynccache_shim.engine.layout import Layout
from asynccache_shim.engine.memory import Slots
from asynccache_shim.engine.parts import Part, Span
from asynccache_shim.engine.sampling import draw
from asynccache_shim.model import NO_TOKEN, Batch, Work


class Pool(Protocol):
    """A pool's device memory: uint8 ``[pages, bytes]`` per layer."""

    def layer(self, i: int) -> torch.Tensor: ...


class Bound(NamedTuple):
    """A part of one layer of the model, and where its tracks are."""

    layer: int
    part: Part
    slots: tuple[Slots, ...]


Tails = Sequence[Any]
"""What each part keeps of a request that stopped within a page."""


class PagedModel:
    """A model on the device pools of one cache. Used by one thread at a time."""

    def __init__(self, model: Any, layout: Layout, pools: Mapping[str, Pool]) -> None:
        """``pools``: ``AsyncCache.pools`` of a cache that was made from ``layout.cache_config``.

        Raises:
            ConfigError: the cache has no such pools.
        """
        self.layout = layout
        self._model = model
        self._empty = DynamicCache(config=model.config)
        self._bound = _bind(layout, pools)
        self._has_tails = any(bound.part.has_tail for bound in self._bound)
        self._tails: dict[int, tuple[int, Tails]] = {}

    def __repr__(self) -> str:
        return f"<PagedModel {self.layout.model!r}: {len(self.layout.layers)} layers>"

    def forward(self, batch: Batch) -> list[int]:
        """One step of a scheduler, request by request. See ``asynccache_shim.model``."""
        for request_id in batch.ended:
            self._tails.pop(request_id, None)
        return [self._next_token(work) for work in batch.works]

    @torch.inference_mode()
    def compute(self, work: Work, keep: int = 1) -> torch.Tensor:
        """Run the model over ``work`` and write its part of the cache; the logits of the last ``keep`` tokens (0: of
        all). Blocks the thread.
        """
        span = _span(work, self.layout.page_size)
        cache = copy.deepcopy(self._empty)
        if work.start:
            tails = self._tails_of(work)
            for bound, tail in zip(self._bound, tails, strict=True):
                bound.part.load(cache.layers[bound.layer], bound.slots, span, tail)
        heard = [bound.part.watch(cache.layers[bound.layer]) for bound in self._bound]
        ids = torch.as_tensor(work.tokens[work.start : work.stop].astype(np.int64), device=self._model.device)
        logits = run(self._model, ids, cache, keep)
        for bound, calls in zip(self._bound, heard, strict=True):
            bound.part.save(cache.layers[bound.layer], bound.slots, span, calls)
        self._keep_tails(cache, work)
        if work.checkpoint is not None:
            self._copy_state(int(work.states[0]), work.checkpoint.slot)
        if logits.is_cuda:  # copies of these pages run on other streams
            torch.cuda.current_stream(logits.device).synchronize()
        return logits

    def _next_token(self, work: Work) -> int:
        logits = self.compute(work)[-1]
        return draw(logits, work.sampling, work.stop) if work.sample else NO_TOKEN

    def _copy_state(self, source: int, target: int) -> None:
        """A checkpoint: the recurrent state in one slot, of every layer, to another."""
        for bound in self._bound:
            for track, slots in zip(bound.part.tracks, bound.slots, strict=True):
                if track.source == "mamba":
                    slots.copy(source, target)

    def _tails_of(self, work: Work) -> Tails:
        """What was kept where the request stopped; nothing if a page ended there.

        Raises:
            RuntimeError: it did not stop where it is to go on.
        """
        nothing = [None] * len(self._bound)
        if work.start % self.layout.page_size == 0 or not self._has_tails:
            return nothing
        stop, tails = self._tails.get(work.request_id, (0, nothing))
        if stop != work.start:
            raise RuntimeError(f"request {work.request_id} stopped at {stop} and cannot go on at {work.start}")
        return tails

    def _keep_tails(self, cache: DynamicCache, work: Work) -> None:
        if work.stop % self.layout.page_size == 0 or not self._has_tails:
            self._tails.pop(work.request_id, None)
        else:
            self._tails[work.request_id] = work.stop, [b.part.tail(cache.layers[b.layer]) for b in self._bound]


def _span(work: Work, page_size: int) -> Span:
    tables = {"full": work.pages, "swa": work.swa_pages, "mamba": work.states[:1]}
    return Span(tables, work.start, work.stop, page_size)


def _bind(layout: Layout, pools: Mapping[str, Pool]) -> list[Bound]:
    if missing := [pool.name for pool in layout.pools if pool.name not in pools]:
        raise ConfigError(f"pools: the cache has no pool called {missing[0]!r}; make it from layout.cache_config()")
    bound = []
    for index, plan in enumerate(layout.layers):
        for part, places in zip(plan.parts, plan.places, strict=True):
            where = zip(part.tracks, places, strict=True)
            slots = tuple(Slots(t, pools[t.pool].layer(place), layout.page_size) for t, place in where)
            bound.append(Bound(index, part, slots))
    return bound
