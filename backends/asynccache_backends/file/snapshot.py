"""A copy of the index on disk, so that a start need not read every segment. Never needed, never trusted unverified.

    index.snapshot: 8 magic · 8 number of segments · 8 number of groups · 16 xxh3_128 of the rest, seeded;
                    per segment its id and the offset from which it must be scanned (8 + 8);
                    every group's header block without padding

Before a snapshot is written the segments it speaks of are synced, so it never names what a power loss can take.
Deaths are not in it: they are in the deletion log.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_128

from asynccache_backends.file.blocks import HEAD_BYTES, Group, block_bytes, pack_block, parse_block

NAME = "index.snapshot"
MAGIC = b"acINDEX\x01"
_HEAD = struct.Struct("<8sQQ16s")
_PAIR = struct.Struct("<QQ")


class Snapshot(NamedTuple):
    """``scan_from``: per segment, where scanning must start; ``groups``: all that was written before."""

    scan_from: Mapping[int, int]
    groups: Sequence[Group]


EMPTY = Snapshot({}, ())


def pack(scan_from: Mapping[int, int], groups: Iterable[Group], seed: int) -> list[bytes]:
    """The file's content, in parts. Reads nothing of a group that ever changes: a thread may do it."""
    table = b"".join(_PAIR.pack(number, offset) for number, offset in scan_from.items())
    blocks = [pack_block(group, seed) for group in groups]
    body = b"".join(blocks)
    checksum = xxh3_128(table, seed)
    checksum.update(body)
    return [_HEAD.pack(MAGIC, len(scan_from), len(blocks), checksum.digest()) + table, body]


def load(folder: Path, seed: int) -> Snapshot:
    """The snapshot in ``folder``; an empty one if there is none that verifies. Blocking."""
    try:
        data = (folder / NAME).read_bytes()
    except OSError:
        return EMPTY
    return parse(data, seed) or EMPTY


def parse(data: bytes, seed: int) -> Snapshot | None:
    """What ``data`` says, or None if it is not whole."""
    if len(data) < _HEAD.size:
        return None
    magic, segments, count, checksum = _HEAD.unpack_from(data)
    if magic != MAGIC or xxh3_128(memoryview(data)[_HEAD.size :], seed).digest() != checksum:
        return None
    at = _HEAD.size + segments * _PAIR.size
    scan_from = dict(_PAIR.iter_unpack(data[_HEAD.size : at]))
    return Snapshot(scan_from, _groups(memoryview(data), at, count, seed))


def _groups(data: memoryview, at: int, count: int, seed: int) -> list[Group]:
    groups = []
    for _ in range(count):
        size = block_bytes(data, at)
        group = parse_block(data[at : at + max(size, HEAD_BYTES)], seed)
        if group is not None:
            groups.append(group)
        at += size
    return groups
