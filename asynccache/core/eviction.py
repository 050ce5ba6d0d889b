"""Eviction: how recent every cell is, the queues in which candidates wait, and the policy that chooses which one goes.

A *candidate* is a cell that may be evicted now: nothing pins it, and if it is FULL's, no node below has FULL on the
same tier. Each candidate waits in one ``Order``, which is one or more ``Queue``s sorted by recency. The policy says in
which queue a cell waits. To choose a victim it compares only the oldest and the newest cell of each queue, so a choice
costs the same however many cells wait.

Queues are lazy. Using or pinning a cell only sets its stamp, which is one assignment. The cell stays where it is until
the policy chooses it; then the caller of the choice sees that it is out of place and moves it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any, ClassVar, Final, NamedTuple

from asynccache.core.tree import Node

_ENDED: Final = -(1 << 60)
_IDLE: Final = -(1 << 59)
_CHUNK: Final = 64


class Recency:
    """Writes the stamps of cells: of two cells of one component, the one with the smaller ``node.stamp[c]`` is the
    colder.

    A use gets the time in microseconds as its stamp, or one more than the last stamp, whichever is later. Two kinds of
    cells lie below all of these. *Idle* cells are those that no match is likely to need. *Ended* cells belong to a
    conversation that is over, and lie below the idle ones. Among idle cells, as among ended ones, the first to become
    so is the coldest.
    """

    __slots__ = ("now", "time")

    def __init__(self) -> None:
        self.time = 0
        """The time in microseconds, as told from outside: the core has no clock."""
        self.now = 0
        """The last stamp."""

    def tick(self) -> int:
        """Return a stamp that is later than all before it."""
        time, now = self.time, self.now + 1
        self.now = now = time if time > now else now
        return now

    def touch(self, node: Node, c: int) -> None:
        """Mark component ``c`` of ``node`` as used just now, by a match or a commit."""
        time, now = self.time, self.now + 1
        self.now = node.stamp[c] = time if time > now else now

    def uncover(self, node: Node, child: Node, c: int) -> None:
        """Raise the stamp of ``node`` to that of ``child``, its last child, which was just evicted: whoever used the
        child used ``node``, too. For FULL, the last use that the policy was told of counts as well."""
        before, stamp = node.stamp[c], child.stamp[c]
        if not c and before >= 0 and node.used > stamp:
            stamp = node.used
        if stamp > before:
            node.stamp[c] = stamp

    def idle(self, node: Node, c: int) -> None:
        """Mark component ``c`` of ``node`` as idle: no match is likely to end where it would be needed."""
        node.stamp[c] = _IDLE + self.tick()

    def end(self, node: Node, c: int) -> None:
        """Mark component ``c`` of ``node`` as ended: the conversation that it is private to will not come back."""
        node.stamp[c] = _ENDED + self.tick()


def is_idle(node: Node, c: int) -> bool:
    """Return True if component ``c`` of ``node`` is idle or ended."""
    return node.stamp[c] < 0


def last_touch(node: Node, c: int) -> int:
    """Return when component ``c`` of ``node`` was used last, became idle or was ended, in microseconds."""
    stamp = node.stamp[c]
    return stamp if stamp >= 0 else stamp - (_IDLE if stamp >= _IDLE else _ENDED)


class Chunk:
    """A run of neighbouring cells of a queue, the coldest first."""

    __slots__ = ("nodes", "queue", "stamps")

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.stamps: list[int] = []
        """The stamp by which each of ``nodes`` waits."""
        self.nodes: list[Node] = []


def _coldest_of(part: Chunk) -> int:
    return part.stamps[0]


class Queue:
    """Cells of one place, sorted by the stamps with which they came, the coldest first, in chunks of a few dozen.

    ``changed`` is set whenever another cell has become the oldest or the newest one. A policy may clear it and keep in
    ``note`` what it worked out about the two.
    """

    __slots__ = ("_place", "changed", "chunks", "note", "order")

    def __init__(self, place: int, order: Order) -> None:
        self._place = place
        self.order = order
        self.chunks: list[Chunk] = []
        self.changed = True
        self.note: Any = None

    def oldest(self) -> Node:
        """Return the coldest cell's node. To be called only if there are ``chunks``."""
        return self.chunks[0].nodes[0]

    def newest(self) -> Node:
        """Return the node of the cell that was used last. To be called only if there are ``chunks``."""
        return self.chunks[-1].nodes[-1]

    def put(self, stamp: int, node: Node) -> None:
        """Have ``node``'s cell, which waits nowhere yet, wait here by ``stamp``. Of equally cold cells the deeper one
        goes first."""
        chunks = self.chunks
        if not chunks:
            chunks.append(Chunk(self))
        part = chunks[-1]
        stamps = part.stamps
        if not stamps or stamp > stamps[-1]:
            if len(stamps) >= _CHUNK:
                part = Chunk(self)
                chunks.append(part)
            part.stamps.append(stamp)
            part.nodes.append(node)
            self.changed = self.order.changed = True
            node.entry[self._place] = part
            return
        part = chunks[max(0, bisect_right(chunks, stamp, key=_coldest_of) - 1)]
        stamps, nodes = part.stamps, part.nodes
        at = bisect_left(stamps, stamp)
        while at < len(stamps) and stamps[at] == stamp and nodes[at].end > node.end:
            at += 1
        stamps.insert(at, stamp)
        nodes.insert(at, node)
        node.entry[self._place] = part
        if not at or at == len(nodes) - 1:
            self.changed = self.order.changed = True
        if len(nodes) > 2 * _CHUNK:
            upper = Chunk(self)
            upper.stamps, part.stamps = stamps[_CHUNK:], stamps[:_CHUNK]
            upper.nodes, part.nodes = nodes[_CHUNK:], nodes[:_CHUNK]
            chunks.insert(chunks.index(part) + 1, upper)
            for moved in upper.nodes:
                moved.entry[self._place] = upper


