"""Which pages were deleted, by place: an append-only log of 32-byte entries, so that a delete outlives a restart.

    deletions.log: per entry 8 segment id · 8 offset of the group · 8 bit set of dead pages · 8 xxh3_64 of these, seeded

Places are never used twice, so order does not matter and reading an entry again does no harm. Blocking functions.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable

from xxhash import xxh3_64_intdigest

from asynccache_backends.file.blocks import Group
from asynccache_backends.file.files import Folder

NAME = "deletions.log"
_PLACE = struct.Struct("<QQQ")
_SUM = struct.Struct("<Q")
ENTRY_BYTES = _PLACE.size + _SUM.size
MOST_BYTES = 1 << 30                               # 33 million entries; the log is compacted with every snapshot


def pack(deaths: Iterable[tuple[Group, int]], seed: int) -> bytes:
    """Entries for (group, bit set of dead pages)."""
    places = (_PLACE.pack(group.segment, group.offset, mask) for group, mask in deaths)
    return b"".join(place + _SUM.pack(xxh3_64_intdigest(place, seed)) for place in places)


def load(folder: Folder, seed: int) -> list[tuple[int, int, int]]:
    """Every entry that verifies: (segment, offset, bit set). Raises OSError: the log is too large, or no plain file."""
    try:
        data = folder.read(NAME, MOST_BYTES)
    except FileNotFoundError:
        return []
    return [
        _PLACE.unpack_from(data, at)
        for at in range(0, len(data) - ENTRY_BYTES + 1, ENTRY_BYTES)
        if _SUM.unpack_from(data, at + _PLACE.size)[0] == xxh3_64_intdigest(data[at : at + _PLACE.size], seed)
    ]


def append(folder: Folder, entries: bytes) -> None:
    """Add entries, whole ones even if the last writer died inside one."""
    fd = folder.open(NAME, os.O_WRONLY | os.O_CREAT)
    try:
        end = os.fstat(fd).st_size // ENTRY_BYTES * ENTRY_BYTES
        if end + len(entries) > MOST_BYTES:
            raise OSError(errno.EFBIG, "the log of deletions is full until the next snapshot")
        if os.pwrite(fd, entries, end) < len(entries):
            raise OSError(28, "no room for a deletion")
    finally:
        os.close(fd)


def sync(folder: Folder) -> None:
    """Make the log survive a power loss."""
    try:
        fd = folder.open(NAME, os.O_WRONLY)
    except FileNotFoundError:
        return
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)
