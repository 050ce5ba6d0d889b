"""Leases: what a request holds while it runs. Granting is all or nothing; committing publishes its pages.

A lease pins the path its prompt matched and owns the pages of everything after it. ``commit`` moves whole pages from
the lease into the tree and moves the pins along.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asynccache.core.keys import HASH_BYTES
from asynccache.core.ledger import DEVICE, HOST, PINNED_TIERS, Kind
from asynccache.core.plan import Medium, More, Plan, Retire, Wait
from asynccache.core.room import Room
from asynccache.core.settings import WritePolicy
from asynccache.core.slots import NO_SLOT, SLOT_BYTES
from asynccache.core.states import ABSENT, ARRIVING, LEAVING, PRESENT
from asynccache.core.transfers import Transfers
from asynccache.core.tree import Node, link, walk
from asynccache.core.world import World
from asynccache.errors import CacheFull

_NOTHING = 1 << 60


class Match(NamedTuple):
    """How far a prompt is cached, in tokens.

    ``device``: the longest prefix valid on the device; ``host``: valid on device or host; ``full``: how far FULL alone
    matched. Of the stretch between the first two: FULL tokens, SWA tokens and MAMBA states that a load_back would bring.
    """

    device: int = 0
    host: int = 0
    full: int = 0
    host_hit_length: int = 0
    swa_host_hit_length: int = 0
    mamba_host_hit_length: int = 0

    @property
    def needs_load_back(self) -> bool:
        """Whether ``host`` is reached only by loading something (SWA or MAMBA alone suffices)."""
        return bool(self.host_hit_length or self.swa_host_hit_length or self.mamba_host_hit_length)


class Ask(NamedTuple):
    """What a request wants. ``limit`` caps the match; ``reserve`` and ``reserve_swa`` are the positions (tokens) up to
    which pages are taken; ``states``: MAMBA slots; ``load``: whether load_back may be used."""

    space: bytes
    key: bytes
    limit: int
    reserve: int
    reserve_swa: int
    states: int = 0
    load: bool = True


class Hold:
    """Pins on the device for a match that ends at ``end``. ``lows[c]``: component c is pinned on the nodes from there
    (a node's border, in pages) to the end; past every end: not at all."""

    __slots__ = ("end", "lows")

    def __init__(self, end: Node, components: int) -> None:
        self.end = end
        self.lows = [_NOTHING] * components


class Lease:
    """One request's hold on the cache. Owned by the core; others read it. Lengths are tokens.

    ``cached``: matched at the grant. ``loads``: operations that must be DONE before its pages are good. ``valid``: None,
    or how many tokens are still good after a load failed. ``length``: committed so far. ``reserved``: FULL pages exist up
    to here. ``states``: its MAMBA slots, the working copy first.
    """

    __slots__ = (
        "cached", "full", "hold", "id", "length", "loaded_tokens", "loads", "own", "own_from", "released", "reserved",
        "states", "valid",
    )  # fmt: skip

    def __init__(self, lease_id: int, hold: Hold) -> None:
        self.id = lease_id
        self.hold = hold
        self.own: list[bytes] = []
        self.own_from: list[int] = []
        self.cached = self.full = self.length = self.reserved = self.loaded_tokens = 0
        self.loads: tuple[int, ...] = ()
        self.states = b""
        self.valid: int | None = None
        self.released = False

    def __repr__(self) -> str:
        return f"<Lease {self.id} cached={self.cached} length={self.length} reserved={self.reserved}>"


class Grant(NamedTuple):
    """A lease, and what must be done for it."""

    lease: Lease
    plan: Plan


class Committed(NamedTuple):
    """``length``: tokens published so far. ``took``: whether the checkpoint's slot went to the tree."""

    plan: Plan
    length: int
    took: bool


class _Ends(NamedTuple):
    device: int
    union: int
    full: int


class Leases:
    """Grants, grows, commits and releases leases in one world."""

    def __init__(self, world: World, transfers: Transfers) -> None:
        self._world = world
        self._transfers = transfers
        self._count = world.count
        self._page_size = world.config.page_size
        self._swa = next((c.index for c in world.components if c.index and c.divides), 0)
        self._mamba = next((c.index for c in world.components if not c.divides), 0)
        self._next = 1
        self.active: dict[int, Lease] = {}

    # match

    def match(self, space: bytes, key: bytes) -> Match:
        """See ``CacheCore.match``."""
        root = self._world.roots.get(space)
        if root is None:
            return Match()
        path, reached = walk(root, self._whole(key, len(key)), 0, self._world.page_bytes)
        if not path:
            return Match()
        ends = self._ends(path, reached)
        self._touch(path[-1], ends.union)
        size = self._page_size
        if ends.union == ends.device:
            return Match(ends.device * size, ends.union * size, ends.full * size)
        loads = self._missing(path, ends.union)
        swa, mamba = self._swa, self._mamba
        return Match(
            ends.device * size, ends.union * size, ends.full * size, loads[0] * size,
            loads[swa] * size if swa else 0, loads[mamba] if mamba else 0,
        )  # fmt: skip

    def _whole(self, key: bytes, limit_bytes: int) -> bytes:
        page = self._world.page_bytes
        return key[: min(len(key), limit_bytes) // page * page]

    def _ends(self, path: Sequence[Node], reached: int) -> _Ends:
        page = reached // self._world.page_bytes
        components = self._world.components
        device = components[0].longest_end(path, page, False)
        union = components[0].longest_end(path, page, True) if device < page and self._world.has_host else device
        full = union
        if self._count > 1:
            union = self._world.valid_end(path, union, self._world.has_host)
            device = min(self._world.valid_end(path, device, False), union)
        return _Ends(device, union, full)

    def _missing(self, path: Sequence[Node], end: int) -> list[int]:
        """Pages (states) per component that a match of ``path`` up to ``end`` lacks on the device."""
        lacking = [0] * self._count
        for component in self._world.components:
            c, first = component.index, component.first_page(end)
            for node in reversed(path):
                start = node.parent.end  # type: ignore[union-attr]
                if node.end <= first:
                    break
                if start < end and node.cells[c].state in (ABSENT, LEAVING):
                    lacking[c] += min(node.end, end) - max(start, first)
        return lacking

    def _touch(self, node: Node, end: int) -> None:
        """Stamp the node that ``end`` lies in, and for SWA the nodes of the last window and a page more. ``node`` is
        that one or below it."""
        policy = self._world.policy
        while node.parent is not None and node.parent.end >= end:
            node = node.parent
        if node.parent is None:
            return
        for c in range(self._count):
            policy.touch(node.cells[c])
        if self._swa:
            first = self._world.components[self._swa].first_page(end) - 1
            above: Node | None = node.parent
            while above is not None and above.end > first and above.parent is not None:
                policy.touch(above.cells[self._swa])
                above = above.parent

    # grant

    def lease(self, ask: Ask) -> Grant | Wait | More:
        """See ``CacheCore.lease``."""
        self._check_possible(ask)
        root = self._world.root(ask.space)
        path, reached = walk(root, self._whole(ask.key, ask.limit * 4), 0, self._world.page_bytes)
        ends = self._ends(path, reached) if path else _Ends(0, 0, 0)
        room = Room.SHORT
        for target in self._targets(ask, path, ends):
            room, lease = self._try(ask, root, path, ends, target)
            if lease is not None:
                return Grant(lease, self._world.plan())
            if room is Room.SLICE:
                return More(self._world.plan())
            path, _ = walk(root, self._whole(ask.key, ask.limit * 4), 0, self._world.page_bytes)
        return Wait(self._world.plan())

    def _check_possible(self, ask: Ask) -> None:
        slots = [shelf.slots.capacity for shelf in self._world.shelves]
        needs = [self._ceil(ask.reserve)]
        if self._swa:
            needs.append(self._ceil(ask.reserve_swa))
        if self._mamba:
            needs.append(ask.states)
        for component, need in zip(self._world.components, needs, strict=True):
            if need > slots[component.index]:
                raise CacheFull(
                    f"{component.kind.name}: {need} slots are asked for, the device has {slots[component.index]} in all"
                )

    def _ceil(self, tokens: int) -> int:
        return -(-tokens // self._page_size)

    def _targets(self, ask: Ask, path: Sequence[Node], ends: _Ends) -> list[int]:
        """The match ends to try, best first. When nothing else runs, a match may not stand in its own way."""
        targets = [ends.device]
        worth = ends.union > ends.device and ask.load
        if worth and self._world.config.load_back_threshold:
            lacking = self._missing(path, ends.union)
            worth = lacking[0] * self._page_size >= self._world.config.load_back_threshold or any(lacking[1:])
        if worth:
            targets.insert(0, ends.union)
        if targets[-1] and not self.active and not self._world.ledger.ops:
            targets.append(0)
        return targets

    def _try(
        self, ask: Ask, root: Node, path: list[Node], ends: _Ends, target: int
    ) -> tuple[Room, Lease | None]:
        """Pin the match up to ``target``, make room for loads and new pages; the lease, or nothing is left behind."""
        world = self._world
        path = self._cut_path(path, target)
        end = path[-1] if path else root
        hold = self._pin(end, target)
        loads = self._loads(path, target)
        for node, mask in loads:
            world.pin(node, HOST, mask.bit_length() - 1)
        needs, own = self._needs(ask, target, loads)
        room = self._transfers.room.make(DEVICE, needs, world.config.slice_steps)
        lease = None
        if room is Room.FREE:
            lease = self._grant(Lease(self._next, hold), ask, path, ends, target, loads, own)
        else:
            self._unpin(hold)
        for node, mask in loads:
            world.unpin(node, HOST, mask.bit_length() - 1)
        return room, lease

    def _cut_path(self, path: list[Node], target: int) -> list[Node]:
        """The path up to ``target``, split there, and where a load of a window would otherwise take more than it."""
        path = path[:]
        while path and path[-1].parent.end >= target:  # type: ignore[union-attr]
            path.pop()
        if path and path[-1].end > target:
            path[-1] = self._split_at(path[-1], target)
        if self._swa and path:
            first = self._world.components[self._swa].first_page(target)
            for i, node in enumerate(path):
                start = node.parent.end  # type: ignore[union-attr]
                if start < first < node.end and node.cells[self._swa].state == ABSENT:
                    path.insert(i, self._split_at(node, first))
                    break
        return path

    def _split_at(self, node: Node, end: int) -> Node:
        return self._world.split(node, end - node.parent.end)  # type: ignore[union-attr]

    def _loads(self, path: Sequence[Node], target: int) -> list[tuple[Node, int]]:
        """What the match lacks on the device: components by node, root first."""
        count = self._count
        firsts = [c.first_page(target) for c in self._world.components]
        floor = min(firsts[1:], default=_NOTHING)
        loads: list[tuple[Node, int]] = []
        for node in reversed(path):
            cells = node.cells
            mask = 0
            for c in range(count):
                if node.end > firsts[c] and cells[c].state == ABSENT and cells[count + c].state == PRESENT:
                    mask |= 1 << c
            if mask:
                loads.append((node, mask))
            elif node.end <= floor and cells[0].state != ABSENT:
                break
        loads.reverse()
        return loads

    def _needs(self, ask: Ask, target: int, loads: Sequence[tuple[Node, int]]) -> tuple[list[int], list[int]]:
        """Slots to take per component: for loads and new pages together, and for new pages alone."""
        own = [max(0, self._ceil(ask.reserve) - target)]
        if self._swa:
            own.append(max(0, self._ceil(ask.reserve_swa) - target))
        if self._mamba:
            own.append(ask.states)
        needs = own[:]
        for node, mask in loads:
            for c in range(self._count):
                if mask >> c & 1:
                    needs[c] += self._world.pages(node, c)
        return needs, own

    def _grant(
        self, lease: Lease, ask: Ask, path: Sequence[Node], ends: _Ends, target: int,
        loads: Sequence[tuple[Node, int]], own: Sequence[int],
    ) -> Lease:  # fmt: skip
        world, size = self._world, self._page_size
        self._next += 1
        self.active[lease.id] = lease
        lease.cached = lease.length = target * size
        lease.full = ends.full * size
        lease.reserved = max(self._ceil(ask.reserve), target) * size
        if loads:
            self._transfers.open_load(loads)
            lease.loaded_tokens = size * sum(world.pages(node, 0) for node, mask in loads if mask & 1)
        lease.own = [world.shelves[c].slots.take(own[c]) for c in range(self._count)]
        lease.own_from = [target] * self._count
        if self._mamba:
            lease.states, lease.own[self._mamba] = lease.own[self._mamba], b""
        self._touch(lease.hold.end, target)
        self._await_arrivals(lease, path, target)
        self._clone(lease, path)
        self._transfers.save_coldest()
        return lease

    def _await_arrivals(self, lease: Lease, path: Sequence[Node], target: int) -> None:
        """Have the lease hear of every load that brings pages it matched."""
        firsts = [c.first_page(target) for c in self._world.components]
        loads: dict[int, None] = {}
        for node in path:
            if node.ops and any(
                node.end > firsts[c] and node.cells[c].state == ARRIVING for c in range(self._count)
            ):
                for op in node.ops:
                    if op.kind is Kind.LOAD_BACK and op.id not in loads:
                        loads[op.id] = None
                        op.leases.append(lease)
        lease.loads = tuple(loads)

    def _clone(self, lease: Lease, path: Sequence[Node]) -> None:
        """Give the request its private copy of the state that it matched."""
        if self._mamba and path and lease.states:
            op = self._transfers.open_clone(path[-1], self._mamba, lease.states[:SLOT_BYTES])
            op.leases.append(lease)
            lease.loads = (*lease.loads, op.id)

    # pins

    def _pin(self, end: Node, target: int, floor: int = 0) -> Hold:
        """Pin, on the device, what a match ending at ``end`` needs, but no auxiliary page before ``floor``."""
        world = self._world
        hold = Hold(end, self._count)
        world.pin_full(end, DEVICE)
        for component in world.components[1:]:
            c = component.index
            low = max(component.first_page(target), floor)
            node = end
            while node.parent is not None and node.end > low:
                world.pin_cell(node, c)
                hold.lows[c] = node.parent.end
                if not component.divides:
                    break
                node = node.parent
        return hold

    def _unpin(self, hold: Hold) -> None:
        self._unpin_until(hold, _NOTHING)
        self._world.unpin_full(hold.end, DEVICE)

    def _unpin_until(self, hold: Hold, border: int) -> None:
        """Drop the auxiliary pins on nodes that end at ``border`` or before."""
        for component in reversed(self._world.components[1:]):
            c = component.index
            low, hold.lows[c] = hold.lows[c], _NOTHING
            node = hold.end
            while node.parent is not None and node.end > low:
                if node.end <= border:
                    self._world.unpin_cell(node, c)
                else:
                    hold.lows[c] = node.parent.end
                if not component.divides:
                    break
                node = node.parent

    # growing and shrinking

    def extend(self, lease: Lease, reserve: int, reserve_swa: int, states: int) -> Plan | More | Wait:
        """See ``CacheCore.extend``."""
        more = [max(0, self._ceil(reserve) - lease.reserved // self._page_size)]
        if self._swa:
            held = lease.own_from[self._swa] + len(lease.own[self._swa]) // SLOT_BYTES
            more.append(max(0, self._ceil(reserve_swa) - held))
        if self._mamba:
            more.append(states)
        room = self._transfers.room.make(DEVICE, more, self._world.config.slice_steps)
        if room is Room.SLICE:
            return More(self._world.plan())
        if room is not Room.FREE:
            return Wait(self._world.plan())
        for c, count in enumerate(more):
            taken = self._world.shelves[c].slots.take(count)
            if c == self._mamba and c:
                lease.states += taken
            else:
                lease.own[c] += taken
        lease.reserved += more[0] * self._page_size
        self._transfers.save_coldest()
        return self._world.plan()

    def advance(self, lease: Lease, position: int) -> Plan:
        """See ``CacheCore.advance``."""
        swa = self._swa
        if swa:
            window = self._world.config.components[swa].window
            border = max(0, position - window - self._page_size) // self._page_size
            self._unpin_until(lease.hold, border)
            passed = min(max(0, border - lease.own_from[swa]), len(lease.own[swa]) // SLOT_BYTES)
            if passed:
                self._give(swa, lease.own[swa][: passed * SLOT_BYTES])
                lease.own[swa] = lease.own[swa][passed * SLOT_BYTES :]
                lease.own_from[swa] += passed
        return self._world.plan()

    def truncate(self, lease: Lease, length: int) -> Plan:
        """See ``CacheCore.truncate``."""
        keep = max(self._ceil(length), lease.length // self._page_size)
        for component in self._world.components:
            c = component.index
            if component.divides:
                at = max(0, keep - lease.own_from[c]) * SLOT_BYTES
                self._give(c, lease.own[c][at:])
                lease.own[c] = lease.own[c][:at]
        lease.reserved = min(lease.reserved, keep * self._page_size)
        return self._world.plan()

    def _give(self, c: int, slots: bytes) -> None:
        if slots:
            self._world.shelves[c].slots.give(slots)
            self._world.freed = True

    def release(self, lease: Lease, ended: bool, retire: bool) -> None:
        """See ``CacheCore.release``."""
        if lease.released:
            return
        lease.released = True
        del self.active[lease.id]
        if ended:
            self._end_tail(lease.hold.end)
        self._unpin(lease.hold)
        slots = lease.own[:]
        if self._mamba:
            slots[self._mamba] = self._leave_clones(lease)
        lease.own = [b""] * self._count
        lease.states = b""
        if retire and any(slots):
            self._retire(slots, False)
        else:
            for c, given in enumerate(slots):
                self._give(c, given)
        self._world.freed = True

    def _leave_clones(self, lease: Lease) -> bytes:
        """The lease's states; one that a clone still writes to stays with that clone until its outcome."""
        for op_id in lease.loads:
            op = self._world.ledger.ops.get(op_id)
            if op is not None and op.kind is Kind.CLONE:
                op.slots = [b""] * self._count
                op.slots[self._mamba] = lease.states[:SLOT_BYTES]
                return lease.states[SLOT_BYTES:]
        return lease.states

    def _retire(self, slots: list[bytes], adoption: bool) -> None:
        op = self._world.ledger.open(Kind.RETIRE)
        op.slots = slots
        self._world.effect(Retire(op.id, adoption))

    def _end_tail(self, node: Node) -> None:
        """The conversation is over: what only it used goes first."""
        while node.parent is not None and len(node.children or ()) <= 1:
            in_flight = sum(DEVICE in PINNED_TIERS[op.kind] for op in node.ops)
            if node.cells[0].pins - in_flight > 1:
                return
            for c in range(self._count):
                self._world.policy.end(node.cells[c])
            node = node.parent

    def pages(self, lease: Lease, kind: int) -> bytes:
        """See ``CacheCore.pages``."""
        c = next(c.index for c in self._world.components if c.kind == kind)
        low = 0 if c == 0 else lease.hold.lows[c]
        parts = []
        for node in self._world.path(lease.hold.end):
            cell = node.cells[c]
            if cell.slots and node.end > low:
                parts.append(cell.slots)
            else:
                parts.append(NO_SLOT * (len(node.key) // self._world.page_bytes))
        parts.append(NO_SLOT * (lease.own_from[c] - lease.length // self._page_size))
        parts.append(lease.own[c])
        parts.append(NO_SLOT * (lease.reserved // self._page_size))
        return b"".join(parts)[: lease.reserved // self._page_size * SLOT_BYTES]

    # commit

    def commit(
        self, lease: Lease, key: bytes, hashes: bytes, checkpoint: tuple[int, int] | None
    ) -> Committed | Wait:
        """See ``CacheCore.commit``."""
        world, size = self._world, self._page_size
        begin, total = lease.length // size, min(len(key) // world.page_bytes, lease.reserved // size)
        key = key[begin * world.page_bytes : total * world.page_bytes]
        path, reached = walk(lease.hold.end, key, 0, world.page_bytes)
        blockers = [op.id for node in path if node.cells[0].state in (ARRIVING, LEAVING)
                    for op in node.ops if op.kind is Kind.LOAD_BACK]  # fmt: skip
        if blockers:
            return Wait(world.plan(), tuple(blockers))
        work = _Commit(lease, begin, total, self._window_start(total), [b""] * self._count)
        if path and path[-1].end > begin + reached // world.page_bytes:
            path[-1] = self._split_at(path[-1], begin + reached // world.page_bytes)
        end = lease.hold.end
        for node in path:
            end = self._merge(work, node)
        end = self._grow(work, end, key, hashes)
        took = self._move_hold(work, end, checkpoint)
        self._write_out(lease, end, begin, took)
        return Committed(world.plan(), lease.length, took)

    def _window_start(self, total: int) -> int:
        return self._world.components[self._swa].first_page(total) if self._swa else 0

    def _merge(self, work: _Commit, node: Node) -> Node:
        """An existing node on the way: what it lacks on the device it takes from the lease, the rest is duplicate."""
        start = node.parent.end  # type: ignore[union-attr]
        swa = self._swa
        if swa:
            first = max(work.window, work.lease.own_from[swa])
            if start < first < node.end and node.cells[swa].state == ABSENT:
                self._merge(work, self._split_at(node, first))
                start = first
        if node.cells[0].state == ABSENT:
            self._insert(node, 0, work.own(0, start, node.end))
        else:
            work.spare(0, start, node.end)
        if swa:
            if node.cells[swa].state == ABSENT and start >= max(work.window, work.lease.own_from[swa]):
                self._insert(node, swa, work.own(swa, start, node.end))
            else:
                work.spare(swa, start, node.end)
        return node

    def _insert(self, node: Node, c: int, slots: bytes) -> None:
        if len(slots) == SLOT_BYTES * self._world.pages(node, c):
            self._world.fill(node, c, slots, PRESENT)
            if c == 0:
                self._world.publish(Medium.GPU, True, node)
        else:
            self._give(c, slots)

    def _grow(self, work: _Commit, end: Node, key: bytes, hashes: bytes) -> Node:
        """New nodes for what the tree does not have: cut where released SWA pages end and where the window begins."""
        at, total = end.end, work.total
        if at >= total:
            return end
        cuts = [total]
        if self._swa:
            released = work.lease.own_from[self._swa]
            if released >= total:
                work.total = at
                return end
            cuts = sorted({cut for cut in (released, work.window) if at < cut < total} | {total})
        for cut in cuts:
            end = self._new_node(work, end, cut, key, hashes)
        return end

    def _new_node(self, work: _Commit, parent: Node, end: int, key: bytes, hashes: bytes) -> Node:
        world, start = self._world, parent.end
        page = world.page_bytes
        node = Node(key[(start - work.begin) * page : (end - work.begin) * page], end, parent, 2 * self._count)
        link(parent, node, page)
        world.counters.nodes += 1
        node.hashes = hashes[start * HASH_BYTES : end * HASH_BYTES]
        world.fill(node, 0, work.own(0, start, end), PRESENT)
        world.publish(Medium.GPU, True, node)
        swa = self._swa
        if swa and start >= work.lease.own_from[swa]:
            self._insert(node, swa, work.own(swa, start, end))
        return node

    def _move_hold(self, work: _Commit, end: Node, checkpoint: tuple[int, int] | None) -> bool:
        """The lease now ends at ``end``: attach the checkpoint, move the pins, keep the pages beyond."""
        lease, world = work.lease, self._world
        took = checkpoint is not None and bool(self._mamba) and self._attach(lease, end, checkpoint)
        old = lease.hold
        floor = lease.own_from[self._swa] if self._swa and lease.own_from[self._swa] > work.begin else 0
        lease.hold = self._pin(end, end.end, floor)
        self._unpin(old)
        for c in range(self._count):
            if c != self._mamba or not c:
                lease.own[c] = work.rest(c, end.end)
                lease.own_from[c] = max(lease.own_from[c], end.end)
        lease.length = end.end * self._page_size
        self._touch(end, end.end)
        if any(work.spares):
            self._retire(work.spares, True)
        return took

    def _attach(self, lease: Lease, end: Node, checkpoint: tuple[int, int]) -> bool:
        position, slot = checkpoint[0] // self._page_size, checkpoint[1].to_bytes(SLOT_BYTES, "little")
        node = end
        while node.parent is not None and node.parent.end >= position:
            node = node.parent
        if node.parent is None or position > node.end or node.cells[0].state != PRESENT:
            return False
        if self._swa and node.cells[self._swa].state == ABSENT:
            return False
        if position < node.end:
            node = self._split_at(node, position)
        if node.cells[self._mamba].state != ABSENT:
            return False
        states = [lease.states[i : i + SLOT_BYTES] for i in range(0, len(lease.states), SLOT_BYTES)]
        states.remove(slot)
        lease.states = b"".join(states)
        self._world.fill(node, self._mamba, slot, PRESENT)
        self._world.policy.touch(node.cells[self._mamba])
        return True

    # write policies

    def _write_out(self, lease: Lease, end: Node, begin: int, took: bool) -> None:
        """Start the backups that the write policy asks for after a commit."""
        world = self._world
        if not world.has_host or end.root.dead:
            return
        policy = world.config.write_policy
        if policy is WritePolicy.WRITE_BACK:
            self._transfers.save_coldest()
            return
        if policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            due = self._count_pass(lease, end)
        else:
            due = end if took or end.end > begin else None
        if due is not None:
            self._transfers.save_or_defer(due, begin)

    def _count_pass(self, lease: Lease, end: Node) -> Node | None:
        """Count this lease's pass, once, through every node without a host copy; the deepest that is due for one."""
        due = None
        node = end
        while node.parent is not None:
            if node.cells[self._count].state != ABSENT:
                return due or node
            if node.passer == lease.id:
                return due
            node.passer = lease.id
            node.passes += 1
            if node.passes > 1 and due is None:
                due = node
            node = node.parent
        return due


class _Commit:
    """The pages of one commit: taken from the lease, by position; ``spares``: duplicates, by component."""

    __slots__ = ("begin", "lease", "spares", "total", "window")

    def __init__(self, lease: Lease, begin: int, total: int, window: int, spares: list[bytes]) -> None:
        self.lease = lease
        self.begin = begin
        self.total = total
        self.window = window
        self.spares = spares

    def own(self, c: int, start: int, end: int) -> bytes:
        """The lease's own slots of component ``c`` for pages ``start`` to ``end``, as far as it has them."""
        base = self.lease.own_from[c]
        return self.lease.own[c][max(0, start - base) * SLOT_BYTES : max(0, end - base) * SLOT_BYTES]

    def spare(self, c: int, start: int, end: int) -> None:
        """These pages are in the tree already."""
        self.spares[c] += self.own(c, start, end)

    def rest(self, c: int, end: int) -> bytes:
        """What stays with the lease after ``end``."""
        base = self.lease.own_from[c]
        return self.lease.own[c][max(0, end - base) * SLOT_BYTES :]
