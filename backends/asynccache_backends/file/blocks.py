"""The format of a segment file. Pure functions and one small class.

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
"""

from __future__ import annotations

import struct

from xxhash import xxh3_128_digest

from asynccache.storage import HEADER_BYTES, KEY_BYTES

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
    integer: those that were deleted, and those that were read since they were written.
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
        """Return the indices of the pages that were not deleted."""
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
