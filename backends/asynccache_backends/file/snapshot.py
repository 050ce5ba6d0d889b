"""A copy of the index on disk, so that a start need not read every segment. Never needed, never trusted unverified.

    index.snapshot: 8 magic · 16 xxh3_128 of all that follows, seeded;
                    8 number of segments · 8 number of groups;
                    per segment its id and the offset from which it must be scanned (8 + 8);
                    every group's header block without padding

Before a snapshot is written the segments it speaks of are synced, so it never names what a power loss can take.
Deaths are not in it: they are in the deletion log.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from xxhash import xxh3_128_digest

from asynccache_backends.file.blocks import HEAD_BYTES, Group, block_bytes, pack_block, parse_block
from asynccache_backends.file.files import Folder, NotPlain

NAME = "index.snapshot"
MAGIC = b"acINDEX\x01"
_HEAD = struct.Struct("<8s16s")
_PAIR = struct.Struct("<QQ")


class Snapshot(NamedTuple):
    """``scan_from``: per segment, where scanning must start; ``groups``: all that was written before."""

    scan_from: Mapping[int, int]
    groups: Sequence[Group]


EMPTY = Snapshot({}, ())


def pack(scan_from: Mapping[int, int], groups: Iterable[Group], seed: int) -> list[bytes]:
    """The file's content, in parts. Reads nothing of a group that ever changes: a thread may do it."""
    blocks = [pack_block(group, seed) for group in groups]
    pairs = ((len(scan_from), len(blocks)), *scan_from.items())
    body = b"".join([*(_PAIR.pack(*pair) for pair in pairs), *blocks])
    return [_HEAD.pack(MAGIC, xxh3_128_digest(body, seed)), body]


def load(folder: Folder, seed: int, most: int) -> Snapshot:
    """The snapshot in ``folder``; an empty one if there is none that verifies and has ``most`` bytes. Blocking.

    Raises:
        NotPlain: something that is no plain file has its name.
    """
    try:
        data = folder.read(NAME, most)
    except NotPlain:
        raise
    except OSError:
        return EMPTY
    return parse(data, seed) or EMPTY


def parse(data: bytes, seed: int) -> Snapshot | None:
    """What ``data`` says, or None if it is not whole."""
    if len(data) < _HEAD.size:
        return None
    magic, checksum = _HEAD.unpack_from(data)
    body = memoryview(data)[_HEAD.size :]
    if magic != MAGIC or xxh3_128_digest(body, seed) != checksum:
        return None
    if len(body) < _PAIR.size:
        return None
    segments, count = _PAIR.unpack_from(body)
    table = _PAIR.size * (1 + segments)
    if len(body) < table + count * HEAD_BYTES:
        return None
    return Snapshot(dict(_PAIR.iter_unpack(body[_PAIR.size : table])), _groups(body, table, count, seed))


def _groups(data: memoryview, at: int, count: int, seed: int) -> list[Group]:
    groups = []
    for _ in range(count):
        size = block_bytes(data, at)                   # at least a head's, also where the data ends earlier
        group = parse_block(data[at : at + size], seed)
        if group is not None:
            groups.append(group)
        at += size
    return groups
