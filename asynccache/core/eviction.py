"""How recent every cell is, the queues in which candidates wait, and the policies that choose among their ends.

A *candidate* is a cell that may be evicted now: nothing pins it, and, of FULL, nothing below it is on the same tier. Each
candidate waits in one ``Order``, which is one or more ``Queue``s sorted by recency. A policy says in which queue a cell
waits, and which of the oldest and newest cells of the queues goes: so a choice costs the same however many cells wait.

A queue may be behind the truth: a cell that was pinned or touched since stays where it was until a policy chooses it.
Whoever asked for the choice looks then, and puts it where it belongs. So a touch costs one store.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol

from asynccache.core.tree import Entry, Node

_ENDED = -(1 << 60)
_IDLE = -(1 << 59)
_FULL_SLICE = 48


class Recency:
    """The stamps of all cells: of two cells of one component, the one with the smaller ``node.stamp[c]`` is the colder.

    A stamp of a use is the time in microseconds, or one more than the last where no time has passed. Below all of those
    are cells that no match end needs (``idle``), and below these what was ended; each of them longest first. ``time``:
    seconds, as told from outside; the core has no clock. ``now``: the last stamp.
    """

    __slots__ = ("now", "time")

    def __init__(self) -> None:
        self.time = 0.0
        self.now = 0

    def tick(self) -> int:
        """A stamp that is later than all before it."""
        now = int(self.time * 1e6)
        self.now = now = now if now > self.now else self.now + 1
        return now

    def touch(self, node: Node, c: int) -> None:
        """Somebody used this."""
        node.stamp[c] = self.tick()

    def fork(self, prefix: Node, suffix: Node, c: int) -> None:
        """A split made ``prefix`` out of ``suffix``."""
        prefix.stamp[c] = suffix.stamp[c]

    def uncover(self, node: Node, child: Node, c: int) -> None:
        """``child``, the last one below ``node``, was evicted."""
        if child.stamp[c] > node.stamp[c]:
            node.stamp[c] = child.stamp[c]

    def end(self, node: Node, c: int) -> None:
        """The conversation that this is private to will not come back."""
        node.stamp[c] = _ENDED + self.tick()

    def idle(self, node: Node) -> None:
        """No match end needs the auxiliary cells of ``node`` as yet."""
        stamp = _IDLE + self.tick()
        for c in range(1, len(node.stamp)):
            node.stamp[c] = stamp


def last_touch(node: Node, c: int) -> int:
    """When ``node``'s component ``c`` was used last, became idle or was ended."""
    stamp = node.stamp[c]
    return stamp if stamp >= 0 else stamp - _IDLE if stamp >= _IDLE else stamp - _ENDED


class Slice:
    """Some neighbours of a queue, the coldest first."""

    __slots__ = ("nodes", "queue", "stamps")

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.stamps: list[int] = []
        self.nodes: list[Node] = []


class Queue:
    """Cells sorted by their stamps, the coldest first, in slices of a few dozen. ``changed`` is set whenever its oldest or
    newest cell has become another; the rest is a policy's to write, about these two."""

    __slots__ = ("changed", "slices", "takes_newest", "until", "value", "version")

    def __init__(self) -> None:
        self.slices: list[Slice] = []
        self.changed = True
        self.takes_newest = False
        self.value = self.until = 0.0
        self.version = -1

    def put(self, stamp: int, node: Node) -> Entry:
        """Have ``node`` wait here; of cells that are equally cold the one that came last goes first."""
        slices = self.slices
        if not slices:
            slices.append(Slice(self))
        part = slices[-1]
        stamps = part.stamps
        if not stamps or stamp > stamps[-1]:
            if len(stamps) >= _FULL_SLICE:
                part = Slice(self)
                slices.append(part)
            part.stamps.append(stamp)
            part.nodes.append(node)
            self.changed = True
        else:
            part = slices[max(0, bisect_right(slices, stamp, key=_first) - 1)]
            at = bisect_left(part.stamps, stamp)
            part.stamps.insert(at, stamp)
            part.nodes.insert(at, node)
            self.changed |= not at and part is slices[0]
            if len(part.nodes) > 2 * _FULL_SLICE:
                self._halve(part)
        return stamp, part

    def _halve(self, part: Slice) -> None:
        """Divide ``part``; entries of the upper half point to the new slice from now on."""
        upper = Slice(self)
        upper.stamps, part.stamps = part.stamps[_FULL_SLICE:], part.stamps[:_FULL_SLICE]
        upper.nodes, part.nodes = part.nodes[_FULL_SLICE:], part.nodes[:_FULL_SLICE]
        self.slices.insert(self.slices.index(part) + 1, upper)
        for stamp, node in zip(upper.stamps, upper.nodes, strict=True):
            node.entry[next(i for i, e in enumerate(node.entry) if e is not None and e[1] is part)] = (stamp, upper)

    def oldest(self) -> Node:
        """The coldest cell; there is one."""
        return self.slices[0].nodes[0]

    def newest(self) -> Node:
        """The most recent one."""
        return self.slices[-1].nodes[-1]


