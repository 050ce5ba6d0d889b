"""One request as the driver sees it, and where requests come from. Values and a protocol, nothing that runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

BLOCK_TOKENS = 512


class Request(NamedTuple):
    """``prompt`` and ``output`` make the tokens when they are needed: a trace holds more than fits in memory.

    ``at``: seconds after the start, for replays by the clock. ``ended``: what the caller tells the cache when it
    releases, that this conversation will not come back. ``shared_blocks``: full blocks that earlier prompts of a
    trace have, too. ``shared_tokens``: what the caller says that other conversations have, too; None: it does not say.
    ``time``: seconds after the start of the trace, whatever the speed of the replay; None: it has no time of its own.
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
    """Where requests come from. ``total`` is None when the source could go on for ever."""

    total: int | None

    def next(self) -> Request | None:
        """The request that arrives now; None when there will be no more."""
        ...

    def done(self, request: Request) -> None:
        """``request`` has ended, well or not: what follows it in its conversation may come."""
        ...
