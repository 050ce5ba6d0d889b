"""The radix tree's shape: nodes, the walk down, and nothing about slots, pins or policies.

A node's key is a run of whole pages; children are found by their first page. ``end`` is the position after the node,
in pages from the root. A node that left the tree has no parent, like a root, and never comes back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynccache.core.keys import HASH_BYTES, common_pages
from asynccache.core.states import ABSENT, NAMES

if TYPE_CHECKING:
    from asynccache.core.ledger import Operation


class Cell:
    """One component of one node on one tier: its state, its slots, who pins it, and where it stands in the order.

    ``stamp`` is kept on the device's cell and serves both tiers. ``entry``: its entry in an eviction order of the tier,
    if it waits in one; any other entry of this cell is void.
    """

    __slots__ = ("entry", "pins", "slots", "stamp", "state")

    def __init__(self) -> None:
        self.state = ABSENT
        self.slots = b""
        self.pins = 0
        self.stamp = 0
        self.entry: Entry | None = None

    def __repr__(self) -> str:
        return f"<{NAMES[self.state]} {len(self.slots) // 4} slots, {self.pins} pins>"


Entry = tuple[int, "Node"]


class Node:
    """A run of pages. ``cells`` holds the components' device cells, then their host cells.

    ``kids``: children whose FULL is not ABSENT on the device, on the host. ``ops``: operations that cover this node.
    ``stored``: bit per component that is known to be in storage. ``passes``/``passer``: commits that went through, for
    write_through_selective. ``unsavable``: its backup failed, so it may be dropped without waiting for another.
    """

    __slots__ = (
        "cells", "children", "end", "hashes", "key", "kids_device", "kids_host", "ops", "parent", "passer", "passes",
        "root", "stored", "unsavable",
    )  # fmt: skip

    def __init__(self, key: bytes, end: int, parent: Node | None, cells: int) -> None:
        self.key = key
        self.end = end
        self.parent = parent
        self.root: Root = parent.root if parent is not None else self  # type: ignore[assignment]
        self.children: dict[bytes, Node] | None = None
        self.cells = tuple([Cell() for _ in range(cells)])
        self.kids_device = 0
        self.kids_host = 0
        self.hashes = b""
        self.ops: tuple[Operation, ...] = ()
        self.stored = 0
        self.passes = 0
        self.passer = 0
        self.unsavable = False

    def __lt__(self, other: Node) -> bool:
        """Of two equally cold nodes the deeper one goes first."""
        return self.end > other.end

    def __repr__(self) -> str:
        return f"<Node ..{self.end} {list(self.cells)}>"


class Root(Node):
    """The start of one namespace. Its ``hashes`` are the namespace's digest, H(-1). ``dead``: invalidated. ``holders``:
    leases and prefetches that may hang something below it."""

    __slots__ = ("dead", "holders")

    def __init__(self, space: bytes, cells: int) -> None:
        super().__init__(b"", 0, None, cells)
        self.hashes = space
        self.dead = False
        self.holders = 0


def walk(start: Node, key: bytes, at: int, page_bytes: int) -> tuple[list[Node], int]:
    """Follow ``key[at:]`` (whole pages) down from ``start``.

    Returns:
        The nodes touched, root first, and the byte position reached: inside the last node where the key diverges from
        it or ends in it.
    """
    path: list[Node] = []
    node, size = start, len(key)
    while at < size:
        children = node.children
        if children is None:
            break
        child = children.get(key[at : at + page_bytes])
        if child is None:
            break
        path.append(child)
        if not key.startswith(child.key, at):
            return path, at + common_pages(key, at, child.key, page_bytes) * page_bytes
        at += len(child.key)
        node = child
    return path, at


def link(parent: Node, child: Node, page_bytes: int) -> None:
    """Hang ``child`` under ``parent``."""
    if parent.children is None:
        parent.children = {}
    parent.children[child.key[:page_bytes]] = child


def unlink(node: Node, page_bytes: int) -> Node:
    """Take a childless ``node`` out of the tree; its former parent."""
    parent = node.parent
    assert parent is not None
    assert parent.children is not None
    del parent.children[node.key[:page_bytes]]
    if not parent.children:
        parent.children = None
    node.parent = None
    return parent


def cut(node: Node, pages: int, page_bytes: int) -> Node:
    """Insert a new node that takes over the first ``pages`` pages of ``node``; it. Only shape, key and hashes move."""
    parent = node.parent
    assert parent is not None
    at = pages * page_bytes
    prefix = Node(node.key[:at], parent.end + pages, parent, len(node.cells))
    link(parent, prefix, page_bytes)
    node.key = node.key[at:]
    node.parent = prefix
    prefix.children = {node.key[:page_bytes]: node}
    if node.hashes:
        prefix.hashes = node.hashes[: pages * HASH_BYTES]
        node.hashes = node.hashes[pages * HASH_BYTES :]
    prefix.stored, prefix.passes, prefix.passer = node.stored, node.passes, node.passer
    prefix.unsavable = node.unsavable
    return prefix
