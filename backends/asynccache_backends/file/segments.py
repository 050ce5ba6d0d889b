"""Segment files: preallocated, appended to, never written in place; deleted whole, the oldest first.

A file's id is in its name and is never used twice, so a location (segment, offset, page) names one page for ever.
``Segment`` and ``SegmentLog`` are the state, changed only on the loop; the functions below them do blocking file work.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import re
from pathlib import Path

from asynccache_backends.file.aio import Files, Moved
from asynccache_backends.file.blocks import BLOCK_BYTES, MAX_PAGES, group_bytes
from asynccache_backends.file.files import Folder, NotPlain

GROUP_BYTES = 8 << 20
MOST_NUMBER = 1 << 62                              # of a segment: a store that made one a second would need longer
PROBE = "direct.probe"
_NAME = re.compile(r"segment-([0-9a-f]{16})\.kv")


class Segment:
    """One open file. ``tail`` is where the next group goes; ``writing``: groups in flight, by offset."""

    def __init__(self, number: int, files: Files, size: int, tail: int = 0) -> None:
        self.number = number
        self.files = files
        self.size = size
        self.tail = tail
        self.writing: dict[int, asyncio.Future[Moved]] = {}
        self.dirty = False
        self.dropped = False
        self._users = 0

    def __repr__(self) -> str:
        return f"Segment({self.number}, {self.tail}/{self.size}, users={self._users})"

    @property
    def settled_to(self) -> int:
        """Every group before this offset was written or has failed."""
        return min(self.writing, default=self.tail)

    def enter(self) -> None:
        """An operation uses the files: they stay open."""
        self._users += 1

    def leave(self) -> None:
        """An operation has let go of the files."""
        self._users -= 1
        self._close_if_unused()

    def drop(self) -> None:
        """No new operation will use it. Its files close with the last one that does."""
        self.dropped = True
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self.dropped and not self._users and self.files.buffered >= 0:
            close_files(self.files)
            self.files = Files(-1, None)


class SegmentLog:
    """The segments, oldest first, and the one that is appended to."""

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self.active: Segment | None = None
        self.next_number = 1

    def __repr__(self) -> str:
        return f"SegmentLog(segments={len(self.segments)}, bytes={self.bytes}, active={self.active!r})"

    @property
    def bytes(self) -> int:
        """What the files take on the disk."""
        return sum(segment.size for segment in self.segments.values())

    @property
    def room(self) -> int:
        """Bytes left in the active segment."""
        return self.active.size - self.active.tail if self.active else 0

    def oldest(self) -> Segment | None:
        """The oldest segment that is not appended to."""
        return next((s for s in self.segments.values() if s is not self.active), None)

    def add(self, segment: Segment) -> None:
        """A segment that is younger than all others."""
        self.segments[segment.number] = segment
        self.next_number = max(self.next_number, segment.number + 1)

    def fit(self, length: int, wanted: int) -> int:
        """How many of ``wanted`` pages the next group can have; 0 if it takes another segment."""
        at_most = min(wanted, MAX_PAGES, max(1, GROUP_BYTES // length))
        count = min(at_most, max(0, self.room - BLOCK_BYTES) // length)
        return count - 1 if count and group_bytes(length, count) > self.room else count

    def take(self, length: int, count: int) -> tuple[Segment, int]:
        """Room for a group in the active segment. The caller starts to write it at once."""
        segment = self.active
        assert segment is not None
        offset = segment.tail
        segment.tail += group_bytes(length, count)
        segment.dirty = True
        return segment, offset


def segment_name(number: int) -> str:
    """The name of a segment's file."""
    return f"segment-{number:016x}.kv"


def list_segments(folder: Path | int) -> list[int]:
    """The ids of the segment files in ``folder``, a path or a descriptor, oldest first."""
    return sorted(int(m[1], 16) for name in os.listdir(folder) if (m := _NAME.fullmatch(name)))


def close_files(files: Files) -> None:
    """Close both descriptors."""
    os.close(files.buffered)
    if files.direct is not None:
        os.close(files.direct)


def create_segment(folder: Folder, number: int, size: int, direct: bool) -> Segment:
    """A new file of ``size`` allocated bytes; on an error nothing is left."""
    name = segment_name(number)
    buffered = folder.create(name)
    try:
        os.posix_fallocate(buffered, 0, size)
        return Segment(number, _files(folder, name, buffered, direct), size)
    except OSError:
        os.close(buffered)
        with contextlib.suppress(OSError):
            folder.unlink(name)
        raise


def open_segment(folder: Folder, number: int, direct: bool) -> Segment:
    """A file of an earlier run, full as far as anyone knows."""
    name = segment_name(number)
    if number >= MOST_NUMBER:
        raise OSError(f"{folder.path / name}: no store gives a segment so high a number; move it away")
    buffered = folder.open(name, os.O_RDWR)
    try:
        size = os.fstat(buffered).st_size
        return Segment(number, _files(folder, name, buffered, direct), size, size)
    except OSError:
        os.close(buffered)
        raise


def _files(folder: Folder, name: str, buffered: int, direct: bool) -> Files:
    return Files(buffered, folder.open(name, os.O_RDWR | os.O_DIRECT) if direct else None)


def cut(segment: Segment, tail: int) -> None:
    """Give back what lies beyond ``tail``."""
    os.ftruncate(segment.files.buffered, tail)


def extend(segment: Segment, tail: int, size: int) -> None:
    """Make everything beyond ``tail`` empty and allocated."""
    os.ftruncate(segment.files.buffered, tail)
    os.posix_fallocate(segment.files.buffered, 0, size)


def supports_direct(folder: Folder) -> bool:
    """Whether a direct write works here; found out by doing one.

    Raises:
        NotPlain: something that is no plain file has the name of the one to be made.
    """
    try:
        os.close(folder.renew(PROBE))
    except NotPlain:
        raise
    except OSError:
        return False
    try:
        return _writes_directly(folder)
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            folder.unlink(PROBE)


def _writes_directly(folder: Folder) -> bool:
    fd = folder.open(PROBE, os.O_RDWR | os.O_DIRECT)
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as block:
            return os.pwrite(fd, block, 0) == BLOCK_BYTES
    finally:
        os.close(fd)
