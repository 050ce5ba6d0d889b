"""Matching: how far a prompt is cached, on which tier, and what that makes recent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asynccache.core.states import ABSENT, LEAVING
from asynccache.core.tree import Node, walk
from asynccache.core.world import NOWHERE, World


class Match(NamedTuple):
    """How far a prompt is cached, in tokens.

    ``device``: the longest prefix valid on the device; ``host``: valid on device or host; ``full``: how far FULL alone
    matched. The rest: FULL tokens, SWA tokens and MAMBA states that a load_back would bring.
    """

    device: int = 0
    host: int = 0
    full: int = 0
    host_hit_length: int = 0
    swa_host_hit_length: int = 0
    mamba_host_hit_length: int = 0

    @property
    def needs_load_back(self) -> bool:
        """Whether ``host`` is reached only by loading something (SWA or MAMBA alone suffices)."""
        return bool(self.host_hit_length or self.swa_host_hit_length or self.mamba_host_hit_length)


class Ends(NamedTuple):
    """Match ends in pages: on the device, on device or host, and where FULL alone ends."""

    device: int
    union: int
    full: int


class Matching:
    """Reads one world; writes nothing but how recent its cells are."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._count = world.count
        self._swa = world.swa
        self._mamba = world.mamba

    def match(self, space: bytes, key: bytes) -> Match:
        """See ``CacheCore.match``."""
        root = self._world.roots.get(space)
        if root is None:
            return Match()
        page = self._world.page_bytes
        path, reached = walk(root, key, 0, page)
        if not path:
            return Match()
        ends = self.ends(path, reached)
        self.touch(path[-1], ends.union)
        size = self._world.config.page_size
        if ends.union == ends.device:
            return Match(ends.device * size, ends.union * size, ends.full * size)
        loads = self.missing(path, ends.union)
        swa, mamba = self._swa, self._mamba
        return Match(
            ends.device * size, ends.union * size, ends.full * size, loads[0] * size,
            loads[swa] * size if swa else 0, loads[mamba] if mamba else 0,
        )  # fmt: skip

    def ends(self, path: Sequence[Node], reached: int) -> Ends:
        """Where the match of ``path``, which was followed to byte ``reached``, ends."""
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
        """Pages (states) per component that a match of ``path`` up to ``end`` lacks on the device."""
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
        """Stamp the node that ``end`` lies in, and for SWA the nodes of the last window, the first of them first.
        ``node`` is the one that ``end`` lies in or below it."""
        recency = self._world.recency
        while node.parent is not None and node.parent.end >= end:
            node = node.parent
        if node.parent is None:
            return
        recency.touch(node, 0)
        if self._count > 1:
            self._touch_end(node, end)

    def _touch_end(self, node: Node, end: int) -> Node:
        """Stamp what a match that ends at ``end``, in ``node``, needs of the other components; the first node above."""
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
        """A request that ended in ``end``, which it still holds, is over: the policy learns of it. ``forked``: the page
        at which it left the ways of those before it; 0: nowhere."""
        world = self._world
        if not world.policy.learns:
            return
        world.policy.use(end, forked, world.recency.tick())
        node, parent = end, end.parent
        while parent is not None:
            for place, entry in enumerate(node.entry):
                if entry is not None:
                    world.reorder(node, place)
            node, parent = parent, parent.parent

    def leave(self, node: Node, begin: int) -> None:
        """A request that began at page ``begin`` and was held at ``node`` is over: the next match of its text is likely
        to end there, or where texts fork. What such ends need of SWA and MAMBA counts as used; what none of them needs
        is idle from now on. Looks at what is new on the path, and above it up to where that was known already."""
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
