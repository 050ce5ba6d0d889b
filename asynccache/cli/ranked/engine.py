"""The engine of several ranks as the command sees it: work for it is sent to all ranks, as a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from asynccache.cli.engine import Piece, Verdict
from asynccache.cli.ranked.work import packed, understood
from asynccache.core.settings import ComponentKind
from asynccache.errors import BatchFailed

if TYPE_CHECKING:
    from asynccache.runtime.cache import AsyncCache


class RankedEngine:
    """The stand-in for an engine of several ranks. ``pools``: by component, how many pools all ranks have together."""

    def __init__(self, cache: AsyncCache, pools: Mapping[ComponentKind, int]) -> None:
        self._cache = cache
        self._pools = pools

    @property
    def slowdown(self) -> float:
        """Always 1.0: the work is done in the processes of the ranks, and is not measured."""
        return 1.0

    def stream(self) -> RankedStream:
        """Return the stream for the work of one request."""
        return RankedStream(self._cache, self._pools)


class RankedStream:
    """The work of one request. ``work``: the number of its last batch, for whoever gives the pages back; None: there
    was none."""

    def __init__(self, cache: AsyncCache, pools: Mapping[ComponentKind, int]) -> None:
        self.work: int | None = None
        self._cache = cache
        self._pools = pools

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Have the ranks fill these pages, without waiting for that. An error shows later, in the bytes."""
        if any(len(piece.ids) for piece in pieces):
            self.work = self._cache.send_batch(packed(pieces, verifies=False))

    async def write(self, pieces: Sequence[Piece]) -> None:
        """Fill these pages on every rank, and return when that is done. Cancelling it does not stop the ranks; the
        batch ``work`` is over when they have ended."""
        if any(len(piece.ids) for piece in pieces):
            self.begin(pieces)
            assert self.work is not None
            await self._cache.batch_ended(self.work)

    async def verify(self, pieces: Sequence[Piece]) -> Verdict:
        """Compare these pages on every rank with what they must hold, and return the verdict on all of them. Cancelling
        it is as for ``write``."""
        if not any(len(piece.ids) for piece in pieces):
            return Verdict(0, 0)
        self.work = self._cache.send_batch(packed(pieces, verifies=True))
        count = sum(len(piece.ids) * self._pools[piece.component] for piece in pieces)
        try:
            await self._cache.batch_ended(self.work)
        except BatchFailed as error:
            found = [understood(rank, reason) for rank, reason in error.reasons.items()]
            wrong = [one for one in found if one is not None]
            if len(wrong) < len(found):
                raise
            return Verdict(count, sum(one.wrong for one in wrong), tuple(what for one in wrong for what in one.what))
        return Verdict(count, 0)
