"""Holds: what a lease pins on the device. A hold is dropped exactly, however often nodes were split meanwhile.

FULL is pinned at the end node, and thereby on all nodes above it. An auxiliary component that divides (SWA) is pinned
on every node from a recorded border to the end node. One that does not divide (MAMBA) is pinned on the end node alone.
When a node splits, its object becomes the suffix, and the new prefix gets a copy of the counts that cover it. So the
walk from the end node up to the border always finds the same pins.
"""

from __future__ import annotations

from asynccache.core.ledger import DEVICE
from asynccache.core.tree import Node
from asynccache.core.world import NOWHERE, World


class Hold:
    """The pins on the device for a match that ends in the node ``end``.

    ``lows[c]``: auxiliary component ``c`` is pinned on the nodes from ``end`` upwards that end after page ``lows[c]``,
    which is a node's border; NOWHERE: on none.
    """

    __slots__ = ("end", "lows")

    def __init__(self, end: Node, components: int) -> None:
        self.end = end
        self.lows = [NOWHERE] * components


def take_hold(world: World, end: Node, target: int, floor: int = 0) -> Hold:
    """Pin what a match that ends at page ``target``, in the node ``end``, needs, and return these pins. Nodes that end
    at page ``floor`` or before get no auxiliary pins."""
    hold = Hold(end, world.count)
    world.pin_full(end, DEVICE)
    for component in world.auxiliary:
        c, low = component.index, component.first_page(target)
        hold.lows[c] = world.pin_run(end, c, low if low > floor else floor)
    return hold


def drop_hold(world: World, hold: Hold) -> None:
    """Undo ``take_hold``."""
    drop_until(world, hold, NOWHERE)
    world.unpin_full(hold.end, DEVICE)


def drop_until(world: World, hold: Hold, border: int) -> None:
    """Drop the auxiliary pins on nodes that end at page ``border`` or before."""
    for c in range(world.count - 1, 0, -1):
        if hold.lows[c] < border:
            hold.lows[c] = world.unpin_run(hold.end, c, hold.lows[c], border)


def shorten_hold(world: World, hold: Hold, valid: int) -> Hold:
    """Pin no more than the first ``valid`` pages of ``hold``, so that what lies beyond them may leave the tree. Return
    the hold to keep instead of ``hold``: ``hold`` itself if it ends within those pages already."""
    end = hold.end
    while end.parent is not None and end.end > valid:
        end = end.parent
    if end is hold.end:
        return hold
    shorter = take_hold(world, end, end.end)
    drop_hold(world, hold)
    return shorter
