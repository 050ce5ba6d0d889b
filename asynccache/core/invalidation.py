"""Forgetting namespaces. Nobody matches below a dead root, and what hangs there goes leaf by leaf as it comes free."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from asynccache.core.claims import Claims
from asynccache.core.ledger import DEVICE, HOST
from asynccache.core.plan import Cleared, More, Plan
from asynccache.core.room import RoomMaker
from asynccache.core.tree import Node, Root
from asynccache.core.world import World

_SLICE = 256


class Invalidation:
    """Takes namespaces out of a world."""

    def __init__(self, world: World, room: RoomMaker) -> None:
        self._world = world
        self._room = room
        self._pass = self._dead_nodes()

    def invalidate(self, space: bytes | None, claims: Claims) -> Plan | More:
        """See ``CacheCore.invalidate``."""
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
                self._pass = self._dead_nodes()
        claims.drop_dead()
        return More(world.plan()) if self.sweep() else world.plan()

    def sweep(self) -> bool:
        """Drop nodes below dead roots that nothing pins any more: a slice of the pass over them, and if that pass ends,
        the first slice of another one. Return True if the pass goes on. What is pinned is left to a later pass, so
        every pass ends."""
        world = self._world
        if not world.dead_roots:
            return False
        left = self._drop_some(_SLICE)
        if not left:
            return True
        self._pass = self._dead_nodes()
        self._drop_some(left)
        world.dead_roots = [root for root in world.dead_roots if root.children is not None or root.holders]
        return False

    def _drop_some(self, steps: int) -> int:
        """Go on with the pass for ``steps`` nodes. Return how many of these steps are left; 0 unless the pass has
        ended."""
        for node in islice(self._pass, steps):
            self._drop(node)
            steps -= 1
        return steps

    def _dead_nodes(self) -> Iterator[Node]:
        """Yield all nodes below dead roots. Nodes may leave and split meanwhile."""
        for root in tuple(self._world.dead_roots):
            yield from self._leaves(root)

    def _leaves(self, root: Root) -> Iterator[Node]:
        """Yield the nodes below ``root``, each after its children."""
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
