"""The answers to one client: requests in, answers out. No socket is seen here, so tests play any script of requests,
deaths and lies against it.

A process may have several sessions, one for each of its stores; what it has reserved is the process's (``Writer``), so
a client whose connection was lost can publish or give back over the next one. Slots are named with their generation: by
then one may have been granted again, to another call of the same process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from asynccache.host import wire
from asynccache.host.pages import HostLabel, PageTable, Writer
from asynccache.storage import Result

if TYPE_CHECKING:
    from asynccache.host.behind import StoresBehind

MISS, HIT, CORRUPT, FAILED = map(int, Result)  # the codes on the wire

LISTED_AT_ONCE = 2000


class HostSession:
    """One client's session. ``ended_well``: it has said that it copies into no slot any more. ``behind``: the stores,
    if there are any. ``now`` and ``clock`` return the unix time, and seconds that never go back."""

    def __init__(
        self, table: PageTable, writer: Writer, label: HostLabel, *, behind: StoresBehind | None,
        now: Callable[[], float], clock: Callable[[], float], counts: Callable[[], dict[str, float]],
    ) -> None:  # fmt: skip
        self.table = table
        self.writer = writer
        self.label = label
        self.ended_well = False
        self.draining = False
        self._granted: dict[int, int] = {}  # slots and generations, over this connection, and not answered for yet
        self._behind = behind
        self._now = now
        self._clock = clock
        self._counts = counts

    def handle(self, request: wire.Requests) -> wire.HostMessage | Awaitable[wire.HostMessage] | None:
        """Return the answer to ``request``; None if it gets none; or what to await for it, if a store is asked."""
        self.table.now = self._clock()
        match request:
            case wire.Exist():
                return self._exist(request)
            case wire.Find():
                return self._find(request)
            case wire.Reserve():
                return self._reserve(request)
            case wire.Publish():
                return self._publish(request)
            case wire.GiveBack(slots, generations):
                self._give_back(zip(slots, generations, strict=False))
                return None
            case wire.Bye():
                self.ended_well = True
                self._give_back(list(self._granted.items()))
                return None
            case wire.Remove():
                return self._remove(request)
            case wire.Damaged():
                return self._damaged(request)
            case wire.RemoveAll():
                return self._remove_all(request)
            case wire.Secure():
                return self._secure(request)
            case wire.Hint():
                return self._hint(request)
            case wire.Tell():
                return self._count(request.number)
            case wire.Enumerate():
                return self._enumerate(request)
        return wire.Refused(request.number, f"{type(request).__name__} is not for a session")

    def verdicts(self, number: int, codes: bytes | bytearray = b"") -> wire.Verdicts:
        """Return an answer of codes."""
        return wire.Verdicts(number, len(self.table.index), self.table.bytes, bytes(codes))

    def _exist(self, ask: wire.Exist) -> wire.Verdicts | Awaitable[wire.HostMessage]:
        index = self.table.index
        codes = bytearray([HIT if key in index else MISS for key in ask.keys])
        hits = sum(codes)  # HIT is 1
        self._note("asked_hits", hits)
        if self._behind is None or hits == len(codes):
            return self.verdicts(ask.number, codes)
        return self._exist_behind(ask, codes, self._behind)

    async def _exist_behind(self, ask: wire.Exist, codes: bytearray, behind: StoresBehind) -> wire.Verdicts:
        await behind.exist(ask.keys, ask.pools, codes)
        return self.verdicts(ask.number, codes)

    def _find(self, ask: wire.Find) -> wire.HostMessage | Awaitable[wire.HostMessage]:
        if not len(ask.keys) == len(ask.sizes) == len(ask.pools):
            return wire.Refused(ask.number, "find: keys, pools and sizes differ in number")
        index, lengths, codes, missing = self.table.index, self.table.lengths, bytearray(), False
        slots: list[int] = []
        for key, size in zip(ask.keys, ask.sizes, strict=True):
            slot = index.get(key)
            if slot is None:
                codes.append(MISS)
                missing = True
            elif lengths[slot] != size:
                codes.append(CORRUPT)
            else:
                codes.append(HIT)
                slots.append(slot)
        self.table.touch(ask.keys)
        self._note("hits", len(slots))
        if not missing or self._behind is None:
            self._note("misses", len(codes) - len(slots))
            return self._places(ask.number, codes, slots)
        return self._find_behind(ask, codes, self._behind)

    async def _find_behind(self, ask: wire.Find, codes: bytearray, behind: StoresBehind) -> wire.Places:
        await behind.read(ask.keys, ask.pools, ask.sizes, codes, self.label)
        slots = []
        for at, (key, size) in enumerate(zip(ask.keys, ask.sizes, strict=True)):
            if codes[at] == HIT:
                slot = self.table.index.get(key)
                if slot is None or self.table.lengths[slot] != size:  # evicted while another one was read
                    codes[at] = MISS
                else:
                    slots.append(slot)
        self.table.touch(ask.keys)
        self._note("misses", len(codes) - len(slots))
        return self._places(ask.number, codes, slots)

    def _places(self, number: int, codes: bytearray, slots: list[int]) -> wire.Places:
        table = self.table
        return wire.Places(number, len(table.index), table.bytes, bytes(codes), slots, table.offsets(slots),
                           [table.generations[slot] for slot in slots])  # fmt: skip

    def _reserve(self, ask: wire.Reserve) -> wire.HostMessage:
        if not len(ask.keys) == len(ask.sizes) == len(ask.pools):
            return wire.Refused(ask.number, "reserve: keys, pools and sizes differ in number")
        table, codes = self.table, bytearray()
        slots: list[int] = []
        if not self.writer.reserved:
            self.writer.since = self._clock()
        for key, pool, size in zip(ask.keys, ask.pools, ask.sizes, strict=True):
            if key in table.index:
                codes.append(HIT)
                continue
            slot = None if self.draining else table.reserve(self.writer, key, pool, size, self.label)
            if slot is None:
                codes.append(FAILED)
            else:
                codes.append(MISS)
                slots.append(slot)
                self._granted[slot] = table.generations[slot]
        self._note("no_room", codes.count(FAILED))
        return self._places(ask.number, codes, slots)

    def _is_pending(self, slot: int, generation: int) -> bool:
        """Return True if the process has this slot reserved with this generation. It is about to be published or given
        back."""
        if slot not in self.writer.reserved or self.table.generations[slot] != generation:
            return False
        self._granted.pop(slot, None)
        return True

    def _give_back(self, granted: Iterable[tuple[int, int]]) -> None:
        self.table.give_back(self.writer, [slot for slot, generation in granted if self._is_pending(slot, generation)])

    def _publish(self, ask: wire.Publish) -> wire.HostMessage:
        if len(ask.slots) != len(ask.generations):
            return wire.Refused(ask.number, "publish: slots and generations differ in number")
        table, writer, now, codes = self.table, self.writer, self._now(), bytearray(len(ask.slots))
        fresh: list[bytes] = []
        for at in range(len(ask.slots) - 1, -1, -1):  # in reverse: the first page is the one that goes last
            slot = ask.slots[at]
            stored = table.publish(writer, slot, now) if self._is_pending(slot, ask.generations[at]) else None
            codes[at] = FAILED if stored is None else HIT
            if stored == slot:
                fresh.append(table.key(slot))
        self._note("stored", len(fresh))
        if self._behind is not None:
            self._behind.write(fresh[::-1])
        return self.verdicts(ask.number, codes)

    def _remove(self, ask: wire.Remove) -> wire.Verdicts | Awaitable[wire.HostMessage]:
        codes = bytearray()
        for key in ask.keys:
            codes.append(HIT if key in self.table.index else MISS)
            self.table.drop(key)
        if self._behind is None:
            return self.verdicts(ask.number, codes)
        return self._remove_behind(ask, codes, self._behind)

    async def _remove_behind(self, ask: wire.Remove, codes: bytearray, behind: StoresBehind) -> wire.Verdicts:
        await behind.delete(ask.keys, ask.pools, codes)
        for key in ask.keys:  # some may have been read from a store before they were deleted there
            self.table.drop(key)
        return self.verdicts(ask.number, codes)

    def _damaged(self, ask: wire.Damaged) -> wire.HostMessage:
        if len(ask.keys) != len(ask.generations):
            return wire.Refused(ask.number, "damaged: keys and generations differ in number")
        codes = bytearray()
        for key, generation in zip(ask.keys, ask.generations, strict=True):
            slot = self.table.index.get(key)
            bad = slot is not None and self.table.generations[slot] == generation
            codes.append(HIT if bad else MISS)
            if bad:
                self.table.drop(key)
                if self._behind is not None:
                    self._behind.suspect(key)
        self._note("damaged", codes.count(HIT))
        return self.verdicts(ask.number, codes)

    def _remove_all(self, ask: wire.RemoveAll) -> wire.Verdicts | Awaitable[wire.HostMessage]:
        self.table.clear()
        if self._behind is None:
            return self.verdicts(ask.number)
        return self._remove_all_behind(ask.number, self._behind)

    async def _remove_all_behind(self, number: int, behind: StoresBehind) -> wire.HostMessage:
        answer = await self._after(behind.clear(), number)
        self.table.clear()  # of what was read from a store before it was deleted there
        return answer

    def _secure(self, ask: wire.Secure) -> wire.Verdicts | Awaitable[wire.HostMessage]:
        if self._behind is None:
            return self.verdicts(ask.number)
        return self._after(self._behind.flush(), ask.number)

    async def _after(self, work: Awaitable[str], number: int) -> wire.HostMessage:
        why = await work
        return wire.Refused(number, why) if why else self.verdicts(number)

    def _hint(self, hint: wire.Hint) -> wire.HostMessage | Awaitable[wire.HostMessage]:
        table = self.table
        match hint.verb:
            case "ENDED":
                done = table.ended(hint.keys)
                self._note("ended", sum(done))
            case "KEEP":
                done = table.keep(hint.keys, hint.seconds)
                self._note("kept", sum(done))
                self._note("not_kept", len(done) - sum(done))
            case "PREFETCH":
                return self._prefetch(hint)
            case _:
                done = [False] * len(hint.keys)
                self._note("hints_unknown", 1)
        return self.verdicts(hint.number, bytes([HIT if one else MISS for one in done]))

    def _prefetch(self, hint: wire.Hint) -> wire.HostMessage | Awaitable[wire.HostMessage]:
        if not len(hint.keys) == len(hint.sizes) == len(hint.pools):
            return wire.Refused(hint.number, "hint: keys, pools and sizes differ in number")
        codes = bytearray([HIT if key in self.table.index else MISS for key in hint.keys])
        self.table.touch(hint.keys)
        missing = codes.count(MISS)
        if not missing or self._behind is None or self.draining:
            return self.verdicts(hint.number, codes)
        self._note("prefetched", missing)
        return self._prefetch_behind(hint, codes, self._behind)

    async def _prefetch_behind(self, hint: wire.Hint, codes: bytearray, behind: StoresBehind) -> wire.Verdicts:
        await behind.read(hint.keys, hint.pools, hint.sizes, codes, self.label)
        self.table.touch(hint.keys)
        return self.verdicts(hint.number, codes)

    def _count(self, number: int) -> wire.Told:
        labels = {
            label.name: {"pages": label.pages, "bytes": label.bytes, **label.counts}
            for label in self.table.known_labels.values()
        }
        return wire.Told(number, len(self.table.index), self.table.bytes, self._counts(), labels)

    def _enumerate(self, ask: wire.Enumerate) -> wire.Enumerated:
        table = self.table
        keys, slot = table.listed(ask.slot, LISTED_AT_ONCE)
        slots = [table.index[key] for key in keys]
        return wire.Enumerated(ask.number, len(table.index), table.bytes, slot, keys,
                               [table.lengths[at] for at in slots], [table.written[at] for at in slots])  # fmt: skip

    def _note(self, name: str, count: int) -> None:
        if count:
            self.table.counts[name] += count
            self.label.counts[name] += count
