"""One request of a run, where a run's requests come from, and token ids that are made out of numbers.

The same numbers give the same tokens on every machine and in every run. A block of a trace becomes 512 tokens. Each
token depends on the block's id and on its position in the block, so blocks with equal ids are equal, and the first n
tokens of a partial block are those of the whole block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

BLOCK_TOKENS = 512
"""Tokens in one block of a trace."""

_U64 = np.uint64
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9
_MASK = (1 << 64) - 1

_OFFSETS = np.arange(BLOCK_TOKENS, dtype=_U64) * _U64(_MIX)


class RunRequest(NamedTuple):
    """One request that ``replay`` or ``stress`` serves.

    number: counts the requests of the run from 0.
    length, output_length: tokens of the prompt and of the output.
    prompt, output: make the tokens when they are called, because the tokens of a whole trace do not fit in memory.
    at: when the request arrives, in seconds after the start of the run; used by replays with ``--speed``.
    ended: True if the release tells the cache that this conversation will not go on.
    extra_key: the namespace of the prompt.
    shared_blocks: full blocks of the prompt that earlier prompts of the trace have as well.
    shared_tokens: the lease tells the cache that other conversations share so many tokens of the prompt; None: the
        lease does not say.
    time: when the request arrived according to the trace, in seconds after the trace's start, whatever the speed of
        the replay; None: the request is not from a trace.
    """

    number: int
    length: int
    output_length: int
    prompt: Callable[[], Tokens]
    output: Callable[[], Tokens]
    at: float = 0.0
    ended: bool = False
    extra_key: str | None = None
    shared_blocks: int = 0
    shared_tokens: int | None = None
    time: float | None = None


class Source(Protocol):
    """A source of requests. ``total``: how many there will be; None if the source could go on for ever."""

    total: int | None

    def next(self) -> RunRequest | None:
        """The request that arrives next; None if no more will come."""
        ...

    def done(self, request: RunRequest) -> None:
        """Tell the source that ``request`` has ended, well or not, so that its conversation may go on."""
        ...


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
