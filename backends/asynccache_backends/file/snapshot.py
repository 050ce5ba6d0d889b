"""The snapshot: a copy of the index on disk, so that a start need not scan every segment. The store works without one,
too.

    index.snapshot: 8 magic · 16 xxh3_128 of all that follows, seeded;
                    8 number of segments · 8 number of groups;
                    per segment its id and the offset from which it must be scanned (8 + 8);
                    every group's header block without padding

Before a snapshot is written the segments that it names are synced, so it never names a page that a power loss may have
taken. Deletions are not in it; they are in their log.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from xxhash import xxh3_128_digest

from asynccache_backends.file.files import Folder, NotPlain
from asynccache_backends.file.segments import HEAD_BYTES, PageGroup, block_bytes, pack_block, parse_block

NAME = "index.snapshot"
MAGIC = b"acINDEX\x01"
_HEAD = struct.Struct("<8s16s")
_PAIR = struct.Struct("<QQ")


class FileIndexSnapshot(NamedTuple):
    """The content of a snapshot: the groups that it names, and in ``scan_from`` for each segment the offset from which
    on the segment must be scanned for later groups."""

    scan_from: Mapping[int, int]
    groups: Sequence[PageGroup]


EMPTY = FileIndexSnapshot({}, ())


def pack(scan_from: Mapping[int, int], groups: Iterable[PageGroup], seed: int) -> list[bytes]:
    """Return the content of the file, in parts. It may run in a thread, since it reads only fields of groups that never
    change."""
    blocks = [pack_block(group, seed) for group in groups]
    pairs = ((len(scan_from), len(blocks)), *scan_from.items())
    body = b"".join([*(_PAIR.pack(*pair) for pair in pairs), *blocks])
    return [_HEAD.pack(MAGIC, xxh3_128_digest(body, seed)), body]


async def read(folder: Folder, most: int) -> bytes:
    """Return the content of the snapshot in ``folder``, for ``parse``; nothing if the file is missing, cannot be read,
    or has more than ``most`` bytes. Cancelling it waits until the file is closed.

    Raises:
        NotPlain: something that is no plain file has its name.
    """
    try:
        return await folder.read(NAME, most)
    except NotPlain:
        raise
    except OSError:
        return b""


def parse(data: bytes, seed: int) -> FileIndexSnapshot:
    """Return the snapshot in ``data``; an empty one if it does not verify."""
    if len(data) < _HEAD.size:
        return EMPTY
    magic, checksum = _HEAD.unpack_from(data)
    body = memoryview(data)[_HEAD.size :]
    if magic != MAGIC or xxh3_128_digest(body, seed) != checksum:
        return EMPTY
    if len(body) < _PAIR.size:
        return EMPTY
    segments, count = _PAIR.unpack_from(body)
    table = _PAIR.size * (1 + segments)
    if len(body) < table + count * HEAD_BYTES:
        return EMPTY
    return FileIndexSnapshot(dict(_PAIR.iter_unpack(body[_PAIR.size : table])), _groups(body, table, count, seed))


def _groups(data: memoryview, at: int, count: int, seed: int) -> list[PageGroup]:
    groups = []
    for _ in range(count):
        size = block_bytes(data, at)  # at least that of a head, so this ends even if the data is cut short
        group = parse_block(data[at : at + size], seed)
        if group is not None:
            groups.append(group)
        at += size
    return groups
