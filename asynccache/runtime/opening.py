"""Ranks open their caches: each its own pools and stores, with one end for all.

Laws:
* Until all are ready they tell each other how far they are, again and again: so a store may take longer to open than
  ranks wait for each other, and a rank that is gone is noticed all the same.
* What fails or is cancelled on one rank is given up on all, at the same exchange.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, Generic, NamedTuple, TypeVar

from asynccache.errors import RankFailure
from asynccache.ranks import Ranks
from asynccache.settle import settled

T = TypeVar("T")

PAUSE = 0.2
"""Between two exchanges, while anything is opening."""


async def open_on_all(ranks: Ranks | None, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """``work`` here, and on all other ranks what is theirs. Cancelling it cancels it on all of them; the second time,
    it leaves the ranks unable to gather.

    Raises:
        RankFailure: another rank failed, is gone, or was cancelled. If it failed here: its own error.
    """
    if ranks is None or ranks.topology.ranks == 1:
        return await work()
    opening = _Opening(asyncio.get_running_loop().create_task(work(), name="asynccache-opening"))
    exchanging = asyncio.get_running_loop().create_task(opening.exchange(ranks), name="asynccache-exchanging")
    cancelled: asyncio.CancelledError | None = None
    while not exchanging.done():
        try:
            await asyncio.wait([exchanging])
        except asyncio.CancelledError as error:
            if cancelled is None:
                opening.give_up("it was cancelled")
            else:
                exchanging.cancel()
            cancelled = error
    opening.work.cancel()  # the others are gone, if it still runs
    await settled([opening.work])
    if cancelled is not None:
        raise cancelled
    return opening.result(exchanging.result())


class _Word(NamedTuple):
    """What a rank says. ``why``: it gives up."""

    done: bool
    why: str = ""


class _Opening(Generic[T]):
    """``why``: it is in vain, for the first reason that was heard."""

    def __init__(self, work: asyncio.Task[T]) -> None:
        self.work = work
        self._why = ""

    def give_up(self, why: str) -> None:
        """Have the work cancelled."""
        self._why = self._why or why
        self.work.cancel()

    async def exchange(self, ranks: Ranks) -> str:
        """Return when nobody is at it any more; why not all are open. Raises ``RankFailure``: a rank is gone."""
        in_vain = ""
        while True:
            await asyncio.wait([self.work], timeout=PAUSE)
            words = [_Word(*json.loads(said)) for said in await ranks.gather(json.dumps(self._word()).encode())]
            bad = [f"rank {rank} could not open its cache: {word.why}" for rank, word in enumerate(words) if word.why]
            in_vain = in_vain or next(iter(bad), "")
            if all(word.done for word in words):
                return in_vain
            if in_vain:
                self.give_up(in_vain)

    def _word(self) -> _Word:
        work = self.work
        if self._why or not work.done():
            return _Word(work.done(), self._why)
        if work.cancelled():
            return _Word(True, "it was cancelled")
        error = work.exception()
        return _Word(True, "" if error is None else f"{type(error).__name__}: {error}")

    def result(self, in_vain: str) -> T:
        """Of this rank's work, if nothing was in vain."""
        if in_vain and (self.work.cancelled() or self.work.exception() is None):
            raise RankFailure(in_vain)
        return self.work.result()
