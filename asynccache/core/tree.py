"""The radix tree's shape: nodes, the walk down, and nothing about slots, pins or policies.

A node's key is a run of whole pages; children are found by their first page. ``end`` is the position after the node,
in pages from the root. A node that left the tree has no parent, like a root, and never comes back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynccache.core.keys import HASH_BYTES
from asynccache.core.states import ABSENT, NAMES

if TYPE_CHECKING:
    from asynccache.core.eviction import Slice
    from asynccache.core.ledger import Operation


class Node:
    """A run of pages, and a cell for each component on each tier.

    A cell's *place* is its component on the device, then on the host. By place: ``state``; ``slots``, bytes of int32;
    ``pins``, how many hold it; ``entry``, where it waits in an eviction order, if it does. By component,
    for both tiers: ``stamp``. Lists, one by attribute: an object a cell costs a commit more than all it does with them.

    ``kids``: children whose FULL is not ABSENT on the device, on the host. ``ops``: operations that cover this node.
    ``stored``: bit per component that is known to be in storage, and above them since when that counts: the world's
    ``stored`` tells. ``passes``/``passer``: commits that went through, for
    write_through_selective. ``unsavable``: its backup failed, so it may be dropped without waiting for another.
    ``condemned``: bit per component whose device cell was chosen to go, and of which nothing is lost then, or will be
    when a backup has ended; FULL's bit is for the whole leaf. Until a request wants it again. ``heat``, ``used``,
    ``name``: the eviction policy's.
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
        self.entry: list[Slice | None] = [None] * places
        self.stamp = [0] * components
        self.kids_device = self.kids_host = 0
        self.hashes = b""
        self.ops: tuple[Operation, ...] = ()
        self.stored = self.passes = self.passer = 0
        self.unsavable = False
        self.condemned = self.heat = self.name = self.used = 0

    def __repr__(self) -> str:
        cells = [f"{NAMES[state]} {pins} pins" for state, pins in zip(self.state, self.pins, strict=True)]
        return f"<Node ..{self.end} {cells}>"


class Root(Node):
    """The start of one namespace. Its ``hashes`` are the namespace's digest, H(-1). ``dead``: invalidated. ``mute``:
    with all others, so no event tells of its pages any more. ``holders``: leases and prefetches that may hang something
    below it."""

    __slots__ = ("dead", "holders", "mute")

    def __init__(self, space: bytes, components: int) -> None:
        super().__init__(b"", 0, None, components)
        self.hashes = space
        self.dead = self.mute = False
        self.holders = 0


def walk(start: Node, key: bytes, at: int, page_bytes: int, stop: int | None = None) -> tuple[list[Node], int]:
    """Follow the whole pages of ``key[at:stop]`` down from ``start``; ``at`` is a page's border.

    Returns:
        The nodes touched, root first, and the byte position reached: inside the last node where the key diverges from
        it or ends in it.
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
    """How many whole pages ``key[at:stop]`` and ``other`` have in common from their starts."""
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


def link(parent: Node, child: Node, page_bytes: int) -> None:
    """Hang ``child`` under ``parent``."""
    if parent.children is None:
        parent.children = {}
    parent.children[child.key[:page_bytes]] = child


def unlink(node: Node, page: bytes) -> Node:
    """Take a childless ``node``, whose first page is ``page``, out of the tree; its former parent."""
    parent = node.parent
    assert parent is not None
    assert parent.children is not None
    del parent.children[page]
    if not parent.children:
        parent.children = None
    node.parent = None
    return parent


def cut(node: Node, pages: int, page_bytes: int) -> Node:
    """Insert a new node that takes over the first ``pages`` pages of ``node``; it. Only shape, key and hashes move."""
    parent = node.parent
    assert parent is not None
    at = pages * page_bytes
    prefix = Node(node.key[:at], parent.end + pages, parent, len(node.stamp))
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
