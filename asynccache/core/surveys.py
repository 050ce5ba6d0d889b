"""Surveys: a question to every live node, answered in slices.

Law: whoever asks holds the tree lock from the first slice to the last. So no node splits meanwhile, and none is asked
twice or left out. Nodes may leave between two slices, and the survey goes on without them.
"""

from __future__ import annotations

from typing import NamedTuple

from asynccache.core.keys import HASH_BYTES
from asynccache.core.plan import More
from asynccache.core.settings import Access
from asynccache.core.states import PRESENT
from asynccache.core.tree import Node
from asynccache.core.world import World

_SLICE = 512


class Unsaved(NamedTuple):
    """How many pages of FULL a close would lose. ``host``: pages that neither the host nor a store has. ``storage``:
    pages that the host has and no store; 0 if no store is written."""

    host: int
    storage: int


class Survey:
    """One walk over the nodes of the namespace ``space``, or of all namespaces (None). Ask one question of it, again
    and again: it answers ``More`` until the walk is over, and then the result."""

    def __init__(self, world: World, space: bytes | None) -> None:
        self._world = world
        roots = world.roots.values() if space is None else [r for r in (world.roots.get(space),) if r is not None]
        self._todo: list[Node] = list(roots)
        self._unsaved = [0, 0]
        self._hashes: list[bytes] = []

    def unsaved(self) -> Unsaved | More:
        """Count what would be lost if the process ended now."""
        for node in self._some():
            if not self._world.stored(node) & 1:
                self._unsaved[node.state[self._world.count] == PRESENT] += self._world.pages(node, 0)
        if self._todo:
            return More(self._world.plan())
        host, storage = self._unsaved
        return Unsaved(host, storage if self._world.access is Access.WRITE else 0)

    def hashes(self) -> list[bytes] | More:
        """Return the prefix hash of every page, 32 bytes each."""
        for node in self._some():
            self._hashes += [node.hashes[at : at + HASH_BYTES] for at in range(0, len(node.hashes), HASH_BYTES)]
        return More(self._world.plan()) if self._todo else self._hashes

    def _some(self) -> list[Node]:
        """Return the next nodes of the walk. Roots have no pages and are left out."""
        nodes: list[Node] = []
        while self._todo and len(nodes) < _SLICE:
            node = self._todo.pop()
            self._todo.extend((node.children or {}).values())
            if node.parent is not None:
                nodes.append(node)
        return nodes
