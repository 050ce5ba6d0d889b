"""The trial that a model passes before it is accepted: on pages it computes what one call without a cache computes.

Everything is compared with one call over all tokens, without a cache, in the model's own dtype. A comparison of calls
with a cache would not do: a model may agree with itself call by call and still be wrong from the second call on. The
trial reaches beyond the longest window and over a page's end after it; requests go on from pages at two places, and in
calls of several tokens and of one.

The trial also finds out how the model may be called. A model whose recurrent layers begin anew in every call of several
tokens is right if a call that goes on computes one token (``Layout.one_by_one``). A model whose layers are all plain
attention may compute several requests in one call (``Layout.packed``), if that gives the same for requests of several
tokens, and for those of one token with pasts of different lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from asynccache_shim.model import Checkpoint, Chunk, Pages

from asynccache import ConfigError
from asynccache_hf.attention import can_attend
from asynccache_hf.call import VERSION, run_alone
from asynccache_hf.layout import Layout
from asynccache_hf.paged import PagedModel

LEAST = 16
"""Tokens before the later of the two places, at least: more than a convolution reaches back."""

MORE = 3
"""Tokens after the last whole page."""

TOLERANCE = {torch.float64: 4e-3, torch.float32: 4e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""The difference that logits may have, relative to their spread: rounding in another order of additions stays well
below it, a state or a key that is wrong well above. In half precision the mean over tokens counts, because a token
whose experts have nearly equal scores may be sent to other experts."""


class TrialEnds(NamedTuple):
    """The places where the trial's requests end."""

    early: int
    late: int
    """Like ``early``, the end of a whole page that requests go on from."""
    stop: int
    """How many tokens the trial has."""


class TrialDifference(NamedTuple):
    """The difference of the logits of one way to compute from the expected ones, and the token with the largest one."""

    error: float
    at: int


class ExpectedLogits(NamedTuple):
    """The trial's tokens, and the logits of one call over all of them without a cache, from that of the token before
    ``plan.late`` on."""

    plan: TrialEnds
    ids: torch.Tensor
    logits: torch.Tensor

    @classmethod
    def of(cls, model: Any, layout: Layout, reach: int) -> ExpectedLogits:
        """The logits that ``model`` computes. ``reach``: the longest run of tokens that any layer looks at as a
        whole."""
        plan = planned(model, layout, reach)
        ids = tokens_for(model, plan.stop)
        with torch.inference_mode():
            return cls(plan, ids, run_alone(model, ids, plan.stop - plan.late + 1))

    def missed(self, at: int, seen: torch.Tensor) -> TrialDifference:
        """Return how much ``seen``, the logits of the tokens from ``at`` on, differ."""
        return compared(at, seen, self.logits[at - self.plan.late + 1 :])


def tokens_for(model: Any, count: int) -> torch.Tensor:
    """Any tokens, the same ones each time."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    made = torch.Generator().manual_seed(count)
    return torch.randint(vocabulary, (count,), generator=made).to(model.device)


def tried(model: Any, layout: Layout, expected: ExpectedLogits) -> Layout:
    """Return ``layout`` with the way to call the model that gives the right logits.

    Raises:
        ConfigError: no way does; the message names the first layer that differs.
    """
    missed: list[tuple[TrialDifference, Layout]] = []
    for way in _ways(model, layout):
        try:
            missed.append((_worst(model, way, expected), way))
        except ConfigError:
            raise
        except Exception as error:
            if not way.packed:
                what = f"{type(error).__name__}: {error}"
                raise ConfigError(f"{type(model).__name__}: on pages it raises {what} ({VERSION})") from error
            continue
        half = model.dtype in (torch.float16, torch.bfloat16)
        # With states, rounding may hide that one was lost: then the safer way is tried as well.
        if missed[-1][0].error <= tolerance(model) and not (half and way.recurrent and not way.one_by_one):
            return way
    best = min(worst.error for worst, _ in missed)
    for worst, way in missed:
        if worst.error <= min(tolerance(model), 2 * best + 1e-4):
            return way
    worst, way = missed[-1]
    raise ConfigError(
        f"{type(model).__name__}: on pages its logits differ by {worst.error:.2g} of their spread from those of one "
        f"call without a cache, most at token {worst.at} of {expected.plan.stop}; {_blame(model, way, expected)}"
    )


def tolerance(model: Any) -> float:
    """Return the tolerance for the dtype that the model computes in."""
    return TOLERANCE.get(model.dtype, TOLERANCE[torch.bfloat16])


def planned(model: Any, layout: Layout, reach: int) -> TrialEnds:
    """Return where the trial's requests go on, and how far the trial goes: over ``reach`` and a page's end after it, if
    the model takes so many tokens.

    Raises:
        ConfigError: the model takes fewer tokens than three pages and ``MORE``.
    """
    size = layout.page_size
    positions = int(getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", 0) or 0)
    most = min((n for n in (positions, layout.limit) if n and n > 0), default=None)
    pages = max(2, reach // size + 1, -(-LEAST // size))
    if most is not None:
        pages = min(pages, (most - size - MORE) // size)
    if pages < 2:
        raise ConfigError(f"page_size={size}: the model takes {most} tokens at most, the trial three pages and more")
    return TrialEnds(size, pages * size, (pages + 1) * size + MORE)


def _ways(model: Any, layout: Layout) -> Iterator[Layout]:
    """Yield the layout for each way to call the model, the fastest first."""
    if can_attend(model, layout):
        yield replace(layout, packed=True)
    yield layout
    if layout.recurrent:
        yield replace(layout, one_by_one=True)


class TrialPool:
    """A pool of the trial."""

    def __init__(self, layers: int, pages: int, size: int, device: torch.device) -> None:
        self._layers = torch.zeros((layers, pages, size), dtype=torch.uint8, device=device)

    def layer(self, i: int) -> torch.Tensor:
        return self._layers[i]

    def leave_gaps(self) -> None:
        """Nobody looks for gaps here."""


def trial_pools(model: Any, layout: Layout, pages: int) -> dict[str, TrialPool]:
    """Pools of so many pages, on the model's device."""
    return {pool.name: TrialPool(pool.layers, pages, pool.layer_bytes, model.device) for pool in layout.pools}


