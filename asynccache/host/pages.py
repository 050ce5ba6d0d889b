"""Which page lies where, which one goes next, and who writes where. Pure bookkeeping: no I/O, no clock.

Laws:
* Every slot and every unit is free, or a page's, or reserved by a process, or both of the latter: never of two pages.
* A slot's generation grows when its page has gone, before anybody else can get the slot.
* A page that is *pinned* (a store is being written from it) keeps its place until it is unpinned, also if it was
  dropped. Like a slot that is reserved, it belongs to a process: if another server takes over meanwhile, until that
  process is dead.
* Of two processes that write the same page the first to publish wins; the other's slot comes free.
* What one process may have reserved is bounded, and so is what all have: half of the memory.

Recency decides what goes: the page that was used longest ago. A call's pages are used in reverse order, so that of a
prefix the deepest page goes first, without which the others still serve, although nobody here knows of prefixes. A
label (a tenant, a model) may have a limit; at it, its own oldest page goes.

Two hints change that order. Pages of a conversation that has *ended* go before all others, the deepest first. A page
that is *kept* is passed over until its time has come; then it goes as if it had never been kept. Nobody can keep all of
the memory, or for ever: kept pages have at most one ``KEPT_SHARE``-th of it, each for at most ``LONGEST_KEPT`` seconds.
Being kept is no pin: a label's limit, a page that finds no room in a row beside kept ones, and whoever deletes have
their way.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from sys import intern
from typing import Any, NamedTuple

from asynccache.host.memory import UNIT, Extents, MemoryLayout, units_of
from asynccache.storage import HEADER_BYTES

LONGEST_SHARE = 8
"""A page takes at most this part of the memory."""
MOST_QUOTA, LEAST_QUOTA = 512 << 20, 64 << 20
QUOTA_SHARE = 8
MOST_SCANNED = 1 << 16
"""Slots that are looked at in one go: millions would keep all clients waiting."""
KEPT_SHARE = 4
LONGEST_KEPT = 3600.0
MOST_PASSED_OVER = 1 << 12
"""Kept pages that are passed over for one page at most."""
MOST_TIMES = 1 << 12
"""Times that are remembered beyond two for each page: who keeps a page again and again gets a new one each time."""
ROOM_IN_A_ROW = 4
"""Once so many times the room that is wanted has come free beside kept pages, and not in a row, they are not spared."""


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
    many stores use it now. ``stored``: whether it can be found. ``written``: when it came, unix time. ``kept``: until
    when it is kept, by the owner's clock; 0: it is not. ``passed``: it would have gone by now, were it not kept."""

    __slots__ = ("generation", "kept", "key", "label", "length", "offset", "passed", "pins", "pool", "slot", "start",
                 "stored", "units", "written")  # fmt: skip

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
        self.stored = self.passed = False
        self.written = self.kept = 0.0


