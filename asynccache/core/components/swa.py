"""SWA: an end is valid where the unbroken run of window data before it covers the window, or reaches the root."""

from __future__ import annotations

from collections.abc import Sequence

from asynccache.core.components.component import Component
from asynccache.core.settings import ComponentKind
from asynccache.core.states import ABSENT, HERE, PRESENT
from asynccache.core.tree import Node


class SlidingWindowComponent(Component):
    """Sliding-window attention. ``window``: its reach in pages, rounded up."""

    __slots__ = ("window",)

    def __init__(self, index: int, hosts: int, window: int) -> None:
        super().__init__(ComponentKind.SWA, index, hosts, divides=True)
        self.window = window

    def longest_end(self, path: Sequence[Node], end: int, host: bool) -> int:
        own, other = self.index, self.host
        floor = end - self.window
        for node in reversed(path):
            start = node.parent.end  # type: ignore[union-attr]
            if start >= end:
                continue
            state = node.state
            if state[own] not in HERE and not (host and state[own] == ABSENT and state[other] == PRESENT):
                end, floor = start, start - self.window  # the run begins anew before this hole
            elif start <= floor:
                return end
        return end

    def first_page(self, end: int) -> int:
        return max(0, end - self.window)
