"""The fate of pages that are not in the tree any more: a short memory, to tell why a request missed.

A page is missed where the tree ends, so what is remembered is the first page of a node that left, under the node that
it hung below. There are two generations, each half of what may be kept; when the younger one is full, the older one is
dropped. So to remember a page costs one assignment, and nothing is ever searched for.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asynccache.core.tree import Node


class Gone(IntEnum):
    """From where a page left the tree: from that tier, and no other had it. NEVER: nothing is remembered of it. STORED:
    it was in storage when it left."""

    NEVER = 0
    DEVICE = 1
    HOST = 2
    STORED = 3


class Ghosts:
    """Remembers up to ``limit`` nodes that left the tree. Nobody ever asks for one that hung below another that has
    left."""

    __slots__ = ("_half", "_old", "_young")

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def note(self, parent: Node, page: bytes, gone: int) -> None:
        """Remember that the node below ``parent`` that began with ``page`` has left the tree. ``gone``: from where, a
        ``Gone``. Roots are told apart by their digests: one may go and come again."""
        young = self._young
        # The key is that of ``find``, but without a call, since every eviction pays for it.
        young[(id(parent) if parent.end else hash(parent.hashes)) + hash(page)] = gone
        if len(young) >= self._half:
            self._old, self._young = young, {}

    def find(self, parent: Node, page: bytes) -> Gone:
        """Return what became of ``page``, which would follow ``parent``."""
        mark = (id(parent) if parent.end else hash(parent.hashes)) + hash(page)
        return Gone(self._young.get(mark) or self._old.get(mark) or 0)
