"""Components: the kinds of KV. Each decides by itself where a match may end, so the tree, the stages and the stores
never ask which kind a component is.

A component is FULL, SWA or MAMBA. All of them answer the same three questions. May a match end here? From which page on
does such an end need the component's data? Is that data divided when a node splits? SWA and MAMBA, which come with
FULL, are the *auxiliary* components. Positions are pages from the root.

* FULL: a match may end at any page of an unbroken run from the root.
* SWA: an end is valid where the unbroken run of window data before it covers the window, or reaches the root.
* MAMBA: an end is valid where a node that ends there holds a checkpoint of the recurrent state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from asynccache.core.settings import ComponentKind, CoreConfig
from asynccache.core.tree import ABSENT, HERE, PRESENT, Node


class Component(ABC):
    """One kind of KV."""

    __slots__ = ("divides", "host", "index", "kind")

    def __init__(self, kind: ComponentKind, index: int, hosts: int, *, divides: bool) -> None:
        self.kind = kind
        self.index = index
        """The component's number in the configuration, which is also its place in a node's lists for the device."""
        self.host = index + hosts
        """The component's place in a node's lists for the host."""
        self.divides = divides
        """True if a split divides the component's data."""

    @abstractmethod
    def longest_end(self, path: Sequence[Node], end: int, host: bool) -> int:
        """Return the longest end of a match along ``path`` that this component allows, at most page ``end``. ``host``:
        whether data that only the host has counts, too."""

    @abstractmethod
    def first_page(self, end: int) -> int:
        """Return the first page whose data a match ending at page ``end`` needs."""


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


class SlidingWindowComponent(Component):
    """Sliding-window attention."""

    __slots__ = ("window",)

    def __init__(self, index: int, hosts: int, window: int) -> None:
        super().__init__(ComponentKind.SWA, index, hosts, divides=True)
        self.window = window
        """The reach in pages, rounded up."""

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


def build(config: CoreConfig) -> tuple[Component, ...]:
    """Return the configured components, in order."""
    return tuple(_component(index, config) for index in range(len(config.components)))


def _component(index: int, config: CoreConfig) -> Component:
    spec, hosts = config.components[index], len(config.components)
    match spec.kind:
        case ComponentKind.FULL:
            return FullComponent(index, hosts)
        case ComponentKind.SWA:
            return SlidingWindowComponent(index, hosts, -(-spec.window // config.page_size))
        case ComponentKind.MAMBA:
            return MambaComponent(index, hosts)
