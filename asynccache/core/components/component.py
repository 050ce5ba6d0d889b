"""The base of FULL, SWA and MAMBA: the questions that each of them answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from asynccache.core.settings import ComponentKind
from asynccache.core.tree import Node


class Component(ABC):
    """One kind of KV. ``index``: its number in the configuration, which is also its place in a node's lists for the
    device. ``host``: its place in these lists for the host. ``divides``: True if a split divides its data."""

    __slots__ = ("divides", "host", "index", "kind")

    def __init__(self, kind: ComponentKind, index: int, hosts: int, *, divides: bool) -> None:
        self.kind = kind
        self.index = index
        self.host = index + hosts
        self.divides = divides

    @abstractmethod
    def longest_end(self, path: Sequence[Node], end: int, host: bool) -> int:
        """Return the longest end, at most page ``end``, that this component allows a match along ``path``. ``host``:
        whether data counts that only the host has."""

    @abstractmethod
    def first_page(self, end: int) -> int:
        """Return the first page whose data a match ending at page ``end`` needs."""