def withdraw(node: Node, place: int) -> None:
    """Take ``node``'s cell at ``place`` out of the queue in which it waits. Nothing happens if it does not wait."""
    part = node.entry[place]
    if part is None:
        return
    node.entry[place] = None
    nodes = part.nodes
    if nodes[0] is node:
        at = 0
    elif nodes[-1] is node:
        at = len(nodes) - 1
    else:
        stamps, stamp = part.stamps, node.stamp[place % len(node.stamp)]
        at = bisect_left(stamps, stamp)
        while at < len(stamps) and stamps[at] == stamp and nodes[at] is not node:
            at += 1
        if at == len(stamps) or nodes[at] is not node:  # it was used since, and waits by a stamp that it had before
            at = nodes.index(node)
    if _drop(part, at):
        part.queue.order.changed = True


def take(node: Node, place: int) -> int:
    """Take out a cell that was chosen, the oldest or the newest one of its queue, and return the stamp by which it
    waited. Unlike ``withdraw``, this leaves ``changed`` of its order as it is."""
    part = node.entry[place]
    assert part is not None
    node.entry[place] = None
    at = 0 if part.nodes[0] is node else len(part.nodes) - 1
    assert part.nodes[at] is node, "a policy chooses the oldest or the newest cell of a queue"
    stamp = part.stamps[at]
    _drop(part, at)
    return stamp


def _drop(part: Chunk, at: int) -> bool:
    """Take cell ``at`` out of ``part``. Return True if its queue may have another oldest or newest cell now."""
    queue, nodes = part.queue, part.nodes
    del part.stamps[at], nodes[at]
    if not nodes:
        chunks = queue.chunks
        del chunks[0 if chunks[0] is part else chunks.index(part)]
    elif at and at != len(nodes):
        return False
    queue.changed = True
    return True


class Order:
    """The queues of one order of one place.

    ``changed`` is set whenever another cell has become the oldest or the newest one of any queue, unless the reason is
    that the cell which the policy chose was taken out (``take``). A policy may clear it and keep in ``note`` what it
    worked out about the queues.
    """

    __slots__ = ("changed", "first", "note", "rest")

    def __init__(self, place: int, queues: int) -> None:
        self.first = Queue(place, self)
        """The queue of idle and ended cells, which go before all others, the coldest first."""
        self.rest = tuple([Queue(place, self) for _ in range(queues)])
        """The queues among whose ends the policy chooses when ``first`` is empty."""
        self.changed = True
        self.note: Any = None

    def is_empty(self) -> bool:
        """Return True if no cell waits here."""
        return not self.first.chunks and not any(queue.chunks for queue in self.rest)

    def entries(self) -> list[tuple[int, Node]]:
        """Return every cell that waits, with the stamp by which it waits, for the audit."""
        return [
            pair for queue in (self.first, *self.rest) for part in queue.chunks
            for pair in zip(part.stamps, part.nodes, strict=True)
        ]  # fmt: skip


