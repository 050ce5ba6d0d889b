"""The books of a memory: which page lies where, which one goes next, and who writes where. No I/O, no clock.

What always holds:
* Every slot and every unit is free, or belongs to one page, to one process that has reserved it, or to both.
* A slot's generation grows when its page has gone, before anybody else can get the slot.
* A page that is *pinned* (a store is being written from it) keeps its place until it is unpinned, also if it was
  dropped. Like a slot that is reserved, it belongs to a process: if another server takes over meanwhile, until that
  process is dead.
* Of two processes that write the same page the first to publish wins; the other's slot comes free.
* What one process may have reserved is bounded, and so is what all have: half of the memory.

Recency decides what goes: the page that was used longest ago, or of several sizes, the pages of the cheapest place
among those around the oldest. A call's pages are used in reverse order. So of a prefix, of which nothing here knows,
the deepest page goes first, and the others still serve. A label (a tenant, a model) may have a limit; at it, its own
oldest page goes.

Two hints change that order. Pages of a conversation that has *ended* go before all others, the deepest first. A page
that is *kept* is passed over until its time has come; then it goes as if it had never been kept. Nobody can keep all of
the memory, or for ever: kept pages have at most one ``KEPT_SHARE``-th of it and of the slots, each for at most
``LONGEST_KEPT`` seconds.
Being kept is no pin: a label's limit, a page that finds no room in a row beside kept ones, and whoever deletes have
their way.
"""

from __future__ import annotations

from array import array
from collections import ChainMap, Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from sys import intern
from typing import Any

import msgspec

from asynccache.host.memory import UNIT, Extents, MemoryLayout, units_of
from asynccache.storage import HEADER_BYTES, KEY_BYTES, Tell

LONGEST_SHARE = 8
"""A page takes at most one ``LONGEST_SHARE``-th of the memory."""
MOST_QUOTA, LEAST_QUOTA = 512 << 20, 64 << 20
QUOTA_SHARE = 8
LISTED = 1 << 12
MOST_SCANNED = 1 << 16
"""Slots that are looked at in one go: millions would keep all clients waiting."""
PLACES, LEAST_COST = 8, 0.01
"""The number of oldest pages around which a place is looked for. The cost of a unit of the oldest page; one of the
newest page costs 1."""
KEPT_SHARE = 4
LONGEST_KEPT = 3600.0
MOST_PASSED_OVER = 1 << 12
"""The most kept pages that are passed over for one page. Among more, no place between them is looked for."""
MOST_TIMES = 1 << 12
"""Expiry times in the heap beyond two for each page, before it is made anew: each ``keep`` of a page adds one."""
_MIDDLE = 1 << 62
"""Where the clock of uses begins: pages of ended conversations count down from here."""


class HostLabel:
    """A label, and how much its pages take. ``limit``: their bytes at most; None: no limit."""

    def __init__(self, name: str, limit: int | None = None) -> None:
        self.name = name
        self.limit = limit
        self.pages = 0
        self.bytes = 0
        self.reserved = 0
        self.counts: Counter[str] = Counter()
        self.order: OrderedDict[bytes, None] = OrderedDict()  # only kept if there is a limit


class Writer:
    """A process that has slots reserved. ``name``: its number and label, for people. ``pinned``: slots of pages that it
    reads from as a server, and how often."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reserved: set[int] = set()
        self.pinned: Counter[int] = Counter()
        self.bytes = 0
        self.since = 0.0
        """When it began to have slots reserved without a break; by the owner's clock."""

    @property
    def holds(self) -> bool:
        """True while anything has to stay where it is because of this process."""
        return bool(self.reserved or self.pinned)

    def __repr__(self) -> str:
        return f"Writer({self.name!r}, {len(self.reserved)} slots)"


class Books(msgspec.Struct, array_like=True):
    """All that a table knows, as one server leaves it to the next: arrays of what ``PageTable`` has by slot, as bytes.
    ``order``: the slots of the stored pages, the coldest first. ``pool_of``, ``label_of``: places in ``pools`` and
    ``labels``. ``kept_for``: the keys of kept pages, each with the seconds that are left to it."""

    usable: int
    order: bytes
    keys: bytes
    lengths: bytes
    starts: bytes
    generations: bytes
    written: bytes
    pools: list[str]
    pool_of: bytes
    labels: list[str]
    label_of: bytes
    kept_for: list[tuple[bytes, float]]


