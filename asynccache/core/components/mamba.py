"""MAMBA: an end is valid where a node that ends there holds a checkpoint of the recurrent state."""

from __future__ import annotations

from collections.abc import Sequence

from asynccache.core.components.component import Component
from asynccache.core.settings import ComponentKind
from asynccache.core.states import ABSENT, HERE, PRESENT
from asynccache.core.tree import Node


class MambaComponent(Component):
    """Recurrent state. One slot stands for everything up to the node's end, so it stays with the suffix of a split."""

    __slots__ = ()

    def __init__(self, index: int, hosts: int) -> None:
        super().__init__(ComponentKind.MAMBA, index, hosts, divides=False)

    def longest_end(self, path: Sequence[Node], end: int, host: bool) -> int:
        own, other = self.index, self.host
        for node in reversed(path):
            if node.end > end:
                continue
            state = node.state[own]
            if state in HERE:
                return node.end
            if host and state == ABSENT and node.state[other] == PRESENT:
                return node.end
        return 0

    def first_page(self, end: int) -> int:
        return max(0, end - 1)
