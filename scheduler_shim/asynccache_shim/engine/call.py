"""One forward call of a transformers model: models differ in what they call their cache."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from asynccache import ConfigError

_NAMES = ("past_key_values", "cache_params")


def run(model: Any, ids: torch.Tensor, cache: DynamicCache, keep: int = 1) -> torch.Tensor:
    """Compute ``ids`` (one-dimensional) after what is in ``cache``, which grows by them; the logits of the last
    ``keep`` tokens (0: of all).

    Raises:
        ConfigError: the model takes no cache.
    """
    takes = inspect.signature(model.forward).parameters
    name = next((name for name in _NAMES if name in takes), None)
    if name is None:
        raise ConfigError(f"{type(model).__name__}: its forward() takes no cache")
    options: dict[str, Any] = {name: cache}
    if "logits_to_keep" in takes:
        options["logits_to_keep"] = keep
    out = model(input_ids=ids.unsqueeze(0), use_cache=True, **options)
    return torch.as_tensor(out.logits)[0, -keep:]
