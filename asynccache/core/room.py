"""Making room on a tier: what is evicted, in which order, and when it is better to wait.

Device: what was condemned ahead of time first, then the coldest, whether it has a host copy or not. Where that is an
only copy, its backup is started and awaited, unless it would be the first to leave the host again. Where the host has
no room for it, what storage has goes without, what is in flight is awaited (what storage takes: unless it is late), and
then claims are let go. Dropping an only copy that the host would keep is the last resort, and counted. Host: copies of
what stays on the device first, so that both tiers together hold as much as they can; then what the policy chooses.
Nothing is evicted in vain: if evicting everything would not be enough, nothing is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from asynccache.core.claims import Claims
from asynccache.core.eviction import last_touch, take
from asynccache.core.ledger import BACKUP_HOST, BACKUP_STORAGE, CLONE, HOST, LOAD_BACK, PREFETCH, Kind
from asynccache.core.plan import Medium
from asynccache.core.settings import Access, WritePolicy
from asynccache.core.states import ABSENT, PRESENT
from asynccache.core.tree import Node
from asynccache.core.world import EARLY, LATE, World

Save = Callable[[Node], bool]

# What has pages of the host, or pins some there, and ends by itself; what storage ends only as long as it is in time.
_BY_ITSELF = (BACKUP_HOST, LOAD_BACK, CLONE)
_ON_HOST = (*_BY_ITSELF, PREFETCH, BACKUP_STORAGE)


class Room(Enum):
    """What came of asking for room."""

    FREE = "the slots are free"
    SHORT = "not now: too much is pinned"
    SAVING = "not now: backups were started, or wait for host pages that operations in flight have"
    SLICE = "not yet: the step budget is used up"


class RoomMaker:
    """Frees slots by eviction. ``save`` starts the backup of a node; false if it cannot start now."""

    __slots__ = ("_claims", "_save", "_world")

    def __init__(self, world: World, save: Save, claims: Claims) -> None:
        self._world = world
        self._save = save
        self._claims = claims

    def make(self, tier: int, needs: Sequence[int], steps: int, *, gently: bool = False) -> Room:
        """Free ``needs[c]`` slots of every component on ``tier``, within ``steps`` heap pops. ``gently``: only those
        host copies go that storage has, and none that was made so that its device cell can go."""
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
                if gently and not self._next_can_wait(place):
                    return Room.SHORT
                if self._evict_next(place, EARLY):
                    continue
                verdict = self._late(place, need)
                if verdict is not Room.FREE:
                    return verdict
        return Room.FREE

    def _late(self, place: int, need: int) -> Room:
        """The coldest goes; if that is an only copy, it and what else is needed are saved first."""
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
        """Whether nothing that is wanted is lost when this cell leaves the device."""
        world = self._world
        return not world.has_host or node.state[place + world.count] == PRESENT or not self._may_save(node, place)

    def is_outdone(self, node: Node, place: int) -> bool:
        """Whether all that the host would have to give up for a copy of this device cell would outlive it there: then
        no copy is made, unless storage is to have it."""
        world = self._world
        host = place + world.count
        if world.shelves[host].slots.left >= world.pages(node, place) or world.shelves[host].orders[EARLY].first.slices:
            return False
        if world.access is Access.WRITE and not self._is_stored(node, place):
            return False
        if place and world.is_candidate(node, 0) and not (self.is_expendable(node, 0) or self.is_outdone(node, 0)):
            return False  # it would take FULL along
        other = self.coldest(host, LATE)
        if other is None:
            return False
        world.offer(other, host)
        return world.policy.sooner(node, other, place, world.recency.time, self._share(node))

    def _share(self, node: Node) -> float:
        """Of the room that a copy of ``node`` takes on the host, what is its own: it takes one of all above it."""
        above, place = node.parent, self._world.count
        while above is not None and above.parent is not None and above.state[place] == ABSENT:
            above = above.parent
        start, parent = above.end if above is not None else 0, node.parent
        assert parent is not None
        return (node.end - parent.end) / (node.end - start)

    def _give_up(self, node: Node, place: int) -> None:
        """A device cell that is outdone leaves, and FULL of a leaf with it."""
        if place and self._world.is_candidate(node, 0):
            self._world.condemn(node, 0)
        self._world.condemn(node, place)
        self.evict(node, place)

    def _next_can_wait(self, place: int) -> bool:
        """Whether the next host copy to go is in storage, and was not made so that its device cell can go: who waits
        for that would have it saved anew, and find it gone again."""
        node = self.coldest(place, EARLY) or self.coldest(place, LATE)
        if node is None:
            return False
        self._world.offer(node, place)
        count, stored = self._world.count, self._world.stored(node)
        return not node.condemned and all(stored >> c & 1 for c in range(count) if node.state[count + c] == PRESENT)

    def _saving(self, place: int, need: int) -> bool:
        """Start backups of the coldest until they cover what is missing, dropping those that need none; whether there
        is anything to wait for."""
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
        """Whether storage has all that would leave the device with this cell."""
        first = 0 if self._world.is_candidate(node, 0) else place
        stored = self._world.stored(node)
        return all(stored >> c & 1 for c in range(first, self._world.count) if node.state[c] == PRESENT)

    def host_is_busy(self) -> bool:
        """Whether anything is in flight that will give host pages back, or let go of some."""
        return any(self._world.ledger.count[kind] for kind in self._awaited())

    def busy(self) -> tuple[int, ...]:
        """The operations that will."""
        kinds = self._awaited()
        return tuple([op.id for op in self._world.ledger.ops.values() if op.kind in kinds])

    def _awaited(self) -> tuple[Kind, ...]:
        return _BY_ITSELF if self._world.storage_is_late else _ON_HOST

    def _may_save(self, node: Node, place: int) -> bool:
        """Whether its backup is wanted and could ever fit."""
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
        self.evict(node, place)
        return True

    def coldest(self, place: int, late: int) -> Node | None:
        """Take out the candidate of an order that goes next, correcting where others wait on the way."""
        world, c = self._world, place % self._world.count
        shelf, now = world.shelves[place], world.recency.time
        order = shelf.orders[late]
        first = order.first
        while True:
            node = first.oldest() if first.slices else shelf.policy.choose(order, now) if order.rest else None
            if node is None:
                return None
            stamp = take(node, place)
            if not world.is_candidate(node, place):
                continue  # it is offered again when it becomes one
            if node.stamp[c] == stamp:
                return node
            world.offer(node, place)

    def evict(self, node: Node, place: int) -> None:
        """Evict a candidate: a leaf of the tier goes whole, any other node gives up this component and its drag."""
        world = self._world
        count = world.count
        tier, component = divmod(place, count)
        base = tier * count
        first = 0 if world.is_candidate(node, base) else component
        for c in range(count - 1, first - 1, -1):
            if node.state[base + c] == PRESENT:
                self._count(node, tier, c)
                if c == 0:
                    if world.on_evict is not None:
                        world.on_evict(tier, last_touch(node, c), world.pages(node, c))
                    world.publish((Medium.GPU, Medium.CPU)[tier], False, node)
                world.vacate(node, base + c)
        if first == 0:
            world.remove_if_empty(node, tier)

    def _count(self, node: Node, tier: int, component: int) -> None:
        world = self._world
        pages = world.pages(node, component)
        if tier == HOST:
            world.counters.evicted_host += pages
            return
        world.counters.evicted_device += pages
        saved = node.state[world.count + component] != ABSENT or world.stored(node) >> component & 1
        saved = saved or (node.condemned & (1 | 1 << component) and self._may_save(node, component))
        if world.has_host and not saved and not node.root.dead and (self._wants_backup(node) or node.unsavable):
            world.counters.lost_pages += pages