class PageTable:
    """All pages of one memory. ``shared`` is the table of generations in the shared memory, which clients read.

    ``index``: the slot of each page that can be found, by its key, the coldest first. The rest is known by slot, in
    arrays, since an object a page would take twice the memory: ``keys`` (None: the slot is free), ``pools``,
    ``labels``, ``lengths`` (bytes of payload), ``starts`` (its first unit), ``generations`` and ``written`` (when it
    was stored, unix time).

    ``now``: seconds by the owner's clock, which the owner sets; until then no page that is kept comes to its time.
    ``kept``: until when a page is kept, by slot; ``kept_bytes``: the units of those pages, in bytes.
    """

    def __init__(
        self, layout: MemoryLayout, shared: Any, *, limits: Mapping[str, int] | None = None, quota: int | None = None,
    ) -> None:  # fmt: skip
        self.layout = layout
        self.index: OrderedDict[bytes, int] = OrderedDict()
        self.known_labels = {name: HostLabel(name, limit) for name, limit in (limits or {}).items()}
        self.counts: Counter[str] = Counter()
        self.bytes = 0
        self.reserved_bytes = 0
        self.usable = 0
        self.now = 0.0
        self.kept: dict[int, float] = {}
        self.kept_bytes = 0
        self.longest = layout.units // LONGEST_SHARE * UNIT
        share = max(layout.units * UNIT // QUOTA_SHARE, min(LEAST_QUOTA, layout.units * UNIT // 2))
        self.quota = min(MOST_QUOTA, share) if quota is None else quota
        self.keys: list[bytes | None] = []
        self.pools: list[str] = []
        self.labels: list[HostLabel] = []
        self.lengths, self.starts, self.generations, self.written = array("Q"), array("I"), array("Q"), array("d")
        self._used = array("Q")  # when, by a clock that counts uses
        self._clock = self._first = _MIDDLE
        self._until: list[tuple[float, int]] = []  # a heap of kept pages: until when, slot
        self._passed = set[int]()  # slots of kept pages that would have gone by now
        self._shared = shared
        self._extents = Extents(layout.units)
        self._free = array("I")  # slots that were used and are free; others have never been used
        self._fixed: dict[int, int] = {}  # slots that keep their place: how often they are reserved or pinned
        self._tell: Tell | None = None

    def __repr__(self) -> str:
        return f"PageTable({len(self.index)} pages, {self.bytes} of {self.usable * UNIT} bytes)"

    @property
    def free_bytes(self) -> int:
        """The bytes that no page and no reservation has."""
        return self._extents.free * UNIT

    def offsets(self, slots: Iterable[int]) -> list[int]:
        """Return where these slots' payloads begin in the memory, in bytes."""
        starts, begin = self.starts, self.layout.payloads_at
        return [begin + starts[slot] * UNIT for slot in slots]

    def grow(self, units: int) -> None:
        """Use the first ``units`` from now on."""
        if units > self.usable:
            self._extents.give(self.usable, units - self.usable)
            self.usable = units

    def label(self, name: str) -> HostLabel:
        """Return the label of this name."""
        if name not in self.known_labels:
            self.known_labels[name] = HostLabel(name)
        return self.known_labels[name]

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that the pages of ``keys`` are used now; of these the first is the one that goes last."""
        index, used, clock = self.index, self._used, self._clock
        for key in reversed(keys):
            slot = index.get(key)
            if slot is not None:
                index.move_to_end(key)
                clock += 1
                used[slot] = clock
                self._passed.discard(slot)
                if self.labels[slot].limit is not None:
                    self.labels[slot].order.move_to_end(key)
        self._clock = clock

    # hints

    def ended(self, keys: Sequence[bytes]) -> list[bool]:
        """Have the pages of ``keys`` go before all others, the last one first: their conversation is over. One that is
        kept goes when its time has come. Returns which of them are there."""
        slots = [self.index.get(key) for key in keys]
        for slot in slots:
            if slot in self.kept:
                self._passed.add(slot)
            elif slot is not None:
                self._go_next(slot)
        return [slot is not None for slot in slots]

    def keep(self, keys: Sequence[bytes], seconds: float) -> list[bool]:
        """Keep the pages of ``keys``, ``LONGEST_KEPT`` seconds at most, the first ones first if not all may be. Returns
        which of them are. Of two who keep a page the longer one counts."""
        self._let_go()
        if not seconds > 0:  # not a number, as well
            return [False] * len(keys)
        until = self.now + min(seconds, LONGEST_KEPT)
        found = []
        for key in keys:
            slot = self.index.get(key)
            size = 0 if slot is None or slot in self.kept else units_of(self.lengths[slot]) * UNIT
            may = slot is not None and self.kept_bytes + size <= self.usable * UNIT // KEPT_SHARE
            may = may and (slot in self.kept or len(self.kept) < self.layout.slots // KEPT_SHARE)
            found.append(may)
            if slot is not None and may and until > self.kept.get(slot, 0.0):
                self.kept_bytes += size
                self.kept[slot] = until
                heappush(self._until, (until, slot))
        if len(self._until) > MOST_TIMES + 2 * len(self.index):
            self._until = [(until, slot) for slot, until in self.kept.items()]
            heapify(self._until)
        return found

    def kept_for(self) -> list[tuple[bytes, float]]:
        """Return what is kept, and for how many seconds from now on."""
        return [(self.key(slot), until - self.now) for slot, until in self.kept.items()]

    def _go_next(self, slot: int) -> None:
        key, label = self.key(slot), self.labels[slot]
        self._first -= 1
        self._used[slot] = self._first
        self.index.move_to_end(key, last=False)
        if label.limit is not None:
            label.order.move_to_end(key, last=False)

    def _let_go(self) -> None:
        """Treat the pages whose time has come like any others."""
        heap, passed = self._until, list[int]()
        while heap and heap[0][0] <= self.now:
            until, slot = heappop(heap)
            if self.kept.get(slot) == until:
                if slot in self._passed:
                    passed.append(slot)
                self._unkeep(slot)
        for slot in sorted(passed, key=self._used.__getitem__, reverse=True):  # the deepest of a prefix goes first
            self._go_next(slot)

    def _unkeep(self, slot: int) -> None:
        if self.kept.pop(slot, None) is not None:
            self.kept_bytes -= units_of(self.lengths[slot]) * UNIT
            self._passed.discard(slot)

    # writing

    def reserve(self, writer: Writer, key: bytes, pool: str, length: int, label: HostLabel) -> int | None:
        """Return a slot for a page of ``length`` bytes, which is the writer's until it publishes it, gives it back or
        dies. Pages are evicted for it. None: there is no room, or the writer has its share."""
        units = units_of(length)
        size = units * UNIT
        if not 0 < length <= self.longest or writer.bytes + size > self.quota or units > self.usable:
            return None
        if self.reserved_bytes + size > self.usable * UNIT // 2:
            return None
        if label.limit is not None and not self._keep_limit(label, length):
            return None
        if not self._free and len(self.keys) == self.layout.slots and not self._evict_oldest():
            return None
        slot = self._slot(label)
        start = self._room(units, slot + 1)
        if start is None:
            self._free.append(slot)
            return None
        self.keys[slot], self.pools[slot], self.labels[slot] = key, intern(pool), label
        self.lengths[slot], self.starts[slot] = length, start
        self._shared[slot] = self.generations[slot]  # again: a client may have written there
        self._hold(writer, slot)
        return slot

    def _slot(self, label: HostLabel) -> int:
        if self._free:
            return self._free.pop()
        self.keys.append(None)
        self.pools.append("")
        self.labels.append(label)
        for numbers in (self.lengths, self.starts, self.generations, self.written, self._used):
            numbers.append(0)
        return len(self.keys) - 1

    def _hold(self, writer: Writer, slot: int) -> None:
        length = self.lengths[slot]
        size = units_of(length) * UNIT
        writer.reserved.add(slot)
        self._fixed[slot] = self._fixed.get(slot, 0) + 1
        writer.bytes += size
        self.reserved_bytes += size
        self.labels[slot].reserved += length

    def publish(self, writer: Writer, slot: int, now: float) -> int | None:
        """Make the page in a slot that ``writer`` has reserved findable, or drop it if another was faster. Returns the
        slot of the page that is stored now; None: the writer has no such slot."""
        if not self._taken_back(writer, slot):
            return None
        key = self.key(slot)
        if (other := self.index.get(key)) is not None:
            self._release(slot)
            return other
        self.written[slot] = now
        self._store(key, slot)
        return slot

    def give_back(self, writer: Writer, slots: Iterable[int]) -> None:
        """Free slots that ``writer`` has reserved. Those that it has not are left alone."""
        for slot in slots:
            if self._taken_back(writer, slot) and slot not in self._fixed:
                self._release(slot)  # else a second process reads there, which a server before this one had pinned

    def end(self, writer: Writer) -> int:
        """Free all that ``writer`` has reserved, and unpin what it has pinned; it can copy no more. Returns how many
        slots it had reserved. Calling it twice is fine."""
        count = len(writer.reserved)
        self.give_back(writer, list(writer.reserved))
        for slot in list(writer.pinned.elements()):
            self.unpin(writer, slot)
        return count

    def _taken_back(self, writer: Writer, slot: int) -> bool:
        if slot not in writer.reserved:
            return False
        writer.reserved.remove(slot)
        self._loosen(slot)
        length = self.lengths[slot]
        size = units_of(length) * UNIT
        writer.bytes -= size
        self.reserved_bytes -= size
        self.labels[slot].reserved -= length
        return True

    def _store(self, key: bytes, slot: int) -> None:
        self._clock += 1
        self._used[slot] = self._clock
        self.index[key] = slot
        length, label = self.lengths[slot], self.labels[slot]
        self.bytes += length + HEADER_BYTES
        label.pages += 1
        label.bytes += length
        if label.limit is not None:
            label.order[key] = None
        if self._tell is not None:
            self._tell(True, (key,))

    # going

    def key(self, slot: int) -> bytes:
        """Return the key of the page in a slot that is not free."""
        key = self.keys[slot]
        assert key is not None, f"slot {slot} is free"
        return key

    def is_stored(self, slot: int) -> bool:
        """Return True if the page in this slot can be found."""
        key = self.keys[slot]
        return key is not None and self.index.get(key) == slot

    def drop(self, key: bytes) -> None:
        """Let nobody find this page any more. Its place comes free now, or when it is unpinned."""
        slot = self.index.pop(key, None)
        if slot is None:
            return
        self._unkeep(slot)
        length, label = self.lengths[slot], self.labels[slot]
        self.bytes -= length + HEADER_BYTES
        label.pages -= 1
        label.bytes -= length
        if label.limit is not None:
            del label.order[key]
        if self._tell is not None:
            self._tell(False, (key,))
        if slot not in self._fixed:
            self._release(slot)

    def pin(self, writer: Writer, slot: int) -> None:
        """Keep a stored page where it is until ``writer`` has unpinned it as often, or is dead."""
        self._fixed[slot] = self._fixed.get(slot, 0) + 1
        writer.pinned[slot] += 1

    def unpin(self, writer: Writer, slot: int) -> None:
        """Take one pin off. A page that was dropped goes with its last pin."""
        writer.pinned[slot] -= 1
        if not writer.pinned[slot]:
            del writer.pinned[slot]
        self._loosen(slot)
        if slot not in self._fixed and not self.is_stored(slot):
            self._release(slot)

    def _loosen(self, slot: int) -> None:
        self._fixed[slot] -= 1
        if not self._fixed[slot]:
            del self._fixed[slot]

    def clear(self) -> None:
        """Drop every page. What is reserved stays so."""
        for key in list(self.index):
            self.drop(key)

    def _keep_limit(self, label: HostLabel, length: int) -> bool:
        assert label.limit is not None
        room = label.limit - label.reserved - length
        if room < 0:
            return False  # also without all that is stored
        while label.bytes > room:
            key = next((key for key in label.order if self.index[key] not in self._fixed), None)
            if key is None:
                return False
            self.counts["over_limit"] += 1
            self.drop(key)
        return True

    def _oldest(self, count: int) -> list[int]:
        """Return the slots of the pages that were used longest ago and may go. Kept pages are passed over, unless there
        are no others."""
        found, passed = list[int](), list[int]()
        for slot in self.index.values():
            if len(found) == count:
                break
            if slot in self.kept and len(passed) < MOST_PASSED_OVER:
                passed.append(slot)
            elif slot not in self._fixed:
                found.append(slot)
        self._passed.update(passed)
        for slot in passed:
            self._clock += 1
            self._used[slot] = self._clock
            self.index.move_to_end(self.key(slot))
        return found or [slot for slot in passed if slot not in self._fixed][:count]

    def _evict(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.counts["evicted"] += 1
            self.labels[slot].counts["evicted"] += 1
            self.drop(self.key(slot))

    def _evict_oldest(self) -> bool:
        self._let_go()
        oldest = self._oldest(1)
        self._evict(oldest)
        return bool(oldest)

    def _room(self, units: int, owner: int) -> int | None:
        """Take ``units`` in a row, and evict the pages that lie there: those of the cheapest place among the places
        around some of the oldest pages. None: there is no such place, and nothing goes."""
        start = self._extents.take(units, owner)
        if start is not None:
            return start
        self._let_go()
        if (oldest := self._oldest(1)) and units_of(self.lengths[oldest[0]]) == units:
            self._evict(oldest)  # of pages of one size this is all that ever happens
            return self._extents.take(units, owner)
        stay: Collection[int] = ChainMap[int, Any](self._fixed, self.kept) if self.kept else self._fixed
        places = [self._place_around(slot, units, stay) for slot in self._oldest(PLACES)]
        found = min(filter(None, places), default=None)
        if found is None and len(stay) <= MOST_PASSED_OVER:
            found = self._place_between(stay, units)
        found = found or self._place_between(self._fixed, units)
        if found is None:
            return None
        self._evict(found[1])
        return self._extents.take(units, owner)

    def _place_around(self, slot: int, units: int, stay: Collection[int]) -> tuple[float, list[int]] | None:
        """Return the cheapest place of ``units`` at or around ``slot`` that has no page which must ``stay``: the cost,
        and the slots of the pages there. A page costs its units, and more the later it was used. None: there is
        none."""
        start = self.starts[slot]
        row = [*self._row(start, units, -1, stay)[::-1], *self._row(start, units, 1, stay)]
        first = self._used[next(iter(self.index.values()))]
        span = self._clock - first + 1
        best, left, total, cost = None, 0, 0, 0.0
        costs = [0.0 if who < 0 else size * ((self._used[who] - first) / span + LEAST_COST) for size, who in row]
        for right, (size, _) in enumerate(row):
            total += size
            cost += costs[right]
            while total - row[left][0] >= units:
                total -= row[left][0]
                cost -= costs[left]
                left += 1
            if total >= units and (best is None or cost < best[0]):
                best = (cost, left, right)
        return None if best is None else (best[0], [who for _, who in row[best[1] : best[2] + 1] if who >= 0])

    def _row(self, at: int, units: int, step: int, stay: Collection[int]) -> list[tuple[int, int]]:
        """Return the extents from unit ``at`` on, upwards, or before it, downwards (``step`` -1), until they have
        ``units`` or there is a page that must ``stay``: the size of each, and the slot of the page there, or -1."""
        row, tags, total = list[tuple[int, int]](), self._extents.tags, 0
        at -= step < 0
        while total < units and 0 <= at < self.usable:
            tag = tags[at]
            slot = tag - 1 if tag > 0 else -1
            if slot in stay:
                break
            size = -tag if slot < 0 else units_of(self.lengths[slot])
            row.append((size, slot))
            total += size
            at += step * size
        return row

    def _place_between(self, stay: Collection[int], units: int) -> tuple[float, list[int]] | None:
        """Return the first place of ``units`` at all between the pages that ``stay``."""
        at = 0
        for start, end in [*sorted((self.starts[slot], self.starts[slot] + units_of(self.lengths[slot]))
                                   for slot in stay), (self.usable, self.usable)]:  # fmt: skip
            if start - at >= units:
                return 0.0, [slot for _, slot in self._row(at, units, 1, stay) if slot >= 0]
            at = end
        return None

    def _release(self, slot: int) -> None:
        generation = self.generations[slot] + 1
        self.generations[slot] = self._shared[slot] = generation
        self.keys[slot] = None
        self._free.append(slot)
        self._extents.give(self.starts[slot], units_of(self.lengths[slot]))

    # for tools, and for the next server

    def listed(self, slot: int, most: int) -> tuple[list[bytes], int]:
        """Return up to ``most`` keys of stored pages in the slots from ``slot`` on, and the slot after these; -1: the
        end."""
        found: list[bytes] = []
        end = min(len(self.keys), slot + MOST_SCANNED)
        for at in range(slot, end):
            key = self.keys[at]
            if key is not None and self.index.get(key) == at:
                if len(found) == most:
                    return found, at
                found.append(key)
        return found, end if slot < end < len(self.keys) else -1

    def watch(self, tell: Tell | None) -> Iterator[list[bytes]]:
        """Call ``tell`` from now on when a page can be found, or can be found no more; None ends that. Returns the keys
        that can be found now, in parts, each of which is right when it is taken."""
        self._tell = tell
        return self._stored_keys()

    def _stored_keys(self) -> Iterator[list[bytes]]:
        at = 0
        while at != -1:
            keys, at = self.listed(at, LISTED)
            yield keys

    def books(self) -> Books:
        """Return all that is known here, except who holds what."""
        pools, labels = {name: at for at, name in enumerate(dict.fromkeys(self.pools))}, list(self.known_labels)
        label_at = {name: at for at, name in enumerate(labels)}
        return Books(
            self.usable, array("I", self.index.values()).tobytes(),
            b"".join([bytes(KEY_BYTES) if key is None else key for key in self.keys]), self.lengths.tobytes(),
            self.starts.tobytes(), self.generations.tobytes(), self.written.tobytes(), list(pools),
            array("I", map(pools.__getitem__, self.pools)).tobytes(), labels,
            array("I", [label_at[label.name] for label in self.labels]).tobytes(), self.kept_for(),
        )  # fmt: skip

    def held_by(self, writer: Writer) -> tuple[list[int], list[int]]:
        """Return the slots that nobody may find or overwrite while ``writer`` lives, and those of the stored pages that
        it has pinned."""
        stored = [slot for slot in writer.pinned if self.is_stored(slot)]
        return [*writer.reserved, *(writer.pinned.keys() - stored)], stored

    def restore(self, books: Books, held: Iterable[tuple[Writer, Sequence[int], Sequence[int]]]) -> None:
        """Take over the pages of another server, and what processes hold there (see ``held_by``). To be called once,
        after ``now`` was set and before anything else."""
        self.usable = books.usable
        for into, data in ((self.lengths, books.lengths), (self.starts, books.starts), (self.written, books.written),
                           (self.generations, books.generations)):  # fmt: skip
            into.frombytes(data)
        names, labels = [intern(name) for name in books.pools], [self.label(name) for name in books.labels]
        self.pools = [names[at] for at in memoryview(books.pool_of).cast("I")]
        self.labels = [labels[at] for at in memoryview(books.label_of).cast("I")]
        self._used = array("Q", bytes(8 * len(self.lengths)))
        self.keys = [None] * len(self.lengths)
        for slot in memoryview(books.order).cast("I"):
            self._store(self._named(books, slot), slot)
        for writer, reserved, pinned in held:
            for slot in reserved:
                self._named(books, slot)
                self._hold(writer, slot)
            for slot in pinned:
                self.pin(writer, slot)
        self._free.extend([slot for slot, key in enumerate(self.keys) if key is None])
        self._extents.give_all_but([(self.starts[slot], units_of(self.lengths[slot]), slot + 1)
                                    for slot, key in enumerate(self.keys) if key is not None], self.usable)  # fmt: skip
        for key, seconds in books.kept_for:
            self.keep([key], seconds)

    def _named(self, books: Books, slot: int) -> bytes:
        key = self.keys[slot] = books.keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES]
        return key

    def audit(self) -> None:
        """Raise AssertionError unless every slot and every unit is in exactly one place. For tests and the soak."""
        taken = [slot for slot, key in enumerate(self.keys) if key is not None]
        assert len(taken) + len(self._free) == len(self.keys) <= self.layout.slots, "a slot is lost"
        ends = 0
        for slot in sorted(taken, key=self.starts.__getitem__):
            assert self.starts[slot] >= ends, "two pages share a unit"
            ends = self.starts[slot] + units_of(self.lengths[slot])
        assert ends <= self.usable, "a page lies beyond the end"
        used = sum(units_of(self.lengths[slot]) for slot in taken)
        assert self._extents.free + used == self.usable, "a unit is lost"
        stored = [slot for slot in taken if self.is_stored(slot)]
        assert len(stored) == len(self.index), "a stored page cannot be found"
        assert set(taken) == {*stored, *self._fixed}, "a slot is nobody's"
        assert list(self.index.values()) == sorted(stored, key=self._used.__getitem__), "the clock is wrong"
        assert self.bytes == sum(self.lengths[slot] + HEADER_BYTES for slot in stored)
        assert self.kept_bytes == sum(units_of(self.lengths[slot]) * UNIT for slot in self.kept)
        assert self.kept_bytes <= self.usable * UNIT // KEPT_SHARE
        assert self._passed <= self.kept.keys() <= set(stored), "a page that cannot be found is kept"
        assert all(self._shared[slot] == generation for slot, generation in enumerate(self.generations))
        at = 0
        while at < self.usable:
            tag = self._extents.tags[at]
            at += -tag if tag < 0 else units_of(self.lengths[tag - 1])
            assert self._extents.tags[at - 1] == tag != 0, "a unit is nobody's"
