"""SWA: an end is valid where the unbroken run of window data before it covers the window, or reaches the root."""

from __future__ import annotations

from collections.abc import Sequence

from asynccache.core.settings import ComponentKind
from asynccache.core.states import ABSENT, HERE, PRESENT
from asynccache.core.tree import Node


class SlidingWindow:
    """Sliding-window attention; ``window`` in pages, rounded up."""

    __slots__ = ("_host", "divides", "index", "kind", "window")

    def __init__(self, index: int, hosts: int, window: int) -> None:
        self.kind = ComponentKind.SWA
        self.index = index
        self.divides = True
        self.window = window
        self._host = index + hosts

    def longest_end(self, path: Sequence[Node], end: int, host: bool) -> int:
        i = len(path) - 1
        while end > 0:
            while path[i].parent.end >= end:  # type: ignore[union-attr]
                i -= 1
            floor = end - self.window
            for j in range(i, -1, -1):
                node = path[j]
                start = node.parent.end  # type: ignore[union-attr]
                if not self._has(node, host):
                    end = start
                    break
                if start <= floor:
                    return end
            else:
                return end
        return 0

    def first_page(self, end: int) -> int:
        return max(0, end - self.window)

    def _has(self, node: Node, host: bool) -> bool:
        state = node.cells[self.index].state
        if state in HERE:
            return True
        return host and state == ABSENT and node.cells[self._host].state == PRESENT
