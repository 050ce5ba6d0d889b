"""A checksum of pages on their device: two pages with different bytes have the same one by chance only (2**-63)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

_SEED = 43
_WORD = 8


def sums(layers: Sequence[torch.Tensor], at: torch.Tensor, step: int) -> npt.NDArray[np.int64]:
    """Return a number for each page ``at`` (int64) of all ``layers`` (uint8, ``[pages, bytes]``) together, computed for
    ``step`` pages at a time."""
    found = torch.zeros(len(at), dtype=torch.int64, device=at.device)
    for layer in layers:
        size = layer.shape[1]
        weights = _weights(-(-size // _WORD)).to(at.device)
        for i in range(0, len(at), step):
            rows = layer[at[i : i + step]]
            if size % _WORD:
                rows = torch.nn.functional.pad(rows, (0, -size % _WORD))
            words = rows.contiguous().view(torch.int64)
            found[i : i + step] = found[i : i + step] * 31 + (words * weights).sum(1)
    return found.cpu().numpy()


@lru_cache(maxsize=64)
def _weights(words: int) -> torch.Tensor:
    """Odd numbers, so that a change of any word changes the sum."""
    drawn = np.random.default_rng(_SEED).integers(-(1 << 63), (1 << 63) - 1, words, np.int64)
    return torch.from_numpy(drawn | 1)
