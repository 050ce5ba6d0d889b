"""The index of a file store: where each key's page lies. It is in memory, and is rebuilt from the files at every start.

A page's location is one integer (see ``page_index``): the number of its group and its index in that group. A page takes
about 280 bytes of memory: its key as the key of a dict, its entry in the group's directory, and its location. A dead
page keeps its place in its group until the segment is reclaimed.
"""

from __future__ import annotations

from collections.abc import Iterable

from asynccache_backends.file.segments import MAX_PAGES, PageGroup
from asynccache_backends.page_index import PageIndex


class FileIndex(PageIndex[PageGroup]):
    """The index of a file store: its holders are groups. ``bytes`` counts payloads."""

    position_bits = 6

    def __init__(self) -> None:
        super().__init__()
        self._segments: dict[int, list[int]] = {}

    def groups_of(self, segment: int) -> list[PageGroup]:
        """Return the groups of one segment, in the order in which they were added."""
        return [self.holders[n] for n in self._segments.get(segment, ())]

    def add(self, group: PageGroup, moved: bool = False) -> None:
        """Add the pages of a group. If they were ``moved``, those that are in the index no more are dead.

        Of two copies of a page, the one that lies later in the log of segments is kept, and the other is marked as
        dead. So the order in which groups are added does not matter: a running store, which adds them as their writes
        end, keeps the same copies as a recovery, which adds them as they lie.
        """
        number = self._hold(group)
        base = number << self.position_bits
        self._segments.setdefault(group.segment, []).append(number)
        fresh, locations = [], self._locations
        for page, key in enumerate(group.keys()):
            old = locations.get(key)
            if moved if old is None else self.at(old)[0].place > group.place:
                group.dead |= 1 << page
                continue
            if old is None:
                fresh.append(key)
            else:
                self._drop(key)
            locations[key] = base + page
            self.bytes += group.length
        self._changed(True, fresh)

    def forget(self, key: bytes) -> bool:
        """Remove a key, and mark its page as dead. Returns False if the key is not stored."""
        there = key in self._locations
        if there:
            self._drop(key)
            self._changed(False, (key,))
        return there

    def place(self, key: bytes) -> tuple[int, int] | None:
        """Return the place of the group that has the page of ``key``; None if that is not stored."""
        location = self._locations.get(key)
        return None if location is None else self.at(location)[0].place

    def forget_all(self, group: PageGroup, pages: Iterable[int]) -> list[bytes]:
        """Forget pages of a group, except for those whose keys lie elsewhere by now. Returns their keys."""
        keys = [key for key in map(group.key, pages) if self.place(key) == group.place]
        return [key for key in keys if self.forget(key)]

    def drop_segment(self, segment: int) -> None:
        """Remove all keys of a segment and its groups. All pages are marked as dead, for those who still have one of
        its groups."""
        left = [group.key(page) for group in self.groups_of(segment) for page in group.live()]
        for key in left:
            self._drop(key)
        for number in self._segments.pop(segment, ()):
            del self.holders[number]
        self._changed(False, left)

    def _drop(self, key: bytes) -> None:
        group, page = self.at(self._locations.pop(key))
        group.dead |= 1 << page
        self.bytes -= group.length


assert 1 << FileIndex.position_bits > MAX_PAGES  # so that consecutive locations are always pages of the same group