class Writer:
    """A process that has slots reserved. ``name``: its number and label, for people. ``pinned``: pages that it reads
    from as a server, and how often."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reserved: dict[int, HostPage] = {}
        self.pinned: Counter[HostPage] = Counter()
        self.bytes = 0
        self.since = 0.0
        """When it began to have slots reserved without a break; by the owner's clock."""

    @property
    def holds(self) -> bool:
        """True while anything has to stay where it is because of this process."""
        return bool(self.reserved or self.pinned)

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
    pages that can be found, the coldest first. ``now``: seconds by the owner's clock, which the owner sets; until then
    no page that is kept comes to its time. ``kept_bytes``: the units of kept pages, in bytes."""

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
        self.now = 0.0
        self.kept_bytes = 0
        self.longest = layout.units // LONGEST_SHARE * UNIT
        share = max(layout.units * UNIT // QUOTA_SHARE, min(LEAST_QUOTA, layout.units * UNIT // 2))
        self.quota = min(MOST_QUOTA, share) if quota is None else quota
        self._shared = generations
        self._extents = Extents()
        self._slots: list[int] = []  # those that were used and are free; others have never been used
        self._generations = array("Q")  # of all that were ever used
        self._in_slot: list[HostPage | None] = []
        self._until: list[tuple[float, int, int]] = []  # a heap of kept pages: until when, slot, generation

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
                page.passed = False
                index.move_to_end(key)
                if page.label.limit is not None:
                    page.label.order.move_to_end(key)

    # hints

    def ended(self, keys: Sequence[bytes]) -> list[bool]:
        """Have the pages of ``keys`` go before all others, the last one first: their conversation is over. One that is
        kept goes when its time has come. Returns which of them are there."""
        found = []
        for key in keys:
            page = self.index.get(key)
            found.append(page is not None)
            if page is not None and page.kept:
                page.passed = True
            elif page is not None:
                self._go_next(page)
        return found

    def keep(self, keys: Sequence[bytes], seconds: float) -> list[bool]:
        """Keep the pages of ``keys``, ``LONGEST_KEPT`` seconds at most, the first ones first if not all may be. Returns
        which of them are. Of two who keep a page the longer one counts."""
        self._let_go()
        if not seconds > 0:  # not a number, as well
            return [False] * len(keys)
        until = self.now + min(seconds, LONGEST_KEPT)
        found = []
        for key in keys:
            page = self.index.get(key)
            size = 0 if page is None or page.kept else page.units * UNIT
            may = page is not None and self.kept_bytes + size <= self.usable * UNIT // KEPT_SHARE
            found.append(may)
            if page is not None and may and until > page.kept:
                self.kept_bytes += size
                page.kept = until
                heappush(self._until, (until, page.slot, page.generation))
        if len(self._until) > MOST_TIMES + 2 * len(self.index):
            self._until = [(page.kept, page.slot, page.generation) for page in self.index.values() if page.kept]
            heapify(self._until)
        return found

    def kept_for(self) -> list[tuple[bytes, float]]:
        """Return what is kept, and for how many seconds from now on."""
        return [(key, page.kept - self.now) for key, page in self.index.items() if page.kept]

    def _go_next(self, page: HostPage) -> None:
        self.index.move_to_end(page.key, last=False)
        if page.label.limit is not None:
            page.label.order.move_to_end(page.key, last=False)

    def _let_go(self) -> None:
        """Treat as any other what was kept until now."""
        heap = self._until
        while heap and heap[0][0] <= self.now:
            until, slot, generation = heappop(heap)
            page = self._in_slot[slot]
            if page is not None and page.generation == generation and page.kept == until:
                self._unkeep(page)
                if page.passed and page.stored:
                    page.passed = False
                    self._go_next(page)

    def _unkeep(self, page: HostPage) -> None:
        if page.kept:
            page.kept = 0.0
            self.kept_bytes -= page.units * UNIT

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
        """Free all that ``writer`` has reserved, and unpin what it has pinned; it can copy no more. Returns how many
        slots it had reserved. Calling it twice is fine."""
        count = len(writer.reserved)
        self.give_back(writer, list(writer.reserved))
        for page in list(writer.pinned.elements()):
            self.unpin(writer, page)
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

    # going

    def drop(self, page: HostPage) -> None:
        """Let nobody find this page any more. Its place comes free now, or when it is unpinned."""
        if not page.stored:
            return
        page.stored = False
        self._unkeep(page)
        del self.index[page.key]
        self.bytes -= page.length + HEADER_BYTES
        label = page.label
        label.pages -= 1
        label.bytes -= page.length
        if label.limit is not None:
            del label.order[page.key]
        if not page.pins:
            self._release(page)

    def pin(self, writer: Writer, page: HostPage) -> None:
        """Keep a stored page where it is until ``writer`` has unpinned it as often, or is dead."""
        page.pins += 1
        writer.pinned[page] += 1

    def unpin(self, writer: Writer, page: HostPage) -> None:
        """Take one pin off. A page that was dropped goes with its last pin."""
        page.pins -= 1
        writer.pinned[page] -= 1
        if not writer.pinned[page]:
            del writer.pinned[page]
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
        self._let_go()
        passed_over = freed = 0
        while not (self._slots or len(self._in_slot) < self.layout.slots) or (
            start := self._extents.take(units)
        ) is None:
            page = next((page for page in self.index.values() if not page.pins), None)
            if page is None:
                return None
            if page.kept and passed_over < MOST_PASSED_OVER and freed < ROOM_IN_A_ROW * units:
                passed_over += 1
                page.passed = True
                self.index.move_to_end(page.key)
                continue
            self.counts["evicted"] += 1
            page.label.counts["evicted"] += 1
            freed += page.units
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

    def generations(self) -> bytes:
        """Return the generation of every slot that was ever used, 8 bytes each."""
        return self._generations.tobytes()

    def kept(self) -> Iterator[KeptPage]:
        """Yield all stored pages, the coldest first."""
        for page in self.index.values():
            yield KeptPage(page.key, page.pool, page.length, page.slot, page.start, page.label.name, page.written)

    def held_by(self, writer: Writer) -> tuple[list[KeptPage], list[int]]:
        """Return what nobody may find or overwrite while ``writer`` lives, and the slots of the stored pages that it
        has pinned."""
        hidden = [*writer.reserved.values(), *(page for page in writer.pinned if not page.stored)]
        kept = [KeptPage(page.key, page.pool, page.length, page.slot, page.start, page.label.name, 0.0)
                for page in hidden]  # fmt: skip
        return kept, [page.slot for page in writer.pinned if page.stored]

    def restore(
        self, usable: int, generations: Sequence[int], kept: Iterable[KeptPage],
        reserved: Iterable[tuple[Writer, KeptPage]], pinned: Iterable[tuple[Writer, int]],
    ) -> None:  # fmt: skip
        """Take over the pages of another server, and what processes hold there. To be called once, first."""
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
        for writer, slot in pinned:
            kept_there = self._in_slot[slot]
            assert kept_there is not None
            self.pin(writer, kept_there)
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
        assert self.kept_bytes == sum(page.units * UNIT for page in stored if page.kept)
        assert self.kept_bytes <= self.usable * UNIT // KEPT_SHARE
        assert not any(page.kept for page in taken if not page.stored), "a page that cannot be found is kept"
        assert all(self._shared[slot] == generation for slot, generation in enumerate(self._generations))
