"""Making room on a tier: which cells are evicted, in which order, and when a caller had better wait.

On the device, what was condemned ahead of time goes first, then the coldest cell. If the coldest cell is an only copy,
its backup is started and awaited, unless the new copy would be the first that the host evicts again. If the host has no
room for the backup, three things are tried in turn:

* The cell is dropped if storage has it.
* Operations in flight on the host are awaited; those of storage only while storage is not late.
* Claims are released.

If all of that gives nothing, an only copy is dropped that the host would have kept. Such drops are counted.

On the host, copies of pages that stay on the device go first, so that both tiers together hold as many pages as they
can. Then the policy chooses.

Nothing is evicted in vain: if evicting everything would not be enough, nothing is touched. Backups that can wait, and
those of a drain, are gentler still (``make_gently``): they evict from the host only if every cell that must go for them
may go.

A call that runs out of steps says SLICE. When it is made again it goes on from there: what was evicted stays evicted.
Backups that it has started are awaited first (SAVING), because they take room on the host, and a slice that did not
wait for them would start others, which evict the new copies again.
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
from asynccache.core.tree import ABSENT, PRESENT, Node
from asynccache.core.world import EARLY, LATE, PASSED, World

# The most copies, of pages that storage does not take, that a drain passes over for one backup.
_MOST_IN_THE_WAY = 64

# Kinds of operations that own or pin host pages: those that end without storage, and all of them.
_BY_ITSELF = (BACKUP_HOST, LOAD_BACK, CLONE)
_ON_HOST = (*_BY_ITSELF, PREFETCH, BACKUP_STORAGE)


class Room(Enum):
    """How an attempt to make room, or to start a backup in it, went."""

    FREE = "the slots are free, or the backup was started"
    SHORT = "not now: too much is pinned"
    SAVING = "not now: backups were started, or wait for host pages that operations in flight have"
    SLICE = "not yet: the call has taken all its steps"


# Reading a member from its Enum takes time, a module's name almost none.
FREE, SHORT, SAVING, SLICE = Room


class Verdict(Enum):
    """The decision about a device cell that goes next: whether it is copied first."""

    EXPENDABLE = "it goes: there is a copy, or none is wanted"
    OUTDONE = "it goes without a copy, because the host would give up that copy first"
    UNSAVED = "it is copied to the host before it goes"
    OPEN = "not known yet: the call has taken all its steps"


EXPENDABLE, OUTDONE, UNSAVED, OPEN = Verdict


class Cost(Enum):
    """The copies that the host may give up for a backup."""

    ANY = "what the policy chooses"
    STORED = "copies that storage has: for a drain, which ends, since it saves only what storage lacks"
    SPARE = "copies that storage has and that were not made so that their device cells can go"


class RoomMaker:
    """Frees slots by eviction. ``backup_host`` starts the backup of a node: ``Transfers.backup_host``."""

    __slots__ = ("_backup_host", "_claims", "_refusal", "_world")

    def __init__(self, world: World, backup_host: Callable[[Node], Room], claims: Claims) -> None:
        self._world = world
        self._backup_host = backup_host
        self._claims = claims
        self._refusal: tuple[list[Node], tuple[int, ...], list[int], int, Cost] | None = None

    def make(self, tier: int, needs: Sequence[int]) -> Room:
        """Evict until ``needs[c]`` slots of every component ``c`` are free on ``tier``. Returns whether they are, and
        if not, why."""
        world = self._world
        base, shelves = tier * world.count, world.shelves
        free = True
        for c, need in enumerate(needs):
            shelf = shelves[base + c]
            if need > shelf.slots.left:
                if need > shelf.reachable():
                    return SHORT
                free = False
        if free:
            return FREE
        for c, need in enumerate(needs):
            place = base + c
            slots, early = shelves[place].slots, shelves[place].orders[EARLY].first
            while slots.left < need:
                room = self._evict_next(place, EARLY) if early.chunks else SHORT
                if room is SHORT:
                    room = self._evict_coldest(place, need)
                if room is not FREE:
                    return room
                if world.steps >= world.limit and slots.left < need:
                    return SLICE
        return FREE

    def make_gently(self, needs: Sequence[int], cost: Cost) -> Room:
        """Evict host copies until ``needs[c]`` slots of every component are free on the host. If a cell would have to
        go that ``cost`` does not allow to go, evict nothing and return SHORT. SLICE: some were evicted, and the cells
        after them were not looked at yet."""
        world, count = self._world, self._world.count
        reach = [shelf.reachable() for shelf in world.shelves[count:]]
        if any(need > there for need, there in zip(needs, reach, strict=True)) or self._is_refused(needs, reach, cost):
            return SHORT
        taken: dict[tuple[Node, int], None] = {}
        above: list[tuple[Node, list[int]]] = []
        stay: list[tuple[Node, int]] = []
        room = self._choose_gently(needs, cost, taken, above, stay)
        for parent, stamps in reversed(above):             # undo what ``_choose_gently`` changed in the parents
            for c in range(count):
                withdraw(parent, count + c)
            parent.kids_host += 1
            parent.stamp[:] = stamps
        for parent, _ in above:
            for place in range(count + 1, 2 * count):
                if (parent, place) not in taken:
                    world.offer(parent, place)
        for node, place in stay:
            world.offer(node, place)
        if room is SHORT:
            self._refusal = [node for node, _ in stay], tuple(needs), reach, world.recency.now, cost
        for node, place in taken:
            if room is SHORT:
                world.offer(node, place)
            elif node.state[place] == PRESENT:  # else it went with another cell of its node
                self.evict(node, place)
        return room

    def _is_refused(self, needs: Sequence[int], reach: Sequence[int], cost: Cost) -> bool:
        """Return True if the last refusal of ``make_gently`` holds for ``needs``, too. That is so if no less is wanted
        at the same cost, no more can be reached, nothing was used since, and the same nodes are still in the way. A
        drain asks for many backups in a row; without this test each would repeat the first one's search."""
        if self._refusal is None:
            return False
        nodes, wanted, reached, now, cost_then = self._refusal
        if cost_then is not cost or now != self._world.recency.now:
            return False
        if any(map(lt, needs, wanted)) or any(map(gt, reach, reached)):
            return False
        host = self._world.count
        self._world.steps += len(nodes) // 8
        return all(node.state[host] == PRESENT and not self._may_go_gently(node, cost) for node in nodes)

    def _choose_gently(
        self, needs: Sequence[int], cost: Cost, taken: dict[tuple[Node, int], None],
        above: list[tuple[Node, list[int]]], stay: list[tuple[Node, int]],
    ) -> Room:  # fmt: skip
        """Take cells out of the host's orders until what goes with them is enough for ``needs``. Chosen cells are added
        to ``taken``, and those that may not go to ``stay``. Returns FREE if enough were taken, SHORT if no cell is left
        or too many are in the way.

        How many are too many? For a backup that can wait, one: eviction would take that one next. For a drain a few
        more, since a store may refuse some pages for good.

        As in an eviction, a node whose last child is taken waits among the others. Its parent is added to ``above``,
        with the stamps that the parent had.
        """
        world, count = self._world, self._world.count
        left = [shelf.slots.left for shelf in world.shelves[count:]]
        going: set[Node] = set()
        for c, need in enumerate(needs):
            place = count + c
            while left[c] < need:
                if taken and world.spent():
                    return SLICE
                late = EARLY
                node = self.coldest(place, EARLY)
                if node is None and self._none_left(place, EARLY):
                    late = LATE
                    node = self.coldest(place, LATE)
                if node is None:
                    return SHORT if self._none_left(place, late) else SLICE
                if node not in going and not self._may_go_gently(node, cost):
                    stay.append((node, place))
                    if cost is Cost.SPARE or len(stay) > _MOST_IN_THE_WAY:
                        return SHORT
                    continue
                taken[node, place] = None
                if node in going:
                    continue
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
        return FREE

    def _evict_coldest(self, place: int, need: int) -> Room:
        """Evict the coldest cell, and return FREE: the caller looks again whether that is enough. If the cell is an
        only copy on the device, start its backup and those of the other cells that must go, and return what to wait
        for."""
        node = self.coldest(place, LATE)
        if node is None:
            return SHORT if self._none_left(place, LATE) else SLICE
        if place >= self._world.count or self.is_expendable(node, place):
            self.evict(node, place)
            return FREE
        verdict = self.judge(node, place)
        if verdict is OUTDONE:
            self._evict_outdone(node, place)
            return FREE
        self._world.offer(node, place)
        if verdict is OPEN:
            return SLICE
        room = self._saving(place, need)
        return room if room is not SHORT else self._evict_next(place, LATE)

    def is_expendable(self, node: Node, place: int) -> bool:
        """Return True if nothing that is wanted is lost when this cell leaves the device. That is so if there is no
        host, or if the host has a copy, or should not or could not have one."""
        world = self._world
        return not world.has_host or node.state[place + world.count] == PRESENT or not self._may_save(node, place)

    def judge(self, node: Node, place: int) -> Verdict:
        """Decide what becomes of this device cell, which goes next.

        It is *outdone* if backing it up is pointless: the copy would be the next page that the host evicts, and storage
        is not to have it. A leaf leaves with all its components. The first of them that has no copy decides, because on
        the host the later ones would go together with that one.
        """
        world = self._world
        if self.is_expendable(node, place):
            return EXPENDABLE
        if world.access is Access.WRITE and not self._is_stored(node, place):
            return UNSAVED
        if world.is_candidate(node, 0):
            place = next(c for c in range(place + 1)
                         if c == place or (node.state[c] == PRESENT and not self.is_expendable(node, c)))  # fmt: skip
        host = place + world.count
        if world.shelves[host].slots.left >= world.pages(node, place) or world.shelves[host].orders[EARLY].first.chunks:
            return UNSAVED
        other = self.coldest(host, LATE)
        if other is None:
            return UNSAVED if self._none_left(host, LATE) else OPEN
        world.offer(other, host)
        sooner = world.shelves[host].policy.sooner(node, other, place, world.recency.time, self._share(node))
        return OUTDONE if sooner else UNSAVED

    def _share(self, node: Node) -> float:
        """Return which part, 0 to 1, of the room that a backup of ``node`` takes on the host is for ``node`` itself.
        The rest is for the nodes above that the host lacks, too."""
        above, place = node.parent, self._world.count
        while above is not None and above.parent is not None and above.state[place] == ABSENT:
            above = above.parent
        start, parent = above.end if above is not None else 0, node.parent
        assert parent is not None
        return (node.end - parent.end) / (node.end - start)

    def _evict_outdone(self, node: Node, place: int) -> None:
        """Evict a device cell that is outdone. FULL of a leaf goes with it."""
        if place and self._world.is_candidate(node, 0):
            self._world.condemn(node, 0)
        self._world.condemn(node, place)
        self.evict(node, place)

    def _may_go_gently(self, node: Node, cost: Cost) -> bool:
        """Return True if the host copy of ``node`` may go: storage has it, and ``cost`` allows that. The copy of a
        condemned node is not spare: the request that waits for the device cell would only make it again, and lose it
        again to the next backup that can wait.
        """
        if node.condemned and cost is Cost.SPARE:
            return False
        count, stored = self._world.count, self._world.stored(node)
        return all(stored >> c & 1 for c in range(count) if node.state[count + c] == PRESENT)

    def _saving(self, place: int, need: int) -> Room:
        """Start backups of the coldest cells until they cover what is missing, and evict those that need no backup.
        Return SAVING if there is anything to wait for, and else SHORT. SLICE: no backup was started yet, and the next
        call goes on."""
        world = self._world
        missing = need - world.shelves[place].slots.left
        pause = SLICE
        while missing > 0:
            node = self.coldest(place, LATE)
            if node is None:
                if self._none_left(place, LATE):
                    break
                return pause
            pages = world.pages(node, place)
            verdict = self.judge(node, place)
            if verdict is EXPENDABLE:
                self.evict(node, place)
            elif verdict is OUTDONE:
                self._evict_outdone(node, place)
            else:
                room = self._backup_host(node) if verdict is UNSAVED else SLICE
                world.offer(node, place)
                if room is SLICE:
                    return pause
                if room is FREE:
                    world.condemn(node, place)
                    if self.host_is_busy():
                        pause = SAVING
                elif self._is_stored(node, place):
                    return SHORT
                elif self.host_is_busy() or not self._claims.release_one(True):
                    break
                else:
                    pages = 0
            missing -= pages
            if missing > 0 and world.spent():
                return pause
        return SAVING if self.host_is_busy() else SHORT

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
        host = self._world.shelves[self._world.count :]
        fits = node.end <= host[0].slots.capacity and self._world.pages(node, place) <= host[place].slots.capacity
        return fits and self._wants_backup(node)

    def _wants_backup(self, node: Node) -> bool:
        selective = self._world.config.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        return not node.unsavable and not node.root.dead and (not selective or node.passes > 1)

    def _evict_next(self, place: int, late: int) -> Room:
        """Evict the cell that goes next in one order, and return FREE; SHORT if there is none. A device cell that was
        condemned as outdone is reprieved instead if it is outdone no more: the host has room by now, or there is a
        store that is to have it."""
        node = self.coldest(place, late)
        if node is None:
            return SHORT if self._none_left(place, late) else SLICE
        if late == EARLY and place < self._world.count:
            verdict = self.judge(node, place)
            if verdict is OPEN:
                self._world.offer(node, place)
                return SLICE
            if verdict is UNSAVED:
                self._world.reprieve(node)
                return FREE
        self.evict(node, place)
        return FREE

    def _none_left(self, place: int, late: int) -> bool:
        """Return True if ``coldest`` found no candidate because there is none; False if it ran out of steps."""
        return not self._world.spent() or self._world.shelves[place].orders[late].is_empty()

    def coldest(self, place: int, late: int) -> Node | None:
        """Take the cell that goes next out of its order, and return its node. Other cells that turn out on the way to
        wait in the wrong place are put right; each is a step. None: no candidate is left, or there are no more steps
        for finding one (``_none_left``)."""
        world, c = self._world, place % self._world.count
        shelf, now = world.shelves[place], world.recency.time
        order = shelf.orders[late]
        first = order.first
        while True:
            node = first.oldest() if first.chunks else shelf.policy.choose(order, now) if order.rest else None
            if node is None:
                assert not any(queue.chunks for queue in order.rest), "a policy chooses while a candidate waits"
                return None
            stamp = take(node, place)
            if world.is_candidate(node, place):
                world.steps += 1
                if node.stamp[c] == stamp:
                    return node
                world.offer(node, place)
            else:  # it is offered again when it becomes one
                world.passed += 1
                if world.passed % PASSED:
                    continue
                world.steps += 1
            if world.steps >= world.limit:
                return None

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
