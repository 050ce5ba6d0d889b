"""The bytes that stand in for KV: a function of the tokens up to the end of a page, of the pool and of the layer.

A page's *value* is 64 bits that depend on the namespace and on every token from the first of the prompt to the last of
the page. This chain is the tool's own and not the cache's, so a fault in the cache's hashing shows as wrong bytes. Word
w of a page in a pool's layer is ``value ^ salt[pool, layer][w]``, with salts drawn at random. So a page in the wrong
slot, layer or pool, a page that is copied by half, and stale bytes all differ from what is expected. It costs one
operation per 8 bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from asynccache.cli.request import Tokens

if TYPE_CHECKING:
    import torch

Values = npt.NDArray[np.uint64]

_U64 = np.uint64
_A, _B, _C = _U64(0x9E3779B97F4A7C15), _U64(0xBF58476D1CE4E5B9), _U64(0x94D049BB133111EB)


def page_values(tokens: Tokens, page_size: int, extra_key: str | None = None) -> Values:
    """The value of each whole page of ``tokens``, in the namespace ``extra_key``."""
    pages = len(tokens) // page_size
    words = tokens[: pages * page_size].astype(_U64)
    words += np.arange(1, len(words) + 1, dtype=_U64) * _A
    words ^= words >> _U64(31)
    words *= _B
    sums: Values = words.reshape(pages, page_size).sum(axis=1, dtype=_U64).cumsum(dtype=_U64)
    sums += _U64(_namespace(extra_key))
    sums ^= sums >> _U64(29)
    sums *= _C
    sums ^= sums >> _U64(32)
    return sums


def _namespace(extra_key: str | None) -> int:
    if extra_key is None:
        return 0
    return int.from_bytes(hashlib.blake2b(extra_key.encode(), digest_size=8).digest(), "little")


class Pattern:
    """Writes and compares the bytes of one layer of one pool. ``page_bytes``: those of a page in this layer;
    ``device``: where the layer is."""

    def __init__(self, pool: str, layer: int, page_bytes: int, device: torch.device | None = None) -> None:
        import torch  # here, because the head of several ranks has no device and needs no torch

        self._torch = torch
        seed = hashlib.blake2b(f"{pool}/{layer}".encode(), digest_size=8).digest()
        rng = np.random.Generator(np.random.PCG64(int.from_bytes(seed, "little")))
        low, high = -(1 << 63), (1 << 63) - 1
        salt = rng.integers(low, high, size=-(-page_bytes // 8), dtype=np.int64, endpoint=True)
        self._salt = torch.from_numpy(salt).to(device)
        self._bytes = page_bytes

    def write(self, layer: torch.Tensor, pages: torch.Tensor, values: torch.Tensor) -> None:
        """Write the bytes that ``values[i]`` stands for to page ``pages[i]`` of ``layer`` (uint8, shape
        ``[pages, page_bytes]``)."""
        self._words(layer).index_copy_(0, pages, self._expand(values))

    def mismatches(self, layer: torch.Tensor, pages: torch.Tensor, values: torch.Tensor) -> Sequence[int]:
        """The positions i at which page ``pages[i]`` of ``layer`` does not hold the bytes that ``values[i]`` stands
        for."""
        found, expected = self._words(layer).index_select(0, pages), self._expand(values)
        if self._torch.equal(found, expected):
            return ()
        wrong: list[int] = (found != expected).any(dim=1).nonzero().flatten().tolist()
        return wrong

    def _expand(self, values: torch.Tensor) -> torch.Tensor:
        rows = self._torch.bitwise_xor(values[:, None], self._salt[None, :])
        return rows if self._whole_words() else rows.view(self._torch.uint8)[:, : self._bytes]

    def _words(self, layer: torch.Tensor) -> torch.Tensor:
        """The layer as 64-bit words if its pages are whole words, because gathering single bytes is ten times
        slower."""
        return layer.view(self._torch.int64) if self._whole_words() else layer

    def _whole_words(self) -> bool:
        return self._bytes % 8 == 0
