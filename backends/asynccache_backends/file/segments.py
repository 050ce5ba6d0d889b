"""Segment files: their format, those that are open, and how they are read when a store is opened. Their room is
allocated in advance; they are appended to, never changed in place, and deleted as a whole.

A segment is a sequence of records, each starting at a multiple of 4 KiB. A record is a *group* of pages or a block of
*deletions*:

    header block, 4 KiB:  64 bytes of head, then the directory
                          of a group: per page its 32-byte key and its 64-byte record header
                          of deletions: per page its 32-byte key and a place, 8 segment number · 8 offset
    payloads of a group:  ``count`` pages of ``length`` bytes each, back to back
    padding to 4 KiB

    head, little-endian:  8 magic · 8 count · 8 segment number · 8 offset in the segment · 8 payload length, 0 for
                          deletions · 16 xxh3_128 of head (this field zero) and directory, seeded ·
                          8 unix time of the writing in seconds, 0 if it is not known

A deletion says that every copy of its page that lies before its place is deleted. So neither the order of deletions nor
a repeated one matters. Segments are reclaimed from the oldest to the newest, so when one goes, none is left that its
deletions speak of.

A segment that gets no more records is *sealed*: a footer follows its last record and ends the file. So a store is
opened by reading footers; only segments without one, such as the last one after a kill, are walked through from header
block to header block. Payloads are not read; every get verifies its records.

    footer:               all header blocks of the segment without padding, then 64 bytes like a head: 8 magic · 8 count
                          of blocks · 8 segment number · 8 offset of the footer · 8 bytes of the blocks · 16 xxh3_128 of
                          the blocks and this · 8 zero

The checksums' seed is a random number of this store's own. So a block that another store left in the same disk space is
not taken for one of this store's. These checksums cover keys and headers only; each page's record header has a checksum
of its payload.

A segment's number is in the name of its file and is never used again. So a place (segment, offset) stands for the same
record for ever. A ``Segment`` is changed only on the event loop. The functions block.

The index says where each key's page lies. It is in memory, and is rebuilt from the files at every start. A page's
location is one integer (see ``page_index``): the number of its group and its index in that group. A page takes about
280 bytes of memory: its key as the key of a dict, its entry in the group's directory, and its location. A dead page
keeps its place in its group until the segment is reclaimed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from xxhash import xxh3_128_digest

from asynccache.storage import HEADER_BYTES, KEY_BYTES
from asynccache_backends.file.files import FileHandles, Folder
from asynccache_backends.page_index import PageIndex

BLOCK_BYTES = 4096
HEAD_BYTES = 64
ENTRY_BYTES = KEY_BYTES + HEADER_BYTES
DELETION = struct.Struct("<32sQQ")
MAX_PAGES = (BLOCK_BYTES - HEAD_BYTES) // ENTRY_BYTES
MAX_DELETIONS = (BLOCK_BYTES - HEAD_BYTES) // DELETION.size
MAX_LENGTH = 1 << 40  # bytes of a payload; no page is as long, so a longer one is damage
GROUP_BYTES = 8 << 20
MOST_NUMBER = 1 << 62  # of a segment; no store ever makes as many, so a higher one in a file's name is damage
MAGIC = b"acSEGMT\x02"
FOOTER_MAGIC = b"acFOOTR\x02"

_HEAD = struct.Struct("<8sQQQQ16sQ")
_NAME = re.compile(r"segment-([0-9a-f]{16})\.kv")


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

    @property
    def place(self) -> tuple[int, int]:
        """Where in the store it lies. A later group has a greater place."""
        return self.segment, self.offset

    def live(self) -> list[int]:
        """Return the indices of the pages that are not dead."""
        return [page for page in range(self.count) if not self.dead >> page & 1]

    def keys(self) -> list[bytes]:
        """Return the keys of all pages."""
        return [self.directory[at : at + KEY_BYTES] for at in range(0, len(self.directory), ENTRY_BYTES)]

    def entry(self, page: int) -> bytes:
        """Return a page's key, followed by its record header."""
        return self.directory[page * ENTRY_BYTES : (page + 1) * ENTRY_BYTES]

    def key(self, page: int) -> bytes:
        """Return a page's key."""
        return self.directory[page * ENTRY_BYTES : page * ENTRY_BYTES + KEY_BYTES]

    def header(self, page: int) -> bytes:
        """Return a page's record header."""
        return self.directory[page * ENTRY_BYTES + KEY_BYTES : (page + 1) * ENTRY_BYTES]

    def payload_offset(self, page: int) -> int:
        """Return the offset in the segment of a page's payload."""
        return self.offset + BLOCK_BYTES + page * self.length


