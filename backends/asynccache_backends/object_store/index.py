"""The index in memory: in which pack each key's page lies. Pure; it can be rebuilt from the footers of all packs.

A key may be in several packs, if two writers have stored it without knowing of each other. Every process reads the
record in the latest pack, in whatever order it has found the packs. A tombstone deletes all records of a key in packs
that are not younger than the tombstone, whether they are found before it or after it. If the pack of a key vanishes,
the key is gone, even if another pack has it, too: that is as rare as the pages of two writers.

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
        return f"PackIndex(pages={self.pages}, packs={len(self.holders)}, tombs={len(self.tombs)})"

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
