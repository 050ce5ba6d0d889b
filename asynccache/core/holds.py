"""Holds: what a lease, a claim or a prefetch pins of the tree on one tier, and how these pins change.

A hold pins the cells that are needed by a match which ends in a given node: FULL on the path to that node, and for the
other components the window or state before the end. A hold is taken and released as a whole.

A hold need not hear of splits. It finds its nodes again by ``end`` and the borders in ``lows`` alone. When a node
splits, its object becomes the suffix, so ``end`` stays right, and the new prefix gets a copy of the counts that cover
it. So a walk from the end node up to a border always finds the same pins.

A *claim* is the hold on the host that a finished prefetch leaves behind for a request, until that request has its
lease. Nothing waits for a claim for good: a request that could not go on otherwise takes claims away (``release_one``),
and the request that loses one only computes the pages that it would have found. A claim pins nodes whose FULL is
PRESENT on the host, so these nodes stay as long as the claim does.
"""

from __future__ import annotations

from collections.abc import Sequence

from asynccache.core.ledger import DEVICE, HOST, NOWHERE, Hold
from asynccache.core.tree import PRESENT, Node
from asynccache.core.world import World


def take_hold(world: World, end: Node, target: int, tier: int = DEVICE, *, floor: int = 0) -> Hold:
    """Pin on ``tier`` what a match needs that ends at page ``target``, in the node ``end``, and return the hold. Nodes
    that end at page ``floor`` or before get no auxiliary pins."""
    hold = Hold(end, tier, world.count)
    world.pin_full(end, tier)
    for component in world.auxiliary:
        c, low = component.index, component.first_page(target)
        hold.lows[c] = world.pin_run(end, c, tier, low if low > floor else floor)
    return hold


def release_hold(world: World, hold: Hold) -> None:
    """Undo ``take_hold``."""
    release_until(world, hold, NOWHERE)
    world.unpin_full(hold.end, hold.tier)


def release_until(world: World, hold: Hold, border: int) -> None:
    """Release the auxiliary pins on nodes that end at page ``border`` or before."""
    for c in range(world.count - 1, 0, -1):
        if hold.lows[c] < border:
            hold.lows[c] = world.unpin_run(hold.end, c, hold.tier, hold.lows[c], border)


def shorten_hold(world: World, hold: Hold, valid: int) -> Hold:
    """Pin no more than the first ``valid`` pages of ``hold``, so that what lies beyond them may leave the tree. Return
    the hold to keep instead of ``hold``: ``hold`` itself if it ends within those pages already."""
    end = hold.end
    while end.parent is not None and end.end > valid:
        end = end.parent
    if end is hold.end:
        return hold
    shorter = take_hold(world, end, end.end, hold.tier)
    release_hold(world, hold)
    return shorter


class Claims:
    """The claims of one world."""

    __slots__ = ("_firm", "_world", "held")

    def __init__(self, world: World) -> None:
        self._world = world
        self._firm: set[int] = set()
        """The holders that stand in line for their leases: their claims are the last to be taken."""
        self.held: dict[int, Hold] = {}
        """The claims by the numbers of their holders, which are requests; the oldest claim first. Requests that arrive
        later have higher numbers."""

    def take(self, holder: int, path: Sequence[Node], target: int) -> None:
        """Pin what the host has of a match along ``path`` that ends at page ``target``, for ``holder``: up to the
        deepest node that begins before that page and has FULL on the host. An earlier claim of the same holder is
        released; the new one is firm if that was."""
        before = self.held.pop(holder, None)
        for end in reversed(path):
            if end.parent.end < target and end.state[self._world.count] == PRESENT:  # type: ignore[union-attr]
                self.held[holder] = take_hold(self._world, end, min(target, end.end), HOST)
                break
        if before is not None:
            self._unpin(before)
        self._firm.intersection_update(self.held)

    def confirm(self, holder: int, firm: bool) -> None:
        """Note whether the request of ``holder`` stands in line. Nothing happens if it has no claim."""
        self._firm.discard(holder)
        if firm and holder in self.held:
            self._firm.add(holder)

    def release(self, holder: int) -> None:
        """Release the claim of ``holder``. Nothing happens if it has none, or it was taken away."""
        self._firm.discard(holder)
        claim = self.held.pop(holder, None)
        if claim is not None:
            self._unpin(claim)

    def _unpin(self, claim: Hold) -> None:
        release_hold(self._world, claim)
        self._world.freed = True

    def release_dead(self) -> None:
        """Release all claims in namespaces that were invalidated: nobody matches there any more."""
        for holder in [holder for holder, claim in self.held.items() if claim.end.root.dead]:
            self.release(holder)

    def release_one(self, firm: bool) -> bool:
        """Take one claim away. Return False if there is none to take.

        Claims of requests that do not stand in line go first, and the oldest of these before the others, since its
        request may have been forgotten. ``firm``: True if claims of requests in line may go, too, after the others.
        Among those the highest number goes first, because that request came last and would be granted its lease last.
        """
        holder = next((holder for holder in self.held if holder not in self._firm), None)
        if holder is None and firm:
            holder = max(self.held, default=None)
        if holder is None:
            return False
        self._world.steps += 1
        self.release(holder)
        return True
