"""Which keys lie where: a dict of small integers over packs. Pure; all of it can be said again by the packs.

A key may lie in several packs: two writers that did not know of each other, or a pack that is being rewritten. The
earliest pack answers, everywhere, whatever the order in which they were found; the others are kept in mind, because the
earliest may vanish. A tombstone takes away all records of a key that were not born later than itself, found before or
after it.

A page costs about 300 bytes here: its key as dict key, its entry in its pack, an int and a dict slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asynccache.storage import HEADER_BYTES, PageKey, Tell
from asynccache_backends.object_store.names import stamp_of
from asynccache_backends.object_store.packs import MAX_RECORDS, Pack

_BITS = 16
_MASK = (1 << _BITS) - 1
assert MAX_RECORDS <= _MASK  # so that no slot is followed by one of the next pack


class Index:
    """``bytes`` counts live headers and payloads, ``stored`` all bytes of all packs. ``tell`` hears of keys that come
    and leave."""

    def __init__(self) -> None:
        self.bytes = 0
        self.stored = 0
        self.tell: Tell | None = None
        self.tombs: dict[str, Sequence[bytes]] = {}
        self._died: dict[bytes, int] = {}
        self._slots: dict[bytes, int] = {}
        self._others: dict[bytes, list[int]] = {}
        self._packs: dict[int, Pack] = {}
        self._numbers: dict[str, int] = {}
        self._next = 0

    def __repr__(self) -> str:
        return f"Index(pages={self.pages}, packs={self.pack_count}, tombs={len(self.tombs)})"

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    @property
    def pages(self) -> int:
        """Keys that are there."""
        return len(self._slots)

    def keys(self) -> list[bytes]:
        """All of them."""
        return list(self._slots)

    @property
    def pack_count(self) -> int:
        """Packs that are there."""
        return len(self._packs)

    def packs(self) -> list[Pack]:
        """Every pack, earliest first. To be sorted they are all looked at: not for the hot path."""
        return sorted(self._packs.values(), key=lambda pack: pack.name)

    def has(self, name: str) -> bool:
        """Whether a pack of that name is there."""
        return name in self._numbers

    def slots(self, keys: Sequence[PageKey]) -> list[tuple[int, int]]:
        """For each key that is there its slot and its position in ``keys``. Neighbours have consecutive slots."""
        slots = self._slots
        return [(slots[key], i) for i, (_, key) in enumerate(keys) if key in slots]

    def at(self, slot: int) -> tuple[Pack, int]:
        """The pack and place of a slot."""
        return self._packs[slot >> _BITS], slot & _MASK

    def live(self, pack: Pack) -> list[int]:
        """The places in ``pack`` that the index answers with; none if it has vanished."""
        base = self._numbers.get(pack.name, -1) << _BITS
        return [at for at, key in enumerate(pack.keys()) if self._slots.get(key) == base + at]

    def buried(self, key: bytes, born: int) -> bool:
        """Whether a tombstone took away a record of ``key`` that was born then."""
        return self._died.get(key, -1) >= born

    def add(self, pack: Pack) -> None:
        """Enter a pack. One that is there already changes nothing."""
        if pack.name in self._numbers:
            return
        number = self._next
        self._next += 1
        self._numbers[pack.name] = number
        self._packs[number] = pack
        self.stored += pack.size
        slots, fresh, size = self._slots, [], 0
        for slot, (key, length, born) in enumerate(pack.births(), number << _BITS):
            if self._died and self.buried(key, born):
                continue
            if key in slots:
                self._hold_also(key, slot)
            else:
                slots[key] = slot
                size += length + HEADER_BYTES
                fresh.append(key)
        pack.live += len(fresh)
        pack.live_bytes += size
        self.bytes += size
        self._changed(True, fresh)

    def drop(self, name: str) -> int:
        """A pack has vanished; keys that lie elsewhere too stay. How many are gone."""
        number = self._numbers.pop(name, None)
        if number is None:
            return 0
        pack = self._packs[number]
        base = number << _BITS
        gone = [key for at, key in enumerate(pack.keys()) if self._let_go(key, base + at)]
        del self._packs[number]
        self.stored -= pack.size
        self._changed(False, gone)
        return len(gone)

    def bury(self, name: str, keys: Iterable[bytes]) -> None:
        """Apply a tombstone. One that is known already changes nothing."""
        if name in self.tombs:
            return
        keys, stamp, gone = tuple(keys), stamp_of(name), []
        self.tombs[name] = keys
        for key in keys:
            self._died[key] = max(stamp, self._died.get(key, -1))
            if self._slots.get(key) is not None and self._take_out(key):
                gone.append(key)
        self._changed(False, gone)

    def unbury(self, name: str) -> None:
        """A tombstone has vanished. What it took out stays out until the packs are read again."""
        for key in self.tombs.pop(name, ()):
            if self._died.get(key) == stamp_of(name):
                del self._died[key]

    def clear(self) -> None:
        """Forget everything."""
        gone = list(self._slots)
        for table in (self._slots, self._others, self._packs, self._numbers, self._died, self.tombs):
            table.clear()
        self.bytes = self.stored = 0
        self._changed(False, gone)

    def _hold_also(self, key: bytes, slot: int) -> None:
        """One more place for a key that has one: the earlier answers."""
        held = later = self._slots[key]
        if self.at(slot)[0].name < self.at(held)[0].name:
            self._silence(key)
            self._answer(key, slot)
        else:
            later = slot
        self._others.setdefault(key, []).append(later)

    def _let_go(self, key: bytes, slot: int) -> bool:
        """One place less for ``key``. Whether it was the last."""
        others = self._others.get(key, [])
        held = self._slots.get(key) == slot
        if held:
            self._silence(key)
        elif slot in others:
            others.remove(slot)
        if held and others:
            heir = min(others, key=lambda other: self.at(other)[0].name)
            others.remove(heir)
            self._answer(key, heir)
        if not others:
            self._others.pop(key, None)
        return held and key not in self._slots

    def _take_out(self, key: bytes) -> bool:
        """Let go of the places of ``key`` that a tombstone reaches. Whether none is left."""
        for slot in (*self._others.get(key, ()), self._slots[key]):
            pack, at = self.at(slot)
            if self.buried(key, pack.entry(at).born):
                self._let_go(key, slot)
        return key not in self._slots

    def _answer(self, key: bytes, slot: int) -> None:
        self._slots[key] = slot
        self._count(slot, 1)

    def _silence(self, key: bytes) -> None:
        self._count(self._slots.pop(key), -1)

    def _count(self, slot: int, sign: int) -> None:
        pack, at = self.at(slot)
        size = sign * (pack.length(at) + HEADER_BYTES)
        pack.live += sign
        pack.live_bytes += size
        self.bytes += size

    def _changed(self, there: bool, keys: Sequence[bytes]) -> None:
        if self.tell is not None and keys:
            self.tell(there, keys)