class Deletions(NamedTuple):
    """Up to 84 deletions (``MAX_DELETIONS``) at ``offset`` of a segment. ``directory`` has each one's key and place."""

    segment: int
    offset: int
    directory: bytes
    length: int = 0
    written: int = 0


SegmentRecord = PageGroup | Deletions


def round_up(size: int) -> int:
    """Return ``size`` rounded up to a multiple of ``BLOCK_BYTES``."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def group_bytes(length: int, count: int) -> int:
    """Return the bytes that a record with ``count`` payloads of ``length`` bytes takes in a segment."""
    return BLOCK_BYTES + round_up(length * count)


def moved_bytes(length: int, count: int) -> int:
    """Return the bytes that a group of so many pages takes in a segment and its footer."""
    return group_bytes(length, count) + HEAD_BYTES + ENTRY_BYTES * count


def pack_block(record: SegmentRecord, seed: int) -> bytes:
    """Return the header block of a record without the padding."""
    entry = ENTRY_BYTES if record.length else DELETION.size
    numbers = (len(record.directory) // entry, record.segment, record.offset, record.length)
    return _head(MAGIC, numbers, record.written, record.directory, seed) + record.directory


def parse_block(data: bytes, seed: int) -> SegmentRecord | None:
    """Return the record whose header block ``data`` begins with; None if that is no such block, or is damaged."""
    if len(data) < HEAD_BYTES or not data.startswith(MAGIC):
        return None
    _, count, segment, offset, length, _, written = _HEAD.unpack_from(data)
    end = HEAD_BYTES + count * (ENTRY_BYTES if length else DELETION.size)
    if not HEAD_BYTES < end <= min(BLOCK_BYTES, len(data)) or length > MAX_LENGTH:
        return None
    directory = data[HEAD_BYTES:end]
    if not data.startswith(_head(MAGIC, (count, segment, offset, length), written, directory, seed)):
        return None
    return PageGroup(segment, offset, length, directory, written) if length else Deletions(segment, offset, directory)


def pack_footer(segment: int, tail: int, records: Iterable[SegmentRecord], seed: int) -> bytes:
    """Return the footer of a segment, for the offset ``tail``."""
    blocks = [pack_block(record, seed) for record in records]
    body = b"".join(blocks)
    return body + _head(FOOTER_MAGIC, (len(blocks), segment, tail, len(body)), 0, body, seed)


def _head(magic: bytes, numbers: tuple[int, int, int, int], written: int, body: bytes, seed: int) -> bytes:
    checksum = xxh3_128_digest(_HEAD.pack(magic, *numbers, bytes(16), written) + body, seed)
    return _HEAD.pack(magic, *numbers, checksum, written)


class Segment:
    """One open segment file of ``size`` bytes. It stays open ``with segment:``."""

    def __init__(self, number: int, files: FileHandles, size: int) -> None:
        self.number = number
        self.files = files
        self.size = size
        self.tail = 0
        """The offset of the next record."""
        self.footer = HEAD_BYTES
        """The bytes that a footer takes, which are kept free."""
        self.deletions: list[Deletions] = []
        self.writing: dict[int, asyncio.Future[BaseException | None]] = {}
        """The records that are being written, by offset."""
        self.sealed = False
        """Whether a footer is there, or was tried."""
        self.synced = 0
        """Up to which offset the segment would survive a power loss."""
        self.dropped = False
        """Whether the segment was removed from the store."""
        self._users = 1  # the store, until it drops the segment

    @property
    def room(self) -> int:
        """The number of bytes that are left for records."""
        return self.size - self.tail - self.footer

    def fit(self, length: int, wanted: int, kept: int = 0) -> int:
        """Return how many of ``wanted`` pages of ``length`` bytes, or of deletions if that is 0, the next record can
        have if ``kept`` bytes stay free; 0 if there is no room for one."""
        entry = ENTRY_BYTES if length else DELETION.size
        most = min(MAX_PAGES, max(1, GROUP_BYTES // length)) if length else MAX_DELETIONS
        room = self.room - kept
        count = max(0, min(wanted, most, (room - BLOCK_BYTES - HEAD_BYTES) // (length + entry)))
        too_large = group_bytes(length, count) + HEAD_BYTES + entry * count > room  # by the padding
        return count - 1 if count and too_large else count

    def take(self, record: SegmentRecord) -> None:
        """Take the room of a record."""
        size = group_bytes(record.length, len(record.directory) // ENTRY_BYTES)
        self.tail = max(self.tail, record.offset + size)
        self.footer += HEAD_BYTES + len(record.directory)

    def files_for(self, length: int) -> FileHandles:
        """Return the descriptors by which pages of ``length`` bytes are read and written: without direct I/O if the
        length is not aligned."""
        return FileHandles(self.files.buffered, self.files.buffered if length % BLOCK_BYTES else self.files.direct)

    def extend(self, size: int) -> None:
        """Empty the file from its tail on, and allocate its room up to ``size`` bytes. It blocks."""
        os.ftruncate(self.files.buffered, self.tail)
        os.posix_fallocate(self.files.buffered, 0, size)
        self.size = size

    def enter(self) -> None:
        """Note that an operation uses the file, so that it stays open."""
        self._users += 1

    def leave(self, *_: object) -> None:
        """Note that an operation has ended its use of the file. It may be called back by a future."""
        self._users -= 1
        if not self._users and self.files.buffered >= 0:
            for fd in set(self.files):
                os.close(fd)
            self.files = FileHandles(-1, -1)  # which no call can use

    __enter__, __exit__ = enter, leave

    def drop(self) -> None:
        """Note that no new operation will use it. The file is closed when the last operation that uses it has ended."""
        if not self.dropped:
            self.dropped = True
            self.leave()


def segment_name(number: int) -> str:
    """Return the name of a segment's file."""
    return f"segment-{number:016x}.kv"


