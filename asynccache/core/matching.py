"""Matching: how far a prompt is cached, on which tier, and which cells become recent by that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asynccache.core.states import ABSENT, LEAVING
from asynccache.core.tree import Node
from asynccache.core.world import NOWHERE, World


class Match(NamedTuple):
    """The lengths to which a prompt is cached, in tokens.

    ``device``: the longest prefix that is valid on the device. ``host``: the longest prefix that is valid with the data
    of device and host together. ``full``: how far FULL alone goes. ``host_hit_length``, ``swa_host_hit_length``: tokens
    of FULL and of SWA that a load_back would bring to reach ``host``. ``mamba_host_hit_length``: how many MAMBA states
    it would bring.
    """

    device: int = 0
    host: int = 0
    full: int = 0
    host_hit_length: int = 0
    swa_host_hit_length: int = 0
    mamba_host_hit_length: int = 0

    @property
    def needs_load_back(self) -> bool:
        """True if ``host`` is reached only with a load_back of FULL, SWA or MAMBA."""
        return bool(self.host_hit_length or self.swa_host_hit_length or self.mamba_host_hit_length)


class Ends:
    """The ends of a match, in pages. ``device``: with the data of the device. ``union``: with the data of device and
    host together. ``full``: how far FULL alone goes. Never changed."""

    __slots__ = ("device", "full", "union")

    def __init__(self, device: int, union: int, full: int) -> None:
        self.device = device
        self.union = union
        self.full = full


class Matching:
    """Finds matches in one world. A match changes only how recent cells are, and so the eviction orders."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._page_size = world.config.page_size
        self._count = world.count
        self._swa = world.swa
        self._mamba = world.mamba

    def match(self, space: bytes, key: bytes) -> Match:
        """See ``CacheCore.match``."""
        path, reached = self._world.find(space, key)
        if not path:
            return Match()
        ends = self.ends(path, reached)
        self.touch(path[-1], ends.union)
        size = self._page_size
        if ends.union == ends.device:
            return Match(ends.device * size, ends.union * size, ends.full * size)
        loads = self.missing(path, ends.union)
        swa, mamba = self._swa, self._mamba
        return Match(
            ends.device * size, ends.union * size, ends.full * size, loads[0] * size,
            loads[swa] * size if swa else 0, loads[mamba] if mamba else 0,
        )  # fmt: skip

    def ends(self, path: Sequence[Node], reached: int) -> Ends:
        """Return where the match ends for a key that was followed along ``path`` up to byte ``reached``."""
        world = self._world
        page = reached // world.page_bytes
        full = world.components[0].longest_end(path, page, False)
        device = world.agreed_end(path, full, False)
        if device == page or not world.has_host:
            return Ends(device, device, full)
        full = world.components[0].longest_end(path, page, True)
        union = world.agreed_end(path, full, True)
        return Ends(min(device, union), union, full)

    def missing(self, path: Sequence[Node], end: int) -> list[int]:
        """Return how many pages of each component (states for MAMBA) a match along ``path`` that ends at page ``end``
        lacks on the device."""
        lacking = [0] * self._count
        for component in self._world.components:
            c, first = component.index, component.first_page(end)
            for node in reversed(path):
                start = node.parent.end  # type: ignore[union-attr]
                if node.end <= first:
                    break
                if start < end and node.state[c] in (ABSENT, LEAVING):
                    lacking[c] += min(node.end, end) - max(start, first)
        return lacking

    def touch(self, node: Node, end: int) -> None:
        """Mark the cells that a match ending at page ``end`` needs as used just now: FULL and MAMBA of the node that
        ``end`` lies in, and SWA of the nodes of the last window, the first of them first. ``node``: that node, or one
        below it."""
        recency = self._world.recency
        while node.parent is not None and node.parent.end >= end:
            node = node.parent
        if node.parent is None:
            return
        recency.touch(node, 0)
        if self._count > 1:
            self._touch_end(node, end)

    def _touch_end(self, node: Node, end: int) -> Node:
        """Mark the cells of SWA and MAMBA that a match ending at page ``end``, in ``node``, needs as used just now.
        Return the node above all marked ones."""
        recency, swa = self._world.recency, self._swa
        self._world.reprieve(node)
        if self._mamba:
            recency.touch(node, self._mamba)
        window, above = [node], node.parent
        assert above is not None
        if swa:
            first = self._world.components[swa].first_page(end)
            while above.parent is not None and above.end > first:
                window.append(above)
                above = above.parent
            for part in reversed(window):
                self._world.reprieve(part)
                recency.touch(part, swa)
        return above

    def use(self, end: Node, forked: int) -> None:
        """Tell the eviction policy, if it learns, that a request is over. The request used the path from the root to
        ``end``, and still holds it. Cells of that path that wait in a queue of the policy are put in order anew, since
        their place depends on their uses. ``forked``: the page at which the request's text left the texts of earlier
        requests; 0: it left none."""
        world = self._world
        if not world.policy.learns:
            return
        world.policy.use(end, forked, world.recency.tick())
        base, components = world.last_base, range(1 if world.policy.full_only else self._count)
        node, parent = end, end.parent
        while parent is not None:
            for c in components:
                if node.entry[base + c] is not None and node.stamp[c] >= 0:
                    world.reorder(node, base + c)
            node, parent = parent, parent.parent

    def leave(self, node: Node, begin: int) -> None:
        """Mark SWA and MAMBA as used or idle on the path of a request that is over. The request's match had ended at
        page ``begin``, and its lease held the path to ``node`` last.

        The next match of its text is likely to end at ``node``, or where texts fork. Cells that a match ending at
        ``node`` needs count as used. Cells that a match ending at a fork needs stay as they are. All other cells are
        idle from now on. The walk goes up from ``node`` through what the request added, and on until it meets what was
        idle before.
        """
        if node.parent is None or self._count == 1:
            return
        low, above = NOWHERE, self._touch_end(node, node.end)
        while above.parent is not None:
            forks = len(above.children or ()) > 1
            if forks and self._swa:
                low = min(low, self._world.components[self._swa].first_page(above.end))
            known = not forks
            if self._swa and above.end <= low:
                known &= self._world.set_idle(above, self._swa)
            if self._mamba and not forks:
                known &= self._world.set_idle(above, self._mamba)
            if known and above.end <= min(low, begin):
                return
            above = above.parent