class Curve(NamedTuple):
    """The figures that a policy has learned for one kind of page, by age; ``Learned.edges`` says where an age begins.
    """

    name: str
    used: tuple[float, ...]
    """How many blocks (of 512 tokens) were used again at each age."""
    reached: tuple[float, ...]
    """How many blocks had reached that age unused."""
    again: tuple[float, ...]
    """The share of blocks, 0 to 1, that is used again before reaching that age."""
    worth: tuple[float, ...]
    """Of two pages, the one with the smaller worth is evicted."""


class Learned(NamedTuple):
    """All that a policy has learned: one curve for each kind of page, the same on all tiers."""

    curves: tuple[Curve, ...]
    edges: tuple[float, ...]
    """The seconds at which the ages begin."""
    requests: int
    """How many requests the policy was told of."""
    lessons: int
    """How often the policy has worked out ``Curve.worth`` from them; 0: never, so all is worth the same."""
    ghosts: int
    """How many nodes that left the tree are remembered."""
    returned: float
    """How many blocks (of 512 tokens) came back while they were remembered."""
    leads: bool
    """True if the policy now chooses by what it has learned; False if it evicts the least recently used, which is so
    before it has learned anything, or if that has found no less of late."""
    watched: int
    """How many nodes are remembered to tell whether the curves or recency find more."""


class Judged(NamedTuple):
    """A policy's judgement of one node."""

    kind: str
    """The name of the node's curve."""
    age: float
    """The seconds since the node's last use."""
    worth: float
    """As in ``Curve``; 0 if the node is idle or ended, since such a node is evicted before the policy is asked."""


class EvictionPolicy:
    """An eviction policy: chooses which candidate is evicted. Every policy overrides ``choose``; the other methods have
    defaults.

    A policy that learns keeps what it knows of a node in three integers. ``node.heat`` and ``node.name`` mean what the
    policy wants; ``node.used`` is the stamp of the last use that it was told of; 0: it was told of none. On a split,
    ``heat`` and ``used`` are copied, and ``name`` goes to the upper part. Nothing else of a node may be changed.
    """

    queues: ClassVar[int] = 1
    """How many queues each order has for this policy. Idle and ended cells wait in none of these queues, and are
    evicted before the cells in them."""
    learns: ClassVar[bool] = False
    """Whether the policy is to be told of uses, and of nodes that leave."""
    full_only: ClassVar[bool] = False
    """Whether the policy chooses among pages of FULL alone. Then the policy is asked about component 0 only, and among
    windows and states the least recently used is evicted."""

    def queue(self, node: Node, c: int) -> int:
        """Return in which queue component ``c`` of ``node`` waits, from 0 to ``queues`` - 1. Asked only if there are
        several. The answer may change only with a use of the node."""
        return 0

    def choose(self, order: Order, now: int) -> Node | None:
        """Return the cell to evict, as its node: the oldest or newest one of one of the queues ``order.rest``. None if
        all are empty. ``now``: the time in microseconds."""
        raise NotImplementedError

    def sooner(self, node: Node, other: Node, c: int, now: int, share: float) -> bool:
        """Return True if component ``c`` of ``node`` would go before that of ``other`` if both waited in one order.
        ``share``: the part, 0 to 1, that ``node`` itself has of the room that must be taken for it; its ancestors may
        need the rest. ``now``: the time in microseconds."""
        return node.stamp[c] < other.stamp[c]

    def use(self, end: Node, forked: int, now: int) -> None:
        """Called when a request that ended in ``end`` gives back what it held: it has used the path from the root.
        ``forked``: the page at which its text left the texts of earlier requests; 0: at none. ``now``: the stamp of
        this use."""

    def end(self, node: Node) -> None:
        """Called when the conversation that ``node`` is private to is over. The node is evicted without asking the
        policy."""

    def recall(self, parent: Node, page: bytes) -> int:
        """Return the end, in pages from the root, of the last node that began with ``page`` below ``parent`` and left
        the tree; 0 if it is not known. A new node is cut there, so that what was used together stays together."""
        return 0

    def forget(self, node: Node, parent: Node, page: bytes, now: int) -> None:
        """Called when ``node``, which began with ``page`` below ``parent``, has left the tree. ``now``: the time in
        microseconds."""

    def learned(self, now: int) -> Learned | None:
        """Return what the policy has learned, for reports; None if it learns nothing. ``now``: the time in
        microseconds."""
        return None

    def judge(self, node: Node, age: int) -> Judged | None:
        """Return the policy's judgement of ``node``, whose last use is ``age`` microseconds ago; None if it has no
        opinion."""
        return None


class Lru(EvictionPolicy):
    """Least recently used first."""

    __slots__ = ()

    def choose(self, order: Order, now: int) -> Node | None:
        queue = order.rest[0]
        return queue.oldest() if queue.chunks else None
