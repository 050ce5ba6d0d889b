"""Passes over all nodes, in slices: what is unsaved (``Survey``), the pages of one namespace (``Listing``), the
forgetting of namespaces (``Invalidation``), and the report of all pages to a store that was just attached
(``Backfill``).

A pass visits each node once that is in the tree from its beginning to its end, even if nodes split, leave and come
between two slices (``Walk``). So nobody has to hold the tree lock from one slice to the next. Pages that come into the
tree during a backfill reach the store by the usual way.

The root of a forgotten namespace is *dead*: nobody matches below it. Its nodes leave the tree leaf by leaf, when
nothing pins them any more. One walk, at the invalidation, finds those that may go at once. After that, whatever takes
the last pin or the last child from a node says so (``World.loose``), so no node is looked at twice in vain.
"""

from __future__ import annotations

from typing import NamedTuple

from asynccache.core.holds import Claims
from asynccache.core.keys import HASH_BYTES
from asynccache.core.ledger import BACKUP_STORAGE, DEVICE, HOST
from asynccache.core.plan import Cleared, Medium, More, Plan
from asynccache.core.room import RoomMaker
from asynccache.core.settings import Access
from asynccache.core.transfers import Transfers
from asynccache.core.tree import PRESENT, Node
from asynccache.core.world import Walk, World

_HASHES = 32  # how many hashes are listed in a step


class Unsaved(NamedTuple):
    """The number of pages of FULL that a close would lose."""

    host: int
    """Pages that neither the host nor a store has."""
    storage: int
    """Pages that the host has and no store; 0 if no store is written."""


class Survey:
    """Counts, over all live nodes, what a close would lose now."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._walk = Walk(world, world.roots.values())
        self._unsaved = [0, 0]

    def unsaved(self) -> Unsaved | More:
        """Count on: ``More`` until the walk is over, and then the result."""
        world = self._world
        while not self._walk.over():
            node = self._walk.step()
            if node is not None and not node.root.dead and not world.stored(node) & 1:
                self._unsaved[node.state[world.count] == PRESENT] += world.pages(node, 0)
            if world.spent():
                return More(world.plan())
        world.plan()
        host, storage = self._unsaved
        return Unsaved(host, storage if world.access is Access.WRITE else 0)


class Listed(NamedTuple):
    """The pages of a namespace."""

    hashes: list[bytes]
    """The pages' prefix hashes, 32 bytes each."""
    writes: set[int]
    """The backups to storage of these pages that were in flight when the list was made."""


class Listing:
    """Lists the pages of the namespace ``space``. A node that leaves the tree meanwhile is on the list, too."""

    def __init__(self, world: World, space: bytes) -> None:
        self._world = world
        self._root = world.roots.get(space)
        self._walk = Walk(world, () if self._root is None else (self._root,))
        self._runs: list[bytes] = []
        self._run, self._at = b"", 0
        self._seen: set[bytes] = set()
        self._pages: list[bytes] = []
        self._writes: set[int] = set()
        if self._root is not None:
            self._root.left = self._runs

    def some(self) -> Listed | More:
        """List on: ``More`` until the list is complete, and then the list."""
        world, runs = self._world, self._runs
        while runs or self._at < len(self._run) or not self._walk.over():
            if not self._walk.over():
                node = self._walk.step()
                if node is not None:
                    runs.append(node.hashes)
                    self._writes.update([op.id for op in node.ops if op.kind == BACKUP_STORAGE])
            elif self._at < len(self._run):
                stop = min(len(self._run), self._at + _HASHES * HASH_BYTES)
                self._pages += [self._run[at : at + HASH_BYTES] for at in range(self._at, stop, HASH_BYTES)]
                self._at = stop
                world.steps += 1
            else:
                self._run, self._at = runs.pop(), 0
                world.steps += 1
                if self._run[-HASH_BYTES:] in self._seen:  # a node that has left may have been listed before
                    self._run = b""
                self._seen.add(self._run[-HASH_BYTES:])
            if world.spent():
                return More(world.plan())
        if self._root is not None:
            self._root.left = None
        world.plan()
        return Listed(self._pages, self._writes)


class Invalidation:
    """Takes namespaces out of a world."""

    def __init__(self, world: World, room: RoomMaker) -> None:
        self._world = world
        self._room = room
        self._walks: list[Walk] = []
        """Walks below the roots that have died."""

    def invalidate(self, space: bytes | None, claims: Claims) -> None:
        world = self._world
        if space is None and world.roots and world.config.publish:
            world.effect(Cleared())
            for dead in world.dead_roots:
                dead.mute = True
        for key in [space] if space is not None else list(world.roots):
            root = world.roots.pop(key, None)
            if root is not None:
                root.dead, root.mute = True, space is None
                world.dead_roots.append(root)
                self._walks.append(Walk(world, [root]))
        claims.release_dead()

    def sweep(self) -> bool:
        """Drop some of the nodes below dead roots that nothing pins any more. Return True if there may be more of
        them now."""
        world, walks = self._world, self._walks
        while world.loose or walks:
            if world.loose:
                world.steps += 1
                self._drop(world.loose.pop())
            elif walks[-1].over():
                walks.pop()
            elif (node := walks[-1].step()) is not None:
                self._drop(node)
            if world.spent():
                break
        world.dead_roots = [root for root in world.dead_roots if root.children is not None or root.holders]
        return bool(world.loose or walks)

    def _drop(self, node: Node) -> None:
        for tier in (DEVICE, HOST):
            place = tier * self._world.count
            if node.parent is not None and self._world.is_candidate(node, place):
                self._room.evict(node, place)


class Filled(NamedTuple):
    """A slice of a pass. ``plan`` has the operations that it began."""

    plan: Plan
    over: bool
    """True if it was the last slice."""


class Backfill:
    """One backfill. The pass names every page in a KV event for STORAGE, since the new store may have the page.
    ``store``: True if the host's pages are also written to storage, even those that another store has."""

    def __init__(self, world: World, transfers: Transfers, *, store: bool) -> None:
        self._world = world
        self._transfers = transfers
        self._store = store
        self._began = world.ledger.next
        self._walk = Walk(world, world.roots.values())

    def some(self, ops: int, pages: int) -> Filled:
        """Do the next slice. It begins at most about ``ops`` operations, on at most about ``pages`` pages of FULL."""
        world, began, begun_pages = self._world, self._world.ledger.next, 0
        while not self._walk.over():
            node = self._walk.peek()
            size = 0 if node is None else world.pages(node, 0)
            if world.ledger.next > began and (world.ledger.next - began >= ops or begun_pages + size > pages):
                break
            self._walk.step()
            if node is not None and not node.root.dead:
                before = world.ledger.next
                world.publish(Medium.STORAGE, True, node)
                if self._store:
                    self._transfers.backup_storage([node], self._began)
                begun_pages += size if world.ledger.next > before else 0
            if world.spent():
                break
        return Filled(world.plan(), self._walk.over())