def _first(part: Slice) -> int:
    return part.stamps[0]


class Order:
    """The queues of one order of one place."""

    __slots__ = ("_place", "queues")

    def __init__(self, place: int, queues: int) -> None:
        self._place = place
        self.queues = tuple([Queue() for _ in range(queues)])

    def push(self, queue: int, stamp: int, node: Node) -> None:
        """Have ``node``'s cell wait here. It waits nowhere else."""
        node.entry[self._place] = self.queues[queue].put(stamp, node)

    def entries(self) -> list[tuple[int, Node]]:
        """Every cell that waits, with the stamp it waits by, for the audit."""
        return [pair for queue in self.queues for part in queue.slices
                for pair in zip(part.stamps, part.nodes, strict=True)]


def withdraw(node: Node, place: int) -> None:
    """Have ``node``'s cell wait no longer; nothing if it does not."""
    entry = node.entry[place]
    if entry is None:
        return
    node.entry[place] = None
    stamp, part = entry
    at = bisect_left(part.stamps, stamp)
    while part.nodes[at] is not node:
        at += 1
    del part.stamps[at], part.nodes[at]
    queue, slices = part.queue, part.queue.slices
    if not at and part is slices[0] or part is slices[-1] and at == len(part.nodes):
        queue.changed = True
    if not part.nodes:
        slices.remove(part) if part is not slices[0] else slices.pop(0)


class EvictionPolicy(Protocol):
    """Has a say in which candidate goes. ``queues``: how many queues each order has.

    A policy is told of every use before what was used can be a candidate again, and may keep what it learns in
    ``node.heat``, an integer, and ``node.used``, the time of the last use in seconds; both are copied on a split.
    """

    queues: int

    def queue(self, node: Node, c: int) -> int:
        """In which queue component ``c`` of ``node`` waits, from 0 on."""
        ...

    def choose(self, queues: Sequence[Queue], now: float) -> Node | None:
        """The oldest or newest of one of ``queues``, which goes; None if all are empty."""
        ...

    def use(self, node: Node, pages: int, forked: bool, now: float) -> None:
        """A request gave back a lease on ``node``. ``forked``: it went another way below it than those before."""
        ...

    def tick(self, now: float) -> None:
        """A request has given back all that it had."""
        ...

    def forget(self, node: Node, parent: Node, page: bytes, pages: int, now: float) -> None:
        """``node``, which began with ``page`` below ``parent``, has left every tier."""
        ...

    def remember(self, parent: Node, page: bytes) -> int:
        """Where a node that began with ``page`` below ``parent`` ended before it was forgotten; 0: it is not known."""
        ...

    def restore(self, node: Node, page: bytes, now: float) -> None:
        """``node``, which begins with ``page``, is new."""
        ...


class Lru:
    """Least recently used first. It learns nothing."""

    __slots__ = ()

    queues = 1

    def queue(self, node: Node, c: int) -> int:
        return 0

    def choose(self, queues: Sequence[Queue], now: float) -> Node | None:
        return queues[0].oldest() if queues[0].slices else None

    def use(self, node: Node, pages: int, forked: bool, now: float) -> None:
        pass

    def tick(self, now: float) -> None:
        pass

    def forget(self, node: Node, parent: Node, page: bytes, pages: int, now: float) -> None:
        pass

    def remember(self, parent: Node, page: bytes) -> int:
        return 0

    def restore(self, node: Node, page: bytes, now: float) -> None:
        pass
