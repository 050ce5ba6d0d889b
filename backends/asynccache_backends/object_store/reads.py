"""Plans the range reads of a get: pages that lie close to each other in a pack are one read of up to a few MiB. Pure,
except for the copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from asynccache.storage import PageKey, Record
from asynccache_backends.object_store.formats import Pack
from asynccache_backends.object_store.index import PackIndex

GAP = 512 << 10  # so many bytes between two wanted pages are read with them, since another request would cost more
INLINE_BYTES = 128 << 10


class WantedRecord(NamedTuple):
    """One record of a get: ``which`` is its position in the call; ``offset`` and ``length`` are those of its payload in
    the pack."""

    which: int
    header: bytes
    offset: int
    length: int


class PackStretch(NamedTuple):
    """One range read, of ``size`` bytes from ``start`` on."""

    pack: Pack
    start: int
    wanted: list[WantedRecord]

    @property
    def size(self) -> int:
        """How many bytes are read."""
        return self.end - self.start

    @property
    def end(self) -> int:
        """The offset in the pack at which it ends."""
        last = self.wanted[-1]
        return last.offset + last.length


def plan_reads(
    index: PackIndex, keys: Sequence[PageKey], records: Sequence[Record], most: int
) -> tuple[list[PackStretch], list[int]]:
    """Return the reads for all keys that are stored, of ``most`` bytes each at most; and the positions of keys whose
    page has another length than their record."""
    stretches: list[PackStretch] = []
    wrong: list[int] = []
    for slot, which in sorted(index.slots(keys)):
        pack, at = index.at(slot)
        _, header, offset, length, _ = pack.entry(at)
        if records[which].payload.nbytes != length:
            wrong.append(which)
            continue
        last = stretches[-1] if stretches else None
        if last is None or last.pack is not pack or offset - last.end > GAP or offset + length - last.start > most:
            last = PackStretch(pack, offset, [])
            stretches.append(last)
        last.wanted.append(WantedRecord(which, header, offset, length))
    return stretches, wrong


def hand_out(stretch: PackStretch, data: Any, records: Sequence[Record]) -> None:
    """Copy the headers and payloads in ``data``, which was read for ``stretch``, to their records. Large copies run in
    a thread."""
    source = np.frombuffer(data, np.uint8)
    for which, header, offset, length in stretch.wanted:
        record, at = records[which], offset - stretch.start
        record.header[:] = header
        np.frombuffer(record.payload, np.uint8)[:] = source[at : at + length]
