"""Which node goes next: the policy that stamps cells, and the order that candidates wait in.

An ``Order`` is a heap with lazy correction: an entry keeps the stamp it was pushed with; whoever pops it compares that
with the cell's stamp of now and pushes it again if it rose. So a touch costs one store, and eviction costs the same
per page however many nodes there are. A cell has at most one entry, in the order where it belongs; a cell that leaves,
or whose stamp fell, has its entry made void by forgetting it. Void entries are thrown out a few at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Protocol

from asynccache.core.tree import Entry, Node

_ENDED = -(1 << 60)
_IDLE = -(1 << 59)
_SWEEP_FROM = 1024


class EvictionPolicy(Protocol):
    """Writes ``node.stamp[c]``; of component ``c`` the smallest stamp goes first."""

    @property
    def now(self) -> int:
        """The latest stamp of a touch: a clock that counts touches, for tools."""
        ...

    def touch(self, node: Node, c: int) -> None:
        """A match or a commit used this."""
        ...

    def fork(self, prefix: Node, suffix: Node, c: int) -> None:
        """A split made ``prefix`` out of ``suffix``."""
        ...

    def uncover(self, node: Node, child: Node, c: int) -> None:
        """``child``, the last one below ``node``, was evicted."""
        ...

    def idle(self, node: Node, c: int) -> None:
        """No match is likely to end where it would need this: it goes before what was used."""
        ...

    def end(self, node: Node, c: int) -> None:
        """The conversation that this is private to will not come back."""
        ...


class Lru:
    """Least recently used first. What no match is likely to need goes before that, and what was ended before all else,
    of both what has been so for longest."""

    __slots__ = ("_clock",)

    def __init__(self) -> None:
        self._clock = 0

    @property
    def now(self) -> int:
        return self._clock

    def touch(self, node: Node, c: int) -> None:
        self._clock = node.stamp[c] = self._clock + 1

    def fork(self, prefix: Node, suffix: Node, c: int) -> None:
        prefix.stamp[c] = suffix.stamp[c]

    def uncover(self, node: Node, child: Node, c: int) -> None:
        if child.stamp[c] > node.stamp[c]:
            node.stamp[c] = child.stamp[c]

    def idle(self, node: Node, c: int) -> None:
        self._clock += 1
        node.stamp[c] = _IDLE + self._clock

    def end(self, node: Node, c: int) -> None:
        self._clock += 1
        node.stamp[c] = _ENDED + self._clock


def is_idle(node: Node, c: int) -> bool:
    """Whether no match is likely to need ``node``'s component ``c``, or its conversation has ended."""
    return node.stamp[c] < 0


def last_touch(node: Node, c: int) -> int:
    """When ``node``'s component ``c`` was used last, became idle or was ended."""
    stamp = node.stamp[c]
    return stamp if stamp >= 0 else stamp - (_IDLE if stamp >= _IDLE else _ENDED)


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": Lru}


class Order:
    """A heap of (stamp, node) for cells of one place. Pushing also carries entries over from an older heap, dropping
    void ones, so that garbage stays a fraction of what lives and no single call pays for a rebuild."""

    __slots__ = ("_heap", "_old", "_place", "_pushes", "_until_sweep")

    def __init__(self, place: int) -> None:
        self._place = place
        self._heap: list[Entry] = []
        self._old: list[Entry] = []
        self._pushes = 0
        self._until_sweep = _SWEEP_FROM

    def push(self, stamp: int, node: Node) -> None:
        """Have ``node``'s cell wait here. It waits nowhere else."""
        entry = (stamp, node)
        node.entry[self._place] = entry
        heappush(self._heap, entry)
        self._pushes += 1
        if self._old:
            self._carry()
        elif self._pushes > self._until_sweep:
            self._heap, self._old = self._old, self._heap
            self._pushes, self._until_sweep = 0, max(_SWEEP_FROM, len(self._old))

    def pop(self) -> Entry | None:
        """Take out the coldest entry that is not void; its stamp may be too low."""
        heap, old, place = self._heap, self._old, self._place
        while heap or old:
            entry = heappop(old if old and (not heap or old[0] < heap[0]) else heap)
            entries = entry[1].entry
            if entries[place] is entry:
                entries[place] = None
                return entry
        return None

    def entries(self) -> list[Entry]:
        """Every entry that is not void, for the audit."""
        return [entry for entry in self._heap + self._old if entry[1].entry[self._place] is entry]

    def _carry(self) -> None:
        old, heap, place = self._old, self._heap, self._place
        for _ in range(3):
            if not old:
                return
            entry = old.pop()
            if entry[1].entry[place] is entry:
                heappush(heap, entry)