def list_segments(folder: int) -> list[int]:
    """Return the numbers of the segments in the folder with this descriptor, the oldest first."""
    return sorted(int(m[1], 16) for name in os.listdir(folder) if (m := _NAME.fullmatch(name)))


def open_segment(folder: Folder, number: int, direct: bool, new_size: int | None = None) -> Segment:
    """Open a segment that exists; what is in it is not known yet. Or make one of ``new_size`` bytes, which are
    allocated on the disk. If it raises OSError, nothing is left open, nor is a new file left."""
    name, is_new = segment_name(number), new_size is not None
    if number >= MOST_NUMBER:
        raise OSError(f"{folder.path / name}: no store gives a segment so high a number; move it away")
    buffered = folder.open(name, os.O_RDWR | (os.O_CREAT | os.O_EXCL if is_new else 0))
    segment = Segment(number, FileHandles(buffered, buffered), os.fstat(buffered).st_size)
    try:
        if new_size is not None:
            segment.extend(new_size)
        if direct:
            segment.files = FileHandles(buffered, folder.open(name, os.O_RDWR | os.O_DIRECT))
    except OSError:
        segment.drop()
        if is_new:
            with contextlib.suppress(OSError):
                folder.unlink(name)
        raise
    return segment


def read_footer(segment: Segment, seed: int) -> list[SegmentRecord] | None:
    """Return the records that a segment's footer names; None if it has none, or a damaged one."""
    fd, at = segment.files.buffered, max(0, segment.size - HEAD_BYTES)
    head = os.pread(fd, HEAD_BYTES, at)
    if len(head) < HEAD_BYTES or not head.startswith(FOOTER_MAGIC):
        return None
    _, count, number, tail, length, *_ = _HEAD.unpack(head)
    taken = os.fstat(fd).st_blocks * 512  # what is on the disk; a file may say that it is longer than any memory
    if (number, tail + length) != (segment.number, at) or length > taken:
        return None
    body = os.pread(fd, length, tail)
    if _head(FOOTER_MAGIC, (count, number, tail, length), 0, body, seed) != head:
        return None
    records, start = [], 0
    while (record := parse_block(body[start : start + BLOCK_BYTES], seed)) is not None:
        records.append(record)
        start += HEAD_BYTES + len(record.directory)
    return records if (len(records), start) == (count, length) else None


