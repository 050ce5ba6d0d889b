"""Plans the reads of a get: pages that lie next to each other are one read, and reads are put into batches. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asynccache.storage import PageKey, Record
from asynccache_backends.file.aio import FileRun
from asynccache_backends.file.blocks import PageGroup
from asynccache_backends.file.index import FileIndex

MOST_BATCH = 4 << 20
LEAST_BATCH = 1 << 20
BATCHES = 4


class GroupStretch(NamedTuple):
    """Pages of one group that lie next to each other, the first at index ``page``. ``which`` has for each page the
    position of its key in the get."""

    group: PageGroup
    page: int
    which: list[int]


class ReadBatch(NamedTuple):
    """One call of the I/O: stretches of pages of one length in one segment. ``runs`` has the bytes and buffers of
    each."""

    segment: int
    length: int
    stretches: list[GroupStretch]
    runs: list[FileRun]


def find_stretches(
    index: FileIndex, keys: Sequence[PageKey], records: Sequence[Record]
) -> tuple[list[GroupStretch], list[int]]:
    """Return the stretches in which the stored pages of ``keys`` lie, in the order in which they were written; and the
    positions of keys whose page has another length than their record."""
    stretches: list[GroupStretch] = []
    wrong: list[int] = []
    expected = -1
    for slot, i in sorted(index.slots(keys)):
        if slot != expected:
            group, page = index.at(slot)
            which: list[int] = []
        if records[i].payload.nbytes != group.length:
            wrong.append(i)
            expected = -1
            continue
        if not which:
            stretches.append(GroupStretch(group, page, which))
        which.append(i)
        expected = slot + 1
    return stretches, wrong


def plan_reads(stretches: Sequence[GroupStretch], records: Sequence[Record]) -> list[ReadBatch]:
    """Divide the stretches into batches. These have 1 to 4 MiB, so that each is worth a call; within that there are
    about as many as can run at the same time."""
    total = sum(stretch.group.length * len(stretch.which) for stretch in stretches)
    limit = max(LEAST_BATCH, min(MOST_BATCH, total // BATCHES))
    batches: list[ReadBatch] = []
    segment = length = room = 0
    left = list(reversed(stretches))
    while left:
        stretch = left.pop()
        group, page, which = stretch
        if room < group.length or length != group.length or segment != group.segment:
            segment, length, room = group.segment, group.length, max(limit, group.length)
            batch = ReadBatch(segment, length, [], [])
            batches.append(batch)
        size = len(which) * length
        if size > room:
            fits = room // length
            left.append(GroupStretch(group, page + fits, which[fits:]))
            stretch = GroupStretch(group, page, which[:fits])
            which, size = stretch.which, fits * length
        batch.stretches.append(stretch)
        batch.runs.append(FileRun(group.payload_offset(page), size, [records[i].payload for i in which]))
        room -= size
    return batches
