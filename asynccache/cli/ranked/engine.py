"""The engine of several ranks: its work is sent to all of them, as a batch.

The payload of a batch says which pages to fill or to verify. A rank that finds wrong pages fails the batch, and reports
the pages as the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from asynccache.cli.engine import BegunBatch, PageRun, Verdict
from asynccache.core.settings import ComponentKind
from asynccache.errors import BatchFailed

if TYPE_CHECKING:
    from asynccache.runtime.cache import AsyncCache

_WRONG = "pages are wrong: "
_decoder = msgspec.msgpack.Decoder(tuple[bool, list[tuple[ComponentKind, bytes, bytes, int]]])


class RankedEngine:
    """See ``Engine``. ``pools``: by component, how many pools all ranks have together."""

    slowdown = 1.0
    """The work is done in the processes of the ranks, and is not measured."""

    def __init__(self, cache: AsyncCache, pools: Mapping[ComponentKind, int]) -> None:
        self._cache = cache
        self._pools = pools

    def close(self) -> None:
        """Do nothing: the ranks end with the cache."""

    def begin(self, pieces: Sequence[PageRun], *, verifies: bool) -> BegunBatch:
        """See ``Engine``."""
        number = self._cache.send_batch(packed(pieces, verifies=verifies))
        count = sum(len(piece.ids) * self._pools[piece.component] for piece in pieces) if verifies else 0
        return BegunBatch(number, lambda: self._verdict(number, count))

    async def _verdict(self, number: int, count: int) -> Verdict:
        try:
            await self._cache.batch_ended(number)
        except BatchFailed as error:
            found = [understood(rank, reason) for rank, reason in error.reasons.items()]
            wrong = [one for one in found if one is not None]
            if len(wrong) < len(found):
                raise
            return Verdict(count, sum(one.wrong for one in wrong), tuple(what for one in wrong for what in one.what))
        return Verdict(count, 0)


def packed(pieces: Sequence[PageRun], *, verifies: bool) -> bytes:
    """Return a batch's payload that tells the ranks to verify these pages or, if ``verifies`` is False, to fill
    them."""
    parts = [(int(one.component), one.ids.tobytes(), one.values.tobytes(), one.first) for one in pieces]
    return msgspec.msgpack.encode((verifies, parts))


def unpacked(payload: bytes) -> tuple[bool, list[PageRun]]:
    """Return the order in a payload: True to verify pages or False to fill them, and the pages."""
    verifies, parts = _decoder.decode(payload)
    return verifies, [PageRun(kind, np.frombuffer(ids, np.int32).copy(), np.frombuffer(values, np.uint64).copy(), first)
                      for kind, ids, values, first in parts]


def complaint(verdict: Verdict) -> str:
    """Return the text with which a rank reports wrong pages."""
    return f"{verdict.wrong} {_WRONG}{'; '.join(verdict.what[:2])}"


def understood(rank: int, reason: str) -> Verdict | None:
    """Return the verdict of a ``complaint`` that ``rank`` has sent; None if ``reason`` is no complaint about pages."""
    count, _, what = reason.partition(" ")
    if not (count.isdecimal() and what.startswith(_WRONG)):
        return None
    return Verdict(0, int(count), (f"rank {rank}: {what.removeprefix(_WRONG)}",))
