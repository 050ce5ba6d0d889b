"""Where each key's page lies: a dict of small integers over groups. Pure; the whole of it is rebuilt at start.

A page costs about 280 bytes here: its key as dict key, its directory entry in its group, an int and a dict slot. Dead
pages keep their place in their group until the segment is reclaimed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asynccache.storage import KEY_BYTES, PageKey, Tell
from asynccache_backends.file.blocks import MAX_PAGES, Group

_PAGE_BITS = 6
_PAGE_MASK = (1 << _PAGE_BITS) - 1
assert MAX_PAGES <= _PAGE_MASK  # so that no slot is followed by one of the next group


class Index:
    """``pages`` and ``bytes`` count live pages and their payloads. ``tell`` hears of keys that come and leave. ``has``
    is ``in``, for those who ask for many keys in a row."""

    def __init__(self) -> None:
        self.bytes = 0
        self.tell: Tell | None = None
        self._slots: dict[bytes, int] = {}
        self._groups: dict[int, Group] = {}
        self._segments: dict[int, list[int]] = {}
        self._next = 0
        self.has = self._slots.__contains__

    def __repr__(self) -> str:
        return f"Index(pages={self.pages}, groups={len(self._groups)}, segments={len(self._segments)})"

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    @property
    def pages(self) -> int:
        """Live pages."""
        return len(self._slots)

    def groups(self) -> list[Group]:
        """Every group, segment by segment."""
        return [self._groups[n] for numbers in self._segments.values() for n in numbers]

    def groups_of(self, segment: int) -> list[Group]:
        """The groups of one segment, in the order in which they came."""
        return [self._groups[n] for n in self._segments.get(segment, ())]

    def slots(self, keys: Sequence[PageKey]) -> list[tuple[int, int]]:
        """For each key that is there its slot and its position in ``keys``. Neighbours have consecutive slots."""
        slots = self._slots
        return [(slots[key], i) for i, (_, key) in enumerate(keys) if key in slots]

    def at(self, slot: int) -> tuple[Group, int]:
        """The group and place of a slot."""
        return self._groups[slot >> _PAGE_BITS], slot & _PAGE_MASK

    def add(self, group: Group) -> None:
        """Enter a group's live pages. A key that is there already moves to the new place."""
        base = self._next << _PAGE_BITS
        self._groups[self._next] = group
        self._segments.setdefault(group.segment, []).append(self._next)
        self._next += 1
        fresh, slots, dead = [], self._slots, group.dead
        for page, key in enumerate(group.keys()):
            if not dead >> page & 1:
                if key not in slots:
                    fresh.append(key)
                else:
                    self._drop(key)
                slots[key] = base + page
        self.bytes += group.length * (group.count - dead.bit_count())
        if self.tell is not None:
            self.tell(True, fresh)

    def keys(self) -> list[bytes]:
        """Every key that is there."""
        return list(self._slots)

    def forget(self, key: bytes) -> tuple[Group, int] | None:
        """Drop a key; its page is dead from now on."""
        place = self._drop(key)
        if place is not None and self.tell is not None:
            self.tell(False, (key,))
        return place

    def _drop(self, key: bytes) -> tuple[Group, int] | None:
        slot = self._slots.pop(key, None)
        if slot is None:
            return None
        group, page = self.at(slot)
        group.dead |= 1 << page
        self.bytes -= group.length
        return group, page

    def forget_at(self, group: Group, page: int) -> tuple[Group, int] | None:
        """Drop the key of a page, if that is where its page still lies."""
        key = group.entry(page)[:KEY_BYTES]
        slot = self._slots.get(key)
        return None if slot is None or self.at(slot) != (group, page) else self.forget(key)

    def drop_segment(self, segment: int) -> None:
        """Forget a segment with all that is left in it: its pages are dead also for those who hold a group of it."""
        left = []
        for number in self._segments.pop(segment, ()):
            group = self._groups.pop(number)
            for page, key in enumerate(group.keys()):
                if not group.dead >> page & 1:
                    del self._slots[key]
                    left.append(key)
                    self.bytes -= group.length
            group.dead = (1 << group.count) - 1
        if self.tell is not None:
            self.tell(False, left)

    def kill(self, deaths: Iterable[tuple[int, int, int]]) -> int:
        """Apply (segment, offset, dead pages) to groups; for recovery. How many name a group that is not there."""
        stale = 0
        places = {(group.segment, group.offset): group for group in self._groups.values()}
        for segment, offset, mask in deaths:
            group = places.get((segment, offset))
            if group is None:
                stale += 1
                continue
            for page, key in enumerate(group.keys()):
                if mask >> page & 1 and not group.dead >> page & 1:
                    self.forget(key)
        return stale
