"""The formats of snapshots and tombstones. A snapshot is the index in one object, so that opening need not read the
footers of all packs. Pure functions.

    snapshot:   8 magic · 32 schema · 8 cursor · 8 packs · 8 tombstones · 16 xxh3_128 of all else;
                per pack 32 name · 8 size · 8 records; per tombstone 32 name · 8 keys;
                all entries of all packs; all keys of all tombstones
    tombstone:  8 magic · 8 keys · 16 xxh3_128 of the keys; the keys

The store does without a snapshot, too, since the footers of the packs say the same. ``cursor`` is the time in seconds
since 1970, by the store's clock, up to which the snapshot's writer had listed the packs. Later ones are listed at
opening.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

from xxhash import xxh3_128, xxh3_128_digest

from asynccache.storage import KEY_BYTES
from asynccache_backends.object_store.names import is_name
from asynccache_backends.object_store.packs import ENTRY_BYTES, MOST_PACK_BYTES, Pack, in_bounds

_MAGIC = b"acINDX\x00\x01"
_TOMB_MAGIC = b"acDEAD\x00\x01"
_HEAD = struct.Struct("<8s32sdQQ")
_CHECKSUM = 16
_PACK = struct.Struct("<32sQQ")
_TOMB = struct.Struct("<32sQ")
_TOMB_HEAD = struct.Struct("<8sQ16s")


class PackIndexSnapshot(NamedTuple):
    """The content of an index. ``tombs`` has the keys of each tombstone by its name."""

    cursor: float
    packs: Sequence[Pack]
    tombs: Mapping[str, Sequence[bytes]]


def pack_snapshot(snapshot: PackIndexSnapshot, schema: bytes) -> bytes:
    """Return the content of the object. It may run in a thread, since it reads only fields of packs that never
    change."""
    packs, tombs = snapshot.packs, snapshot.tombs
    body = b"".join([
        *(_PACK.pack(pack.name.encode(), pack.size, pack.count) for pack in packs),
        *(_TOMB.pack(name.encode(), len(keys)) for name, keys in tombs.items()),
        *(pack.entries for pack in packs),
        *(key for keys in tombs.values() for key in keys),
    ])
    head = _HEAD.pack(_MAGIC, schema, snapshot.cursor, len(packs), len(tombs))
    return b"".join((head, _checksum(head, body), body))


def parse_snapshot(data: memoryview, schema: bytes) -> PackIndexSnapshot | None:
    """Return the snapshot in ``data``; None if it is damaged or has another schema."""
    head, checksum = data[: _HEAD.size], data[_HEAD.size : _HEAD.size + _CHECKSUM]
    body = data[_HEAD.size + _CHECKSUM :]
    if len(checksum) < _CHECKSUM or _checksum(head, body) != checksum:
        return None
    magic, theirs, cursor, packs, tombs = _HEAD.unpack(head)
    if magic != _MAGIC or theirs != schema:
        return None
    at = packs * _PACK.size
    if at + tombs * _TOMB.size > len(body) or not isfinite(cursor):
        return None
    heads = list(_PACK.iter_unpack(body[:at]))
    names = list(_TOMB.iter_unpack(body[at : at + tombs * _TOMB.size]))
    rest = bytes(body[at + tombs * _TOMB.size :])
    end = sum(count for _, _, count in heads) * ENTRY_BYTES
    if end + sum(count for _, count in names) * KEY_BYTES != len(rest) or not _are_names([*heads, *names]):
        return None
    found = list(_packs(heads, rest))
    if not all(pack.size <= MOST_PACK_BYTES and in_bounds(pack.entries, pack.size) for pack in found):
        return None
    return PackIndexSnapshot(cursor, found, dict(_tombs(names, rest[end:])))


def _are_names(heads: Sequence[tuple[bytes, Any]]) -> bool:
    """Return True if all names have the form of ``NameClock``'s. The checksum does not tell that: somebody may have
    made the object by hand."""
    return all(is_name(name.decode("ascii", "replace")) for name, *_ in heads)


def _checksum(head: bytes | memoryview, body: bytes | memoryview) -> bytes:
    digest = xxh3_128(head)
    digest.update(body)
    return digest.digest()


def _packs(heads: Sequence[tuple[bytes, int, int]], rest: bytes) -> Iterator[Pack]:
    at = 0
    for name, size, count in heads:
        end = at + count * ENTRY_BYTES
        yield Pack(name.decode(), size, rest[at:end])
        at = end


def _tombs(names: Sequence[tuple[bytes, int]], rest: bytes) -> Iterator[tuple[str, Sequence[bytes]]]:
    at = 0
    for name, count in names:
        end = at + count * KEY_BYTES
        yield name.decode(), _cut(rest[at:end])
        at = end


def pack_tomb(keys: Sequence[bytes]) -> bytes:
    """Return the content of a tombstone."""
    body = b"".join(keys)
    return _TOMB_HEAD.pack(_TOMB_MAGIC, len(keys), xxh3_128_digest(body)) + body


def parse_tomb(name: str, data: bytes) -> Sequence[bytes] | None:
    """Return the keys of a tombstone; None if it is damaged."""
    if len(data) < _TOMB_HEAD.size or not is_name(name):
        return None
    magic, count, checksum = _TOMB_HEAD.unpack_from(data)
    body = data[_TOMB_HEAD.size :]
    if magic != _TOMB_MAGIC or len(body) != count * KEY_BYTES or xxh3_128_digest(body) != checksum:
        return None
    return _cut(body)


def _cut(body: bytes) -> tuple[bytes, ...]:
    return tuple(body[at : at + KEY_BYTES] for at in range(0, len(body), KEY_BYTES))
