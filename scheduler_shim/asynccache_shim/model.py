"""The contract between the scheduler and a model: one blocking call for each step, with plain values as arguments. And
the thread in which a model computes.

The scheduler decides, and the model computes. A model reads and writes KV in ``cache.pools``, only at the slots
that the call names. It never sees a lease, a request or the cache's tree. When ``forward`` is called, all data that it
may read is on the device already, and each slot that it is to write belongs to one request alone.

A task that is cancelled while it waits for the model still waits for the call to return. So no page is given back
while a model may still read or write it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]
A = TypeVar("A")
R = TypeVar("R")

NO_TOKEN = -1
"""The value that ``forward`` returns for a ``Chunk`` whose ``sample`` is False."""


class Sampling(NamedTuple):
    """The options by which the next token is drawn. With ``temperature`` 0 it is the most likely one."""

    temperature: float = 0.0
    top_p: float = 1.0
    """Draw among the most likely of these that together have this share of their probability."""
    seed: int | None = None
    """With a seed the draw is a function of it and of the token's position, so a request that was retracted goes on as
    if it had not been."""
    top_k: int = 0
    """Draw among this many of the most likely tokens, and those that are as likely as the last of them; 0: among
    all."""


class Checkpoint(NamedTuple):
    """An order to keep a copy of the recurrent state after ``position`` tokens in MAMBA slot ``slot``. ``position`` is
    always the chunk's ``stop``."""

    position: int
    slot: int


class Chunk(NamedTuple):
    """One request's part of a step: compute the positions ``[start, stop)`` of ``tokens``.

    The page tables may change between two steps; the KV that they lead to does not.
    """

    request_id: int
    tokens: Pages
    """Prompt and output so far, int32, at least ``stop`` of them; not to be changed."""
    start: int
    """Where the request's previous chunk stopped. For its first chunk, and for the first after a retraction, the end of
    what comes from the cache: 0 or a multiple of the page size."""
    stop: int
    pages: Pages
    """FULL's page table. Position p is in page ``pages[p // page_size]``; the table covers at least ``[0, stop)``."""
    swa_pages: Pages
    """SWA's page table in the same form, with -1 where there is no page. It covers the window before ``start`` and all
    up to ``stop``. Empty if there is no SWA pool."""
    states: Pages
    """MAMBA slots, the working copy first. That slot holds the state after ``start`` tokens (nothing yet if ``start``
    is 0), and must hold the state after ``stop`` tokens when the call returns. Empty if there is no MAMBA pool."""
    checkpoint: Checkpoint | None
    """Where to keep a copy of that state as well; None: nowhere."""
    sample: bool
    """Whether to return the token that follows ``tokens[stop - 1]``."""
    sampling: Sampling = Sampling()
    """How that token is drawn."""


class Batch(NamedTuple):
    """One step."""

    chunks: tuple[Chunk, ...]
    ended: tuple[int, ...] = ()
    """The ids of requests that finished, were aborted or were retracted since the last call. A model that keeps
    anything of a request between calls must forget the requests in ``ended`` before it looks at ``chunks``, because a
    retracted request may be among ``chunks`` again, under the same id."""


class Model(Protocol):
    """A model, which computes the steps. It is called from one thread at a time, and never from the event loop's
    thread."""

    def forward(self, batch: Batch) -> Sequence[int]:
        """Compute the batch. Returns the next token of every chunk, in the order of ``chunks``; ``NO_TOKEN`` for
        one that does not sample.

        It must return only when all KV is written. On a device with a queue the writes may still be queued, if later
        copies of that device are ordered behind them. An error that it raises ends the requests of the batch, and
        nothing of the step is published.
        """
        ...


# the thread that a model runs in


class ModelThread:
    """A thread that runs calls in the order in which they were started."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "model")

    def start(self, function: Callable[[A], R], argument: A) -> asyncio.Future[R]:
        """Queue ``function(argument)`` for the thread; returns a future of its result."""
        return asyncio.get_running_loop().run_in_executor(self._thread, _call, function, argument)

    def close(self, wait: bool) -> None:
        """End the thread when the calls that were started have returned. With ``wait``, block until then."""
        self._thread.shutdown(wait)


def _call(function: Callable[[A], R], argument: A) -> R:
    try:
        return function(argument)
    except StopIteration as error:  # a future cannot hold StopIteration: its waiter would wait for ever
        raise RuntimeError("model: it raised StopIteration") from error


async def returned(future: asyncio.Future[R]) -> asyncio.CancelledError | None:
    """Wait until ``future`` is done, also if this task is cancelled meanwhile. Returns the cancellation that came, for
    the caller to raise; None if none came."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled
