"""The log of deletions: which pages were deleted, so that they do not come back after a restart. ``append`` and
``sync`` block.

    deletions.log: per entry 8 segment id · 8 offset of the group · 8 bit set of dead pages · 8 xxh3_64 of these, seeded

Entries are appended, and with every snapshot the log is replaced by one with a single entry for each group. A place in
a segment is never used for a second group, so neither the order of entries nor a repeated one matters.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable

from xxhash import xxh3_64_intdigest

from asynccache_backends.file.files import Folder
from asynccache_backends.file.segments import PageGroup

NAME = "deletions.log"
_PLACE = struct.Struct("<QQQ")
_SUM = struct.Struct("<Q")
ENTRY_BYTES = _PLACE.size + _SUM.size
MOST_BYTES = 1 << 30  # 33 million entries; the log is made compact with every snapshot


def pack(deaths: Iterable[tuple[PageGroup, int]], seed: int) -> bytes:
    """Return the bytes of the entries for these groups, each with the bit set of its dead pages."""
    places = (_PLACE.pack(group.segment, group.offset, mask) for group, mask in deaths)
    return b"".join(place + _SUM.pack(xxh3_64_intdigest(place, seed)) for place in places)


async def read(folder: Folder) -> bytes:
    """Return the content of the log, for ``parse``. Cancelling it waits until the file is closed.

    Raises:
        OSError: the log is too large, cannot be read, or is no plain file.
    """
    try:
        return await folder.read(NAME, MOST_BYTES)
    except FileNotFoundError:
        return b""


def parse(data: bytes, seed: int) -> list[tuple[int, int, int]]:
    """Return every entry that verifies, as (segment, offset, bit set of dead pages)."""
    return [
        _PLACE.unpack_from(data, at)
        for at in range(0, len(data) - ENTRY_BYTES + 1, ENTRY_BYTES)
        if _SUM.unpack_from(data, at + _PLACE.size)[0] == xxh3_64_intdigest(data[at : at + _PLACE.size], seed)
    ]


def append(folder: Folder, entries: bytes) -> None:
    """Append ``entries`` to the log. If an earlier writer died within an entry, they begin where that one began.

    Raises:
        OSError: the log is full, or the disk refuses.
    """
    fd = folder.open(NAME, os.O_WRONLY | os.O_CREAT)
    try:
        end = os.fstat(fd).st_size // ENTRY_BYTES * ENTRY_BYTES
        if end + len(entries) > MOST_BYTES:
            raise OSError(errno.EFBIG, "the log of deletions is full until the next snapshot")
        if os.pwrite(fd, entries, end) < len(entries):
            raise OSError(errno.ENOSPC, "no room for a deletion")
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
