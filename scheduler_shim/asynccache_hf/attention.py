"""One step's attention over pages: the new tokens of each request attend to that request's own past, in whatever pages
it lies.

Requests of about the same length with one new token each are one call, with a row for each; a request with several new
tokens is a call of its own. Keys and values are read through an index of places; a request's place for a token is
``page * page_size + offset``, so a sliding window is a part of the same index.

transformers asks for an attention function by name. The one called ``sdpa`` is replaced by a wrapper, which does the
same as before unless it is given ``PagedAttention`` pages. ``eager`` stands for a function of each family's own and is
not in transformers' registry. The layers of a model that uses it ask for ``EAGER`` while it computes on pages.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as functional
from asynccache_shim.model import Pages
from transformers import AttentionInterface, PreTrainedModel

from asynccache_hf.call import parameters
from asynccache_hf.layout import Layout
from asynccache_hf.memory import ScratchMemory, TrackMemory
from asynccache_hf.parts import KeysAndValues

EAGER = "asynccache_eager"

KEYWORD = "asynccache_pages"
"""The argument of a model's ``forward`` that its attention functions find the pages in. ``cache`` will not do: since
transformers 5.24 the model itself takes that."""

_renaming = threading.Lock()

LAYER_TYPES = {"full": "full_attention", "swa": "sliding_attention"}
"""The names that transformers gives the layers of a component."""

PADDED = 2
"""The most times its own length that a request is padded to, so that it is computed in one call with longer ones."""


class StepRow(NamedTuple):
    """One request in a step, which computes the request's tokens ``start`` to ``stop``."""

    tables: Mapping[str, Pages]
    """The request's page tables, by component."""
    start: int
    stop: int

    def places(self, component: str, positions: npt.NDArray[np.int64], page_size: int) -> npt.NDArray[np.int64]:
        """The places of the request's tokens at these ``positions``."""
        return self.tables[component][positions // page_size].astype(np.int64) * page_size + positions % page_size


class RowGroup(NamedTuple):
    """Requests that are computed in one call, each as one row of it."""

    tokens: torch.Tensor
    """The numbers of the requests' tokens in the step, ``[rows * new]``."""
    read: torch.Tensor
    """The places of the tokens that each row attends to, ``[rows * seen]``."""
    rows: int
    mask: torch.Tensor | None
    """``[rows, 1, new, seen]``, true where a token attends; None: to all before it."""


class StepPlan(NamedTuple):
    """A step, for the layers of one component."""

    write: torch.Tensor
    """The places of all new tokens."""
    groups: tuple[RowGroup, ...]


def planned(
    rows: Sequence[StepRow], component: str, window: int | None, page_size: int, device: torch.device
) -> StepPlan:
    """Return how the layers of ``component`` compute the step. ``window``: its window in tokens; None: it has none."""
    starts, at = [], 0
    for row in rows:
        starts.append(at)
        at += row.stop - row.start
    write = np.concatenate([row.places(component, np.arange(row.start, row.stop), page_size) for row in rows])
    seen = [row.stop for row in rows]  # how many tokens each row attends to, the new ones included
    if window is not None:
        seen = [min(row.stop, row.stop - row.start + window - 1) for row in rows]
    together = [[i] for i, row in enumerate(rows) if row.stop - row.start > 1]
    ones = sorted((i for i, row in enumerate(rows) if row.stop - row.start == 1), key=lambda i: seen[i])
    together += _alike(ones, seen)
    groups = []
    for own in together:  # a row that is shorter than the longest of its group is filled up from its last place
        some, most = [rows[i] for i in own], max(seen[i] for i in own)
        first = [row.stop - seen[i] for i, row in zip(own, some, strict=True)]
        read = np.concatenate([row.places(component, np.minimum(np.arange(at, at + most), row.stop - 1), page_size)
                               for row, at in zip(some, first, strict=True)])  # fmt: skip
        new = some[0].stop - some[0].start
        tokens = np.array([starts[i] for i in own]) if new == 1 else np.arange(starts[own[0]], starts[own[0]] + new)
        mask = _mask(new, [seen[i] for i in own], window, device)
        groups.append(RowGroup(torch.from_numpy(tokens).to(device), torch.from_numpy(read).to(device), len(own), mask))
    return StepPlan(torch.from_numpy(write).to(device), tuple(groups))


class PagedAttention:
    """The pages that a model's attention is computed on, layer by layer: keys and values by token, in pages."""

    def __init__(self, layout: Layout, slots: Sequence[TrackMemory]) -> None:
        """``slots``: the memory of each layer's keys and values."""
        parts = [layer.parts[0] for layer in layout.layers]
        self.windows = {part.tracks[0].source: part.window for part in parts}
        self._components = [part.tracks[0].source for part in parts]
        self._page_size = layout.page_size
        self._slots = slots
        self._scratch = ScratchMemory()
        self._plans: Mapping[str, StepPlan] = {}

    def plan(self, rows: Sequence[StepRow], device: torch.device) -> None:
        """Note that the next call computes ``rows``, in this order."""
        self._plans = {component: planned(rows, component, window, self._page_size, device)
                       for component, window in self.windows.items()}  # fmt: skip

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None,
        given: Mapping[str, Any],
    ) -> torch.Tensor:  # fmt: skip
        """Write ``key`` and ``value`` (``[1, heads, tokens, width]``) to the pages of one layer, and return the
        attention of ``query`` over all tokens that it attends to: ``[1, tokens, heads, width]``."""
        slots = self._slots[module.layer_idx]
        plan = self._plans[self._components[module.layer_idx]]
        options = options_of(given, module)
        slots.put(plan.write, {"keys": key[0].transpose(0, 1), "values": value[0].transpose(0, 1)})
        made = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
        for group in plan.groups:
            asks = query[0].index_select(1, group.tokens)
            asks = asks.view(len(asks), group.rows, -1, asks.shape[-1]).transpose(0, 1)
            found = slots.take(group.read, self._scratch)
            pair = (found["keys"], found.get("values", found["keys"]))
            keys, values = (each.view(group.rows, -1, *each.shape[1:]).transpose(1, 2) for each in pair)
            out = _computed(asks, keys, values, group.mask, scaling, **options)
            made[group.tokens] = out.transpose(1, 2).flatten(0, 1)
        return made.unsqueeze(0)

    @property
    def mask(self) -> Any:
        """The mask to give to the model, so that it makes none of its own. Its content is never read, because requests
        are kept apart by their places."""
        none = torch.empty(1, 1, 1, 1)
        return none if len(self.windows) == 1 else {LAYER_TYPES[component]: none for component in self.windows}


