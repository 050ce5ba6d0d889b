"""FULL: a match may end at any page of an unbroken run from the root."""

from __future__ import annotations

from collections.abc import Sequence

from asynccache.core.components.component import Component
from asynccache.core.settings import ComponentKind
from asynccache.core.states import ABSENT, HERE, PRESENT
from asynccache.core.tree import Node


class FullComponent(Component):
    """Full attention. On each tier its data is closed towards the root: where a node has it, all nodes above have it.
    So the run is found from its far end."""

    __slots__ = ()

    def __init__(self, index: int, hosts: int) -> None:
        super().__init__(ComponentKind.FULL, index, hosts, divides=True)

    def longest_end(self, path: Sequence[Node], end: int, host: bool) -> int:
        own, other = self.index, self.host
        covered = 0
        for i in range(len(path) - 1, -1, -1):
            if path[i].state[own] in HERE:
                covered = i + 1
                break
        if host:
            for i in range(covered, len(path)):
                state = path[i].state
                if state[own] != ABSENT or state[other] != PRESENT:
                    break
                covered = i + 1
        return min(end, path[covered - 1].end) if covered else 0

    def first_page(self, end: int) -> int:
        return 0
