"""The index in memory: in which pack each key's page lies. Pure; it can be rebuilt from the footers of all packs.

A key may be in several packs: two writers have stored it without knowing of each other, or a pack is being rewritten.
Every process reads the record that was born last, and of those of one birth the one in the latest pack, in whatever
order it has found the packs. So pages are found where a collection has moved them to. A tombstone deletes all records
of a key that are not younger than the tombstone, whether they are found before it or after it. If the pack of a key
vanishes, the key is gone, even if another pack has it, too: that is as rare as the pages of two writers.

A page's location is one integer (see ``page_index``): the number of its pack and the position of its record there. A
page takes about 300 bytes of memory: its key as the key of a dict, its entry in the pack's footer, and its location.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asynccache.storage import HEADER_BYTES
from asynccache_backends.object_store.formats import MAX_RECORDS, Pack, stamp_of
from asynccache_backends.page_index import PageIndex


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

    def __repr__(self) -> str:
        return f"PackIndex(pages={self.pages}, packs={self.pack_count}, tombs={len(self.tombs)})"

    @property
    def pack_count(self) -> int:
        """The number of packs."""
        return len(self.holders)

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

    def buried(self, key: bytes, born: int) -> bool:
        """Return True if a tombstone has deleted the record of ``key`` that was born at this time."""
        return self._died.get(key, -1) >= born

    def born(self, key: bytes) -> int:
        """Return when the record of ``key`` that is read was born, in milliseconds since 1970; -1 if there is none."""
        location = self._locations.get(key)
        return -1 if location is None else self._rank(location)[0]

    def birth(self, key: bytes, stamp: int) -> int:
        """Return when a record of ``key`` that is stored at the time ``stamp`` counts as born: then, or right after the
        latest tombstone of the key, so that no tombstone of before deletes it."""
        return max(stamp, self._died.get(key, -1) + 1)

    def add(self, pack: Pack) -> None:
        """Add a pack, unless it was added before."""
        if pack.name in self._numbers:
            return
        number = self._hold(pack)
        self._numbers[pack.name] = number
        self.stored += pack.size
        locations, fresh = self._locations, []
        for location, (key, length, born) in enumerate(pack.births(), number << self.position_bits):
            if self._died and self.buried(key, born):
                continue
            if key not in locations:
                fresh.append(key)
            elif (born, pack.name) > self._rank(locations[key]):
                self._count(locations[key], -1)
            else:
                continue
            locations[key] = location
            pack.live += 1
            pack.live_bytes += length + HEADER_BYTES
            self.bytes += length + HEADER_BYTES
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
        there = [key for key in dict.fromkeys(keys) if key in self._locations]
        self._remove([key for key in there if self.buried(key, self._rank(self._locations[key])[0])])

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

    def _rank(self, location: int) -> tuple[int, str]:
        """Return the birth of the record at ``location`` and its pack's name. Of several records of a key the one with
        the highest rank is read."""
        pack, at = self.at(location)
        return pack.entry(at).born, pack.name

    def _remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._count(self._locations.pop(key), -1)
        self._changed(False, keys)

    def _count(self, location: int, sign: int) -> None:
        pack, at = self.at(location)
        size = sign * (pack.length(at) + HEADER_BYTES)
        pack.live += sign
        pack.live_bytes += size
        self.bytes += size


assert 1 << PackIndex.position_bits > MAX_RECORDS  # so that consecutive locations are always records of the same pack
