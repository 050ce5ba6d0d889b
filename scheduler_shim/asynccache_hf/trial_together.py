"""The trial of a model under continuous batching: several requests in a step must compute the same as one call without
a cache. They begin with nothing cached, begin on a part of another request's pages, and go on token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from asynccache import ConfigError
from asynccache_hf.attending import places_of
from asynccache_hf.continuous import ELSEWHERE, PageCache, PagedManager, RequestPages, StepProcessor, heard, waiting
from asynccache_hf.layout import Layout
from asynccache_hf.paged import bind
from asynccache_hf.trial import ExpectedLogits, tolerance, trial_pools


def tried_together(manager: PagedManager, model: Any, layout: Layout, expected: ExpectedLogits) -> None:
    """
    Raises:
        ConfigError: in a step of several requests the model computes something else.
    """
    (_, late, stop), size = expected.plan, layout.page_size
    all_pages, shared = -(-stop // size), late // size
    count, own = 3 * all_pages, all_pages - shared
    slots = [own.slots[0] for own in bind(layout, trial_pools(model, layout, count))]
    cache = PageCache(layout, slots, count * size, late - 1)
    failed: list[BaseException] = []
    processor = manager.processor(cache, lambda output: failed.append(output.error) if output.error else None)
    first = np.arange(all_pages)
    second, third = (np.concatenate([first[:shared], first[:own] + all_pages + i * own]) for i in range(2))
    worst = 0.0
    for requests in (  # each: its length, how many of its tokens are in its pages, its pages
        [(late, 0, first)],  # in two steps, since a step computes at most late - 1 tokens
        [(stop, late, first), (late + 1, late, second), (late + 2, late, third)],
        [(stop, stop - 1, first), (late + 2, late + 1, second), (late, 0, first + 2 * all_pages)],
    ):
        for number, (length, cached, pages) in enumerate(requests):
            places = places_of(layout, {"full": pages, "swa": pages}, model.device)
            cache.held[str(number)] = RequestPages(cached, places, 0, _nothing, _nothing)
            processor.scheduler.add_waiting_request(waiting(str(number), expected.ids[:length].tolist()))
        worst = max(worst, _stepped(processor, model, [length for length, _, _ in requests], expected, failed))
    if worst > tolerance(model):
        raise ConfigError(
            f"{type(model).__name__}: in steps of several requests its logits differ by {worst:.2g} of their spread "
            f"from those of one call; {ELSEWHERE}"
        )


def _stepped(
    processor: StepProcessor, model: Any, lengths: Sequence[int], expected: ExpectedLogits,
    failed: Sequence[BaseException],
) -> float:  # fmt: skip
    """Step until each request has its token. Return the largest difference of their logits from the expected ones.
    ``lengths``: the tokens of each request. ``failed``: the errors of steps.

    Raises:
        ConfigError: a step failed.
    """
    worst, left = 0.0, len(lengths)
    with heard(model) as logits:
        while left:
            got = processor.step(model)
            if failed:
                raise ConfigError(
                    f"{type(model).__name__}: a step of several requests raises {type(failed[0]).__name__}: "
                    f"{next(iter(str(failed[0]).splitlines()), '')}; {ELSEWHERE}"
                ) from failed[0]
            for name, made in zip(got, logits[-1][: len(got)] if got else (), strict=True):
                missed = expected.missed(lengths[int(name)] - 1, made.unsqueeze(0))
                worst, left = max(worst, missed.error), left - 1
    return worst


def _nothing(*_: int) -> None: ...
