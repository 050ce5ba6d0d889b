"""From files to an index, after a clean end, a kill or a power loss. Blocking functions.

A group that the snapshot names is taken from it; what lies beyond is found by walking the segments from header block
to header block. A block that does not verify (a write that never happened or was torn) is stepped over, 4 KiB at a
time, as long as the file has data. Payloads are not read: their records are verified whenever they are.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import NamedTuple

from asynccache_backends.file import deletions, snapshot
from asynccache_backends.file.blocks import BLOCK_BYTES, MAGIC, Group, parse_block, round_up
from asynccache_backends.file.files import Folder
from asynccache_backends.file.index import Index
from asynccache_backends.file.segments import Segment, list_segments, open_segment

_SCAN_BYTES = 1 << 20
_LEAST_SNAPSHOT = 64 << 20
_SECTOR = 512                                      # in which the blocks of a file are counted


class Recovered(NamedTuple):
    """``scanned``: groups that came from segments and not from the snapshot. ``stale_deaths``: entries of the deletion
    log that name nothing any more."""

    found: Index
    segments: list[Segment]
    scanned: int
    stale_deaths: int


def recover(folder: Folder, seed: int, direct: bool) -> Recovered:
    """Open every segment and find what is in it; each segment's tail is then the end of its last group.

    Raises:
        NotPlain: one of the files is none. OSError: the disk refuses. Nothing stays open.
    """
    segments: list[Segment] = []
    try:
        segments.extend(open_segment(folder, number, direct) for number in list_segments(folder.fd))
        return _read(folder, seed, segments)
    except OSError:
        for segment in segments:
            segment.drop()
        raise


def _read(folder: Folder, seed: int, segments: list[Segment]) -> Recovered:
    index = Index()
    saved = snapshot.load(folder, seed, _most_saved(segments))
    scanned = 0
    for segment in segments:
        groups = [g for g in saved.groups if g.segment == segment.number and g.offset + BLOCK_BYTES < segment.size]
        known = {group.offset for group in groups}
        fresh = [g for g in scan(segment, saved.scan_from.get(segment.number, 0), seed) if g.offset not in known]
        scanned += len(fresh)
        for group in (*groups, *fresh):
            index.add(group)
        segment.tail = max((round_up(group.end) for group in (*groups, *fresh)), default=0)
    return Recovered(index, segments, scanned, index.kill(deletions.load(folder, seed)))


def _most_saved(segments: list[Segment]) -> int:
    """How large a snapshot is read: it says of each group less than the group's own header block does. What takes no
    room on the disk does not count. One that is larger, as after segments were deleted, is made again by scanning."""
    taken = [os.fstat(segment.files.buffered).st_blocks * _SECTOR for segment in segments]
    return _LEAST_SNAPSHOT + sum(map(min, taken, [segment.size for segment in segments]))


def scan(segment: Segment, start: int, seed: int) -> Iterator[Group]:
    """The groups of a segment from ``start`` on."""
    fd, at = segment.files.buffered, start
    while at < segment.size:
        group = parse_block(os.pread(fd, BLOCK_BYTES, at), seed)
        if group is not None and (group.segment, group.offset) == (segment.number, at):
            yield group
            at = group.end
        else:
            at = _next_block(fd, at + BLOCK_BYTES, segment.size)


def _next_block(fd: int, at: int, size: int) -> int:
    """Where the next thing that looks like a header block starts, or ``size``."""
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
    """Step over what was allocated and never written."""
    if at >= size:
        return size
    try:
        return os.lseek(fd, at, os.SEEK_DATA) // BLOCK_BYTES * BLOCK_BYTES
    except OSError as error:
        return size if error.errno == errno.ENXIO else at
