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
    """Reads one world; writes nothing but what makes recent."""

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
        """Somebody asked: stamp the node that ``end`` lies in, and for SWA the nodes of the last window and a page more.
        ``node`` is that one or below it."""
        stamp = self._world.recency.tick()
        while node.parent is not None and node.parent.end >= end:
            node = node.parent
        if node.parent is None:
            return
        node.stamp[:] = [stamp] * self._count
        if self._swa:
            first = self._world.components[self._swa].first_page(end) - 1
            above: Node | None = node.parent
            while above is not None and above.end > first and above.parent is not None:
                above.stamp[self._swa] = stamp
                above = above.parent

    def use(self, end: Node, forked: int) -> None:
        """A request that ended in ``end`` gives back its lease, which pins all of it still: stamp its path, and of the
        other components what a match needs that ends here, or where requests went different ways. ``forked``: the
        page at which this one left the ways of those before it; 0: nowhere.

        A prompt that is asked again ends before its last token, so for SWA this end has a page more than its window.
        """
        world, swa, mamba = self._world, self._swa, self._mamba
        stamp, now, policy = world.recency.tick(), world.recency.time, world.policy
        low, node = NOWHERE, end
        while (parent := node.parent) is not None:
            node.stamp[0] = stamp
            if swa or mamba:
                ends = node is end or (node.children is not None and len(node.children) > 1)
                if swa:
                    if ends:
                        low = min(low, world.components[swa].first_page(node.end) - (node is end))
                    if node.end > low:
                        node.stamp[swa] = stamp
                if mamba and ends:
                    node.stamp[mamba] = stamp
            policy.use(node, node.end - parent.end, node.end <= forked, now)
            for place, entry in enumerate(node.entry):
                if entry is not None:
                    world.reorder(node, place)
            node = parent
        policy.tick(now)
