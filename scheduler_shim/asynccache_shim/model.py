"""What the scheduler asks of a model: one blocking call per step, on values.

Law: the scheduler decides, the model computes. A model reads and writes KV in ``cache.pools`` at the slots that it is
told, and nowhere else; it never sees a lease, a request or the cache's tree. When ``forward`` is called, everything it
may read is on the device already, and what it is told to write belongs to that request alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]

NO_TOKEN = -1
"""What ``forward`` returns for a ``Work`` that is not to sample."""


class Sampling(NamedTuple):
    """How the next token is drawn. ``temperature`` 0: the likeliest one. With a ``seed`` the draw is a function of it
    and of the token's position, so that a request which was retracted goes on as it would have."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None


class Checkpoint(NamedTuple):
    """Keep the recurrent state after ``position`` tokens (always the work's ``stop``) in MAMBA slot ``slot`` too."""

    position: int
    slot: int


class Work(NamedTuple):
    """One request's part of a step: compute the positions ``[start, stop)`` of ``tokens``.

    ``tokens``: prompt and output so far, int32, at least ``stop`` of them; not to be changed.
    ``pages``: FULL's page table, position p at page ``pages[p // page_size]``; covers ``[0, stop)`` or more.
    ``swa_pages``: the window's, -1 where it has no page; covers the window before ``start`` and up to ``stop``; empty
    when there is no SWA pool. ``states``: MAMBA slots, the working copy first: it holds the state after ``start``
    tokens (nothing, if ``start`` is 0) and must hold the one after ``stop`` when the call returns; empty when there is
    no MAMBA pool. ``checkpoint``: see there. ``sample``: return the token that follows ``tokens[stop - 1]``.

    ``start`` is 0 or where the same request's previous work stopped or, the first time and after a retraction, a page
    multiple up to which KV comes from the cache. The page tables may change between two steps, the KV they lead to
    does not.
    """

    request_id: int
    tokens: Pages
    start: int
    stop: int
    pages: Pages
    swa_pages: Pages
    states: Pages
    checkpoint: Checkpoint | None
    sample: bool
    sampling: Sampling = Sampling()


class Batch(NamedTuple):
    """One step. ``ended``: requests that finished, were aborted or retracted since the last call; a model that keeps
    anything of a request between calls forgets it now (before it looks at ``works``: a retracted one may be back)."""

    works: tuple[Work, ...]
    ended: tuple[int, ...] = ()


class Model(Protocol):
    """Called from one worker thread at a time, never from the event loop's thread."""

    def forward(self, batch: Batch) -> Sequence[int]:
        """Compute; the next token of every work in order, ``NO_TOKEN`` where it is not to sample.

        Returns when all KV is written (a device's queue may still hold the writes, if later copies of that device are
        ordered behind them). What it raises ends the requests of the batch, and nothing of the step is published.
        """
        ...
