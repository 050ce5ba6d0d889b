"""The format of a pack. Pure functions.

    the payloads, one after the other; per record 120 bytes: 32 key · 64 header · 8 offset · 8 length · 8 born;
    64 bytes trailer: 8 magic · 32 schema · 8 number of records · 16 xxh3_128 of the entries and the trailer before it

The record headers lie in the footer, so that a payload can be sent directly from its host page. A reader finds the
footer by the size of the object and its last bytes, and needs nothing else of it. ``born`` is the time in the name of
the first pack that had the record, in milliseconds since 1970. A collection that moves the record keeps it, so that
tombstones concern the record as before.
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
MOST_PACK_BYTES = 5 << 30  # the most that one request can store

_ENTRY = struct.Struct("<32s64sQQQ")
_HEAD = struct.Struct("<8s32sQ")
TRAILER_BYTES = _HEAD.size + 16
ENTRY_BYTES = _ENTRY.size


class FooterCheck(Enum):
    """The verdict on a footer: whether it can be used."""

    GOOD = "good"
    DAMAGED = "damaged"
    FOREIGN = "foreign"  # undamaged, but with another record schema


class Footer(NamedTuple):
    """A footer that was read. ``entries`` is empty unless the verdict is GOOD."""

    verdict: FooterCheck
    entries: bytes


class FooterEntry(NamedTuple):
    """One record of a pack. ``offset`` and ``length`` are those of its payload, in bytes."""

    key: bytes
    header: bytes
    offset: int
    length: int
    born: int


class Pack:
    """A stored pack of ``size`` bytes. ``entries`` are those of its footer. ``stamp`` is the time in its name. ``live``
    is how many of its records are read, and ``live_bytes`` the size of these; the index keeps both."""

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
        """How many records it has, live or not."""
        return len(self.entries) // ENTRY_BYTES

    def entry(self, at: int) -> FooterEntry:
        """Return the record at position ``at``."""
        return FooterEntry(*_ENTRY.unpack_from(self.entries, at * ENTRY_BYTES))

    def length(self, at: int) -> int:
        """Return the bytes of the payload of the record at position ``at``."""
        end = (at + 1) * ENTRY_BYTES - 8
        return int.from_bytes(self.entries[end - 8 : end], "little")

    def births(self) -> Iterator[tuple[bytes, int, int]]:
        """Yield the key, the payload's bytes and ``born`` of every record, in order."""
        return ((key, length, born) for key, _, _, length, born in _ENTRY.iter_unpack(self.entries))

    def keys(self) -> Iterator[bytes]:
        """Yield the key of every record, in order."""
        entries = self.entries
        return (entries[at : at + KEY_BYTES] for at in range(0, len(entries), ENTRY_BYTES))


def pack_entries(
    keys: Sequence[bytes], headers: Sequence[bytes], lengths: Sequence[int], born: Sequence[int]
) -> bytes:
    """Return the entries of records whose payloads lie one after another from the start of the pack."""
    parts, offset = [], 0
    for key, header, length, birth in zip(keys, headers, lengths, born, strict=True):
        parts.append(_ENTRY.pack(key, header, offset, length, birth))
        offset += length
    return b"".join(parts)


def trailer_of(entries: bytes, schema: bytes) -> bytes:
    """Return the trailer that follows these entries."""
    head = _HEAD.pack(MAGIC, schema, len(entries) // ENTRY_BYTES)
    return head + xxh3_128_digest(entries + head)


def footer_bytes(tail: bytes) -> int:
    """Return the length of the footer that ends with ``tail``, as its trailer says; 0 if that is no trailer."""
    if len(tail) < TRAILER_BYTES:
        return 0
    magic, _, count = _HEAD.unpack_from(tail, len(tail) - TRAILER_BYTES)
    return count * ENTRY_BYTES + TRAILER_BYTES if magic == MAGIC and 0 < count <= MAX_RECORDS else 0


def parse_footer(tail: bytes, size: int, schema: bytes) -> Footer:
    """Parse the footer of an object of ``size`` bytes. ``tail`` is the end of the object, with at least the footer."""
    length = footer_bytes(tail)
    if not 0 < length <= min(len(tail), size):
        return Footer(FooterCheck.DAMAGED, b"")
    entries, trailer = tail[len(tail) - length : -TRAILER_BYTES], tail[-TRAILER_BYTES:]
    if xxh3_128_digest(entries + trailer[: _HEAD.size]) != trailer[_HEAD.size :]:
        return Footer(FooterCheck.DAMAGED, b"")
    if trailer[len(MAGIC) : len(MAGIC) + len(schema)] != schema:
        return Footer(FooterCheck.FOREIGN, b"")
    return Footer(FooterCheck.GOOD, entries) if in_bounds(entries, size) else Footer(FooterCheck.DAMAGED, b"")


def in_bounds(entries: bytes, size: int) -> bool:
    """Return True if the payloads lie one after another and fill an object of ``size`` bytes up to its footer."""
    at, end = 0, size - len(entries) - TRAILER_BYTES
    for _, _, offset, length, _ in _ENTRY.iter_unpack(entries):
        if offset != at or not length:
            return False
        at += length
    return at == end


assert ENTRY_BYTES == KEY_BYTES + HEADER_BYTES + 24
