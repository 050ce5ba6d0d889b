"""Recovery: the index is rebuilt from the files after a clean end, a kill or a power loss. It runs in
threads.

Groups that the snapshot names are taken from the snapshot. Later groups are found by walking through the segments from
header block to header block. Where a block does not verify, because its write never happened or was torn, the search
goes on 4 KiB further, as long as the file has data. Payloads are not read: every get verifies its records.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import NamedTuple

from asynccache_backends.file import deletions, snapshot
from asynccache_backends.file.files import Folder, ThreadIO
from asynccache_backends.file.segments import (
    BLOCK_BYTES,
    MAGIC,
    PageGroup,
    Segment,
    list_segments,
    open_segment,
    parse_block,
    round_up,
)
from asynccache_backends.file.state import FileIndex

_SCAN_BYTES = 1 << 20
_LEAST_SNAPSHOT = 64 << 20
_SECTOR = 512  # bytes; st_blocks counts in these


class Recovered(NamedTuple):
    """The outcome of a recovery. ``scanned``: how many groups were found in segments, because the snapshot did not have
    them. ``stale_deaths``: how many entries of the log of deletions name groups that do not exist any more."""

    found: FileIndex
    segments: list[Segment]
    scanned: int
    stale_deaths: int


async def recover(io: ThreadIO, folder: Folder, seed: int, direct: bool) -> Recovered:
    """Open every segment and find its groups. Each segment's ``tail`` is the end of its last group then. Cancelling it
    waits until no thread reads, and leaves nothing open.

    Raises:
        NotPlain: something else than a plain file has the name of one of the files.
        OSError: the disk refuses. In both cases nothing is left open.
    """
    segments: list[Segment] = []
    try:
        await io.run(_open_segments, folder, direct, segments)
        saved = await snapshot.read(folder, await io.run(_most_saved, segments))
        return await io.run(_read, seed, segments, saved, await deletions.read(folder))
    except BaseException:
        for segment in segments:
            segment.drop()
        raise


def _open_segments(folder: Folder, direct: bool, segments: list[Segment]) -> None:
    segments.extend(open_segment(folder, number, direct) for number in list_segments(folder.fd))


def _read(seed: int, segments: list[Segment], snapshot_data: bytes, log: bytes) -> Recovered:
    index, saved, scanned = FileIndex(), snapshot.parse(snapshot_data, seed), 0
    for segment in segments:
        groups = [g for g in saved.groups if g.segment == segment.number and g.offset + BLOCK_BYTES < segment.size]
        known = {group.offset for group in groups}
        fresh = [g for g in scan(segment, saved.scan_from.get(segment.number, 0), seed) if g.offset not in known]
        scanned += len(fresh)
        for group in (*groups, *fresh):
            index.add(group)
        segment.tail = max((round_up(group.end) for group in (*groups, *fresh)), default=0)
    return Recovered(index, segments, scanned, index.apply_deletions(deletions.parse(log, seed)))


def _most_saved(segments: list[Segment]) -> int:
    """Return the most bytes that a snapshot can have and still be read.

    For each group it has fewer bytes than the group's header block, so it is smaller than the segments, counted by what
    they really take on the disk. A larger snapshot, say one that is left after segments were deleted by hand, is not
    read, and the segments are scanned instead.
    """
    taken = [os.fstat(segment.files.buffered).st_blocks * _SECTOR for segment in segments]
    return _LEAST_SNAPSHOT + sum(map(min, taken, [segment.size for segment in segments]))


def scan(segment: Segment, start: int, seed: int) -> Iterator[PageGroup]:
    """Yield the groups of a segment from the offset ``start`` on."""
    fd, at = segment.files.buffered, start
    while at < segment.size:
        group = parse_block(os.pread(fd, BLOCK_BYTES, at), seed)
        if group is not None and (group.segment, group.offset) == (segment.number, at):
            yield group
            at = group.end
        else:
            at = _next_block(fd, at + BLOCK_BYTES, segment.size)


def _next_block(fd: int, at: int, size: int) -> int:
    """Return the offset, from ``at`` on, of the next block that begins like a header block; ``size`` if there is
    none."""
    while (at := _next_data(fd, at, size)) < size:
        data = os.pread(fd, _SCAN_BYTES, at)
        if not data:
            return size
        for step in range(0, len(data), BLOCK_BYTES):
            if data.startswith(MAGIC, step):
                return at + step
        at += round_up(len(data))
    return size


def _next_data(fd: int, at: int, size: int) -> int:
    """Return the offset, from ``at`` on, of the next block that was ever written; ``size`` if there is none."""
    if at >= size:
        return size
    try:
        return os.lseek(fd, at, os.SEEK_DATA) // BLOCK_BYTES * BLOCK_BYTES
    except OSError as error:
        return size if error.errno == errno.ENXIO else at
