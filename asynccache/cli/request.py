"""One request of a run, and where a run's requests come from. Values and a protocol; nothing here runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

BLOCK_TOKENS = 512
"""Tokens in one block of a trace."""


class RunRequest(NamedTuple):
    """One request that ``replay`` or ``stress`` serves.

    number: counts the requests of the run from 0.
    length, output_length: tokens of the prompt and of the output.
    prompt, output: make the tokens when they are called, because the tokens of a whole trace do not fit in memory.
    at: when the request arrives, in seconds after the start of the run; used by replays with ``--speed``.
    ended: the release tells the cache that this conversation will not go on.
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
    """Where requests come from. ``total``: how many there will be; None if the source could go on for ever."""

    total: int | None

    def next(self) -> RunRequest | None:
        """The request that arrives next; None if no more will come."""
        ...

    def done(self, request: RunRequest) -> None:
        """Tell the source that ``request`` has ended, well or not, so that its conversation may go on."""
        ...
