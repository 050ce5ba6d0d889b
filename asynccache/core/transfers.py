"""Opening and closing the transfers between the tiers: backup_host, load_back, clone, backup_storage.

Backups go parent first, and outcomes on one path apply root first: an operation whose outcome came before that of one
above it is parked. When one fails, everything ARRIVING below it is doomed at once, and leaves when its own outcome
comes. So data on a tier is closed towards the root at every moment.

A backup of pages that the engine may still be computing is parked, too, until it is known that they were computed. So
what a failed batch did not compute never counts as saved, and nothing below it does.

A call that runs out of steps leaves outcomes, or backups that could start, to ``follow_up`` (``World.behind``). To the
rest of the core, an operation whose outcome is not applied yet is in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from operator import gt

from asynccache.core.holds import Claims, shorten_hold
from asynccache.core.ledger import (
    BACKUP_HOST,
    BACKUP_STORAGE,
    CLONE,
    COMPUTE,
    DEVICE,
    HOST,
    LOAD_BACK,
    PREFETCH,
    Fragment,
    Operation,
)
from asynccache.core.plan import (
    SLOT_BYTES,
    BackupStorage,
    Clone,
    LoadBack,
    Medium,
    Move,
    Outcome,
    Status,
    StoredPages,
)
from asynccache.core.room import FREE, OPEN, SHORT, SLICE, UNSAVED, Cost, Room, RoomMaker
from asynccache.core.settings import Access
from asynccache.core.tree import ABSENT, ARRIVING, LEAVING, PRESENT, Node
from asynccache.core.world import LATE, Walk, World
from asynccache.errors import InvariantViolation

_UNBOUNDED = 1 << 60
_RETRIES = 16
_LOOKS = 4
_CLIMBED = 16  # how many nodes of a path that is walked upwards count as a step


class Transfers:
    """The transfers of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._count = world.count
        self._kinds = [c.kind for c in world.components]
        self._rooms = [shelf.slots.capacity for shelf in world.shelves[world.count :]]
        self.claims = Claims(world)
        self.promised = [0] * world.count
        """Host slots that prefetches in flight may still take, by component: no backup takes them."""
        self.room = RoomMaker(world, self.backup_host, self.claims)
        self.deferred: dict[Node, None] = {}
        """Nodes whose backup could not start yet."""
        self.unstored: dict[Node, None] = {}
        """Nodes that storage did not take."""
        self._storage_works = False
        self._outcomes: deque[Outcome] = deque()
        """Outcomes that were not applied yet."""
        self._unparked: list[Operation] = []
        """Operations that need wait for no other any more, the next one last."""

    # backup_host

    def backup_host(self, node: Node, floor: int = _UNBOUNDED, cost: Cost = Cost.ANY) -> Room:
        """Start the backup of ``node`` and of every ancestor that lacks one. Returns FREE if it was started, or there
        was nothing to start; SHORT if it must wait; SLICE if room for it was made on the host, and the next call goes
        on. Pages that the host could never hold are left out.

        ``floor``: a page, counted from the root. The walk towards the root ends at a node that lacks nothing and ends
        at this page or before. ``cost``: what the host may give up for the backup.
        """
        chain = self._lacking(node, floor)
        if not chain:
            return SHORT if chain is None else FREE
        if self._is_busy():
            return SHORT
        return self._open_backup(chain, cost)

    def backup_or_defer(self, node: Node, floor: int = _UNBOUNDED) -> None:
        """Start the backup of ``node``, for which the host may give up spare copies only.

        A backup that must wait is tried again later if storage is to have the pages, or if only too many backups were
        in flight. Any other node can wait until it is among the coldest of the device: before that, a copy on the host
        would only take room.
        """
        room = self.backup_host(node, floor, Cost.SPARE)
        if room is FREE:
            self.deferred.pop(node, None)
        elif room is not SHORT:
            self.deferred[node] = None
            self._world.behind = True
        elif self._world.access is Access.WRITE or self._is_busy():
            self.deferred[node] = None

    def _is_busy(self) -> bool:
        return self._world.ledger.count[BACKUP_HOST] >= self._world.config.max_backup_ops

    def retry_deferred(self) -> None:
        """Try some of the deferred backups again."""
        for node in list(islice(self.deferred, _RETRIES)):
            del self.deferred[node]
            if node.parent is None or node.root.dead:
                continue
            room = self.backup_host(node, 0, Cost.SPARE)
            if room is not FREE:
                self.deferred[node] = None
                self._world.behind |= room is SLICE
                return
            if self._world.spent():
                self._world.behind |= bool(self.deferred)
                return

    def backup_some(self, walk: Walk) -> None:
        """Start every backup that can be started in the next slice of ``walk``: of data that only the device has, and
        of host pages that are not in storage."""
        world = self._world
        while not walk.over():
            node = walk.peek()
            if node is not None and not node.root.dead:
                if self._worth_saving(node) and self.backup_host(node, cost=Cost.STORED) is SLICE:
                    return
                self.backup_storage([node])
            walk.step()
            if world.spent():
                return

    def _worth_saving(self, node: Node) -> bool:
        """Return True if a backup could bring the host anything of ``node`` itself that storage lacks. A backup that
        could bring only its ancestors is not worth it: paths that are too long for the host would push each other out
        of it for ever."""
        unsaved = self._missing(node) & ~self._world.stored(node)
        fits = [c for c in self._world.bits[unsaved] if self._world.pages(node, c) <= self._rooms[c]]
        return bool(fits) and node.end <= self._rooms[0]

    def _lacking(self, node: Node, floor: int) -> list[tuple[Node, int]] | None:
        """Return ``node`` and those of its ancestors that lack a host copy of a component that the device has: root
        first, each with a bit for every such component. None if a host copy on the way is leaving, because nothing can
        follow it.

        The walk up ends at a node that lacks nothing and ends at page ``floor`` or before: what is above it has FULL on
        the host, too.
        """
        chain = []
        place, climbed = self._count, 0
        while node.parent is not None:
            climbed += 1
            host = node.state[place]
            if host == LEAVING:
                return None
            if missing := self._missing(node):
                chain.append((node, missing))
            elif node.end <= floor and host != ABSENT:
                break
            node = node.parent
        self._world.steps += climbed // _CLIMBED
        chain.reverse()
        return chain

    def _missing(self, node: Node) -> int:
        """Return a bit for each component that is PRESENT on the device and ABSENT on the host."""
        state, count = node.state, self._count
        missing = int(state[0] == PRESENT and state[count] == ABSENT)
        for c in range(1, count):
            if state[c] == PRESENT and state[count + c] == ABSENT:
                missing |= 1 << c
        return missing

    def _open_backup(self, chain: list[tuple[Node, int]], cost: Cost) -> Room:
        world = self._world
        needs = [0] * self._count
        for node, mask in chain:
            for c in world.bits[mask]:
                needs[c] += len(node.slots[c]) // SLOT_BYTES
        if chain[-1][0].end > self._rooms[0] or any(map(gt, needs, self._rooms)):
            needs, chain = self._fitting(chain)
            if not chain:
                return FREE
        room = self._host_room(chain[-1][0], needs, cost)
        if room is FREE:
            op = world.ledger.open(BACKUP_HOST)
            world.backup(op, self._start(op, chain, DEVICE, HOST))
        return room

    def _fitting(self, chain: list[tuple[Node, int]]) -> tuple[list[int], list[tuple[Node, int]]]:
        """Return the slots for the part of ``chain`` that the host could ever hold, by component, and that part: of
        FULL the start of the path, of the other components the deepest nodes."""
        rooms = self._rooms
        needs, open_, fitting = [0] * self._count, (1 << self._count) - 1, []
        for node, mask in reversed(chain):
            if node.end > rooms[0]:
                continue
            for c in range(self._count):
                if mask & open_ & 1 << c:
                    pages = self._world.pages(node, c)
                    if needs[c] + pages > rooms[c]:
                        open_ &= ~(1 << c)
                    else:
                        needs[c] += pages
            if mask & open_:
                fitting.append((node, mask & open_))
        fitting.reverse()
        return needs, fitting

    def _host_room(self, end: Node, needs: Sequence[int], cost: Cost) -> Room:
        """Make room on the host, if there is too little, but never by evicting ``end`` or a node above it. Returns FREE
        if there is room now. ``needs``: slots by component."""
        place, crowded = self._count, False
        for need, promised in zip(needs, self.promised, strict=True):
            shelf = self._world.shelves[place]
            if need > shelf.slots.left - promised:
                if need and need + promised > shelf.reachable():
                    return SHORT
                crowded |= need > shelf.slots.left
            place += 1
        if not crowded:
            return FREE
        self._world.pin(end, HOST, 0)
        room = self.room.make(HOST, needs) if cost is Cost.ANY else self.room.make_gently(needs, cost)
        self._world.unpin(end, HOST, 0)
        return room

    # load_back

    def open_load(self, loads: Sequence[tuple[Node, int]]) -> Operation:
        """Start loading the components (a bit each) of each node in ``loads``, root first. The caller has made room.
        Returns the operation."""
        op = self._world.ledger.open(LOAD_BACK)
        self._world.copy(LoadBack(op.id, self._start(op, loads, HOST, DEVICE)))
        return op

    def open_clone(self, node: Node, component: int, slot: bytes) -> Operation:
        """Start copying ``node``'s device slot of ``component`` to ``slot``, after the load that may still fill it.
        Returns the operation."""
        world = self._world
        after = next((op.id for op in node.ops if op.kind is LOAD_BACK and _moves(op, node) >> component & 1), 0)
        op = world.ledger.open(CLONE)
        world.cover(op, node, 1 << component)
        world.copy(Clone(op.id, (Move(self._kinds[component], node.slots[component], slot),), after))
        return op

    # backup_storage

    def backup_storage(self, nodes: Iterable[Node], again: int = 0) -> None:
        """Start storing what ``nodes`` have on the host and storage lacks. ``again``: the number of an operation; if it
        is not 0, all host pages of the nodes are stored, except those that this operation or a later one is storing."""
        world, count = self._world, self._count
        if world.access is not Access.WRITE:
            return
        todo = [(node, mask) for node in nodes if node.hashes and (mask := self._unstored(node, again))]
        if not todo:
            return
        op = world.ledger.open(BACKUP_STORAGE)
        world.steps += len(todo)
        for node, mask in todo:
            world.cover(op, node, mask)
        pages = []
        for c in range(count - 1, -1, -1):
            nodes_of = [node for node, mask in todo if mask >> c & 1]
            if nodes_of:
                hashes = b"".join([n.hashes if world.components[c].divides else n.hashes[-32:] for n in nodes_of])
                slots = b"".join([n.slots[count + c] for n in nodes_of])
                pages.append(StoredPages(self._kinds[c], hashes, slots))
        world.effect(BackupStorage(op.id, tuple(pages)))

    def store_again(self) -> None:
        """Offer some of the nodes that storage did not take once more, if storage has just taken others and is idle
        now. So a store that is away or too slow is left alone, and one that is back gets these nodes over time. Few are
        tried at once, so that they pin little of the host. A node that is too large even alone was never added to
        ``unstored`` (``_stored``): only a drain tries it again."""
        if not self._storage_works or self._world.ledger.count[BACKUP_STORAGE]:
            return
        self._storage_works = False
        pages = max(1, self._rooms[0] // _RETRIES)
        for node in list(islice(self.unstored, _RETRIES)):
            if pages > 0:
                del self.unstored[node]
                pages -= self._world.pages(node, 0)
                if node.parent is not None:
                    self.backup_storage([node])

    def _unstored(self, node: Node, again: int) -> int:
        if node.root.dead:
            return 0
        held = sum(1 << c for c in range(self._count) if node.state[self._count + c] == PRESENT)
        for op in node.ops:
            if op.kind is BACKUP_STORAGE and op.id >= again:
                held &= ~_moves(op, node)
        return held if again else held & ~self._world.stored(node)

    # ahead of demand

    def backup_coldest(self) -> None:
        """Condemn the coldest leaves of the device, and start backups of those that are to have one, until free and
        condemned pages pass the watermark. Nothing is done where every page has its copy already, because then no
        eviction has to wait. If the call runs out of steps, the next one that takes pages goes on.

        What is condemned takes room on both tiers, so the watermark is a share of the smaller one.
        """
        world, free = self._world, self._world.shelves[0].slots
        if free.capacity - free.left <= world.clean_pages:
            return
        wanted = int(min(free.capacity, self._rooms[0]) * world.config.write_back_watermark) - free.left
        while wanted > world.condemned_pages and not world.spent():
            node = self.room.coldest(0, LATE)
            if node is None:
                return
            verdict = self.room.judge(node, 0)
            if verdict is OPEN or (verdict is UNSAVED and self.backup_host(node) is not FREE):
                world.offer(node, 0)
                return
            world.condemn(node, 0)
            world.offer(node, 0)

    # outcomes

    def note_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        """Note ``outcomes``, which ``settle`` applies."""
        self._outcomes.extend(outcomes)

    def unpark(self, op: Operation) -> None:
        """Have ``settle`` close the operations that are parked until the end of ``op``."""
        self._unparked.extend(reversed(op.parked))
        op.parked = []

    def settle(self) -> bool:
        """Apply outcomes, and after each one those that were parked until then. Return True if some are left."""
        world, outcomes, unparked = self._world, self._outcomes, self._unparked
        while outcomes or unparked:
            if unparked:
                op = unparked.pop()
            else:
                outcome = outcomes.popleft()
                told = world.ledger.ops.get(outcome.op)
                if told is None or told.status is not None or told.kind is PREFETCH:
                    raise InvariantViolation(
                        f"an outcome for operation {outcome.op}, which is not waiting for one: {told}"
                    )
                told.status = outcome.status
                op = told
            if op.id in world.ledger.ops:  # else it was doomed while it was parked, and has been closed since
                world.steps += 2 * len(op.fragments) + 1
                self._close(op)
            if world.spent():
                break
        return bool(outcomes or unparked)

    def _close(self, op: Operation) -> None:
        if op.kind is BACKUP_HOST:
            self._close_arrival(op, HOST)
            return
        if op.kind is LOAD_BACK:
            self._close_arrival(op, DEVICE)
            return
        assert op.status is not None
        done = op.status is Status.DONE
        fragments = list(op.fragments)
        self._world.uncover(op)
        self._world.end(op, op.status)
        if op.kind is BACKUP_STORAGE:
            self._stored(op, done, fragments)
        elif op.kind is CLONE and not done:
            self._fail_leases(op, 0)
        for place, slots in enumerate(op.slots):
            self._world.shelves[place].slots.give(slots)
        self.unpark(op)

    def _stored(self, op: Operation, done: bool, fragments: Sequence[Fragment]) -> None:
        """Note what storage has of an operation that has ended. Some pages of a failed operation may be in storage even
        so. Its nodes are noted for another try, except those that fill more than a quarter of the host."""
        for node, moves, _ in fragments:
            if done:
                self._world.note_stored(node, moves, op)
            elif node.parent is not None and not node.root.dead and self._world.pages(node, 0) <= self._rooms[0] // 4:
                self._note_unstored(node)
            if moves & 1:
                self._world.publish(Medium.STORAGE, True, node)
        self._storage_works = done

    def _note_unstored(self, node: Node) -> None:
        """Add ``node`` to ``unstored``. Of the other nodes there a few are looked at, and those that have left the tree
        are dropped, since a store may be away for long."""
        self.unstored[node] = None
        for other in list(islice(self.unstored, _LOOKS)):
            del self.unstored[other]
            if other.parent is not None and not other.root.dead:
                self.unstored[other] = None

    def _close_arrival(self, op: Operation, tier: int) -> None:
        """Close an operation that fills cells of ``tier``, or park it if it must wait for an operation above it."""
        base = tier * self._count
        if op.status is Status.DONE and not op.doomed:
            above = self._above(op, base)
            if above is not None:
                above.parked.append(op)
                return
            self._arrived(op, tier, base)
        else:
            if not op.doomed:
                self._fail_from_start(op)
                self._doom_below(op, base)
            self._failed(op, base)
        self.unpark(op)

    def _above(self, op: Operation, base: int) -> Operation | None:
        """Return an operation that still has to bring FULL for a node that ``op`` covers, or for the parent of one; or,
        if ``op`` is a backup, a COMPUTE of such a node or of any node above; None if there is none. ``base``: the place
        of the tier's first component."""
        brings = {node for node, moves, _ in op.fragments if moves & 1}
        for node, _, _ in op.fragments:
            parent = node.parent
            assert parent is not None
            for above in (node, parent):
                if above.state[base] == ARRIVING and above not in brings:
                    return next(o for o in above.ops if o.kind is op.kind and _moves(o, above) & 1)
        return self._computing(op) if base and self._world.ledger.count[COMPUTE] else None

    def _computing(self, backup: Operation) -> Operation | None:
        """Return a COMPUTE of a node that ``backup`` covers, or of one above: the backup's pages may rest on that
        batch. That holds even if the host has had all nodes between for long, since the batch may have put a state
        there, or brought pages back to the device."""
        climbed, node = 0, backup.fragments[0][0]
        for other, _, _ in backup.fragments:
            if other.end > node.end:
                node = other
        while node.parent is not None:
            climbed += 1
            for op in node.ops:
                if op.kind is COMPUTE and not op.doomed:
                    return op
            node = node.parent
        self._world.steps += climbed // _CLIMBED
        return None

    def _arrived(self, op: Operation, tier: int, base: int) -> None:
        world = self._world
        fragments = list(op.fragments)
        for node, moves, _ in fragments:
            for c in range(self._count):
                if moves >> c & 1:
                    world.arrive(node, base + c)
            if moves & 1:
                world.publish((Medium.GPU, Medium.CPU)[tier], True, node)
            if tier == HOST:
                node.unsavable = False
        if tier == HOST:
            self.backup_storage([node for node, _, _ in fragments])
        world.uncover(op)
        world.end(op, Status.DONE)

    def _failed(self, op: Operation, base: int) -> None:
        world = self._world
        for node, moves, _ in reversed(list(op.fragments)):
            for c in range(self._count - 1, -1, -1):
                if moves >> c & 1:
                    world.vacate(node, base + c)
            node.unsavable |= base > 0 and not op.doomed
        world.uncover(op)
        world.end(op, Status.FAILED)

    def _doom_below(self, failed: Operation, base: int) -> None:
        """Doom every other operation of the same kind that fills cells of the failed nodes, or of nodes below them."""
        stack = [node for node, moves, _ in failed.fragments if moves & 1]
        seen: set[int] = {id(node) for node in stack}
        cut_roots = [root for root in self._world.dead_roots if root.origin is not root]
        while stack:
            node = stack.pop()
            for op in node.ops:
                if op is not failed and not op.doomed and op.kind is failed.kind:
                    self._doom(op, base)
            left = node.kids_host if base else node.kids_device  # none of them is PRESENT below what has just failed
            if not left:
                continue
            cut_off = [top for root in cut_roots for top in (root.children or {}).values() if top.parent is node]
            for child in chain(cut_off, (node.children or {}).values()):
                if child.state[base] != ABSENT:
                    left -= 1
                    if id(child) not in seen:
                        seen.add(id(child))
                        stack.append(child)
                    if not left:
                        break

    def _doom(self, op: Operation, base: int) -> None:
        op.doomed = True
        if op.status is not None:
            self._unparked.append(op)  # it was parked, and waits no longer
        for node, moves, _ in op.fragments:
            for c in range(self._count):
                if moves >> c & 1:
                    self._world.doom(node, base + c)
        self._fail_from_start(op)

    def _fail_from_start(self, op: Operation) -> None:
        """Tell the leases of ``op`` that their pages are invalid from the first page that ``op`` covers."""
        self._fail_leases(op, min(_start(node) for node, _, _ in op.fragments) * self._world.config.page_size)

    def _fail_leases(self, op: Operation, valid: int) -> None:
        if op.kind is LOAD_BACK:
            self._world.counters.failed_loads += 1
        for lease in op.leases:
            lease.valid = valid if lease.valid is None else min(lease.valid, valid)
            if not lease.released:
                lease.hold = shorten_hold(self._world, lease.hold, lease.valid // self._world.config.page_size)

    # helpers

    def _start(
        self, op: Operation, chosen: Iterable[tuple[Node, int]], source: int, target: int
    ) -> tuple[Move, ...]:
        """Cover the chosen nodes, take slots for what is copied, and return the moves. The caller has made room."""
        world, count, shelves = self._world, self._count, self._world.shelves
        src, dst = [b""] * count, [b""] * count
        for node, mask in chosen:
            world.steps += 1
            world.cover(op, node, mask)
            for c in world.bits[mask]:
                held, place = node.slots[source * count + c], target * count + c
                taken = shelves[place].slots.take(len(held) // SLOT_BYTES)
                world.fill(node, place, taken, ARRIVING)
                src[c] += held
                dst[c] += taken
        return tuple([Move(self._kinds[c], src[c], dst[c]) for c in range(count) if src[c]])


def _moves(op: Operation, node: Node) -> int:
    return next(moves for covered, moves, _ in op.fragments if covered is node)


def _start(node: Node) -> int:
    return node.parent.end if node.parent is not None else 0
