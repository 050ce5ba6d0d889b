"""One forward call of a transformers model. Models differ in the name of the argument that takes the cache, and in
their other arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import transformers

from asynccache import ConfigError

VERSION = f"transformers {transformers.__version__}"
"""What to name in a message about something that this version may lack."""

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""The names of the argument for the cache: since transformers 5.24, before, and in older models with recurrent states
alone."""


def parameters(model: Any) -> frozenset[str]:
    """Return the names of the parameters of the model's ``forward``."""
    return _names(type(model).forward)


@lru_cache(maxsize=64)
def _names(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def cache_name(model: Any) -> str:
    """Return the name of the argument in which ``forward`` takes its cache.

    Raises:
        ConfigError: the model takes none.
    """
    takes = parameters(model)
    name = next((name for name in CACHE_NAMES if name in takes), None)
    if name is None:
        raise ConfigError(f"{type(model).__name__}: its forward() takes no cache")
    return name


def run(model: Any, ids: torch.Tensor, cache: Any, keep: int = 1, start: int = 0) -> torch.Tensor:
    """Compute the tokens ``ids`` (one-dimensional) at the positions from ``start`` on, after the tokens that are in
    ``cache``, and add them to ``cache``. Return the logits of the last ``keep`` tokens (0: of all), ``[tokens,
    vocabulary]``.

    Positions are passed wherever the model takes them: some models count from 0 in every call otherwise.

    Raises:
        ConfigError: the model takes no cache.
    """
    options: dict[str, Any] = {cache_name(model): cache, "use_cache": True, **_common(model, keep)}
    if "position_ids" in parameters(model):
        options["position_ids"] = torch.arange(start, start + len(ids), device=ids.device).unsqueeze(0)
    out = model(input_ids=ids.unsqueeze(0), **options)
    return torch.as_tensor(out.logits)[0, -keep:]


def run_alone(model: Any, ids: torch.Tensor, keep: int = 1) -> torch.Tensor:
    """Return the logits of the last ``keep`` tokens (0: of all), computed by one call over all of ``ids`` without a
    cache. Every way to compute them with a cache is compared with this one."""
    out = model(input_ids=ids.unsqueeze(0), use_cache=False, **_common(model, keep))
    return torch.as_tensor(out.logits)[0, -keep:]


def _common(model: Any, keep: int) -> dict[str, Any]:
    return {"logits_to_keep": keep} if "logits_to_keep" in parameters(model) else {}
