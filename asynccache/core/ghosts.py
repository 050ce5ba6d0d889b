"""The fate of pages that are not in the tree any more: a short memory, to tell why a request missed.

A request misses at the page where the tree ends. So the first page of each node that left is remembered, together with
the node that it hung below. There are two generations, each half of what may be kept; when the younger one is full, the
older one is dropped. So to remember a page costs one assignment, and nothing is ever searched for.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asynccache.core.tree import Node


class Gone(IntEnum):
    """The tier from which a page left the tree, when no other tier had it. NEVER: nothing is remembered of the page.
    STORED: the page was in storage when it left."""

    NEVER = 0
    DEVICE = 1
    HOST = 2
    STORED = 3


class Ghosts:
    """Remembers up to ``limit`` nodes that left the tree. Only nodes whose parent is still in the tree can be found
    again."""

    __slots__ = ("_half", "_old", "_young")

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def note(self, parent: Node, page: bytes, gone: int) -> None:
        """Remember that the node below ``parent`` that began with ``page`` has left the tree. ``gone``: a ``Gone``, the
        tier that it left. A root is known by its digest, not its identity, since a root may be dropped and made
        again."""
        young = self._young
        # The key is that of ``find``, but without a call, since every eviction pays for it.
        young[(id(parent) if parent.end else hash(parent.hashes)) + hash(page)] = gone
        if len(young) >= self._half:
            self._old, self._young = young, {}

    def find(self, parent: Node, page: bytes) -> Gone:
        """Return what became of ``page``, which would follow ``parent``."""
        mark = (id(parent) if parent.end else hash(parent.hashes)) + hash(page)
        return Gone(self._young.get(mark) or self._old.get(mark) or 0)
