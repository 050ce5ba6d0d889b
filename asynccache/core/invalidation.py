"""Forgetting namespaces. A dead root is matched by nobody; what hangs below it goes leaf by leaf as it comes free."""

from __future__ import annotations

from collections.abc import Iterator

from asynccache.core.leases import Leases
from asynccache.core.ledger import DEVICE, HOST
from asynccache.core.plan import More, Plan
from asynccache.core.prefetching import Prefetches
from asynccache.core.room import RoomMaker
from asynccache.core.tree import Node, Root
from asynccache.core.world import World

_SLICE = 256


class Invalidation:
    """Takes namespaces out of a world."""

    def __init__(self, world: World, room: RoomMaker, leases: Leases, prefetches: Prefetches) -> None:
        self._world = world
        self._room = room
        self._leases = leases
        self._prefetches = prefetches

    def invalidate(self, space: bytes | None) -> Plan | More:
        """See ``CacheCore.invalidate``."""
        world = self._world
        for key in [space] if space is not None else list(world.roots):
            root = world.roots.pop(key, None)
            if root is not None:
                root.dead = True
                world.dead_roots.append(root)
        return More(world.plan()) if self.sweep() else world.plan()

    def sweep(self) -> bool:
        """Drop what has come free below dead roots, a slice of it; whether there is more to drop now."""
        world = self._world
        if not world.dead_roots:
            return False
        steps = _SLICE
        for root in list(world.dead_roots):
            for node in self._leaves(root):
                if steps <= 0:
                    return True
                steps -= 1
                self._drop(node)
            if root.children is None and not self._is_held(root):
                world.dead_roots.remove(root)
        return False

    def _is_held(self, root: Root) -> bool:
        """Whether a lease or a prefetch may still hang something below ``root``."""
        ends = [lease.hold.end for lease in self._leases.active.values()]
        return any(node.root is root for node in (*ends, *(f.anchor for f in self._prefetches.active.values())))

    def _leaves(self, root: Root) -> Iterator[Node]:
        """Nodes below ``root``, each after its children."""
        stack = [(node, False) for node in (root.children or {}).values()]
        while stack:
            node, seen = stack.pop()
            if seen or node.children is None:
                yield node
                continue
            stack.append((node, True))
            stack.extend((child, False) for child in list(node.children.values()))

    def _drop(self, node: Node) -> None:
        for tier in (DEVICE, HOST):
            place = tier * self._world.count
            if node.parent is not None and self._world.is_candidate(node, place):
                self._room.evict(node, place)

    def nodes(self) -> Iterator[Node]:
        """Every live node of every namespace."""
        for root in self._world.roots.values():
            yield from self._leaves(root)