class TrialStage:
    """A model on pages of its own, and the trial's three requests: one that computes everything and leaves pages, one
    that goes on from the later place, one that goes on from the earlier."""

    def __init__(self, model: Any, layout: Layout, expected: ExpectedLogits) -> None:
        size, plan = layout.page_size, expected.plan
        shared, all_pages = plan.late // size, -(-plan.stop // size)
        count = max(2 * all_pages - shared, 3)
        self.paged = PagedModel(model, layout, trial_pools(model, layout, count))
        self.tokens = expected.ids.cpu().numpy().astype(np.int32)
        self.first = np.arange(all_pages, dtype=np.int32)
        self.later = np.concatenate([self.first[:shared], np.arange(all_pages, count, dtype=np.int32)])

    def chunk(self, who: int, pages: Pages, start: int, stop: int, state: int, checkpoint: int | None = None) -> Chunk:
        """``state``: the slot of the request's state; ``checkpoint``: the slot of a copy of it."""
        kept = Checkpoint(stop, checkpoint) if checkpoint is not None else None
        states = np.array([state], np.int32)
        return Chunk(who, self.tokens, start, stop, pages, pages, states, kept, sample=False)

    def compute(
        self, who: int, pages: Pages, start: int, stop: int, state: int, checkpoint: int | None = None
    ) -> torch.Tensor:
        """The logits of the last token of a chunk."""
        return self.paged.compute(self.chunk(who, pages, start, stop, state, checkpoint))


def _worst(model: Any, layout: Layout, expected: ExpectedLogits) -> TrialDifference:
    """Return the largest difference of what is computed on pages. The states of the three requests are in slots 0, 1
    and 2."""
    stage = TrialStage(model, layout, expected)
    chunk, first, later = stage.chunk, stage.first, stage.later
    early, late, stop = expected.plan
    stage.compute(1, first, 0, early, 0, checkpoint=2)
    stage.compute(1, first, early, late, 0, checkpoint=1)
    steps = [[chunk(1, first, late, stop - 1, 0)], [chunk(1, first, stop - 1, stop, 0)],
             [chunk(2, later, late, stop, 1), chunk(3, first, early, stop, 2)]]  # fmt: skip
    if layout.packed:
        steps.append([chunk(1, first, stop - 1, stop, 0), chunk(2, later, late, late + 1, 1)])
    missed = []
    for step in steps:  # of all tokens the logits would, for a long window, be several GiB
        for each, logits in zip(step, stage.paged.compute_all(step, stop - late), strict=True):
            missed.append(expected.missed(each.stop - len(logits), logits))
    return max(missed, key=lambda missed: missed.error)


def compared(at: int, seen: torch.Tensor, wanted: torch.Tensor) -> TrialDifference:
    """Return how much the logits ``seen``, of the tokens from ``at`` on, differ from those ``wanted``. Errors are root
    mean squares over the vocabulary, relative to the wanted logits' spread."""
    half = seen.dtype in (torch.float16, torch.bfloat16)
    seen, wanted = seen.float(), wanted.float()
    wanted = wanted[: len(seen)]
    spread = (wanted - wanted.mean(-1, keepdim=True)).norm(dim=-1).clamp(min=1e-6)
    errors = (seen - wanted).norm(dim=-1) / spread
    errors = torch.where(errors.isnan(), torch.full_like(errors, torch.inf), errors)
    worst = int(errors.argmax())
    return TrialDifference(float(errors.mean() if half else errors[worst]), at + worst)


# which layer


def _blame(model: Any, layout: Layout, expected: ExpectedLogits) -> str:
    """A sentence on the first layer whose output differs."""
    found: list[torch.Tensor] = []
    layers = _layers(model, len(layout.layers))
    plan = expected.plan
    if not layers:
        return "which of its layers differs is not known"
    hooks = [layer.register_forward_hook(lambda _, __, out: found.append(_hidden(out))) for layer in layers]
    try:
        with torch.inference_mode():
            run_alone(model, expected.ids)
            wanted, found[:] = list(found), []
            stage = TrialStage(model, layout, expected)
            stage.compute(1, stage.first, 0, plan.late, 0, checkpoint=1)
            found.clear()
            stage.compute(2, stage.later, plan.late, plan.stop, 1)
    finally:
        for hook in hooks:
            hook.remove()
    rows = torch.stack([torch.cat(found[i :: len(layers)]) for i in range(len(layers))])
    for index, (seen, whole) in enumerate(zip(rows, wanted, strict=True)):
        if compared(0, seen, whole[plan.late :]).error > tolerance(model):
            return f"the first layer that differs is {index}, a {type(layers[index]).__name__}"
    return "no single layer differs: it keeps something beside its cache's layers"


def _layers(model: Any, count: int) -> list[Any]:
    """The modules of the model's layers: its first list of ``count`` modules; empty if it has none."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    return list(lists[0]) if lists else []


def _hidden(out: Any) -> torch.Tensor:
    """Return the hidden states that a layer hands on, ``[tokens, width]``."""
    first = out[0] if isinstance(out, tuple) else out
    return torch.as_tensor(first)[0] if first.dim() == 3 else torch.as_tensor(first)
