"""The names and the content of all objects. Pure functions, but for the clock.

    PREFIX/packs/<name>           a pack
    PREFIX/packs/<name>.dead      a tombstone: what was stored under its keys up to the time in its name is deleted
    PREFIX/index/<name>           a snapshot of the index, so that opening need not read the footers of all packs

    name:       128 bits in hex, 48 of time and 80 random ones, so names sort by time
    pack:       the payloads, one after the other; per record 120 bytes: 32 key · 64 header · 8 offset · 8 length ·
                8 time in the pack's name; 64 bytes trailer: 8 magic · 32 schema · 8 number of records · 16 xxh3_128
                of the entries and the trailer before it
    tombstone:  8 magic · 8 number of keys · 16 xxh3_128 of the keys; the keys
    snapshot:   8 magic · 32 schema · 16 xxh3_128 of the rest; 8 length of the table; the table, a ``_SnapshotTable``
                in MessagePack; the footers' entries of each pack; the keys of each tombstone

No part of a name comes from a user. The times in a writer's names never go back, and are later than those in all names
that it has seen of others. So its tombstones are later than every pack that it knows, and what it stores after a
deletion is later than the tombstone. Names whose time is more than a day ahead are an exception: their writer's clock
is wrong, and nobody follows it.

The record headers lie in the footer, behind all payloads. A reader finds the footer by the size of the object and its
last bytes, and needs nothing else of it. The time in each record is for readers of earlier versions, in which packs
were rewritten.

The index in memory says in which pack each key's page lies. It can be rebuilt from the footers of all packs. A key may
be in several packs, if two writers have stored it without knowing of each other. Every process reads the record in the
latest pack, in whatever order it has found the packs. A tombstone deletes all records of a key in packs that are not
younger than the tombstone, whether they are found before it or after it. If the pack of a key vanishes, the key is
gone, even if another pack has it, too: that is as rare as the pages of two writers.

A page's location is one integer (see ``page_index``): the number of its pack and the position of its record there. A
page takes about 300 bytes of memory: its key as the key of a dict, its entry in the pack's footer, and its location.
"""

from __future__ import annotations

import re
import secrets
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec
from xxhash import xxh3_128, xxh3_128_digest

from asynccache.storage import HEADER_BYTES, KEY_BYTES
from asynccache_backends.page_index import PageIndex

PACKS = "packs"
INDEX = "index"
DEAD = ".dead"

_NAME = re.compile(r"[0-9a-f]{32}")
_STAMP_DIGITS = 12
LAST_STAMP = 16**_STAMP_DIGITS - 1
_WILD = 24 * 3600 * 1000

MAGIC = b"acPACK\x00\x01"
MAX_RECORDS = (1 << 16) - 1
MOST_PACK_BYTES = 5 << 30  # the most that one request can store

_ENTRY = struct.Struct("<32s64sQQQ")
_HEAD = struct.Struct("<8s32sQ")
TRAILER_BYTES = _HEAD.size + 16
ENTRY_BYTES = _ENTRY.size
_INDEX_MAGIC = b"acINDX\x00\x03"
_TOMB_MAGIC = b"acDEAD\x00\x01"
_TOMB_HEAD = struct.Struct("<8sQ16s")

_Name = Annotated[str, msgspec.Meta(pattern=rf"^{_NAME.pattern}\Z")]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_HASHED_AT_ONCE = 1 << 20


def is_name(text: str) -> bool:
    """Return True if ``text`` is a name of the form that ``NameClock`` gives."""
    return _NAME.fullmatch(text) is not None


def stamp_of(name: str) -> int:
    """Return the time in a name, in milliseconds since 1970."""
    return int(name[:_STAMP_DIGITS], 16)


def first_name(stamp: int) -> str:
    """Return a text that sorts before all names with the time ``stamp`` and after all with an earlier one."""
    return f"{max(0, stamp):0{_STAMP_DIGITS}x}"


