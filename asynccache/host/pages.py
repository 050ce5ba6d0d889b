"""Which page lies where, which one goes next, and who writes where. Pure bookkeeping: no I/O, no clock.

Laws:
* Every slot and every unit is free, or a page's, or reserved by a process, or both of the latter: never of two pages.
* A slot's generation grows when its page has gone, before anybody else can get the slot.
* A page that is *pinned* (a store reads from it or into it) keeps its place until it is unpinned, also if it was
  dropped.
* Of two processes that write the same page the first to publish wins; the other's slot comes free.
* What one process may have reserved is bounded, and so is what all have: half of the memory.

Recency decides what goes: the page that was used longest ago. A call's pages are used in reverse order, so that of a
prefix the deepest page goes first, without which the others still serve, although nobody here knows of prefixes. A
label (a tenant, a model) may have a limit; at it, its own oldest page goes.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from sys import intern
from typing import Any, NamedTuple

from asynccache.host.memory import UNIT, Extents, MemoryLayout, units_of
from asynccache.storage import HEADER_BYTES, Tell

LONGEST_SHARE = 8
"""A page takes at most this part of the memory."""
MOST_QUOTA, LEAST_QUOTA = 512 << 20, 64 << 20
QUOTA_SHARE = 8
LISTED = 1 << 12
MOST_SCANNED = 1 << 16
"""Slots that are looked at in one go: millions would keep all clients waiting."""


class HostLabel:
    """What pages of one label take. ``limit``: their bytes at most; None: no limit."""

    def __init__(self, name: str, limit: int | None = None) -> None:
        self.name = name
        self.limit = limit
        self.pages = 0
        self.bytes = 0
        self.reserved = 0
        self.counts: Counter[str] = Counter()
        self.order: OrderedDict[bytes, HostPage] = OrderedDict()  # only kept if there is a limit


class HostPage:
    """A page's place. ``length``: the bytes of its payload. ``offset``: where that begins in the memory. ``pins``: how
    many stores use it now. ``stored``: whether it can be found. ``written``: when it came, unix time."""

    __slots__ = ("generation", "key", "label", "length", "offset", "pins", "pool", "slot", "start", "stored", "units",
                 "written")  # fmt: skip

    def __init__(
        self, key: bytes, pool: str, length: int, slot: int, start: int, units: int, offset: int, generation: int,
        label: HostLabel,
    ) -> None:  # fmt: skip
        self.key = key
        self.pool = pool
        self.length = length
        self.slot = slot
        self.start = start
        self.units = units
        self.offset = offset
        self.generation = generation
        self.label = label
        self.pins = 0
        self.stored = False
        self.written = 0.0


class Writer:
    """A process that has slots reserved. ``name``: its number and label, for people."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reserved: dict[int, HostPage] = {}
        self.bytes = 0
        self.since = 0.0
        """When it began to have slots reserved without a break; by the owner's clock."""

    def __repr__(self) -> str:
        return f"Writer({self.name!r}, {len(self.reserved)} slots)"


class KeptPage(NamedTuple):
    """A page as one server leaves it to the next, the coldest first."""

    key: bytes
    pool: str
    length: int
    slot: int
    start: int
    label: str
    written: float


