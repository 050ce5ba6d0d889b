"""What became of pages that are not in the tree any more: a short memory, to tell why a request missed.

A page is missed where the tree ends, so what is remembered is the first page of a node that left, under the node that
it hung below. Two generations, each half of what may be kept: the older one goes when the younger is full, so
a note costs a store in a dict and nothing is ever searched for.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asynccache.core.tree import Node


class Gone(IntEnum):
    """From where a page left the tree: a tier's number and one. STORED: it was in storage when it did."""

    NEVER = 0
    DEVICE = 1
    HOST = 2
    STORED = 3


class Ghosts:
    """Remembers up to ``limit`` nodes that left. What hung below a node that is gone itself is never asked for."""

    __slots__ = ("_half", "_old", "_young")

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def note(self, parent: Node, page: bytes, gone: int) -> None:
        """The node that began with ``page`` below ``parent`` has left the tree. A root may go and come again; its
        digest stays."""
        young = self._young
        young[(id(parent) if parent.end else hash(parent.hashes)) + hash(page)] = gone  # evictions pay: not by a call
        if len(young) >= self._half:
            self._old, self._young = young, {}

    def find(self, parent: Node, page: bytes) -> Gone:
        """What became of ``page``, which would follow ``parent``."""
        mark = (id(parent) if parent.end else hash(parent.hashes)) + hash(page)
        return Gone(self._young.get(mark) or self._old.get(mark) or 0)