class NameClock:
    """Gives new names. ``now`` returns the time in seconds since 1970."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self.now = now
        self._last = 0

    def seen(self, stamp: int) -> None:
        """Note the time in a name of another writer, so that later names from here come after it. A time that is more
        than a day ahead is taken for an error and ignored."""
        if self._last < stamp < self.now() * 1000 + _WILD:
            self._last = stamp

    def name(self) -> str:
        """Return a new name, which is later than all that were given or seen."""
        self._last = max(int(self.now() * 1000), self._last + 1)
        return f"{first_name(self._last)}{secrets.token_hex(10)}"


class FooterEntry(NamedTuple):
    """One record of a pack. ``offset`` and ``length`` are those of its payload, in bytes."""

    key: bytes
    header: bytes
    offset: int
    length: int


class Pack:
    """A stored pack of ``size`` bytes. ``entries`` are those of its footer. ``stamp`` is the time in its name. ``live``
    is the number of its live records, from which gets are answered; the index keeps it."""

    __slots__ = ("entries", "live", "name", "size", "stamp")

    def __init__(self, name: str, size: int, entries: bytes) -> None:
        self.name = name
        self.stamp = stamp_of(name)
        self.size = size
        self.entries = entries
        self.live = 0

    def entry(self, at: int) -> FooterEntry:
        """Return the record at position ``at``."""
        return FooterEntry(*_ENTRY.unpack_from(self.entries, at * ENTRY_BYTES)[:4])

    def length(self, at: int) -> int:
        """Return the bytes of the payload of the record at position ``at``."""
        end = (at + 1) * ENTRY_BYTES - 8
        return int.from_bytes(self.entries[end - 8 : end], "little")

    def keys(self) -> Iterator[bytes]:
        """Yield the key of every record, in order."""
        entries = self.entries
        return (entries[at : at + KEY_BYTES] for at in range(0, len(entries), ENTRY_BYTES))


def pack_entries(keys: Sequence[bytes], headers: Sequence[bytes], lengths: Sequence[int], stamp: int) -> bytes:
    """Return the entries of records whose payloads lie one after another from the start of the pack, in whose name is
    the time ``stamp``."""
    parts, offset = [], 0
    for key, header, length in zip(keys, headers, lengths, strict=True):
        parts.append(_ENTRY.pack(key, header, offset, length, stamp))
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


def parse_footer(tail: bytes, size: int, schema: bytes) -> bytes | None:
    """Return the entries in the footer of an object of ``size`` bytes; None if it is damaged or has another record
    schema. ``tail`` is the end of the object, with at least the footer."""
    length = footer_bytes(tail)
    if not 0 < length <= min(len(tail), size):
        return None
    entries = tail[len(tail) - length : -TRAILER_BYTES]
    right = tail[-TRAILER_BYTES:] == trailer_of(entries, schema) and in_bounds(entries, size)
    return entries if right else None


def in_bounds(entries: bytes, size: int) -> bool:
    """Return True if the payloads lie one after another and fill an object of ``size`` bytes up to its footer, and
    there are no more records than a pack may have."""
    if len(entries) % ENTRY_BYTES or len(entries) > MAX_RECORDS * ENTRY_BYTES:
        return False
    at, end = 0, size - len(entries) - TRAILER_BYTES
    for _, _, offset, length, _ in _ENTRY.iter_unpack(entries):
        if offset != at or not length:
            return False
        at += length
    return at == end


class PackIndexSnapshot(NamedTuple):
    """The content of a snapshot: the name, the size and the footer's entries of each pack, and the keys of each
    tombstone by its name. ``cursor`` is the time in seconds since 1970, by the store's clock, up to which the
    snapshot's writer had listed the packs. Later ones are listed at opening."""

    cursor: float
    packs: Sequence[tuple[str, int, bytes]]
    tombs: Mapping[str, tuple[bytes, ...]]


class _SnapshotTable(NamedTuple):
    """The small part of a snapshot: the name, the size and the number of records of each pack, and the number of keys
    of each tombstone. Entries and keys follow as they are, because one call that encodes or decodes all of them would
    hold the interpreter's lock for a tenth of a second where there are a million."""

    cursor: float
    packs: list[tuple[_Name, int, _Count]]
    tombs: dict[_Name, _Count]


