"""Draws the next token from logits."""

from __future__ import annotations

import torch
from asynccache_shim.model import Sampling

COLDEST = 1e-5
"""The smallest temperature to divide by. At much higher temperatures than this the likeliest token is already
certain."""


def draw(logits: torch.Tensor, sampling: Sampling, position: int) -> int:
    """Draw the token for ``position``. With a seed the draw depends on logits, seed and position alone, so a request
    that is interrupted and computed again draws the same token."""
    if sampling.temperature <= 0:
        return int(logits.argmax())
    logits = logits.float().cpu()
    chances = torch.softmax((logits - logits.max()) / max(sampling.temperature, COLDEST), dim=-1)
    chances, tokens = chances.sort(descending=True, stable=True)
    before = chances.cumsum(0) - chances
    chances[before >= sampling.top_p] = 0
    chances[0] = max(float(chances[0]), torch.finfo(chances.dtype).tiny)
    return int(tokens[torch.multinomial(chances, 1, generator=_generator(sampling, position))])


def _generator(sampling: Sampling, position: int) -> torch.Generator | None:
    if sampling.seed is None:
        return None
    mixed = (sampling.seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9) % (1 << 63)
    return torch.Generator().manual_seed(mixed)
