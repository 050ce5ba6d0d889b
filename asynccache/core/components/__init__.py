"""What a component decides for itself. The tree, the stages and the stores never ask which kind it is.

A component is FULL, SWA or MAMBA. All of them answer the same questions: may a match end here, from which page on does
an end need me, and does my data divide when a node splits. Positions are pages from the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asynccache.core.components.full import Full
from asynccache.core.components.mamba import Mamba
from asynccache.core.components.swa import SlidingWindow
from asynccache.core.settings import ComponentKind, CoreConfig
from asynccache.core.tree import Node


class Component(Protocol):
    """One kind of KV. ``index`` is its place in the configuration, ``divides``: a split divides its data."""

    kind: ComponentKind
    index: int
    divides: bool

    def longest_end(self, path: Sequence[Node], end: int, host: bool) -> int:
        """The longest valid end of a match that is at most ``end``. ``host``: data that only the host has counts."""
        ...

    def first_page(self, end: int) -> int:
        """The first page that a match ending at ``end`` needs."""
        ...


def build(config: CoreConfig) -> tuple[Component, ...]:
    """The configured components, in order."""
    return tuple(_component(index, config) for index in range(len(config.components)))


def _component(index: int, config: CoreConfig) -> Component:
    spec, hosts = config.components[index], len(config.components)
    match spec.kind:
        case ComponentKind.FULL:
            return Full(index, hosts)
        case ComponentKind.SWA:
            return SlidingWindow(index, hosts, -(-spec.window // config.page_size))
        case ComponentKind.MAMBA:
            return Mamba(index, hosts)
