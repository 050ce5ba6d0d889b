"""Reading a group back from its file, as a scrub does. Not hot, so it goes through ``aiofiles``: the threads that serve
gets and puts have nothing to do with it.
"""

from __future__ import annotations

import errno
import mmap
import os

import aiofiles

from asynccache.storage import KEY_BYTES, PageKey, Record
from asynccache_backends.file.blocks import BLOCK_BYTES, Group, group_bytes, parse_block
from asynccache_backends.file.files import Folder


async def read_group(folder: Folder, name: str, group: Group) -> memoryview:
    """The group's bytes, as far as the file goes. Raises OSError. Not to be cancelled: ``completed``."""
    got = 0
    async with aiofiles.open(name, "rb", buffering=0, opener=lambda path, _: folder.open(path)) as file:
        there = max(1, os.fstat(file.fileno()).st_size - group.offset)
        data = memoryview(mmap.mmap(-1, min(there, group_bytes(group.length, group.count))))
        await file.seek(group.offset)
        while got < data.nbytes and (count := await file.readinto(data[got:])):
            got += count
    return data[:got]


def is_intact(group: Group, data: memoryview, seed: int) -> bool:
    """Whether the header block in ``data`` says what the index knows."""
    found = parse_block(data[:BLOCK_BYTES], seed)
    return found is not None and (found.directory, found.length) == (group.directory, group.length)


def stored_records(group: Group, pages: list[int], data: memoryview) -> tuple[list[PageKey], list[Record]]:
    """Keys and records of ``pages``, which may be cut short."""
    keys = [PageKey("", group.entry(page)[:KEY_BYTES]) for page in pages]
    starts = [BLOCK_BYTES + page * group.length for page in pages]
    headers = [memoryview(bytearray(group.header(page))) for page in pages]
    return keys, [Record(h, data[at : at + group.length]) for h, at in zip(headers, starts, strict=True)]


def is_gone(error: OSError) -> bool:
    """The segment was reclaimed meanwhile."""
    return error.errno == errno.ENOENT