class PageTable:
    """All pages of one memory. ``generations`` is the table in the shared memory, which clients read. ``index``: the
    pages that can be found, the coldest first."""

    def __init__(
        self, layout: MemoryLayout, generations: Any, *, limits: Mapping[str, int] | None = None,
        quota: int | None = None,
    ) -> None:  # fmt: skip
        self.layout = layout
        self.index: OrderedDict[bytes, HostPage] = OrderedDict()
        self.labels: dict[str, HostLabel] = {name: HostLabel(name, limit) for name, limit in (limits or {}).items()}
        self.counts: Counter[str] = Counter()
        self.bytes = 0
        self.reserved_bytes = 0
        self.usable = 0
        self.longest = layout.units // LONGEST_SHARE * UNIT
        share = max(layout.units * UNIT // QUOTA_SHARE, min(LEAST_QUOTA, layout.units * UNIT // 2))
        self.quota = min(MOST_QUOTA, share) if quota is None else quota
        self._shared = generations
        self._extents = Extents()
        self._slots: list[int] = []  # those that were used and are free; others have never been used
        self._generations = array("Q")  # of all that were ever used
        self._in_slot: list[HostPage | None] = []
        self._tell: Tell | None = None

    def __repr__(self) -> str:
        return f"PageTable({len(self.index)} pages, {self.bytes} of {self.usable * UNIT} bytes)"

    @property
    def free_bytes(self) -> int:
        """The bytes that no page and no reservation has."""
        return self._extents.free * UNIT

    def grow(self, units: int) -> None:
        """Use the first ``units`` from now on."""
        if units > self.usable:
            self._extents.give(self.usable, units - self.usable)
            self.usable = units

    def label(self, name: str) -> HostLabel:
        """Return the label of this name."""
        if name not in self.labels:
            self.labels[name] = HostLabel(name)
        return self.labels[name]

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that the pages of ``keys`` are used now; of these the first is the one that goes last."""
        index = self.index
        for key in reversed(keys):
            page = index.get(key)
            if page is not None:
                index.move_to_end(key)
                if page.label.limit is not None:
                    page.label.order.move_to_end(key)

    # writing

    def reserve(self, writer: Writer, key: bytes, pool: str, length: int, label: HostLabel) -> HostPage | None:
        """Return a place for a page of ``length`` bytes, which is the writer's until it publishes it, gives it back or
        dies. Pages are evicted for it. None: there is no room, or the writer has its share."""
        units = units_of(length)
        size = units * UNIT
        if not 0 < length <= self.longest or writer.bytes + size > self.quota or units > self.usable:
            return None
        if self.reserved_bytes + size > self.usable * UNIT // 2:
            return None
        if label.limit is not None and not self._keep_limit(label, length):
            return None
        start = self._room(units)
        if start is None:
            return None
        slot = self._slot()
        page = HostPage(key, intern(pool), length, slot, start, units, self.layout.payloads_at + start * UNIT,
                        self._generations[slot], label)  # fmt: skip
        self._in_slot[slot] = page
        self._shared[slot] = page.generation  # again: a client may have written there
        writer.reserved[slot] = page
        writer.bytes += size
        label.reserved += length
        self.reserved_bytes += size
        return page

    def publish(self, writer: Writer, slot: int, now: float) -> HostPage | None:
        """Make the page in a slot that ``writer`` has reserved findable, or drop it if another was faster. Returns the
        page that is stored now; None: the writer has no such slot."""
        page = self._taken_back(writer, slot)
        if page is None:
            return None
        if (other := self.index.get(page.key)) is not None:
            self._release(page)
            return other
        self._store(page, now)
        return page

    def give_back(self, writer: Writer, slots: Iterable[int]) -> None:
        """Free slots that ``writer`` has reserved. Those that it has not are left alone."""
        for slot in slots:
            page = self._taken_back(writer, slot)
            if page is not None:
                self._release(page)

    def end(self, writer: Writer) -> int:
        """Free all that ``writer`` has reserved; it can write no more. Returns how many slots that were. Calling it
        twice is fine."""
        count = len(writer.reserved)
        self.give_back(writer, list(writer.reserved))
        return count

    def _taken_back(self, writer: Writer, slot: int) -> HostPage | None:
        page = writer.reserved.pop(slot, None)
        if page is not None:
            writer.bytes -= page.units * UNIT
            page.label.reserved -= page.length
            self.reserved_bytes -= page.units * UNIT
        return page

    def _store(self, page: HostPage, now: float) -> None:
        page.stored, page.written = True, now
        self.index[page.key] = page
        self.bytes += page.length + HEADER_BYTES
        label = page.label
        label.pages += 1
        label.bytes += page.length
        if label.limit is not None:
            label.order[page.key] = page
        if self._tell is not None:
            self._tell(True, (page.key,))

    # going

    def drop(self, page: HostPage) -> None:
        """Let nobody find this page any more. Its place comes free now, or when it is unpinned."""
        if not page.stored:
            return
        page.stored = False
        del self.index[page.key]
        self.bytes -= page.length + HEADER_BYTES
        label = page.label
        label.pages -= 1
        label.bytes -= page.length
        if label.limit is not None:
            del label.order[page.key]
        if self._tell is not None:
            self._tell(False, (page.key,))
        if not page.pins:
            self._release(page)

    def unpin(self, page: HostPage) -> None:
        """Take one pin off. A page that was dropped goes with its last pin."""
        page.pins -= 1
        if not page.pins and not page.stored and self._in_slot[page.slot] is page:
            self._release(page)

    def clear(self) -> None:
        """Drop every page. What is reserved stays so."""
        for page in list(self.index.values()):
            self.drop(page)

    def _keep_limit(self, label: HostLabel, length: int) -> bool:
        assert label.limit is not None
        room = label.limit - label.reserved - length
        if room < 0:
            return False  # also without all that is stored
        while label.bytes > room:
            page = next((page for page in label.order.values() if not page.pins), None)
            if page is None:
                return False
            self.counts["over_limit"] += 1
            self.drop(page)
        return True

    def _room(self, units: int) -> int | None:
        """Take ``units`` in a row, evicting pages until there are, and a slot beside them."""
        while not (self._slots or len(self._in_slot) < self.layout.slots) or (
            start := self._extents.take(units)
        ) is None:
            page = next((page for page in self.index.values() if not page.pins), None)
            if page is None:
                return None
            self.counts["evicted"] += 1
            page.label.counts["evicted"] += 1
            self.drop(page)
        return start

    def _slot(self) -> int:
        if self._slots:
            return self._slots.pop()
        self._generations.append(0)
        self._in_slot.append(None)
        return len(self._in_slot) - 1

    def _release(self, page: HostPage) -> None:
        slot = page.slot
        generation = self._generations[slot] + 1
        self._generations[slot] = self._shared[slot] = generation
        self._in_slot[slot] = None
        self._slots.append(slot)
        self._extents.give(page.start, page.units)

    # for tools, and for the next server

    def listed(self, slot: int, most: int) -> tuple[list[HostPage], int]:
        """Return up to ``most`` stored pages in the slots from ``slot`` on, and the slot after these; -1: the end."""
        found: list[HostPage] = []
        end = min(len(self._in_slot), slot + MOST_SCANNED)
        for at in range(slot, end):
            page = self._in_slot[at]
            if page is not None and page.stored:
                if len(found) == most:
                    return found, at
                found.append(page)
        return found, end if slot < end < len(self._in_slot) else -1

    def watch(self, tell: Tell | None) -> Iterator[list[bytes]]:
        """Call ``tell`` from now on when a page can be found, or can be found no more; None ends that. Returns the keys
        that can be found now, in parts, each of which is right when it is taken."""
        self._tell = tell
        return self._keys()

    def _keys(self) -> Iterator[list[bytes]]:
        at = 0
        while at < len(self._in_slot):
            yield [page.key for page in self._in_slot[at : at + LISTED] if page is not None and page.stored]
            at += LISTED

    def generations(self) -> bytes:
        """Return the generation of every slot that was ever used, 8 bytes each."""
        return self._generations.tobytes()

    def kept(self) -> Iterator[KeptPage]:
        """Yield all stored pages, the coldest first."""
        for page in self.index.values():
            yield KeptPage(page.key, page.pool, page.length, page.slot, page.start, page.label.name, page.written)

    def reserved_by(self, writer: Writer) -> list[KeptPage]:
        """Return what a writer has reserved."""
        return [KeptPage(page.key, page.pool, page.length, page.slot, page.start, page.label.name, 0.0)
                for page in writer.reserved.values()]  # fmt: skip

    def restore(
        self, usable: int, generations: Sequence[int], kept: Iterable[KeptPage],
        reserved: Iterable[tuple[Writer, KeptPage]],
    ) -> None:  # fmt: skip
        """Take over the pages of another server, and what processes have reserved there. To be called once, first."""
        self._generations = array("Q", generations)
        self._in_slot = [None] * len(generations)
        places: list[tuple[int, int]] = []

        def page_of(one: KeptPage) -> HostPage:
            units = units_of(one.length)
            places.append((one.start, units))
            offset = self.layout.payloads_at + one.start * UNIT
            page = HostPage(one.key, one.pool, one.length, one.slot, one.start, units, offset, generations[one.slot],
                            self.label(one.label))  # fmt: skip
            self._in_slot[one.slot] = page
            return page

        for one in kept:
            self._store(page_of(one), one.written)
        for writer, one in reserved:
            page = page_of(one)
            writer.reserved[one.slot] = page
            writer.bytes += page.units * UNIT
            page.label.reserved += page.length
            self.reserved_bytes += page.units * UNIT
        self._slots = [slot for slot, page in enumerate(self._in_slot) if page is None]
        self._extents.give_all_but(places, usable)
        self.usable = usable

    def audit(self) -> None:
        """Raise AssertionError unless every slot and every unit is in exactly one place. For tests and the soak."""
        taken = [page for page in self._in_slot if page is not None]
        assert len(taken) + len(self._slots) == len(self._in_slot) <= self.layout.slots, "a slot is lost"
        ends = 0
        for page in sorted(taken, key=lambda page: page.start):
            assert page.start >= ends, "two pages share a unit"
            ends = page.start + page.units
        assert ends <= self.usable, "a page lies beyond the end"
        assert self._extents.free + sum(page.units for page in taken) == self.usable, "a unit is lost"
        stored = [page for page in taken if page.stored]
        assert {page.key: page for page in stored} == self.index, "a stored page cannot be found"
        assert self.bytes == sum(page.length + HEADER_BYTES for page in stored)
        assert all(self._shared[slot] == generation for slot, generation in enumerate(self._generations))
