"""The trial of a model under continuous batching: several requests in a step compute what one call without a cache
computes, cold, over a part of another's pages, and token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from asynccache import ConfigError
from asynccache_hf.attending import places_of
from asynccache_hf.call import run_alone
from asynccache_hf.continuous import ELSEWHERE, PageCache, PagedManager, RequestPages, StepProcessor, heard, waiting
from asynccache_hf.layout import Layout
from asynccache_hf.memory import TrackMemory
from asynccache_hf.paged import ModelPool
from asynccache_hf.trial import TrialEnds, TrialPool, compared, planned, tokens_for, tolerance


class ExpectedLogits(NamedTuple):
    """The trial's tokens, and the logits of one call over them, from that of the last token of ``plan.late`` on."""

    plan: TrialEnds
    ids: torch.Tensor
    logits: torch.Tensor


class TrialRequest(NamedTuple):
    """A request of the trial: its first ``length`` tokens, of which ``cached`` are in the pages, which are those from
    ``own`` on, and the first request's before."""

    length: int
    cached: int
    own: int


def wanted_of(model: Any, layout: Layout) -> ExpectedLogits:
    """To be asked before the model's attention is changed."""
    plan = planned(model, layout, layout.window)
    ids = tokens_for(model, plan.stop)
    with torch.inference_mode():
        return ExpectedLogits(plan, ids, run_alone(model, ids, plan.stop - plan.late + 1))


def tried_together(manager: PagedManager, model: Any, layout: Layout, wanted: ExpectedLogits) -> None:
    """
    Raises:
        ConfigError: in a step of several requests the model computes something else.
    """
    (_, late, stop), size = wanted.plan, layout.page_size
    all_pages, shared = -(-stop // size), late // size
    count = 3 * all_pages
    memory = {p.name: TrialPool(p.layers, count, p.layer_bytes, model.device) for p in layout.pools}
    cache = PageCache(layout, slots_of(layout, memory), count * size, late - 1)
    failed: list[BaseException] = []
    processor = manager.processor(cache, lambda told: failed.append(told.error) if told.error else None)
    second = all_pages - shared
    worst = 0.0
    for numbers in (
        [(late, 0, 0)],  # in two steps
        [(stop, late, 0), (late + 1, late, all_pages), (late + 2, late, all_pages + second)],
        [(stop, stop - 1, 0), (late + 2, late + 1, all_pages), (late, 0, 2 * all_pages)],
    ):
        asked = [TrialRequest(*each) for each in numbers]
        for number, each in enumerate(asked):
            pages = np.concatenate([np.arange(shared), np.arange(each.own + shared, each.own + all_pages)])
            if each.own >= all_pages:
                pages[shared:] = np.arange(each.own, each.own + second)
            if not each.cached:
                pages = np.arange(each.own, each.own + all_pages)
            cache.held[str(number)] = RequestPages(each.cached, places_of(layout, pages, pages, model.device), 0,
                                           _nothing, _nothing)  # fmt: skip
            processor.scheduler.add_waiting_request(waiting(str(number), wanted.ids[: each.length].tolist()))
        worst = max(worst, _stepped(processor, model, asked, wanted, failed))
    if worst > tolerance(model):
        raise ConfigError(
            f"{type(model).__name__}: in steps of several requests its logits differ by {worst:.2g} of their spread "
            f"from those of one call; {ELSEWHERE}"
        )


def _stepped(
    processor: StepProcessor, model: Any, asked: Sequence[TrialRequest], wanted: ExpectedLogits,
    failed: Sequence[BaseException],
) -> float:  # fmt: skip
    """How far the logits of these requests are off, at most.

    Raises:
        ConfigError: a step failed.
    """
    worst, left = 0.0, len(asked)
    with heard(model) as logits:
        while left:
            got = processor.step(model)
            if failed:
                raise ConfigError(
                    f"{type(model).__name__}: a step of several requests raises {type(failed[0]).__name__}: "
                    f"{next(iter(str(failed[0]).splitlines()), '')}; {ELSEWHERE}"
                ) from failed[0]
            for name, made in zip(got, logits[-1][: len(got)] if got else (), strict=True):
                at = asked[int(name)].length - 1
                missed = compared(at, made.unsqueeze(0), wanted.logits[at - wanted.plan.late + 1 :])
                worst, left = max(worst, missed.error), left - 1
    return worst


def slots_of(layout: Layout, pools: dict[str, ModelPool] | Any) -> list[TrackMemory]:
    """Return the place where each layer of the model keeps its keys and values."""
    found = []
    for layer in layout.layers:
        (part,), ((place,),) = layer.parts, layer.places
        track = part.tracks[0]
        found.append(TrackMemory(track, pools[track.pool].layer(place), layout.page_size))
    return found


def _nothing(*_: int) -> None: ...
