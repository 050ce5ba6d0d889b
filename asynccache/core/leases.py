"""Leases: the part of the cache that a request has while it runs. A lease is granted as a whole or not at all.

A lease pins the path its prompt matched and owns the pages of everything after it. ``commits`` moves whole pages from
the lease into the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from asynccache.core.holds import release_hold, release_until, take_hold
from asynccache.core.keys import TOKEN_BYTES
from asynccache.core.ledger import CLONE, DEVICE, HOST, LOAD_BACK, NOWHERE, ON_DEVICE, RETIRE, CoreLease, Operation
from asynccache.core.match import Ends, Matches
from asynccache.core.plan import NO_SLOT, SLOT_BYTES, More, Plan, Retire, Wait
from asynccache.core.room import FREE, SAVING, SHORT, SLICE, Room
from asynccache.core.transfers import Transfers
from asynccache.core.tree import ABSENT, ARRIVING, PRESENT, Node, walk
from asynccache.core.world import PASSED, World, split_at
from asynccache.errors import CacheFull

EVERYTHING: Final = 1 << 60


class LeaseRequest(NamedTuple):
    """The request for a lease. Positions and lengths are in tokens."""

    space: bytes
    """The digest of the request's namespace."""
    key: bytes
    limit: int
    """No match goes further than this."""
    reserve: int
    reserve_swa: int
    """FULL pages are taken up to position ``reserve`` and SWA pages up to ``reserve_swa``, but no further than
    ``chunk`` and ``chunk_swa`` beyond the end of the match."""
    states: int = 0
    """How many MAMBA slots are taken."""
    load: bool = True
    """True if pages may be copied for the lease, by a load_back or as a private copy."""
    chunk: int = EVERYTHING
    chunk_swa: int = EVERYTHING
    shorter: bool = True
    """True if a match shorter than the longest one will do."""
    shared: int = EVERYTHING
    """How many tokens of ``key`` other conversations have, too; EVERYTHING: their number is not known."""


class Grant(NamedTuple):
    """The lease that was granted, and the plan of what must be done for it."""

    lease: CoreLease
    plan: Plan


def retire(world: World, slots: list[bytes]) -> None:
    """Retire these device slots, by component: nobody takes them until the engine is done with them."""
    op = world.ledger.open(RETIRE)
    op.slots = slots
    world.effect(Retire(op.id))


def _limit(lease: CoreLease, valid: int) -> None:
    lease.valid = valid if lease.valid is None else min(lease.valid, valid)


