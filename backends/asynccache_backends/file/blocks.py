"""How pages lie in a segment file. Pure functions and one small class.

A segment is a sequence of *groups*, each starting at a multiple of 4 KiB:

    header block, 4 KiB:  64 bytes of head, then per page its 32-byte key and its 64-byte record header
    payloads:             ``count`` pages of ``length`` bytes each, back to back
    padding to 4 KiB

    head, little-endian:  8 magic · 2 version · 2 flags (0) · 4 count · 8 segment id · 8 offset in the segment ·
                          8 payload length · 16 xxh3_128 of head (this field zero) and directory, seeded ·
                          8 unix time of the writing in seconds, 0 where nobody knows

The seed is the store's own random number, so bytes that merely look like a block, or that another store left behind,
are not taken for one. The checksum covers the block, not the payloads: the record headers do that.
"""

from __future__ import annotations

import struct

from xxhash import xxh3_128_digest

from asynccache.storage import HEADER_BYTES, KEY_BYTES

BLOCK_BYTES = 4096
HEAD_BYTES = 64
ENTRY_BYTES = KEY_BYTES + HEADER_BYTES
MAX_PAGES = (BLOCK_BYTES - HEAD_BYTES) // ENTRY_BYTES
MAX_LENGTH = 1 << 40                               # bytes of a payload: no page is as long
MAGIC = b"acSEGMT\x01"
VERSION = 1

_HEAD = struct.Struct("<8sHHIQQQ16sQ")
_NO_SUM = bytes(16)


class Group:
    """Up to 42 pages that were written together. ``dead`` and ``hot`` are bit sets over its pages: forgotten, and read
    since they were written."""

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
        return f"Group(segment={self.segment}, offset={self.offset}, {self.count} x {self.length}, dead={self.dead:b})"

    @property
    def end(self) -> int:
        """Where the next group starts."""
        return self.offset + group_bytes(self.length, self.count)

    def live(self) -> list[int]:
        """The pages that were not forgotten."""
        return [page for page in range(self.count) if not self.dead >> page & 1]

    def keys(self) -> list[bytes]:
        """Every page's key."""
        return [self.directory[at : at + KEY_BYTES] for at in range(0, len(self.directory), ENTRY_BYTES)]

    def entry(self, page: int) -> bytes:
        """A page's key and record header."""
        return self.directory[page * ENTRY_BYTES : (page + 1) * ENTRY_BYTES]

    def header(self, page: int) -> bytes:
        """A page's record header."""
        return self.directory[page * ENTRY_BYTES + KEY_BYTES : (page + 1) * ENTRY_BYTES]

    def payload_offset(self, page: int) -> int:
        """Where a page's payload lies in the segment."""
        return self.offset + BLOCK_BYTES + page * self.length


def round_up(size: int) -> int:
    """``size`` rounded up to whole blocks."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def group_bytes(length: int, count: int) -> int:
    """The room that a group takes."""
    return BLOCK_BYTES + round_up(length * count)


def pack_block(group: Group, seed: int) -> bytes:
    """The group's header block without its padding."""
    fields = (MAGIC, VERSION, 0, group.count, group.segment, group.offset, group.length)
    checksum = xxh3_128_digest(_HEAD.pack(*fields, _NO_SUM, group.written) + group.directory, seed)
    return _HEAD.pack(*fields, checksum, group.written) + group.directory


def block_bytes(data: bytes | memoryview, at: int) -> int:
    """The length of the packed block that starts at ``at``, if one does."""
    return HEAD_BYTES + ENTRY_BYTES * int.from_bytes(data[at + 12 : at + 16], "little")


def parse_block(data: bytes | memoryview, seed: int) -> Group | None:
    """The group whose header block ``data`` starts with; None where it is anything else, or damaged."""
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
    return Group(segment, offset, length, directory, written)
