"""Which range reads answer a get: neighbours in a pack are read at once, up to a few MiB. Pure, but for the copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from asynccache.storage import PageKey, Record
from asynccache_backends.object_store.index import Index
from asynccache_backends.object_store.packs import Pack

GAP = 512 << 10                                        # unwanted bytes that cost less than another request
INLINE_BYTES = 128 << 10


class Wanted(NamedTuple):
    """One record of a get: its place in the call, and where its payload lies in the pack."""

    which: int
    header: bytes
    offset: int
    length: int


class Stretch(NamedTuple):
    """One range read."""

    pack: Pack
    start: int
    wanted: list[Wanted]

    @property
    def size(self) -> int:
        """How much is read."""
        return self.end - self.start

    @property
    def end(self) -> int:
        """Where it ends in the pack."""
        last = self.wanted[-1]
        return last.offset + last.length


def plan_reads(
    index: Index, keys: Sequence[PageKey], records: Sequence[Record], most: int
) -> tuple[list[Stretch], list[int]]:
    """The reads that bring every key that is there, and which keys have a page of another length than their record."""
    stretches: list[Stretch] = []
    wrong: list[int] = []
    for slot, which in sorted(index.slots(keys)):
        pack, at = index.at(slot)
        _, header, offset, length, _ = pack.entry(at)
        if records[which].payload.nbytes != length:
            wrong.append(which)
            continue
        last = stretches[-1] if stretches else None
        if last is None or last.pack is not pack or offset - last.end > GAP or offset + length - last.start > most:
            last = Stretch(pack, offset, [])
            stretches.append(last)
        last.wanted.append(Wanted(which, header, offset, length))
    return stretches, wrong


def hand_out(stretch: Stretch, data: Any, records: Sequence[Record]) -> None:
    """Copy what was read to where it belongs. Runs in a thread where it is much."""
    source = np.frombuffer(data, np.uint8)
    for which, header, offset, length in stretch.wanted:
        record, at = records[which], offset - stretch.start
        record.header[:] = header
        np.frombuffer(record.payload, np.uint8)[:] = source[at : at + length]
