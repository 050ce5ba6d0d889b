"""The world: the core's mutable state, and the few steps that change it.

Every change of a cell goes through ``fill``, ``arrive``, ``doom`` or ``vacate``, every pin through the methods whose
names begin with ``pin`` or ``unpin``, and every split through ``split``. These keep the sums (evictable pages, children
per tier) exact, so nothing is recounted.

Pins. FULL: a node counts the pins that end at it plus its pinned children; the count reaches the parent only when it
leaves or returns to zero, so an unpinned node heads a wholly unpinned subtree. The other components count each node
alone. A pin of component c comes with pins of all components before it. So a pinned cell never goes along with another
cell that is evicted.

Steps. Whatever a core call does for cells or nodes other than those on its request's own path, it counts in ``steps``:
a cell that is looked at in an eviction order, a node that a pass visits, a node whose transfer begins or ends. A call
may take ``slice_steps`` of them. Every loop takes at least one step, however much the call has done before, and ends
when the call is ``spent``. So a call always gets on, and never takes long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from asynccache.core import components
from asynccache.core.eviction import EvictionPolicy, Lru, Order, Queue, Recency, is_idle, withdraw
from asynccache.core.keys import HASH_BYTES, TOKEN_BYTES
from asynccache.core.ledger import DEVICE, HOST, NOWHERE, Ledger, Operation, SlotPool
from asynccache.core.plan import (
    EMPTY,
    FREED,
    MOST_BYTES,
    MOST_OPS,
    SLOT_BYTES,
    BackupHost,
    Clone,
    Effect,
    Ended,
    LoadBack,
    Medium,
    Move,
    Plan,
    Publish,
    Status,
)
from asynccache.core.policies import make_policy
from asynccache.core.settings import Access, ComponentKind, CoreConfig
from asynccache.core.tree import (
    ABSENT,
    LEAVING,
    MAY,
    PRESENT,
    Ghosts,
    Node,
    Root,
    cut,
    cut_off,
    illegal,
    link,
    unlink,
    walk,
)
from asynccache.errors import InvariantViolation

# The two eviction orders of a place: cells in EARLY go before those in LATE.
EARLY: Final = 0
LATE: Final = 1
PASSED: Final = 16

# How many bits of ``Node.stored`` are for components. The era stands above them.
_BITS = len(ComponentKind)
_MASK = (1 << _BITS) - 1


class Shelf:
    """One component on one tier.

    On the device, condemned cells go early; on the host, copies of pages that stay on the device do. ``policy`` chooses
    among the rest. The cache's own policy chooses only where pages leave the last tier, and among windows and states
    only if it wants to. Everywhere else the policy is ``Lru``. Pages that leave a device for a host are not lost, and
    by recency the pages of one path leave the device together. If only the end of a path left, the host, which is
    closed towards the root, would have to hold the rest of the path, too, while that is still on the device.
    """

    __slots__ = ("evictable", "orders", "policy", "slots")

    def __init__(self, place: int, capacity: int, policy: EvictionPolicy, given: list[bytes] | None = None) -> None:
        self.slots = SlotPool(capacity, given)
        self.evictable = 0
        """How many slots eviction could free."""
        self.policy = policy
        self.orders = (Order(place, 0), Order(place, type(policy).queues))
        """The cells that may be evicted, those that go EARLY and those that go LATE."""

    def reachable(self) -> int:
        """Return how many slots are free or could be freed by eviction."""
        return self.slots.left + self.evictable


class Counters:
    """Counts since the start, and how many nodes there are now."""

    __slots__ = ("evicted_device", "evicted_host", "failed_loads", "lost_pages", "nodes", "splits")

    def __init__(self) -> None:
        self.nodes = 0
        """How many nodes there are now. ``evicted_*`` and ``lost_pages`` count slots, ``failed_loads`` operations."""
        self.splits = 0
        self.evicted_device = 0
        self.evicted_host = 0
        self.lost_pages = 0
        self.failed_loads = 0


class World:
    """The tree, the shelves, the ledger, and the plan under construction."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.page_bytes = config.page_size * TOKEN_BYTES
        self.components = components.build(config)
        self.auxiliary = self.components[1:]
        self.count = len(self.components)
        self.dividing = sum(c.divides for c in self.components)
        self.swa = next((c.index for c in self.components if c.index and c.divides), 0)
        """The number of the component that keeps a window; 0, which is FULL's, if there is none."""
        self.mamba = next((c.index for c in self.components if not c.divides), 0)
        """The number of the component that does not divide; 0 if there is none."""
        self.has_host = config.components[0].host > 0
        capacities = [c.device for c in config.components] + [c.host for c in config.components]
        self.recency = Recency()
        self.policy = make_policy(config)
        self.last_base = self.count if self.has_host else 0
        """The place of FULL on the last tier, where the policy of the cache chooses."""
        self.shelves: list[Shelf] = []
        for place, capacity in enumerate(capacities):
            chooses = place >= self.last_base and not (place % self.count and self.policy.full_only)
            given: list[bytes] | None = [] if config.note_given and place < self.count else None
            self.shelves.append(Shelf(place, capacity, self.policy if chooses else Lru(), given))
        self.bits = tuple(tuple(c for c in range(self.count) if mask >> c & 1) for mask in range(1 << self.count))
        self.ledger = Ledger()
        self.roots: dict[bytes, Root] = {}
        self.dead_roots: list[Root] = []
        self.loose: list[Node] = []
        """Nodes below dead roots that may go now: their last pin or child on a tier has gone. ``Invalidation`` drops
        them."""
        self.counters = Counters()
        self.ghosts = Ghosts(config.remember) if config.remember else None
        self.clean_pages = 0
        """How many pages of FULL are PRESENT on both tiers."""
        self.condemned_pages = 0
        """How many pages of FULL are condemned."""
        self.access = Access.WRITE if config.storage else Access.NONE
        self.era = 0
        self.storage_is_late = False
        self.may_split = True
        """False while a call must not split a node; the runtime sets it."""
        self.behind = False
        """True if work is left for ``follow_up``."""
        self.steps = self.passed = 0
        """What all calls together have taken in steps, and how many cells in eviction orders they have ``passed`` over
        because they were no candidates; ``PASSED`` of these count as a step."""
        self.limit = config.slice_steps
        """How high ``steps`` may be at the end of this call: higher if the call pins a long path for itself alone. Its
        cells come back into the orders when the pins go, and the next slice has to pass over them again."""
        self._era_began = 0
        self._effects: list[Effect] = []
        self._backups: list[int] = []
        self._moves: list[tuple[Move, ...]] = []
        self._moved = 0
        self._ended: list[Ended] = []
        self.freed = False

    # the plan under construction

    def effect(self, effect: Effect) -> None:
        """Add an effect to the plan under construction: any but a copy."""
        self._effects.append(effect)

    def copy(self, effect: LoadBack | Clone) -> None:
        """Add a copy to the plan under construction, behind the backups that were decided before it."""
        if self._backups:
            self._join_backups()
        self._effects.append(effect)

    def backup(self, op: Operation, moves: tuple[Move, ...]) -> None:
        """Add a copy to the host to the plan under construction: an effect with the backups before it (``BackupHost``)
        if no other copy came in between, and they do not become too many together."""
        size = 0
        for move in moves:
            size += len(move.src)
        if self._backups and (len(self._backups) >= MOST_OPS or self._moved + size > MOST_BYTES):
            self._join_backups()
        self._backups.append(op.id)
        self._moves.append(moves)
        self._moved += size

    def _join_backups(self) -> None:
        moves = self._moves[0]
        if len(self._backups) > 1:
            every = [move for some in self._moves for move in some]
            moves = tuple([
                Move(kind, b"".join([move.src for move in every if move.component == kind]),
                     b"".join([move.dst for move in every if move.component == kind]))
                for kind in sorted({move.component for move in every})
            ])  # fmt: skip
        self._effects.append(BackupHost(tuple(self._backups), moves))
        self._backups, self._moves, self._moved = [], [], 0

    def end(self, op: Operation, status: Status) -> None:
        """Close ``op``, which ended with ``status``, and say so in the plan."""
        self.ledger.close(op)
        self._ended.append(Ended(op.id, status))
        self.freed = True

    def spent(self) -> bool:
        """Return True if this call has taken all the steps that it may take."""
        return self.steps >= self.limit

    def plan(self) -> Plan:
        """Return what this call decided, and begin the plan of the next call, with steps of its own."""
        self.limit = self.steps + self.config.slice_steps
        if self._backups:
            self._join_backups()
        if not self._effects and not self._ended:
            if not self.freed:
                return EMPTY
            self.freed = False
            return FREED
        plan = Plan(tuple(self._effects), tuple(self._ended), self.freed)
        self._effects, self._ended, self.freed = [], [], False
        return plan

    def publish(self, medium: Medium, stored: bool, node: Node) -> None:
        """Announce that ``node``'s FULL pages appeared on ``medium`` (``stored``), or left it, if events are wanted."""
        root = node.root
        if self.config.publish and node.hashes and not root.mute:
            parent = node.parent
            before = parent.hashes[-HASH_BYTES:] if parent is not None and parent.parent is not None else b""
            self.effect(Publish(medium, stored, before, node.hashes, node.key if stored else b"", root.hashes))

    def find(self, space: bytes, key: bytes) -> tuple[list[Node], int]:
        """Follow ``key`` in the namespace ``space``, and return what ``walk`` returns; nothing if there is no such
        namespace."""
        root = self.roots.get(space)
        return ([], 0) if root is None else walk(root, key, 0, self.page_bytes)

    def enter(self, space: bytes) -> Root:
        """Return the root of the namespace ``space``, which is made if there is none, and count one more holder of
        it."""
        root = self.roots.get(space)
        if root is None:
            root = self.roots[space] = Root(space, self.count)
        root.holders += 1
        return root

    def leave(self, root: Root) -> None:
        """Undo ``enter``. A namespace that nobody holds and nothing hangs below is forgotten."""
        root = root.origin
        root.holders -= 1
        self._forget_if_idle(root)

    def _forget_if_idle(self, root: Root) -> None:
        if not root.holders and root.children is None and self.roots.get(root.hashes) is root:
            del self.roots[root.hashes]

    # storage

    def stored(self, node: Node) -> int:
        """Return a bit for each component of ``node`` that is known to be in a store."""
        stored = node.stored
        return stored & _MASK if stored >> _BITS == self.era else 0

    def note_stored(self, node: Node, mask: int, op: Operation) -> None:
        """Note that ``op`` has put the components in ``mask`` (a bit each) of ``node`` into a store, or got them from
        one. Nothing is noted if ``op`` began before the last detachment, since its store may be the one that left."""
        if op.id >= self._era_began:
            node.stored = self.era << _BITS | self.stored(node) | mask

    def forget_stored(self) -> None:
        """Forget for every page that it is stored: a store was detached, and nobody knows which pages only that store
        had. Pages that operations in flight put into a store do not count either. Only the era changes, so no node need
        be touched."""
        self.era += 1
        self._era_began = self.ledger.next

    # cells

    def pages(self, node: Node, component: int) -> int:
        """Return how many slots ``component`` takes for this node."""
        return len(node.key) // self.page_bytes if self.components[component].divides else 1

    def fill(self, node: Node, place: int, slots: bytes, state: int) -> None:
        """Give an ABSENT cell its ``slots``, and turn it into an ARRIVING or PRESENT one, as ``state`` says."""
        if not MAY[node.state[place]][state]:
            raise illegal(node.state[place], state)
        node.state[place] = state
        node.slots[place] = slots
        if place == 0:
            node.parent.kids_device += 1  # type: ignore[union-attr]
            self.reprieve(node.parent)  # type: ignore[arg-type]  # no leaf any more
        elif place == self.count:
            node.parent.kids_host += 1  # type: ignore[union-attr]
        if state == PRESENT:
            self._became_present(node, place)
        if place < self.count:
            self.reorder(node, place + self.count)

    def arrive(self, node: Node, place: int) -> None:
        """Turn an ARRIVING cell into a PRESENT one."""
        if not MAY[node.state[place]][PRESENT]:
            raise illegal(node.state[place], PRESENT)
        node.state[place] = PRESENT
        self._became_present(node, place)

    def doom(self, node: Node, place: int) -> None:
        """Turn an ARRIVING cell into a LEAVING one."""
        if not MAY[node.state[place]][LEAVING]:
            raise illegal(node.state[place], LEAVING)
        node.state[place] = LEAVING

    def vacate(self, node: Node, place: int) -> None:
        """Turn a cell of any other state into an ABSENT one, and free its slots."""
        state, slots, count = node.state[place], node.slots[place], self.count
        if not MAY[state][ABSENT]:
            raise illegal(state, ABSENT)
        shelf = self.shelves[place]
        twin = place + count if place < count else place - count
        if node.condemned >> place % count & 1:
            if place >= count:
                self.reprieve(node)
            elif not place:
                self.condemned_pages -= len(slots) // SLOT_BYTES
            node.condemned &= ~(1 << place % count)
        if state == PRESENT:
            pages = len(slots) // SLOT_BYTES
            if not node.pins[place]:
                shelf.evictable -= pages
            if not place % count and node.state[twin] == PRESENT:
                self.clean_pages -= pages
            withdraw(node, place)
        node.state[place] = ABSENT
        node.slots[place] = b""
        shelf.slots.give(slots)
        self.freed = True
        if place == 0:
            self._child_left(node, DEVICE)
        elif place == count:
            self._child_left(node, HOST)
        self.reorder(node, twin)

    def _became_present(self, node: Node, place: int) -> None:
        count = self.count
        twin = place + count if place < count else place - count
        if not node.pins[place]:
            self.shelves[place].evictable += len(node.slots[place]) // SLOT_BYTES
            self.offer(node, place)
        if not place % count and node.state[twin] == PRESENT:
            self.clean_pages += len(node.slots[place]) // SLOT_BYTES
        if place >= count:
            self.reorder(node, twin)

    def _child_left(self, node: Node, tier: int) -> None:
        parent = node.parent
        assert parent is not None
        if tier == DEVICE:
            parent.kids_device -= 1
            left = parent.kids_device
        else:
            parent.kids_host -= 1
            left = parent.kids_host
        if not left and parent.parent is not None:
            for c in range(self.count):
                self.recency.uncover(parent, node, c)
            self.offer(parent, tier * self.count)

    # eviction orders

    def eviction_order(self, node: Node, place: int) -> int:
        """Return the order in which this cell waits to be evicted. It is EARLY on the device for what was condemned,
        and on the host for a copy of what stays on the device; else LATE."""
        count = self.count
        if place < count:
            return EARLY if node.condemned >> place & 1 else LATE
        place -= count
        return EARLY if node.state[place] != ABSENT and not node.condemned & (1 | 1 << place) else LATE

    def is_candidate(self, node: Node, place: int) -> bool:
        """Return True if this cell may be evicted now: it is PRESENT and not pinned, and if it is FULL's, no child has
        FULL on that tier."""
        if node.state[place] != PRESENT or node.pins[place]:
            return False
        if place == 0:
            return not node.kids_device
        return place != self.count or not node.kids_host

    def offer(self, node: Node, place: int) -> None:
        """Put a cell into its eviction order, if it is a candidate and waits in none yet."""
        if node.entry[place] is None and self.is_candidate(node, place):
            self.queue(node, place, self.eviction_order(node, place)).put(node.stamp[place % self.count], node)
        if node.root.dead and not place % self.count and self.is_candidate(node, place):
            self.loose.append(node)

    def queue(self, node: Node, place: int, order: int) -> Queue:
        """Return the queue in which this cell waits, or would wait, in ``order``, EARLY or LATE, of its place."""
        queues, c = self.shelves[place].orders[order], place % self.count
        rest = queues.rest
        if not rest or node.stamp[c] < 0:
            return queues.first
        return rest[self.policy.queue(node, c)] if len(rest) > 1 else rest[0]

    def reorder(self, node: Node, place: int) -> None:
        """Take a cell out of its eviction order and offer it anew: something that decides where it waits has
        changed."""
        if node.state[place] == PRESENT:
            withdraw(node, place)
            if not node.pins[place]:
                self.offer(node, place)

    def condemn(self, node: Node, c: int) -> None:
        """Note that the device cell of component ``c``, a candidate or about to be one, is the next to go. From now on
        its copy on the host is more than a duplicate, so the copy does not go early. If ``c`` is FULL, the leaf
        ``node`` goes whole."""
        if not node.condemned >> c & 1:
            node.condemned |= 1 << c
            if not c:
                self.condemned_pages += self.pages(node, 0)
            self._reorder_all(node)

    def reprieve(self, node: Node) -> None:
        """Undo ``condemn`` for all components: a request wants ``node`` after all, or the node has lost the host copy
        that made it expendable."""
        if node.condemned:
            if node.condemned & 1:
                self.condemned_pages -= self.pages(node, 0)
            node.condemned = 0
            self._reorder_all(node)

    def _reorder_all(self, node: Node) -> None:
        for place in range(2 * self.count):
            self.reorder(node, place)

    def set_idle(self, node: Node, c: int) -> bool:
        """Mark component ``c`` of ``node`` as idle: no match is likely to end where it would be needed. Return True if
        it was idle or ended before."""
        if is_idle(node, c):
            return True
        self._restamp(node, c, self.recency.idle)
        return False

    def _restamp(self, node: Node, c: int, mark: Callable[[Node, int], None]) -> None:
        """Have ``mark`` change the stamp of component ``c`` of ``node``, and have the cells wait by the new stamp. They
        leave their queues first, because a cell is found in its queue by its stamp."""
        withdraw(node, c)
        withdraw(node, c + self.count)
        mark(node, c)
        self.reorder(node, c)
        self.reorder(node, c + self.count)

    def end_conversation(self, node: Node) -> None:
        """Have all cells of ``node`` go before all others: the conversation that it is private to is over."""
        if self.policy.learns:
            self.policy.end(node)
        for c in range(self.count):
            self._restamp(node, c, self.recency.end)

    # pins

    def pin(self, node: Node, tier: int, top: int) -> None:
        """Pin components 0..top of ``node`` on ``tier``."""
        self.pin_full(node, tier)
        if top:
            base = tier * self.count
            for place in range(base + 1, base + top + 1):
                self.pin_cell(node, place)

    def unpin(self, node: Node, tier: int, top: int) -> None:
        """Undo ``pin``."""
        if top:
            base = tier * self.count
            for place in range(base + top, base, -1):
                self.unpin_cell(node, place)
        self.unpin_full(node, tier)

    # ``pin_full`` and ``unpin_full`` walk up for as long as counts leave zero or return to it. FULL is closed towards
    # the root, so of the nodes whose count changes like that, the deepest PRESENT one and all above it are PRESENT, and
    # only that deepest one can be a leaf of the tier.

    def pin_full(self, node: Node, tier: int) -> None:
        """Count a pin of FULL that ends at ``node``."""
        place, deepest = tier * self.count, None
        parent = node.parent
        while parent is not None:
            counts = node.pins
            pins = counts[place]
            counts[place] = pins + 1
            if pins:
                break
            if deepest is None and node.state[place] == PRESENT:
                deepest = node
            node = parent
            parent = node.parent
        if deepest is not None:
            self.shelves[place].evictable -= deepest.end - node.end
            if deepest.condemned and not place:
                self.reprieve(deepest)

    def unpin_full(self, node: Node, tier: int) -> None:
        """Undo ``pin_full``."""
        place, deepest = tier * self.count, None
        parent = node.parent
        while parent is not None:
            counts = node.pins
            counts[place] = pins = counts[place] - 1
            if pins:
                break
            if deepest is None and node.state[place] == PRESENT:
                deepest = node
            node = parent
            parent = node.parent
        if deepest is not None:
            self.shelves[place].evictable += deepest.end - node.end
            self.offer(deepest, place)

    def pin_cell(self, node: Node, place: int) -> None:
        """Count a pin of one auxiliary cell."""
        node.pins[place] += 1
        if node.pins[place] == 1 and node.state[place] == PRESENT:
            self.shelves[place].evictable -= len(node.slots[place]) // SLOT_BYTES

    def unpin_cell(self, node: Node, place: int) -> None:
        """Undo ``pin_cell``."""
        node.pins[place] -= 1
        if not node.pins[place] and node.state[place] == PRESENT:
            self.shelves[place].evictable += len(node.slots[place]) // SLOT_BYTES
            if node.entry[place] is None:
                self.offer(node, place)

    def pin_run(self, node: Node, c: int, tier: int, low: int) -> int:
        """Pin auxiliary component ``c`` on ``tier``, on the nodes from ``node`` upwards that end after page ``low``; if
        it does not divide, on ``node`` alone. Return the page at which the pinned nodes begin; NOWHERE if there are
        none."""
        place, border, pages = tier * self.count + c, NOWHERE, 0
        divides = self.components[c].divides
        parent = node.parent
        while parent is not None and node.end > low:
            pins = node.pins[place]
            node.pins[place] = pins + 1
            if not pins and node.state[place] == PRESENT:
                pages += len(node.slots[place])
            border = parent.end
            if not divides:
                break
            node = parent
            parent = node.parent
        self.shelves[place].evictable -= pages // SLOT_BYTES
        return border

    def unpin_run(self, node: Node, c: int, tier: int, low: int, border: int) -> int:
        """Undo ``pin_run``, which returned ``low``, on the nodes that end at page ``border`` or before. Return the page
        at which the nodes begin that stay pinned; NOWHERE if there are none."""
        place, rest = tier * self.count + c, NOWHERE
        divides = self.components[c].divides
        while node.end > low:
            parent = node.parent
            assert parent is not None
            if node.end <= border:
                self.unpin_cell(node, place)
            else:
                rest = parent.end
            if not divides:
                break
            node = parent
        return rest

    # shape

    def add(self, parent: Node, key: bytes, hashes: bytes) -> Node:
        """Hang a new node below ``parent`` and return it. ``key``: its pages. ``hashes``: theirs, or b""."""
        node = Node(key, parent.end + len(key) // self.page_bytes, parent, self.count)
        link(parent, node, self.page_bytes)
        self.counters.nodes += 1
        node.hashes = hashes
        return node

    def split(self, node: Node, pages: int) -> Node:
        """Split ``node`` after ``pages`` pages, and return the new prefix. ``node`` itself stays the suffix, with its
        leases.

        Raises:
            InvariantViolation: nodes may not be split now: the caller does not hold the tree lock.
        """
        if not self.may_split:
            raise InvariantViolation("a node would be split by a call that does not hold the tree lock")
        self.reprieve(node)
        prefix = cut(node, pages, self.page_bytes)
        prefix.stored &= (1 << self.dividing) - 1 | ~_MASK  # what does not divide belongs to the suffix
        self.counters.nodes += 1
        self.counters.splits += 1
        self.ledger.divide(prefix, node, self.dividing)
        for component in self.components:
            if component.divides:
                for place in (component.index, component.index + self.count):
                    self._divide(prefix, node, place, 4 * pages)
        for place in range(2 * self.count):
            self.offer(prefix, place)
        return prefix

    def _divide(self, prefix: Node, node: Node, place: int, at: int) -> None:
        state, slots, pins = node.state[place], node.slots[place], node.pins[place]
        prefix.state[place] = state
        prefix.slots[place], node.slots[place] = slots[:at], slots[at:]
        if place < self.count:
            prefix.stamp[place] = node.stamp[place]
        if place % self.count:
            prefix.pins[place] = pins
            return
        tier = place // self.count
        prefix.pins[place] = (pins > 0) + sum(tier in op.tiers for op in node.ops)
        if tier == DEVICE:
            prefix.kids_device = int(state != ABSENT)
        else:
            prefix.kids_host = int(state != ABSENT)

    def cut_off(self, top: Node) -> None:
        """Take ``top`` and all below it out of reach: a batch that was to compute ``top`` has failed. What was
        announced of these pages is withdrawn. They leave as pages of a dead root do, when nothing pins them any
        more."""
        left = top.root.left
        nodes = cut_off(top, self.page_bytes)
        for node in nodes:
            if left is not None:
                left.append(node.hashes)
            for medium, place in ((Medium.GPU, 0), (Medium.CPU, self.count)):
                if node.state[place] == PRESENT:
                    self.publish(medium, False, node)
        top.root.mute = True
        self.dead_roots.append(top.root)
        self.loose.extend(nodes)
        self.freed = True

    def remove_if_empty(self, node: Node, tier: int) -> None:
        """Take ``node`` out of the tree if it has FULL on no tier, and then every node above it that this leaves
        childless and empty. ``tier``: where its FULL was last."""
        count = self.count
        while (
            node.parent is not None
            and node.children is None
            and node.state[0] == ABSENT
            and node.state[count] == ABSENT
        ):
            page = node.key[: self.page_bytes]
            if node.ops:
                self.ledger.forget(node)
            parent = unlink(node, page)
            if (left := node.root.left) is not None:
                left.append(node.hashes)
            if self.ghosts is not None and not node.root.dead:
                stored = node.stored & 1 and node.stored >> _BITS == self.era
                self.ghosts.note(parent, page, 3 if stored else tier + 1)
            if self.policy.learns:
                self.policy.forget(node, parent, page, self.recency.time)
            self.counters.nodes -= 1
            node = parent
        if node is node.root:
            self._forget_if_idle(node.root)

    # operations

    def cover(self, op: Operation, node: Node, moves: int) -> None:
        """Have ``op`` cover ``node``, and pin there the components up to the last one that it moves (a bit each in
        ``moves``)."""
        top = moves.bit_length() - 1
        op.fragments.append((node, moves, top))
        node.ops = (*node.ops, op)
        for tier in op.tiers:
            self.pin(node, tier, top)

    def uncover(self, op: Operation) -> None:
        """Drop the pins of all that ``op`` covers."""
        for node, _, top in op.fragments:
            for tier in op.tiers:
                self.unpin(node, tier, top)

    def valid_end(self, path: Sequence[Node], end: int, host: bool) -> int:
        """Return the longest end of a match along ``path``, at most page ``end``, that every component accepts.
        ``host``: whether data counts that only the host has."""
        return self.agreed_end(path, self.components[0].longest_end(path, end, host), host)

    def agreed_end(self, path: Sequence[Node], end: int, host: bool) -> int:
        """Return ``valid_end`` for an ``end`` that FULL accepts: it accepts every shorter one, so only the others are
        asked."""
        agreed = 1
        while end and agreed < self.count:
            for component in self.auxiliary:
                before, end = end, component.longest_end(path, end, host)
                agreed = agreed + 1 if end == before else 2
                if agreed == self.count:
                    break
        return end


def split_at(world: World, node: Node, end: int) -> Node:
    """Split ``node`` at position ``end``, in pages from the root, and return the new prefix."""
    return world.split(node, end - node.parent.end)  # type: ignore[union-attr]


# How many of a node's children are listed in a step. A list of them is one copy of a dictionary's keys.
LISTED = 256


class Walk:
    """A walk over the nodes below ``roots``, a node at a time; between two steps the tree may change. A node that is in
    the tree from the first step to the last is visited once, also if it was split or the node below it has left.
    """

    __slots__ = ("_levels", "_roots", "_world")

    def __init__(self, world: World, roots: Iterable[Node]) -> None:
        self._world = world
        self._roots = list(roots)
        self._levels: list[tuple[Node, list[bytes]]] = []
        """The nodes to visit, by the visited node above each and its own first page. The node itself would not do: when
        it is split, the upper piece is a new object."""
        world.steps += len(self._roots) // LISTED

    def over(self) -> bool:
        """Return True if there is nothing left to visit."""
        return not self._levels and not self._roots

    def peek(self) -> Node | None:
        """Return the node that ``step`` would visit; None if what hung there has left the tree, or it is a root."""
        if not self._levels:
            return None
        above, pages = self._levels[-1]
        return above.children.get(pages[-1]) if above.children is not None else None

    def step(self) -> Node | None:
        """Visit the next node, and return what ``peek`` returns."""
        node = self.peek()
        below: Node | None = node
        if self._levels:
            pages = self._levels[-1][1]
            pages.pop()
            if not pages:
                self._levels.pop()
        else:
            below = self._roots.pop()
        self._world.steps += 1
        if below is not None and below.children is not None:
            self._levels.append((below, list(below.children)))
            self._world.steps += len(below.children) // LISTED
        return node
