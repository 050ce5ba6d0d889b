"""The shape of the radix tree: nodes, the states of their cells, the walk down from the root, and a short memory of the
nodes that left. Slots, pins and policies are none of its concern.

A node's key is a run of whole pages; children are found by their first page. ``end`` is the position after the node,
in pages from the root. A node that left the tree has no parent, like a root, and never comes back.

A cell, one component of a node on one tier, is in one of four states. These are the only steps between them:

    ABSENT   -> PRESENT   an insert brought the data
    ABSENT   -> ARRIVING  an operation will bring it
    ARRIVING -> PRESENT   that operation is DONE
    ARRIVING -> ABSENT    that operation FAILED
    ARRIVING -> LEAVING   doomed: FULL failed to arrive at a node that this cell's operation covers, or above such a
                          node; the operation's own I/O still runs
    LEAVING  -> ABSENT    the I/O has its outcome, DONE or FAILED; only now are the slots free
    PRESENT  -> ABSENT    evicted

Any other step is a bug. Code that changes a state asks ``MAY`` first, so an illegal step raises an error and changes
nothing. States are small integers and no Enum, because they are read on every step of a walk.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

from asynccache.core.keys import HASH_BYTES
from asynccache.errors import InvariantViolation

if TYPE_CHECKING:
    from asynccache.core.eviction import Chunk
    from asynccache.core.ledger import Operation

ABSENT: Final = 0
ARRIVING: Final = 1
PRESENT: Final = 2
LEAVING: Final = 3

# A match may count on device data in these states: a lease waits for what is ARRIVING.
HERE: Final = (PRESENT, ARRIVING)

NAMES = ("ABSENT", "ARRIVING", "PRESENT", "LEAVING")

_LEGAL = frozenset(
    {
        (ABSENT, PRESENT),
        (ABSENT, ARRIVING),
        (ARRIVING, PRESENT),
        (ARRIVING, ABSENT),
        (ARRIVING, LEAVING),
        (LEAVING, ABSENT),
        (PRESENT, ABSENT),
    }
)

# MAY[old][new] is True if that step is legal.
MAY = tuple(tuple((old, new) in _LEGAL for new in range(4)) for old in range(4))


def illegal(old: int, new: int) -> InvariantViolation:
    """Return the error to raise where ``MAY`` says no."""
    return InvariantViolation(f"illegal step {NAMES[old]} -> {NAMES[new]}")


class Node:
    """A run of pages, with a cell for each component on each tier.

    Each attribute of the cells is one list. There is no object for a cell, because making such objects would take more
    time than all the rest of a commit. The *place* of a cell is its index in these lists: first the components on the
    device, then the components on the host. ``state``; ``slots``, bytes of int32; ``pins``, the counts that keep the
    data; ``entry``, the chunk of an eviction queue in which the cell waits, or None. Only ``stamp`` has one entry for
    each component, which both tiers share.
    """

    __slots__ = (
        "children", "condemned", "end", "entry", "hashes", "heat", "key", "kids_device", "kids_host", "name", "ops",
        "parent", "passer", "passes", "pins", "root", "slots", "stamp", "state", "stored", "unsavable", "used",
    )  # fmt: skip

    def __init__(self, key: bytes, end: int, parent: Node | None, components: int) -> None:
        places = 2 * components
        self.key = key
        self.end = end
        self.parent = parent
        self.root: Root = parent.root if parent is not None else self  # type: ignore[assignment]
        self.children: dict[bytes, Node] | None = None
        self.state = [ABSENT] * places
        self.slots = [b""] * places
        self.pins = [0] * places
        self.entry: list[Chunk | None] = [None] * places
        self.stamp = [0] * components
        self.kids_device = self.kids_host = 0
        """How many children have FULL on that tier in any state but ABSENT."""
        self.hashes = b""
        """The prefix hashes of its pages, 32 bytes each, or b"" if they are not known."""
        self.ops: tuple[Operation, ...] = ()
        """The operations in flight that cover this node."""
        self.stored = self.passes = self.passer = 0
        """``stored`` has a bit for each component that is known to be in storage, and above these bits the era in which
        that was noted: read it with ``World.stored``. For write_through_selective: ``passes`` leases have committed
        through this node while it had no host copy, and ``passer`` is the last of them."""
        self.unsavable = False
        """True if the node's last backup to the host failed, so the node may be dropped without waiting for another."""
        self.condemned = self.heat = self.name = self.used = 0
        """``condemned`` has a bit for each component whose device cell goes next. The host has a copy of such a cell,
        or gets one by a backup in flight, or is to have none. FULL's bit stands for the whole leaf. The bits are
        cleared when a request wants the node again. ``heat``, ``used`` and ``name`` belong to the eviction policy."""

    def __repr__(self) -> str:
        cells = [f"{NAMES[state]} {pins} pins" for state, pins in zip(self.state, self.pins, strict=True)]
        return f"<Node ..{self.end} {cells}>"


class Root(Node):
    """The start of one namespace. Its ``hashes`` are the namespace's digest, H(-1).

    A node whose batch has failed gets a dead root of its own, of which it is the only child (``cut_off``).
    """

    __slots__ = ("dead", "holders", "left", "mute", "origin")

    def __init__(self, space: bytes, components: int) -> None:
        super().__init__(b"", 0, None, components)
        self.hashes = space
        self.dead = self.mute = False
        """``dead``: nobody matches below this root any more, because its namespace was invalidated. ``mute``: KV events
        tell no more of its pages; they were withdrawn before, or all namespaces were invalidated together."""
        self.holders = 0
        """How many leases and prefetches may still hang something below it."""
        self.left: list[bytes] | None = None
        """The hashes of nodes that have left since somebody began to list the namespace's pages; None while nobody
        does."""
        self.origin: Root = self
        """For a root that was made by ``cut_off``, the root that its node was below before, which counts the holders;
        else this root."""


