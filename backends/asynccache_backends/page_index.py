"""The index of a store that keeps many pages in one file or object: it says where each key's page lies. Pure. The file
store and the object store build their indexes on it.

A page's *location* is one integer: the number of its *holder* (a group, a pack) and the page's position in that. An
integer takes less memory than a pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from asynccache.storage import PageKey, Tell

PART = 4096


class Holder(Protocol):
    """A place with pages: a group, a pack."""

    def keys(self) -> Iterable[bytes]:
        """The key of each page, by position, also of those that are dead."""
        ...


H = TypeVar("H", bound=Holder)


class PageIndex(Generic[H]):
    """The locations of all stored pages, by key. ``holders`` has the holders by number. The position is the lowest
    ``position_bits`` bits of a location. ``bytes`` is the size of all pages that are stored. ``tell`` hears of keys
    that are added and removed."""

    position_bits: int

    def __init__(self) -> None:
        self.bytes = 0
        self.tell: Tell | None = None
        self.holders: dict[int, H] = {}
        self._locations: dict[bytes, int] = {}
        self._next = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._locations

    @property
    def pages(self) -> int:
        """How many pages are stored."""
        return len(self._locations)

    def watched(self, tell: Tell | None) -> Iterator[list[bytes]]:
        """Call ``tell`` from now on at every change; None ends that. Returns the keys that are stored now, about
        ``PART`` at a time. Each part is right when it is taken, however the index changes from one to the next."""
        self.tell = tell
        return self._parts() if tell is not None else iter(())

    def _parts(self) -> Iterator[list[bytes]]:
        part: list[bytes] = []
        last = -1
        while new := [number for number in self.holders if number > last]:  # again: pages may move to new holders
            for number in new:
                holder, base = self.holders.get(number), number << self.position_bits
                for location, key in enumerate(() if holder is None else holder.keys(), base):
                    if self._locations.get(key) == location:
                        part.append(key)
                        if len(part) == PART:
                            yield part
                            part = []
            last = new[-1]
        yield part

    def locate(self, keys: Sequence[PageKey]) -> list[tuple[int, int]]:
        """Return, for each key that is stored, its location and its position in ``keys``. Pages that lie next to each
        other in a holder have consecutive locations."""
        locations = self._locations
        return [(locations[key], i) for i, (_, key) in enumerate(keys) if key in locations]

    def at(self, location: int) -> tuple[H, int]:
        """Return the holder of a location, and the position of the page in it."""
        return self.holders[location >> self.position_bits], location & ((1 << self.position_bits) - 1)

    def _hold(self, holder: H) -> int:
        """Add a holder and return its number, which no other ever gets."""
        number, self._next = self._next, self._next + 1
        self.holders[number] = holder
        return number

    def _changed(self, there: bool, keys: Sequence[bytes]) -> None:
        if self.tell is not None and keys:
            self.tell(there, keys)