def pack_snapshot(snapshot: PackIndexSnapshot, schema: bytes) -> bytes:
    """Return the content of the object."""
    packs = [(name, size, len(entries) // ENTRY_BYTES) for name, size, entries in snapshot.packs]
    tombs = {name: len(keys) for name, keys in snapshot.tombs.items()}
    table = msgspec.msgpack.encode(_SnapshotTable(snapshot.cursor, packs, tombs))
    body = [len(table).to_bytes(8, "little"), table, *(entries for _, _, entries in snapshot.packs)]
    body += [b"".join(keys) for keys in snapshot.tombs.values()]
    return b"".join((_INDEX_MAGIC, schema, _digest(body), *body))


def parse_snapshot(data: memoryview, schema: bytes) -> PackIndexSnapshot | None:
    """Return the snapshot in ``data``; None if it is damaged or has another schema. The checksum does not tell whether
    its content is possible: somebody may have made the object by hand."""
    start = len(_INDEX_MAGIC) + len(schema) + 16
    parts = (data[at : at + _HASHED_AT_ONCE] for at in range(start, len(data), _HASHED_AT_ONCE))
    if data[:start] != _INDEX_MAGIC + schema + _digest(parts):
        return None
    at = start + 8
    end = at + int.from_bytes(data[start:at], "little")
    try:
        cursor, sizes, counts = msgspec.msgpack.decode(data[at:end], type=_SnapshotTable)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    records, buried = sum(count for _, _, count in sizes), sum(counts.values())
    if end + records * ENTRY_BYTES + buried * KEY_BYTES != len(data) or not 0 <= cursor * 1000 <= LAST_STAMP:
        return None
    packs = []
    for name, size, count in sizes:
        entries = bytes(data[end : (end := end + count * ENTRY_BYTES)])
        if size > MOST_PACK_BYTES or not in_bounds(entries, size):
            return None
        packs.append((name, size, entries))
    tombs = {}
    for name, count in counts.items():
        ends = range(end + KEY_BYTES, (end := end + count * KEY_BYTES) + 1, KEY_BYTES)
        tombs[name] = tuple(bytes(data[key_end - KEY_BYTES : key_end]) for key_end in ends)
    return PackIndexSnapshot(cursor, packs, tombs)


def _digest(parts: Iterable[bytes | memoryview]) -> bytes:
    digest = xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()


def pack_tomb(keys: Sequence[bytes]) -> bytes:
    """Return the content of a tombstone."""
    body = b"".join(keys)
    return _TOMB_HEAD.pack(_TOMB_MAGIC, len(keys), xxh3_128_digest(body)) + body


def parse_tomb(name: str, data: bytes) -> tuple[bytes, ...] | None:
    """Return the keys of a tombstone; None if it is damaged."""
    body = data[_TOMB_HEAD.size :]
    keys = tuple(body[at : at + KEY_BYTES] for at in range(0, len(body), KEY_BYTES))
    return keys if is_name(name) and len(body) % KEY_BYTES == 0 and data == pack_tomb(keys) else None


class PackIndex(PageIndex[Pack]):
    """The index of an object store: its holders are packs. ``bytes`` counts the headers and payloads that can be read;
    ``stored`` is the size of all packs. ``tombs`` has the keys of each tombstone by its name."""

    position_bits = 16

    def __init__(self) -> None:
        super().__init__()
        self.stored = 0
        self.tombs: dict[str, tuple[bytes, ...]] = {}
        self._died: dict[bytes, int] = {}
        self._numbers: dict[str, int] = {}

    def packs(self) -> list[Pack]:
        """Return all packs, the earliest first. It sorts them, so it is not for the hot path."""
        return sorted(self.holders.values(), key=lambda pack: pack.name)

    def has(self, name: str) -> bool:
        """Return True if there is a pack of this name."""
        return name in self._numbers

    def live(self, pack: Pack) -> list[int]:
        """Return the positions of the live records of ``pack``, those that are read; none if the pack has vanished."""
        base = self._numbers.get(pack.name, -1) << self.position_bits
        return [at for at, key in enumerate(pack.keys()) if self._locations.get(key) == base + at]

    def pack_of(self, key: bytes) -> Pack | None:
        """Return the pack that ``key`` is read from, if there is one."""
        location = self._locations.get(key)
        return None if location is None else self.at(location)[0]

    def add(self, pack: Pack) -> None:
        """Add a pack, unless it was added before."""
        if pack.name in self._numbers:
            return
        number = self._hold(pack)
        self._numbers[pack.name] = number
        self.stored += pack.size
        locations, fresh = self._locations, []
        for location, key in enumerate(pack.keys(), number << self.position_bits):
            if self._died.get(key, -1) >= pack.stamp:
                continue
            if key not in locations:
                fresh.append(key)
            elif pack.name > self.at(locations[key])[0].name:
                self._count(locations[key], -1)
            else:
                continue
            locations[key] = location
            self._count(location, 1)
        self._changed(True, fresh)

    def drop(self, name: str) -> None:
        """Remove a pack that has vanished, and the keys that were read from it."""
        number = self._numbers.pop(name, None)
        if number is None:
            return
        pack = self.holders[number]
        base = number << self.position_bits
        self._remove([key for location, key in enumerate(pack.keys(), base) if self._locations.get(key) == location])
        del self.holders[number]
        self.stored -= pack.size

    def bury(self, name: str, keys: Iterable[bytes]) -> None:
        """Apply a tombstone, unless it was applied before."""
        if name in self.tombs:
            return
        keys, stamp = tuple(keys), stamp_of(name)
        self.tombs[name] = keys
        for key in keys:
            self._died[key] = max(stamp, self._died.get(key, -1))
        found = [(key, self.pack_of(key)) for key in dict.fromkeys(keys)]
        self._remove([key for key, pack in found if pack is not None and self._died[key] >= pack.stamp])

    def unbury(self, name: str) -> None:
        """Forget a tombstone that has vanished. The records that it has deleted stay deleted here until the packs are
        added again."""
        for key in self.tombs.pop(name, ()):
            if self._died.get(key) == stamp_of(name):
                del self._died[key]

    def clear(self) -> None:
        """Remove everything."""
        gone = list(self._locations)
        for table in (self._locations, self.holders, self._numbers, self._died, self.tombs):
            table.clear()
        self.bytes = self.stored = 0
        self._changed(False, gone)

    def _remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._count(self._locations.pop(key), -1)
        self._changed(False, keys)

    def _count(self, location: int, sign: int) -> None:
        pack, at = self.at(location)
        pack.live += sign
        self.bytes += sign * (pack.length(at) + HEADER_BYTES)


assert 1 << PackIndex.position_bits > MAX_RECORDS  # so that consecutive locations are always records of the same pack
