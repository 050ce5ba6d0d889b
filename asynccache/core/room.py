"""Making room on a tier: which cells are evicted, in which order, and when a caller had better wait.

On the device, what was condemned ahead of time goes first, then the coldest, whether the host has a copy of it or not.
If the coldest cell is an only copy, its backup is started and awaited, unless the new copy would be the first to leave
the host again. If the host has no room for the backup, there are three steps. The device drops the cell if storage has
it. Else operations in flight on the host are awaited (those of storage only while storage is not late), and then
claims are let go. The last resort is to drop an only copy that the host would keep; such drops are counted.

On the host, copies of pages that stay on the device go first, so that both tiers together hold as many pages as they
can. Then the policy chooses. Nothing is evicted in vain: if evicting everything would not be enough, nothing is
touched. A backup that can wait, or that a drain makes, evicts from the host only if every cell that must go for it may
go; otherwise nothing is evicted (``make_gently``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from operator import gt, lt

from asynccache.core.eviction import take, withdraw
from asynccache.core.holds import Claims
from asynccache.core.ledger import (
    BACKUP_HOST,
    BACKUP_STORAGE,
    CLONE,
    COMPUTE,
    HOST,
    LOAD_BACK,
    ON_DEVICE,
    PREFETCH,
    Kind,
)
from asynccache.core.plan import Medium
from asynccache.core.settings import Access, WritePolicy
from asynccache.core.states import ABSENT, PRESENT
from asynccache.core.tree import Node
from asynccache.core.world import EARLY, LATE, World

Save = Callable[[Node], bool]

# Kinds of operations that own or pin host pages: those that end without storage, and all of them.
_BY_ITSELF = (BACKUP_HOST, LOAD_BACK, CLONE)
_ON_HOST = (*_BY_ITSELF, PREFETCH, BACKUP_STORAGE)


class Room(Enum):
    """The outcome of an attempt to make room."""

    FREE = "the slots are free"
    SHORT = "not now: too much is pinned"
    SAVING = "not now: backups were started, or wait for host pages that operations in flight have"
    SLICE = "not yet: the step budget is used up"


class Cost(Enum):
    """The copies that the host may give up for a backup."""

    ANY = "what the policy chooses"
    STORED = "copies that storage has: for a drain, which ends, since it saves only what storage lacks"
    SPARE = "copies that storage has and that were not made so that their device cells can go"


class RoomMaker:
    """Frees slots by eviction. ``save`` starts the backup of a node, and returns False if it cannot start now."""

    __slots__ = ("_claims", "_refusal", "_save", "_world")

    def __init__(self, world: World, save: Save, claims: Claims) -> None:
        self._world = world
        self._save = save
        self._claims = claims
        self._refusal: tuple[Node | None, tuple[int, ...], list[int], int, Cost] | None = None

    def make(self, tier: int, needs: Sequence[int], steps: int) -> Room:
        """Evict until ``needs[c]`` slots of every component ``c`` are free on ``tier``, in at most ``steps`` steps. A
        step evicts one node's cells, or starts all backups that are needed and evicts what needs none. Returns whether
        the slots are free, and if not, why."""
        base = tier * self._world.count
        shelves = self._world.shelves
        free = True
        for c, need in enumerate(needs):
            shelf = shelves[base + c]
            if need > shelf.slots.left:
                if need > shelf.reachable():
                    return Room.SHORT
                free = False
        if free:
            return Room.FREE
        for c, need in enumerate(needs):
            place = base + c
            while shelves[place].slots.left < need:
                if steps <= 0:
                    return Room.SLICE
                steps -= 1
                if self._evict_next(place, EARLY):
                    continue
                verdict = self._late(place, need)
                if verdict is not Room.FREE:
                    return verdict
        return Room.FREE

    def make_gently(self, needs: Sequence[int], cost: Cost) -> bool:
        """Evict host copies until ``needs[c]`` slots of every component are free on the host, and return True. If a
        cell would have to go that ``cost`` does not allow to go, evict nothing and return False."""
        world, count = self._world, self._world.count
        reach = [shelf.reachable() for shelf in world.shelves[count:]]
        if any(need > there for need, there in zip(needs, reach, strict=True)) or self._is_refused(needs, reach, cost):
            return False
        taken: dict[tuple[Node, int], None] = {}
        above: list[tuple[Node, list[int]]] = []
        enough, refusing = self._choose_gently(needs, cost, taken, above)
        for parent, stamps in reversed(above):             # undo what ``_choose_gently`` changed in the parents
            for c in range(count):
                withdraw(parent, count + c)
            parent.kids_host += 1
            parent.stamp[:] = stamps
        for parent, _ in above:
            for place in range(count + 1, 2 * count):
                if (parent, place) not in taken:
                    world.offer(parent, place)
        if not enough:
            self._refusal = refusing, tuple(needs), reach, world.recency.now, cost
        for node, place in taken:
            if not enough:
                world.offer(node, place)
            elif node.state[place] == PRESENT:  # else it went with another cell of its node
                self.evict(node, place)
        return enough

    def _is_refused(self, needs: Sequence[int], reach: Sequence[int], cost: Cost) -> bool:
        """Return True if the last refusal holds for ``needs``, too: no less is wanted at the same cost, no more can be
        reached, nothing was used since, and the same node is still in the way. During a drain many backups ask in a
        row, and without this test each would repeat the first one's search in vain."""
        if self._refusal is None:
            return False
        node, wanted, reached, now, cost_then = self._refusal
        if cost_then is not cost or now != self._world.recency.now:
            return False
        if any(map(lt, needs, wanted)) or any(map(gt, reach, reached)):
            return False
        return node is None or (node.state[self._world.count] == PRESENT and not self._may_go_gently(node, cost))

    def _choose_gently(
        self, needs: Sequence[int], cost: Cost, taken: dict[tuple[Node, int], None],
        above: list[tuple[Node, list[int]]],
    ) -> tuple[bool, Node | None]:  # fmt: skip
        """Take cells out of the orders of the host until what goes with them is enough for ``needs``, and add them to
        ``taken``. Return True if they are enough. Else return False and the node that may not go gently; None if no
        cell is left.

        As in an eviction, a node whose last child is taken waits among the others. Each parent is added to ``above``,
        with the stamps that it had."""
        world, count = self._world, self._world.count
        left = [shelf.slots.left for shelf in world.shelves[count:]]
        going: set[Node] = set()
        for c, need in enumerate(needs):
            place = count + c
            while left[c] < need:
                node = self.coldest(place, EARLY) or self.coldest(place, LATE)
                if node is None:
                    return False, None
                taken[node, place] = None
                if node in going:
                    continue
                if not self._may_go_gently(node, cost):
                    return False, node
                going.add(node)
                first = self._first(node, place)
                for also in range(first, count):
                    if node.state[count + also] == PRESENT:
                        left[also] += world.pages(node, also)
                if not first:
                    parent = node.parent
                    assert parent is not None
                    above.append((parent, parent.stamp[:]))
                    parent.kids_host -= 1
                    if not parent.kids_host and parent.parent is not None:
                        for each in range(count):
                            world.recency.uncover(parent, node, each)
                        world.offer(parent, count)
        return True, None

    def _late(self, place: int, need: int) -> Room:
        """Evict the coldest cell, and return FREE: the caller looks again whether that is enough. If the cell is an
        only copy on the device, start its backup and those of the other cells that must go, and return what to wait
        for."""
        node = self.coldest(place, LATE)
        if node is None:
            return Room.SHORT
        if place < self._world.count and not self.is_expendable(node, place):
            if self.is_outdone(node, place):
                self._give_up(node, place)
                return Room.FREE
            self._world.offer(node, place)
            if self._saving(place, need):
                return Room.SAVING
            return Room.FREE if self._evict_next(place, LATE) else Room.SHORT
        self.evict(node, place)
        return Room.FREE

    def is_expendable(self, node: Node, place: int) -> bool:
        """Return True if nothing that is wanted is lost when this cell leaves the device. That is so if there is no
        host, or if the host has a copy, or should not or could not have one."""
        world = self._world
        return not world.has_host or node.state[place + world.count] == PRESENT or not self._may_save(node, place)

    def is_outdone(self, node: Node, place: int) -> bool:
        """Return True if every cell that the host would have to give up for a copy of this device cell would outlive
        that copy. Then no copy is made. Return False if storage is to have a copy. A leaf leaves with all its
        components. Its first component without a copy decides, because on the host the components after it would go
        with that one, too."""
        world = self._world
        if world.access is Access.WRITE and not self._is_stored(node, place):
            return False
        if world.is_candidate(node, 0):
            place = next(c for c in range(place + 1)
                         if c == place or (node.state[c] == PRESENT and not self.is_expendable(node, c)))  # fmt: skip
        host = place + world.count
        if world.shelves[host].slots.left >= world.pages(node, place) or world.shelves[host].orders[EARLY].first.slices:
            return False
        other = self.coldest(host, LATE)
        if other is None:
            return False
        world.offer(other, host)
        return world.shelves[host].policy.sooner(node, other, place, world.recency.time, self._share(node))

    def _share(self, node: Node) -> float:
        """Return which part, 0 to 1, of the room that a backup of ``node`` takes on the host is for ``node`` itself.
        The rest is for the nodes above that the host lacks, too."""
        above, place = node.parent, self._world.count
        while above is not None and above.parent is not None and above.state[place] == ABSENT:
            above = above.parent
        start, parent = above.end if above is not None else 0, node.parent
        assert parent is not None
        return (node.end - parent.end) / (node.end - start)

    def _give_up(self, node: Node, place: int) -> None:
        """Evict a device cell that is outdone. FULL of a leaf goes with it."""
        if place and self._world.is_candidate(node, 0):
            self._world.condemn(node, 0)
        self._world.condemn(node, place)
        self.evict(node, place)

    def _may_go_gently(self, node: Node, cost: Cost) -> bool:
        """Return True if storage has the host copy of ``node``, and ``cost`` allows for it. A copy that was made so
        that its device cell can go is not spare. If it went, the request that waits for the device cell would start its
        backup anew, and again find the copy gone, as often as there are backups that can wait."""
        if node.condemned and cost is Cost.SPARE:
            return False
        count, stored = self._world.count, self._world.stored(node)
        return all(stored >> c & 1 for c in range(count) if node.state[count + c] == PRESENT)

    def _saving(self, place: int, need: int) -> bool:
        """Start backups of the coldest cells until they cover what is missing, and evict those that need no backup.
        Return True if there is anything to wait for."""
        world = self._world
        missing = need - world.shelves[place].slots.left
        while missing > 0 and (node := self.coldest(place, LATE)) is not None:
            if self.is_expendable(node, place):
                missing -= world.pages(node, place)
                self.evict(node, place)
                continue
            if self.is_outdone(node, place):
                missing -= world.pages(node, place)
                self._give_up(node, place)
                continue
            saved = self._save(node)
            world.offer(node, place)
            if saved:
                world.condemn(node, place)
                missing -= world.pages(node, place)
            elif self._is_stored(node, place):
                return False
            elif self.host_is_busy() or not self._claims.let_go(True):
                break
        return self.host_is_busy()

    def _is_stored(self, node: Node, place: int) -> bool:
        """Return True if storage has all that would leave the device with this cell."""
        first = 0 if self._world.is_candidate(node, 0) else place
        stored = self._world.stored(node)
        return all(stored >> c & 1 for c in range(first, self._world.count) if node.state[c] == PRESENT)

    def host_is_busy(self) -> bool:
        """Return True if an operation is in flight that will give host pages back or let go of some, and that may be
        awaited."""
        return any(self._world.ledger.count[kind] for kind in self._awaited())

    def something_ends(self) -> bool:
        """Return True if any operation is in flight that may be awaited."""
        ledger = self._world.ledger
        kinds = ON_DEVICE if self._world.storage_is_late else (*ON_DEVICE, PREFETCH, BACKUP_STORAGE)
        failing = ledger.count[COMPUTE] and any(op.kind is COMPUTE and op.doomed for op in ledger.ops.values())
        return any(ledger.count[kind] for kind in kinds) or bool(failing)

    def busy(self) -> tuple[int, ...]:
        """Return the ids of the operations that ``host_is_busy`` looks for."""
        kinds = self._awaited()
        return tuple([op.id for op in self._world.ledger.ops.values() if op.kind in kinds])

    def _awaited(self) -> tuple[Kind, ...]:
        return _BY_ITSELF if self._world.storage_is_late else _ON_HOST

    def _may_save(self, node: Node, place: int) -> bool:
        """Return True if a backup of this cell is wanted and could ever fit on the host."""
        host = self._world.shelves[self._world.count :]
        fits = node.end <= host[0].slots.capacity and self._world.pages(node, place) <= host[place].slots.capacity
        return fits and self._wants_backup(node)

    def _wants_backup(self, node: Node) -> bool:
        selective = self._world.config.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        return not node.unsavable and not node.root.dead and (not selective or node.passes > 1)

    def _evict_next(self, place: int, late: int) -> bool:
        node = self.coldest(place, late)
        if node is None:
            return False
        if late == EARLY and self._is_wanted_again(node, place):
            self._world.reprieve(node)
        else:
            self.evict(node, place)
        return True

    def _is_wanted_again(self, node: Node, place: int) -> bool:
        """Return True if a device cell that was condemned as outdone is so no more: the host has room by now, or there
        is a store that is to have it."""
        if place >= self._world.count:
            return False
        return not self.is_expendable(node, place) and not self.is_outdone(node, place)

    def coldest(self, place: int, late: int) -> Node | None:
        """Take the cell that goes next out of its order, and return its node; None if no candidate is left. Other cells
        that turn out on the way to wait in the wrong place are put right."""
        world, c = self._world, place % self._world.count
        shelf, now = world.shelves[place], world.recency.time
        order = shelf.orders[late]
        first = order.first
        while True:
            node = first.oldest() if first.slices else shelf.policy.choose(order, now) if order.rest else None
            if node is None:
                assert not any(queue.slices for queue in order.rest), "a policy chooses while a candidate waits"
                return None
            stamp = take(node, place)
            if not world.is_candidate(node, place):
                continue  # it is offered again when it becomes a candidate
            if node.stamp[c] == stamp:
                return node
            world.offer(node, place)

    def evict(self, node: Node, place: int) -> None:
        """Evict a candidate. A leaf of the tier goes whole. Any other node gives up this component and those after it,
        which depend on it."""
        world = self._world
        count = world.count
        tier = place // count
        base = tier * count
        first = self._first(node, place)
        for c in range(count - 1, first - 1, -1):
            if node.state[base + c] == PRESENT:
                self._count(node, tier, first, c)
                if c == 0:
                    world.publish((Medium.GPU, Medium.CPU)[tier], False, node)
                world.vacate(node, base + c)
        if first == 0:
            world.remove_if_empty(node, tier)

    def _first(self, node: Node, place: int) -> int:
        """Return the first of the components that ``node`` gives up if its cell at ``place`` is evicted now."""
        component = place % self._world.count
        return 0 if self._world.is_candidate(node, place - component) else component

    def _count(self, node: Node, tier: int, first: int, component: int) -> None:
        """Count the eviction of one cell. ``first``: the first component that leaves ``node`` with ``component``. Cells
        that were given up on purpose, and those that leave with them, do not count as lost."""
        world = self._world
        pages = world.pages(node, component)
        if tier == HOST:
            world.counters.evicted_host += pages
            return
        world.counters.evicted_device += pages
        saved = node.state[world.count + component] != ABSENT or world.stored(node) >> component & 1
        given_up = node.condemned & (2 << component) - (1 << first)
        saved = saved or (given_up and self._may_save(node, component))
        if world.has_host and not saved and not node.root.dead and (self._wants_backup(node) or node.unsavable):
            world.counters.lost_pages += pages
