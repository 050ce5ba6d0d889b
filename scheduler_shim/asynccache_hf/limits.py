"""How many tokens a model's positions mean the same for, whatever comes after them.

Two kinds of rotary embedding turn every position's key by an angle that depends on how long the whole sequence is:
``longrope`` has one set of angles up to a length and another one beyond, ``dynamic`` changes them with each token
beyond. Up to that length a prefix is a prefix; beyond, its keys would have to be computed anew, and transformers does
that. So pages are served up to there, and what is longer is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def longest(config: Any) -> int | None:
    """The number of tokens up to which a prefix's keys do not depend on what follows; None: any number."""
    text = config.get_text_config(decoder=True)
    given, most = getattr(text, "rope_parameters", None), int(getattr(text, "max_position_embeddings", 0) or 0)
    given = given if isinstance(given, Mapping) else {}
    limits = []
    for rope in (given,) if "rope_type" in given else given.values():  # of all layers, or of each type
        kind = str(rope.get("rope_type", "default")) if isinstance(rope, Mapping) else "default"
        if kind == "longrope":
            limits.append(int(rope.get("original_max_position_embeddings") or most))
        elif "dynamic" in kind:  # the angles of a longer sequence are given up by a sequence that is shorter than this
            limits.append((most or 1) - 1)
    return min(filter(None, limits), default=None)
