"""Segment files. Their room is allocated in advance; they are appended to, never changed in place, and deleted as a
whole.

A segment's number is in the name of its file and is never used again. So a location (segment, offset, page) stands for
the same page for ever. ``Segment`` and ``SegmentLog`` keep the state and are changed only on the event loop. The
functions below them block.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import re
from pathlib import Path

from asynccache_backends.file.aio import FileHandles, RunsMoved
from asynccache_backends.file.blocks import BLOCK_BYTES, MAX_PAGES, group_bytes
from asynccache_backends.file.files import Folder, NotPlain

GROUP_BYTES = 8 << 20
MOST_NUMBER = 1 << 62  # of a segment; no store ever makes as many, so a higher one in a file's name is damage
PROBE = "direct.probe"
_NAME = re.compile(r"segment-([0-9a-f]{16})\.kv")


class Segment:
    """One open segment file of ``size`` bytes.

    ``tail``: the offset of the next group. ``writing``: the groups that are being written, by offset. ``dirty``:
    whether it has to be synced. ``dropped``: whether it was removed from the store.
    """

    def __init__(self, number: int, files: FileHandles, size: int, tail: int = 0) -> None:
        self.number = number
        self.files = files
        self.size = size
        self.tail = tail
        self.writing: dict[int, asyncio.Future[RunsMoved]] = {}
        self.dirty = False
        self.dropped = False
        self._users = 0

    def __repr__(self) -> str:
        return f"Segment({self.number}, {self.tail}/{self.size}, users={self._users})"

    @property
    def written_to(self) -> int:
        """An offset before which no group is being written any more."""
        return min(self.writing, default=self.tail)

    def enter(self) -> None:
        """Note that an operation uses the file, so that it stays open."""
        self._users += 1

    def leave(self) -> None:
        """Note that an operation has ended its use of the file."""
        self._users -= 1
        self._close_if_unused()

    def drop(self) -> None:
        """Note that no new operation will use it. The file is closed when the last operation that uses it has ended."""
        self.dropped = True
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self.dropped and not self._users and self.files.buffered >= 0:
            close_files(self.files)
            self.files = FileHandles(-1, None)


class SegmentLog:
    """All segments, the oldest first. ``active`` is the one that is appended to, if there is one."""

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self.active: Segment | None = None
        self.next_number = 1

    def __repr__(self) -> str:
        return f"SegmentLog(segments={len(self.segments)}, bytes={self.bytes}, active={self.active!r})"

    @property
    def bytes(self) -> int:
        """How many bytes the files take on the disk."""
        return sum(segment.size for segment in self.segments.values())

    @property
    def room(self) -> int:
        """How many bytes are left in the active segment."""
        return self.active.size - self.active.tail if self.active else 0

    def oldest(self) -> Segment | None:
        """Return the oldest segment that is not the active one, or None."""
        return next((s for s in self.segments.values() if s is not self.active), None)

    def add(self, segment: Segment) -> None:
        """Add a segment, which is newer than all others."""
        self.segments[segment.number] = segment
        self.next_number = max(self.next_number, segment.number + 1)

    def fit(self, length: int, wanted: int) -> int:
        """Return how many of ``wanted`` pages the next group can have; 0 if the active segment has no room for one."""
        at_most = min(wanted, MAX_PAGES, max(1, GROUP_BYTES // length))
        count = min(at_most, max(0, self.room - BLOCK_BYTES) // length)
        return count - 1 if count and group_bytes(length, count) > self.room else count

    def take(self, length: int, count: int) -> tuple[Segment, int]:
        """Take room for a group in the active segment. Returns that segment and the group's offset. The caller must
        begin to write the group before the next await."""
        segment = self.active
        assert segment is not None
        offset = segment.tail
        segment.tail += group_bytes(length, count)
        segment.dirty = True
        return segment, offset


def segment_name(number: int) -> str:
    """Return the name of a segment's file."""
    return f"segment-{number:016x}.kv"


def list_segments(folder: Path | int) -> list[int]:
    """Return the numbers of the segments in ``folder``, a path or a descriptor, the oldest first."""
    return sorted(int(m[1], 16) for name in os.listdir(folder) if (m := _NAME.fullmatch(name)))


def close_files(files: FileHandles) -> None:
    """Close both descriptors."""
    os.close(files.buffered)
    if files.direct is not None:
        os.close(files.direct)


def create_segment(folder: Folder, number: int, size: int, direct: bool) -> Segment:
    """Make and open a new segment of ``size`` bytes, which are allocated on the disk. If it raises OSError, no file is
    left."""
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
    """Open a segment of an earlier run. Its ``tail`` is the end of the file until the groups in it are known."""
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


def _files(folder: Folder, name: str, buffered: int, direct: bool) -> FileHandles:
    return FileHandles(buffered, folder.open(name, os.O_RDWR | os.O_DIRECT) if direct else None)


def cut(segment: Segment, tail: int) -> None:
    """Shorten the file to ``tail`` bytes."""
    os.ftruncate(segment.files.buffered, tail)


def extend(segment: Segment, tail: int, size: int) -> None:
    """Empty the file from ``tail`` on, and allocate its room up to ``size`` bytes."""
    os.ftruncate(segment.files.buffered, tail)
    os.posix_fallocate(segment.files.buffered, 0, size)


def supports_direct(folder: Folder) -> bool:
    """Return True if files in this folder can be written with O_DIRECT. That is tried with a small file, which is
    removed again.

    Raises:
        NotPlain: something that is no plain file has the name of that file.
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