def scan(segment: Segment, seed: int) -> Iterator[SegmentRecord]:
    """Yield the records of a segment that can be found by walking through it.

    Where a block does not verify, because its write never happened or was torn, the search goes on 4 KiB further, as
    long as the file has data."""
    fd, at = segment.files.buffered, 0
    while at < segment.size:
        record = parse_block(os.pread(fd, BLOCK_BYTES, at), seed)
        if record is not None and (record.segment, record.offset) == (segment.number, at):
            yield record
            at += group_bytes(record.length, len(record.directory) // ENTRY_BYTES)
            continue
        at += BLOCK_BYTES
        try:
            at = os.lseek(fd, at, os.SEEK_DATA) // BLOCK_BYTES * BLOCK_BYTES
        except OSError as error:
            if error.errno == errno.ENXIO:  # no data follows
                break


class FileIndex(PageIndex[PageGroup]):
    """The index of a file store: its holders are groups. ``bytes`` counts payloads."""

    position_bits = 6

    def __init__(self) -> None:
        super().__init__()
        self._segments: dict[int, list[int]] = {}

    def groups_of(self, segment: int) -> list[PageGroup]:
        """Return the groups of one segment, in the order in which they were added."""
        return [self.holders[n] for n in self._segments.get(segment, ())]

    def add(self, group: PageGroup, moved: bool = False) -> None:
        """Add the pages of a group. If they were ``moved``, those that are in the index no more are dead.

        Of two copies of a page, the one that lies later in the log of segments is kept, and the other is marked as
        dead. So the order in which groups are added does not matter: a running store, which adds them as their writes
        end, keeps the same copies as a recovery, which adds them as they lie.
        """
        number = self._hold(group)
        base = number << self.position_bits
        self._segments.setdefault(group.segment, []).append(number)
        fresh, locations = [], self._locations
        for page, key in enumerate(group.keys()):
            old = locations.get(key)
            if moved if old is None else self.at(old)[0].place > group.place:
                group.dead |= 1 << page
                continue
            if old is None:
                fresh.append(key)
            else:
                self._drop(key)
            locations[key] = base + page
            self.bytes += group.length
        self._changed(True, fresh)

    def forget(self, key: bytes) -> bool:
        """Remove a key, and mark its page as dead. Returns False if the key is not stored."""
        there = key in self._locations
        if there:
            self._drop(key)
            self._changed(False, (key,))
        return there

    def place(self, key: bytes) -> tuple[int, int] | None:
        """Return the place of the group that has the page of ``key``; None if that is not stored."""
        location = self._locations.get(key)
        return None if location is None else self.at(location)[0].place

    def forget_all(self, group: PageGroup, pages: Iterable[int]) -> list[bytes]:
        """Forget pages of a group, except for those whose keys lie elsewhere by now. Returns their keys."""
        keys = [key for key in map(group.key, pages) if self.place(key) == group.place]
        return [key for key in keys if self.forget(key)]

    def drop_segment(self, segment: int) -> list[bytes]:
        """Remove all keys of a segment and its groups. All pages are marked as dead, for those who still have one of
        its groups. Returns the keys that were removed."""
        left = [group.key(page) for group in self.groups_of(segment) for page in group.live()]
        for key in left:
            self._drop(key)
        for number in self._segments.pop(segment, ()):
            del self.holders[number]
        self._changed(False, left)
        return left

    def _drop(self, key: bytes) -> None:
        group, page = self.at(self._locations.pop(key))
        group.dead |= 1 << page
        self.bytes -= group.length


assert 1 << FileIndex.position_bits > MAX_PAGES  # so that consecutive locations are always pages of the same group
