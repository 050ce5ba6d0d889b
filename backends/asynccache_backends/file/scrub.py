"""Reading a whole group back from its file, for a scrub."""

from __future__ import annotations

import errno
import mmap
import os

from asynccache.storage import KEY_BYTES, PageKey, Record
from asynccache_backends.file.files import Folder
from asynccache_backends.file.segments import BLOCK_BYTES, PageGroup, group_bytes, parse_block


def read_group(folder: Folder, name: str, group: PageGroup) -> memoryview:
    """Return the group's bytes, fewer if the file ends earlier. It blocks. Raises OSError."""
    got = 0
    with os.fdopen(folder.open(name), "rb", buffering=0) as file:
        there = max(1, os.fstat(file.fileno()).st_size - group.offset)
        data = memoryview(mmap.mmap(-1, min(there, group_bytes(group.length, group.count))))
        file.seek(group.offset)
        while got < data.nbytes and (count := file.readinto(data[got:])):
            got += count
    return data[:got]


def is_intact(group: PageGroup, data: memoryview, seed: int) -> bool:
    """Return True if the header block in ``data`` verifies and says the same as the index."""
    found = parse_block(data[:BLOCK_BYTES], seed)
    return found is not None and (found.directory, found.length) == (group.directory, group.length)


def stored_records(group: PageGroup, pages: list[int], data: memoryview) -> tuple[list[PageKey], list[Record]]:
    """Return the keys and records of these pages. A record may be too short, where ``data`` is."""
    keys = [PageKey("", group.entry(page)[:KEY_BYTES]) for page in pages]
    starts = [BLOCK_BYTES + page * group.length for page in pages]
    headers = [memoryview(bytearray(group.header(page))) for page in pages]
    return keys, [Record(h, data[at : at + group.length]) for h, at in zip(headers, starts, strict=True)]


def is_gone(error: OSError) -> bool:
    """Return True if the error means that the file does not exist: its segment was reclaimed meanwhile."""
    return error.errno == errno.ENOENT