def can_attend(model: Any, layout: Layout) -> bool:
    """Return True if attention over pages may be tried with this model: its attention function is one that is replaced,
    it takes positions, each of its layers keeps keys and values by token and nothing else, and all windows are
    equal."""
    used = getattr(model.config, "_attn_implementation", None)
    if used not in ("sdpa", "eager") or "position_ids" not in parameters(model):
        return False
    if any(len(layer.parts) != 1 or not isinstance(layer.parts[0], KeysAndValues) for layer in layout.layers):
        return False
    types = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())
    windows = {layer.parts[0].window for layer in layout.layers} - {None}
    return types <= set(LAYER_TYPES.values()) and len(windows) <= 1


def _with_paged_attention(usual: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention function that does the same as ``usual`` unless it is given ``PagedAttention`` pages."""

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None,
        *others: Any, **given: Any,
    ) -> Any:  # fmt: skip
        pages = given.pop(KEYWORD, None)
        if pages is not None:
            return pages.attend(module, query, key, value, given.pop("scaling", None), given), None
        return usual(module, query, key, value, attention_mask, *others, **given)

    attention.asynccache = True  # type: ignore[attr-defined]
    return attention


def replace_attention() -> None:
    """Replace ``sdpa`` in transformers' registry of attention functions, and add ``EAGER``. A second call does
    nothing."""
    usual = AttentionInterface()["sdpa"]
    if not getattr(usual, "asynccache", False):
        AttentionInterface.register("sdpa", _with_paged_attention(usual))
        AttentionInterface.register(EAGER, _with_paged_attention(_own_eager))


def _own_eager(module: Any, *args: Any, **given: Any) -> Any:
    """The ``eager`` of this module itself: for calls of the model in other threads while it asks for ``EAGER``."""
    return _eager_of(module)(module, *args, **given)


def _eager_of(module: Any) -> Any:
    """The function that ``eager`` stands for in this module's file; None: it has none."""
    return inspect.unwrap(type(module).forward).__globals__.get("eager_attention_forward")


def eager_layers(model: Any) -> list[dict[str, Any]]:
    """The attributes of those modules of ``model`` that choose their attention function by its configuration; none if
    that does not say ``eager``."""
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation != "eager":
        return []
    asking = (module for module in model.modules() if module.__dict__.get("config") is config and _eager_of(module))
    return [module.__dict__ for module in asking if not isinstance(module, PreTrainedModel)]


@contextmanager
def named_eager(layers: Sequence[dict[str, Any]]) -> Iterator[None]:
    """A context in which these layers have a configuration that says ``EAGER``; those of one model at a time."""
    if not layers:
        yield
        return
    with _renaming:
        own = layers[0]["config"]
        other = copy.copy(own)
        other._attn_implementation = EAGER
        try:
            for layer in layers:
                layer["config"] = other
            yield
        finally:
            for layer in layers:
                layer["config"] = own


# groups


def _alike(ones: Sequence[int], seen: Sequence[int]) -> Iterator[list[int]]:
    """Yield runs of ``ones``, in the order of their lengths, such that no request of a run is padded too much."""
    group: list[int] = []
    for i in ones:
        if group and seen[i] > PADDED * seen[group[0]]:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _mask(new: int, seen: Sequence[int], window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return the mask of a group: of one row with several ``new`` tokens, or of rows of one each that attend to
    ``seen`` tokens."""
    longest = max(seen)
    causal = new == longest and (window is None or new <= window)  # nothing before it, and no window to leave
    if min(seen) == longest and (new == 1 or causal):
        return None
    keys = torch.arange(longest, device=device)
    last = (torch.tensor(seen, device=device) - 1)[:, None, None] if new == 1 else keys[None, -new:, None]
    mask = keys <= last
    if window is not None and new > 1:
        mask &= keys > last - window
    return mask[:, None]


# computing


def _computed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float | None,
    softcap: float | None, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    rows, heads, new, _ = query.shape
    shared = heads // key.shape[1]
    if new == 1 and shared > 1 and sinks is None:  # heads that share keys become further queries of one head
        query, shared = query.reshape(rows, key.shape[1], shared, -1), 1
    if shared > 1:
        key, value = (each.repeat_interleave(shared, 1) for each in (key, value))
    if softcap is None and sinks is None:
        causal = mask is None and new > 1
        out = functional.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scaling)
    else:
        out = _spelt_out(query, key, value, mask, scaling, softcap, sinks, new)
    return out.reshape(rows, heads, new, -1)


def _spelt_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float | None,
    softcap: float | None, sinks: torch.Tensor | None, new: int,
) -> torch.Tensor:  # fmt: skip
    """Compute attention step by step, for options that torch's own function has no argument for."""
    weights = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        weights = torch.tanh(weights / softcap) * softcap
    if mask is None and new > 1:
        mask = torch.ones(new, new, dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        weights = weights.masked_fill(~mask, torch.finfo(weights.dtype).min)
    if sinks is not None:
        column = sinks.to(weights.dtype).reshape(1, -1, 1, 1).expand(*weights.shape[:3], 1)
        weights = torch.cat([weights, column], -1)
    shares = functional.softmax(weights, -1, dtype=torch.float32).to(query.dtype)
    return (shares if sinks is None else shares[..., :-1]) @ value


def options_of(given: Mapping[str, Any], module: Any) -> dict[str, Any]:
    """Return what a model says about its attention beside its scaling, as arguments of ``_computed``."""
    sinks = given.get("s_aux")
    return {"softcap": given.get("softcap"), "sinks": getattr(module, "sinks", None) if sinks is None else sinks}
