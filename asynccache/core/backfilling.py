"""Backfilling: what the tree knows is made known to a store that was attached just now, and stored there.

Law: a pass visits every node that is there from its beginning to its end, even if nodes split, leave and come between
two slices, so nobody has to hold the tree lock for it. What comes meanwhile goes to the store by itself.
"""

from __future__ import annotations

from typing import NamedTuple

from asynccache.core.plan import Medium, Plan
from asynccache.core.transfers import Transfers
from asynccache.core.tree import Node
from asynccache.core.world import World

_SLICE = 128


class Filled(NamedTuple):
    """A slice of a pass. ``plan`` has the operations that it began. ``over``: True if it was the last slice."""

    plan: Plan
    over: bool


class Backfill:
    """One pass. It names every page to the KV events. ``store``: True if what the host has is also stored, even if
    another store has it."""

    def __init__(self, world: World, transfers: Transfers, *, store: bool) -> None:
        self._world = world
        self._transfers = transfers
        self._store = store
        self._began = world.ledger.next
        self._todo: list[tuple[Node, Node]] = []
        for root in world.roots.values():
            self._push(root)

    def some(self, ops: int, pages: int) -> Filled:
        """Do the next slice, which begins about ``ops`` operations on about ``pages`` pages of FULL and no more."""
        world, began, begun_pages = self._world, self._world.ledger.next, 0
        for _ in range(_SLICE):
            if not self._todo:
                break
            size = world.pages(self._todo[-1][0], 0)
            if world.ledger.next > began and (world.ledger.next - began >= ops or begun_pages + size > pages):
                break
            before = world.ledger.next
            self._visit(*self._todo.pop())
            begun_pages += size if world.ledger.next > before else 0
        return Filled(world.plan(), not self._todo)

    def _push(self, above: Node) -> None:
        self._todo.extend((node, above) for node in (above.children or {}).values())

    def _visit(self, node: Node, above: Node) -> None:
        """Visit ``node``, and the pieces that were split off it since it was found below ``above``."""
        if node.parent is None or node.root.dead:
            return
        self._push(node)
        pieces = [node]
        while (prefix := pieces[-1].parent) is not above and prefix is not None and prefix.parent is not None:
            pieces.append(prefix)
        for piece in reversed(pieces):
            self._world.publish(Medium.STORAGE, True, piece)
            if self._store:
                self._transfers.store([piece], self._began)