class Leases:
    """Grants, grows and releases leases in one world."""

    def __init__(self, world: World, transfers: Transfers, matches: Matches) -> None:
        self._world = world
        self._transfers = transfers
        self._matches = matches
        self._count = world.count
        self._page_size = world.config.page_size
        self._swa = world.swa
        self._mamba = world.mamba
        self._index: dict[int, int] = {component.kind: component.index for component in world.components}
        self._next = 1
        self.active: dict[int, CoreLease] = {}

    def lease(self, ask: LeaseRequest) -> Grant | Wait | More:
        self.check_possible(ask)
        root = self._world.enter(ask.space)
        answer = self._attempt(ask, root)
        if not isinstance(answer, Grant):
            self._world.leave(root)
        return answer

    def _attempt(self, ask: LeaseRequest, root: Node) -> Grant | Wait | More:
        stop = min(len(ask.key), ask.limit * TOKEN_BYTES)
        tried: set[tuple[int, bool]] = set()
        # With a window, each end is tried twice: the second time the node is cut in which the window begins, so that no
        # more than the window is pinned.
        cuts = (False, True) if self._swa else (False,)
        while True:  # an attempt may have evicted what a shorter match needs, so each one matches again
            path, reached = walk(root, ask.key, 0, self._world.page_bytes, stop)
            ends = self._matches.ends(path, reached)
            targets = self._targets(ask, path, ends)
            for target, exact in [(target, cut) for target in targets for cut in cuts]:
                if (target, exact) not in tried:
                    break
            else:
                return Wait(self._world.plan())
            tried.add((target, exact))
            room, lease = self._try(ask, root, self._cut_path(path, target, exact, self._private(ask)), ends, target)
            if lease is not None:
                return Grant(lease, self._world.plan())
            if room is SLICE:
                return More(self._world.plan())
            if room is SAVING:  # it will fit soon; with a shorter match now, the request would compute more
                return Wait(self._world.plan())

    def check_possible(self, ask: LeaseRequest) -> None:
        size = self._page_size
        self._check_capacity(0, ask.reserve, size, "tokens")
        if self._swa:
            self._check_capacity(self._swa, min(ask.reserve_swa, ask.chunk_swa), size, "tokens")
        if self._mamba:
            self._check_capacity(self._mamba, ask.states, 1, "states")

    def _check_capacity(self, c: int, need: int, unit: int, what: str) -> None:
        """Raise ``CacheFull`` if the device has fewer than ``need`` of component ``c``. ``unit``: how many of ``what``
        a slot holds."""
        room = self._world.shelves[c].slots.capacity * unit
        if need > room:
            name = self._world.components[c].kind.name.lower()
            raise CacheFull(f"{name}: {need} {what} are asked for, the device has room for {room}")

    def _ceil(self, tokens: int) -> int:
        return -(-tokens // self._page_size)

    def _targets(self, ask: LeaseRequest, path: Sequence[Node], ends: Ends) -> list[int]:
        """Return the match ends to try, in pages, best first. Ends with 0 (no reuse) when the cache is idle: then
        nothing else will free room, and the matched pages themselves may be in the way."""
        targets = [ends.device]
        worth = ends.union > ends.device and ask.load
        if worth and self._world.config.load_back_threshold:
            lacking = self._matches.missing(path, ends.union)
            worth = lacking[0] * self._page_size >= self._world.config.load_back_threshold or any(lacking[1:])
        if worth:
            targets.insert(0, ends.union)
        ledger = self._world.ledger
        if targets[-1] and not self.active and not (ledger.ops and any(ledger.count[kind] for kind in ON_DEVICE)):
            targets.append(0)
        return targets if ask.shorter else targets[:1]

    def _try(
        self, ask: LeaseRequest, root: Node, path: list[Node], ends: Ends, target: int
    ) -> tuple[Room, CoreLease | None]:
        """Pin the match up to page ``target``, and make room for loads and new pages. Return whether there is room, and
        the lease; None if it does not fit, and then nothing stays pinned."""
        world = self._world
        end = path[-1] if path else root
        hold = take_hold(world, end, target)
        loads = self._loads(path, target) if target > ends.device else []
        for node, mask in loads:
            world.pin(node, HOST, mask.bit_length() - 1)
        needs, own = self._needs(ask, target, loads)
        world.limit += self._count * (len(path) + len(loads)) // PASSED  # see ``World.limit``
        room = self._transfers.room.make(DEVICE, needs)
        lease = None
        if room is FREE:
            lease = self._grant(CoreLease(self._next, hold), ask, path, ends, target, loads, own)
        else:
            release_hold(self._world, hold)
        for node, mask in loads:
            world.unpin(node, HOST, mask.bit_length() - 1)
        return room, lease

    def _private(self, ask: LeaseRequest) -> int:
        """Return the page from which on the text is private to its conversation; NOWHERE if that is not known."""
        return NOWHERE if ask.shared == EVERYTHING else ask.shared // self._page_size

    def _cut_path(self, path: list[Node], target: int, exact: bool, private: int) -> list[Node]:
        """Return the path up to page ``target``, after splitting nodes at ``target`` and at page ``private``. The node
        in which the window of that end begins is split where it begins, too: if its SWA must be loaded, so that only
        the window is; if ``exact``, so that only the window is pinned; and if texts fork at ``target``, so that the
        pages which this end needs are a node of their own."""
        world = self._world
        path = path[:]
        while path and path[-1].parent.end >= target:  # type: ignore[union-attr]
            path.pop()
        forks = bool(path) and path[-1].end > target
        if forks:
            path[-1] = split_at(world, path[-1], target)
        if self._swa and path:
            first = self._world.components[self._swa].first_page(target)
            for i, node in enumerate(path):
                start = node.parent.end  # type: ignore[union-attr]
                if start < first < node.end and (exact or forks or node.state[self._swa] == ABSENT):
                    path.insert(i, split_at(world, node, first))
                    break
        if path and private < path[-1].end:
            for i, node in enumerate(path):
                if node.parent.end < private < node.end:  # type: ignore[union-attr]
                    path.insert(i, split_at(world, node, private))
                    break
        return path

    def _loads(self, path: Sequence[Node], target: int) -> list[tuple[Node, int]]:
        """Return the nodes, root first, from which the match must load data, each with a bit for each component to be
        loaded."""
        count = self._count
        firsts = [c.first_page(target) for c in self._world.components]
        floor = min(firsts[1:], default=NOWHERE)
        loads: list[tuple[Node, int]] = []
        for node in reversed(path):
            state = node.state
            mask = 0
            for c in range(count):
                if node.end > firsts[c] and state[c] == ABSENT and state[count + c] == PRESENT:
                    mask |= 1 << c
            if mask:
                loads.append((node, mask))
            elif node.end <= floor and state[0] != ABSENT:
                break
        loads.reverse()
        return loads

    def _needs(self, ask: LeaseRequest, target: int, loads: Sequence[tuple[Node, int]]) -> tuple[list[int], list[int]]:
        """Return how many slots to take, by component: for loads and new pages together, and for new pages alone."""
        begin = target * self._page_size
        own = [max(0, self._ceil(min(ask.reserve, begin + ask.chunk)) - target)]
        if self._swa:
            own.append(max(0, self._ceil(min(ask.reserve_swa, begin + ask.chunk_swa)) - target))
        if self._mamba:
            own.append(ask.states)
        needs = own[:]
        for node, mask in loads:
            for c in range(self._count):
                if mask >> c & 1:
                    needs[c] += self._world.pages(node, c)
        return needs, own

    def _grant(
        self, lease: CoreLease, ask: LeaseRequest, path: Sequence[Node], ends: Ends, target: int,
        loads: Sequence[tuple[Node, int]], own: Sequence[int],
    ) -> CoreLease:  # fmt: skip
        world, size = self._world, self._page_size
        self._next += 1
        self.active[lease.id] = lease
        lease.cached = lease.length = target * size
        lease.full = ends.full * size
        lease.shared = self._private(ask)
        lease.reserved = (target + own[0]) * size
        if loads:
            self._transfers.open_load(loads)
            lease.loaded_tokens = size * sum(world.pages(node, 0) for node, mask in loads if mask & 1)
        lease.own = [world.shelves[c].slots.take(own[c]) for c in range(self._count)]
        lease.own_from = [target] * self._count
        if self._mamba:
            lease.states, lease.own[self._mamba] = lease.own[self._mamba], b""
        self._matches.touch(lease.hold.end, target)
        self._await_arrivals(lease, path, target)
        if ask.load and self._mamba and path and lease.states:  # copy the matched state to the lease's first slot
            op = self._transfers.open_clone(path[-1], self._mamba, lease.states[:SLOT_BYTES])
            op.leases.append(lease)
            lease.loads = (*lease.loads, op.id)
        self._transfers.backup_coldest()
        return lease

    def _await_arrivals(self, lease: CoreLease, path: Sequence[Node], target: int) -> None:
        """Note in the lease the loads that bring pages of its match, and note the lease in each of them, so that it
        hears when one fails."""
        loads: dict[int, None] = {}
        for node in path:
            if node.ops and any(
                node.state[c.index] == ARRIVING and node.end > c.first_page(target) for c in self._world.components
            ):
                for op in node.ops:
                    if op.kind is LOAD_BACK and op.id not in loads:
                        loads[op.id] = None
                        op.leases.append(lease)
        if loads:
            lease.loads = tuple(loads)

    # batches that failed

    def fail_computing(self, op: Operation) -> None:
        """Take the pages that ``op``, a COMPUTE, covers out of the tree, with everything below them: the engine does
        not compute them. They stay pinned on the device until the engine has let go of them. Leases keep the pages that
        they hold, and learn how many of their tokens are still good."""
        op.doomed, op.tiers = True, (DEVICE,)
        for node, _, last in op.fragments:
            self._world.pin(node, DEVICE, last)
        size = self._page_size
        for lease in op.leases:
            _limit(lease, lease.length)
        if op.fragments:
            top = op.fragments[0][0]  # the highest: they are on one path, root first
            start = top.parent.end * size  # type: ignore[union-attr]
            for lease in self.active.values():
                node = lease.hold.end
                while node.end > top.end:
                    node = node.parent  # type: ignore[assignment]
                if node is top:
                    _limit(lease, start)
            if not top.root.dead:
                self._world.cut_off(top)
                self._transfers.claims.release_dead()
        self._transfers.unpark(op)

    # growing and shrinking

    def extend(self, lease: CoreLease, reserve: int, reserve_swa: int, states: int) -> Plan | More | Wait:
        more = [max(0, self._ceil(reserve) - lease.reserved // self._page_size)]
        if self._swa:
            held = lease.own_from[self._swa] + len(lease.own[self._swa]) // SLOT_BYTES
            more.append(max(0, self._ceil(reserve_swa) - held))
        if self._mamba:
            more.append(states)
        room = self._transfers.room.make(DEVICE, more)
        if room is SHORT and self._trim_window(lease):
            room = self._transfers.room.make(DEVICE, more)
        if room is SLICE:
            return More(self._world.plan())
        if room is not FREE:
            ops = self._world.ledger.ops.values()
            copies = tuple([op.id for op in ops if DEVICE in op.tiers])  # they end without waiting for storage
            return Wait(self._world.plan(), self._transfers.room.busy() if room is SAVING else copies)
        for c, count in enumerate(more):
            taken = self._world.shelves[c].slots.take(count)
            if c == self._mamba and c:
                lease.states += taken
            else:
                lease.own[c] += taken
        lease.reserved += more[0] * self._page_size
        self._transfers.backup_coldest()
        return self._world.plan()

    def _trim_window(self, lease: CoreLease) -> bool:
        """Unpin SWA before the window. Pins cover whole nodes, so the node is cut in which the window begins. Return
        False if nothing before it was pinned."""
        hold, swa = lease.hold, self._swa
        first = max(self._world.components[swa].first_page(hold.end.end), lease.border) if swa else 0
        if not swa or hold.lows[swa] >= first:
            return False
        node = hold.end
        while node.parent is not None and node.parent.end > first:
            node = node.parent
        if node.parent is not None and node.parent.end < first < node.end:
            split_at(self._world, node, first)
        release_until(self._world, hold, first)
        return True

    def advance(self, lease: CoreLease, position: int) -> Plan:
        swa = self._swa
        if swa:
            window = self._world.config.components[swa].window
            border = max(0, position - window - self._page_size) // self._page_size
            release_until(self._world, lease.hold, border)
            lease.border = border
            passed = min(max(0, border - lease.own_from[swa]), len(lease.own[swa]) // SLOT_BYTES)
            if passed:
                self._give(swa, lease.own[swa][: passed * SLOT_BYTES])
                lease.own[swa] = lease.own[swa][passed * SLOT_BYTES :]
                lease.own_from[swa] += passed
        return self._world.plan()

    def truncate(self, lease: CoreLease, length: int) -> Plan:
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

    def release(self, lease: CoreLease, ended: bool, hold_back: bool, used: bool) -> None:
        if lease.released:
            return
        lease.released = True
        del self.active[lease.id]
        if used:
            self._matches.leave(lease.hold.end, lease.cached // self._page_size)
            self._matches.use(lease.hold.end, lease.forked)
        if ended:
            self._end_tail(lease.hold.end, lease.shared)
        release_hold(self._world, lease.hold)
        slots = lease.own[:]
        if self._mamba:
            slots[self._mamba] = self._leave_clones(lease)
        lease.own = [b""] * self._count
        lease.states = b""
        if hold_back and any(slots):
            retire(self._world, slots)
        else:
            for c, given in enumerate(slots):
                self._give(c, given)
        self._world.freed = True
        self._world.leave(lease.hold.end.root)

    def _leave_clones(self, lease: CoreLease) -> bytes:
        """Return the lease's state slots that can be given back. A slot that a clone still writes to is handed to the
        clone's operation, which keeps it until its outcome."""
        for op_id in lease.loads:
            op = self._world.ledger.ops.get(op_id)
            if op is not None and op.kind is CLONE:
                op.slots = [b""] * self._count
                op.slots[self._mamba] = lease.states[:SLOT_BYTES]
                return lease.states[SLOT_BYTES:]
        return lease.states

    def _end_tail(self, node: Node, private: int) -> None:
        """Mark the nodes that only this conversation used as ended, so that they are evicted before all others. These
        are the nodes from ``node`` upwards that begin at page ``private`` or after it. If ``private`` is NOWHERE, they
        are the nodes without a fork at their end or below. The walk ends at a node that another lease pins."""
        while node.parent is not None:
            if len(node.children or ()) > 1 if private == NOWHERE else node.parent.end < private:
                return
            in_flight = sum(DEVICE in op.tiers for op in node.ops)
            if node.pins[0] - in_flight > 1:
                return
            self._world.end_conversation(node)
            node = node.parent

    def pages(self, lease: CoreLease, kind: int) -> bytes:
        c = self._index[kind]
        low = 0 if c == 0 else lease.hold.lows[c]
        parts, missing = [lease.own[c]], lease.own_from[c]
        node = lease.hold.end
        parts.append(NO_SLOT * (missing - node.end))
        while node.parent is not None:
            slots = node.slots[c] if node.end > low else b""
            parts.append(slots or NO_SLOT * (node.end - node.parent.end))
            node = node.parent
        parts.reverse()
        size = lease.reserved // self._page_size * SLOT_BYTES
        table = b"".join(parts)
        return table.ljust(size, b"\xff") if len(table) < size else table[:size]
