"""What a pack looks like. Pure functions.

    the payloads, one after the other; per record 120 bytes: 32 key · 64 header · 8 offset · 8 length · 8 born;
    64 bytes trailer: 8 magic · 32 schema · 8 number of records · 16 xxh3_128 of the entries and the trailer before it

Headers lie in the footer, so a payload can be sent from the host page it lies in and read without its neighbours. The
footer is all that a reader needs to know: the size of the object and its last bytes tell where it begins. ``born`` is
the time in the name of the record's first pack: one that a collection moves is no younger for a tombstone than it was.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from xxhash import xxh3_128_digest

from asynccache.storage import HEADER_BYTES, KEY_BYTES
from asynccache_backends.object_store.names import stamp_of

MAGIC = b"acPACK\x00\x01"
MAX_RECORDS = (1 << 16) - 1
MOST_PACK_BYTES = 5 << 30                          # what one request can store

_ENTRY = struct.Struct("<32s64sQQQ")
_HEAD = struct.Struct("<8s32sQ")
TRAILER_BYTES = _HEAD.size + 16
ENTRY_BYTES = _ENTRY.size


class Verdict(Enum):
    """What a footer turned out to be."""

    GOOD = "good"
    DAMAGED = "damaged"
    FOREIGN = "foreign"                                # whole, perhaps, but of another kind or record schema


class Footer(NamedTuple):
    """``entries`` is empty unless the verdict is GOOD."""

    verdict: Verdict
    entries: bytes


class Entry(NamedTuple):
    """One record of a pack."""

    key: bytes
    header: bytes
    offset: int
    length: int
    born: int


class Pack:
    """A pack that is there. ``live`` records are the ones that the index answers with, ``live_bytes`` their size."""

    __slots__ = ("entries", "live", "live_bytes", "name", "size", "stamp")

    def __init__(self, name: str, size: int, entries: bytes) -> None:
        self.name = name
        self.stamp = stamp_of(name)
        self.size = size
        self.entries = entries
        self.live = 0
        self.live_bytes = 0

    def __repr__(self) -> str:
        return f"Pack({self.name}, records={self.count}, live={self.live})"

    @property
    def count(self) -> int:
        """Records, dead ones included."""
        return len(self.entries) // ENTRY_BYTES

    def entry(self, at: int) -> Entry:
        """The ``at``-th record."""
        return Entry(*_ENTRY.unpack_from(self.entries, at * ENTRY_BYTES))

    def length(self, at: int) -> int:
        """Its payload's bytes."""
        end = (at + 1) * ENTRY_BYTES - 8
        return int.from_bytes(self.entries[end - 8 : end], "little")

    def births(self) -> Iterator[tuple[bytes, int, int]]:
        """Every record's key, payload bytes and birth, in order."""
        return ((key, length, born) for key, _, _, length, born in _ENTRY.iter_unpack(self.entries))

    def keys(self) -> Iterator[bytes]:
        """Every record's key, in order."""
        entries = self.entries
        return (entries[at : at + KEY_BYTES] for at in range(0, len(entries), ENTRY_BYTES))


def pack_entries(
    keys: Sequence[bytes], headers: Sequence[bytes], lengths: Sequence[int], born: Sequence[int]
) -> bytes:
    """The entries of records that lie one after the other."""
    parts, offset = [], 0
    for key, header, length, birth in zip(keys, headers, lengths, born, strict=True):
        parts.append(_ENTRY.pack(key, header, offset, length, birth))
        offset += length
    return b"".join(parts)


def trailer_of(entries: bytes, schema: bytes) -> bytes:
    """What follows the entries."""
    head = _HEAD.pack(MAGIC, schema, len(entries) // ENTRY_BYTES)
    return head + xxh3_128_digest(entries + head)


def footer_bytes(tail: bytes) -> int:
    """How long the footer is that ends with ``tail``, as its trailer says; 0 if that is none."""
    if len(tail) < TRAILER_BYTES:
        return 0
    magic, _, count = _HEAD.unpack_from(tail, len(tail) - TRAILER_BYTES)
    return count * ENTRY_BYTES + TRAILER_BYTES if magic == MAGIC and 0 < count <= MAX_RECORDS else 0


def parse_footer(tail: bytes, size: int, schema: bytes) -> Footer:
    """What the end of an object of ``size`` bytes says. ``tail`` holds the whole footer, and maybe more."""
    length = footer_bytes(tail)
    if not 0 < length <= min(len(tail), size):
        return Footer(Verdict.DAMAGED, b"")
    entries, trailer = tail[len(tail) - length : -TRAILER_BYTES], tail[-TRAILER_BYTES:]
    if xxh3_128_digest(entries + trailer[: _HEAD.size]) != trailer[_HEAD.size :]:
        return Footer(Verdict.DAMAGED, b"")
    if trailer[len(MAGIC) : len(MAGIC) + len(schema)] != schema:
        return Footer(Verdict.FOREIGN, b"")
    return Footer(Verdict.GOOD, entries) if in_bounds(entries, size) else Footer(Verdict.DAMAGED, b"")


def in_bounds(entries: bytes, size: int) -> bool:
    """Whether the payloads lie one after the other in an object of ``size`` bytes and fill it, but for its footer."""
    at, end = 0, size - len(entries) - TRAILER_BYTES
    for _, _, offset, length, _ in _ENTRY.iter_unpack(entries):
        if offset != at or not length:
            return False
        at += length
    return at == end


assert ENTRY_BYTES == KEY_BYTES + HEADER_BYTES + 24
