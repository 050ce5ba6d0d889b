"""Holds: what a lease pins on the device, counted so that undoing it is exact however often nodes split meanwhile.

FULL is pinned at the end node. An auxiliary component that divides is pinned on every node from a recorded border to
the end; one that does not, on the end node alone. A split keeps the suffix's object and copies the counts that cover
the prefix, so the same walk always finds the same pins.
"""

from __future__ import annotations

from asynccache.core.ledger import DEVICE
from asynccache.core.tree import Node
from asynccache.core.world import NOWHERE, World


class Hold:
    """Pins on the device for a match that ends at ``end``. ``lows[c]``: component c is pinned on the nodes from there
    (a node's border, in pages) to the end; NOWHERE: not at all."""

    __slots__ = ("end", "lows")

    def __init__(self, end: Node, components: int) -> None:
        self.end = end
        self.lows = [NOWHERE] * components


def take_hold(world: World, end: Node, target: int, floor: int = 0) -> Hold:
    """Pin what a match ending at page ``target``, in ``end``, needs, but no auxiliary page before ``floor``."""
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
    """The same hold on no more than the first ``valid`` pages: what is beyond them may leave the tree."""
    end = hold.end
    while end.parent is not None and end.end > valid:
        end = end.parent
    if end is hold.end:
        return hold
    shorter = take_hold(world, end, end.end)
    drop_hold(world, hold)
    return shorter
