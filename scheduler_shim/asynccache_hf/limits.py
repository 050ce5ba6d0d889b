"""How many tokens a model's positions mean the same for, whatever comes after them.

Two kinds of rotary embedding turn every position's key by an angle that depends on how long the whole sequence is:
``longrope`` has one set of angles up to a length and another one beyond, ``dynamic`` changes them with each token
beyond. Up to that length a prefix is a prefix; beyond, its keys would have to be computed anew, and transformers does
that. So pages are served up to there, and what is longer is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def longest(config: Any) -> int | None:
    """The number of tokens up to which a prefix's keys do not depend on what follows; None: any number."""
    text = config.get_text_config(decoder=True)
    limits = [limit for rope in _ropes(getattr(text, "rope_parameters", None)) if (limit := _limit(text, rope))]
    return min(limits, default=None)


def _ropes(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """The parameters of each rotary embedding: a model has one, or one for each type of layer."""
    if not isinstance(parameters, Mapping):
        return
    if "rope_type" in parameters:
        yield parameters
    else:
        yield from (each for each in parameters.values() if isinstance(each, Mapping))


def _limit(config: Any, rope: Mapping[str, Any]) -> int | None:
    kind = str(rope.get("rope_type", "default"))
    most = int(getattr(config, "max_position_embeddings", 0) or 0)
    if kind == "longrope":
        return int(rope.get("original_max_position_embeddings") or most) or None
    if "dynamic" in kind:  # the angles of a longer sequence are given up by a sequence that is shorter than this
        return (most or 1) - 1
    return None
