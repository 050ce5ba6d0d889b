"""Segment files: their format, and those that a store has open. Their room is allocated in advance; they are appended
to, never changed in place, and deleted as a whole.

A segment is a sequence of *groups*, each starting at a multiple of 4 KiB:

    header block, 4 KiB:  64 bytes of head, then per page its 32-byte key and its 64-byte record header
    payloads:             ``count`` pages of ``length`` bytes each, back to back
    padding to 4 KiB

    head, little-endian:  8 magic · 2 version · 2 flags (0) · 4 count · 8 segment id · 8 offset in the segment ·
                          8 payload length · 16 xxh3_128 of head (this field zero) and directory, seeded ·
                          8 unix time of the writing in seconds, 0 if it is not known

The checksum's seed is a random number of this store's own. So a block that another store left in the same disk space is
not taken for one of this store's. The checksum covers the header block only; each page's record header has a checksum
of its payload.

A segment's number is in the name of its file and is never used again. So a location (segment, offset, page) stands for
the same page for ever. ``PageGroup``, ``Segment`` and ``SegmentLog`` keep the state and are changed only on the event
loop. The functions at the end block.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import re
import struct
from pathlib import Path

from xxhash import xxh3_128_digest

from asynccache.storage import HEADER_BYTES, KEY_BYTES
from asynccache_backends.file.files import FileHandles, Folder, NotPlain, RunsMoved

BLOCK_BYTES = 4096
HEAD_BYTES = 64
ENTRY_BYTES = KEY_BYTES + HEADER_BYTES
MAX_PAGES = (BLOCK_BYTES - HEAD_BYTES) // ENTRY_BYTES
MAX_LENGTH = 1 << 40  # bytes of a payload; no page is as long, so a longer one is damage
MAGIC = b"acSEGMT\x01"
VERSION = 1

_HEAD = struct.Struct("<8sHHIQQQ16sQ")
_NO_SUM = bytes(16)


class PageGroup:
    """Up to 42 pages (``MAX_PAGES``) of ``length`` bytes each that were written together, at ``offset`` of a segment.

    ``directory`` has each page's key and record header. ``dead`` and ``hot`` are sets of pages, as the bits of an
    integer. Dead pages are no longer in the index: they were deleted or evicted, or a later copy is read instead. Hot
    pages were read since they were written.
    """

    __slots__ = ("count", "dead", "directory", "hot", "length", "offset", "segment", "written")

    def __init__(self, segment: int, offset: int, length: int, directory: bytes, written: int = 0) -> None:
        self.segment = segment
        self.offset = offset
        self.length = length
        self.directory = directory
        self.written = written
        self.count = len(directory) // ENTRY_BYTES
        self.dead = 0
        self.hot = 0

    def __repr__(self) -> str:
        where = f"segment={self.segment}, offset={self.offset}"
        return f"PageGroup({where}, {self.count} x {self.length}, dead={self.dead:b})"

    @property
    def end(self) -> int:
        """The offset at which the next group begins."""
        return self.offset + group_bytes(self.length, self.count)

    def live(self) -> list[int]:
        """Return the indices of the pages that are not dead."""
        return [page for page in range(self.count) if not self.dead >> page & 1]

    def keys(self) -> list[bytes]:
        """Return the keys of all pages."""
        return [self.directory[at : at + KEY_BYTES] for at in range(0, len(self.directory), ENTRY_BYTES)]

    def entry(self, page: int) -> bytes:
        """Return a page's key, followed by its record header."""
        return self.directory[page * ENTRY_BYTES : (page + 1) * ENTRY_BYTES]

    def header(self, page: int) -> bytes:
        """Return a page's record header."""
        return self.directory[page * ENTRY_BYTES + KEY_BYTES : (page + 1) * ENTRY_BYTES]

    def payload_offset(self, page: int) -> int:
        """Return the offset in the segment of a page's payload."""
        return self.offset + BLOCK_BYTES + page * self.length


def round_up(size: int) -> int:
    """Return ``size`` rounded up to a multiple of ``BLOCK_BYTES``."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def group_bytes(length: int, count: int) -> int:
    """Return the bytes that a group of ``count`` pages of ``length`` bytes takes in a segment."""
    return BLOCK_BYTES + round_up(length * count)


def pack_block(group: PageGroup, seed: int) -> bytes:
    """Return the group's header block without the padding."""
    fields = (MAGIC, VERSION, 0, group.count, group.segment, group.offset, group.length)
    checksum = xxh3_128_digest(_HEAD.pack(*fields, _NO_SUM, group.written) + group.directory, seed)
    return _HEAD.pack(*fields, checksum, group.written) + group.directory


def block_bytes(data: bytes | memoryview, at: int) -> int:
    """Return the length without padding of the header block that begins at ``at``, provided that one does."""
    return HEAD_BYTES + ENTRY_BYTES * int.from_bytes(data[at + 12 : at + 16], "little")


def parse_block(data: bytes | memoryview, seed: int) -> PageGroup | None:
    """Return the group whose header block ``data`` begins with; None if that is no such block, or is damaged."""
    if len(data) < HEAD_BYTES or data[:8] != MAGIC:
        return None
    magic, version, flags, count, segment, offset, length, checksum, written = _HEAD.unpack_from(data)
    end = HEAD_BYTES + count * ENTRY_BYTES
    if version != VERSION or not 0 < count <= MAX_PAGES or not 0 < length <= MAX_LENGTH or end > len(data):
        return None
    directory = bytes(data[HEAD_BYTES:end])
    head = _HEAD.pack(magic, version, flags, count, segment, offset, length, _NO_SUM, written)
    if xxh3_128_digest(head + directory, seed) != checksum:
        return None
    return PageGroup(segment, offset, length, directory, written)


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
        """The number of bytes that the files take on the disk."""
        return sum(segment.size for segment in self.segments.values())

    @property
    def room(self) -> int:
        """The number of bytes that are left in the active segment."""
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
