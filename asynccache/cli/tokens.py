"""Makes token ids out of numbers. The same numbers give the same tokens on every machine and in every run.

A block of a trace becomes 512 tokens. Each token depends on the block's id and on its position in the block, so blocks
with equal ids are equal, and the first n tokens of a partial block are those of the whole block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from asynccache.cli.request import BLOCK_TOKENS, Tokens

_U64 = np.uint64
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9
_MASK = (1 << 64) - 1

_OFFSETS = np.arange(BLOCK_TOKENS, dtype=_U64) * _U64(_MIX)


def block_tokens(blocks: Sequence[int], length: int) -> Tokens:
    """The first ``length`` tokens of these blocks, laid end to end."""
    seeds = np.array([_seed(block) for block in blocks], dtype=_U64)
    return _finish((seeds[:, None] + _OFFSETS).reshape(-1)[:length])


def stream_tokens(stream: int, start: int, length: int) -> Tokens:
    """Tokens ``[start, start + length)`` of an endless stream of tokens."""
    offsets = np.arange(start, start + length, dtype=_U64) * _U64(_MIX)
    return _finish(offsets + _U64(_seed(stream) ^ _MIX))


def _seed(number: int) -> int:
    mixed = (number + 1) * _GOLDEN & _MASK
    return (mixed ^ (mixed >> 31)) & _MASK


def _finish(x: npt.NDArray[np.uint64]) -> Tokens:
    x ^= x >> _U64(29)
    x *= _U64(_MIX)
    x >>= _U64(33)
    return x.astype(np.int32)
