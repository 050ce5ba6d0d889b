"""The engine of several ranks as the command sees it: what is to be done goes to all of them, as a batch."""

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
    """``pools``: how many pools of a component all ranks have."""

    def __init__(self, cache: AsyncCache, pools: Mapping[ComponentKind, int]) -> None:
        self._cache = cache
        self._pools = pools

    @property
    def slowdown(self) -> float:
        """1.0: the work is done in the processes of the ranks, and not measured."""
        return 1.0

    def stream(self) -> RankedStream:
        """For one request."""
        return RankedStream(self._cache, self._pools)


class RankedStream:
    """The work of one request. ``work``: the last batch, for whoever gives the pages back."""

    def __init__(self, cache: AsyncCache, pools: Mapping[ComponentKind, int]) -> None:
        self.work: int | None = None
        self._cache = cache
        self._pools = pools

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Have these pages filled; nobody waits, and what goes wrong shows in the bytes."""
        if any(len(piece.ids) for piece in pieces):
            self.work = self._cache.send_batch(packed(pieces, verifies=False))

    async def write(self, pieces: Sequence[Piece]) -> None:
        """Fill these pages on every rank. Cancelling leaves the ranks at it: ``work`` tells when it is over."""
        if any(len(piece.ids) for piece in pieces):
            self.begin(pieces)
            assert self.work is not None
            await self._cache.batch_ended(self.work)

    async def verify(self, pieces: Sequence[Piece]) -> Verdict:
        """Compare these pages with what they must hold on every rank. Cancelling is as for ``write``."""
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