def walk(start: Node, key: bytes, at: int, page_bytes: int, stop: int | None = None) -> tuple[list[Node], int]:
    """Follow the whole pages of ``key[at:stop]`` down from ``start``. The byte position ``at`` lies where a page
    begins.

    Returns:
        The nodes below ``start`` that were reached, the highest first, and the byte position in ``key`` up to which
        they agree with it. That position lies inside the last node if the key diverges from it or ends in it.
    """
    path: list[Node] = []
    node = start
    if stop is None:
        stop = len(key)
    last = stop - page_bytes
    while at <= last:
        children = node.children
        if children is None:
            break
        child = children.get(key[at : at + page_bytes])
        if child is None:
            break
        path.append(child)
        if not key.startswith(child.key, at):
            return path, at + common_pages(key, at, stop, child.key, page_bytes) * page_bytes
        at += len(child.key)
        node = child
    return path, min(at, stop // page_bytes * page_bytes)


def common_pages(key: bytes, at: int, stop: int, other: bytes, page_bytes: int) -> int:
    """Return how many whole pages ``key[at:stop]`` and ``other`` have in common from their starts."""
    low, high = 0, min(stop - at, len(other)) // page_bytes
    if key.startswith(other[: high * page_bytes], at):
        return high
    while low + 1 < high:  # the first ``low`` are common, the first ``high`` are not
        middle = (low + high) // 2
        if key.startswith(other[low * page_bytes : middle * page_bytes], at + low * page_bytes):
            low = middle
        else:
            high = middle
    return low


def _above(parent: Node, child: Node) -> Node:
    """Return the node that has ``child`` among its children: ``parent``, or the root of ``child`` if that was cut
    off."""
    return parent if child.root is parent.root else child.root


def link(parent: Node, child: Node, page_bytes: int) -> None:
    """Hang ``child`` under ``parent``."""
    above = _above(parent, child)
    if above.children is None:
        above.children = {}
    above.children[child.key[:page_bytes]] = child


def unlink(node: Node, page: bytes) -> Node:
    """Take a childless ``node``, whose first page is ``page``, out of the tree, and return its former parent."""
    parent = node.parent
    assert parent is not None
    _forget_child(_above(parent, node), page)
    node.parent = None
    return parent


def _forget_child(above: Node, page: bytes) -> None:
    assert above.children is not None
    del above.children[page]
    if not above.children:
        above.children = None


def cut_off(top: Node, page_bytes: int) -> list[Node]:
    """Take ``top``, with all below it, out of reach of every walk down from its root, and return these nodes, each
    before its children. From now on they are below a dead root, ``top.root``. Walks up from them go on as before,
    through the parent of ``top``, which counts ``top`` and its pins as before: whoever holds one of these nodes holds
    the whole path."""
    parent = top.parent
    assert parent is not None
    root = Root(top.root.hashes, len(top.stamp))
    root.dead, root.origin = True, top.root.origin
    _forget_child(parent, top.key[:page_bytes])
    nodes, todo = [], [top]
    while todo:
        node = todo.pop()
        node.root = root
        nodes.append(node)
        if node.children is not None:
            todo.extend(node.children.values())
    link(parent, top, page_bytes)
    return nodes


def cut(node: Node, pages: int, page_bytes: int) -> Node:
    """Insert a new node above ``node`` that takes over its first ``pages`` pages, and return it. Key and hashes are
    divided. What is noted for storage, write policy and eviction policy is copied to the new node; only ``name``, which
    belongs to the first page, moves there. Cells are left to ``World.split``."""
    parent = node.parent
    assert parent is not None
    at = pages * page_bytes
    prefix = Node(node.key[:at], parent.end + pages, parent, len(node.stamp))
    prefix.root = node.root
    link(parent, prefix, page_bytes)
    node.key = node.key[at:]
    node.parent = prefix
    prefix.children = {node.key[:page_bytes]: node}
    if node.hashes:
        prefix.hashes = node.hashes[: pages * HASH_BYTES]
        node.hashes = node.hashes[pages * HASH_BYTES :]
    prefix.stored, prefix.passes, prefix.passer = node.stored, node.passes, node.passer
    prefix.unsavable, prefix.heat, prefix.used = node.unsavable, node.heat, node.used
    prefix.name, node.name = node.name, 0
    return prefix


class Gone(IntEnum):
    """The last tier that a page was on before it left the tree. NEVER: nothing is remembered of it. STORED: storage had
    it."""

    NEVER = 0
    DEVICE = 1
    HOST = 2
    STORED = 3


class Ghosts:
    """Remembers up to ``limit`` nodes that left the tree, to tell why a request missed. A request misses at the page
    where the tree ends. So the first page of each node that left is remembered, together with the node that it hung
    below, and only nodes whose parent is still in the tree can be found again.

    There are two generations, each half of what may be kept; when the younger one is full, the older one is dropped. So
    to remember a page costs one assignment, and nothing is ever searched for.
    """

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
