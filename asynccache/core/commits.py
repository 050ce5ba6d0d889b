"""Commits: whole pages move from a lease into the tree, and the write policy decides what is backed up.

Pages that the tree has already are duplicates, and the lease's slots for them are retired. Where the tree has such
pages but not on the device, it takes over the lease's slots instead.

A commit may publish pages that the engine is still computing. A COMPUTE operation covers what such a commit gave to the
tree, until it is known whether the engine's batches ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asynccache.core.holds import release_hold, take_hold
from asynccache.core.keys import HASH_BYTES
from asynccache.core.leases import retire
from asynccache.core.ledger import COMPUTE, LOAD_BACK, CoreLease
from asynccache.core.match import Matches
from asynccache.core.plan import SLOT_BYTES, Compute, Medium, Plan, Wait
from asynccache.core.settings import WritePolicy
from asynccache.core.transfers import Transfers
from asynccache.core.tree import ABSENT, ARRIVING, LEAVING, PRESENT, Node, walk
from asynccache.core.world import World, split_at

_WRITE_BACK = WritePolicy.WRITE_BACK
_SELECTIVE = WritePolicy.WRITE_THROUGH_SELECTIVE


class Committed(NamedTuple):
    """The result of a commit."""

    plan: Plan
    length: int
    """How many tokens of the lease are committed so far."""
    took: bool
    """Whether the checkpoint's slot went to the tree."""
    computing: int
    """The id of the ``Compute`` in the plan; 0: there is none."""


def _loading(path: Sequence[Node], swa: int, window: int) -> tuple[int, ...]:
    """Return the ids of the loads in flight, doomed ones too, that bring FULL of these nodes, or SWA of those nodes
    that end after page ``window``."""
    loads: list[int] = []
    for node in path:
        states = (node.state[0], node.state[swa] if node.end > window else ABSENT)
        if ARRIVING in states or LEAVING in states:
            loads += [op.id for op in node.ops if op.kind is LOAD_BACK]
    return tuple(loads)


class _Commit:
    """One commit of the pages ``begin`` to ``total``."""

    __slots__ = ("begin", "filled", "hashes", "key", "lease", "spares", "total", "window")

    def __init__(
        self, lease: CoreLease, key: bytes, hashes: bytes, begin: int, total: int, window: int, spares: list[bytes],
        filled: dict[Node, int] | None,
    ) -> None:  # fmt: skip
        self.lease = lease
        self.key = key
        self.hashes = hashes
        self.begin = begin
        self.total = total
        self.window = window
        """The first page whose SWA the end needs."""
        self.spares = spares
        """The slots to retire, by component."""
        self.filled = filled
        """The nodes of which the commit filled device cells, with a bit for each; None: nobody asks, since all pages
        are computed."""

    def note(self, node: Node, c: int) -> None:
        """Note that the commit filled the device cell of component ``c`` of ``node``."""
        if self.filled is not None:
            self.filled[node] = self.filled.get(node, 0) | 1 << c

    def own(self, c: int, start: int, end: int) -> bytes:
        """Return the lease's own slots of component ``c`` for pages ``start`` to ``end``, as far as it has them."""
        base = self.lease.own_from[c]
        if end <= base:
            return b""
        return self.lease.own[c][max(0, start - base) * SLOT_BYTES : (end - base) * SLOT_BYTES]

    def spare(self, c: int, start: int, end: int) -> None:
        """Note that these pages of the lease are duplicates."""
        self.spares[c] += self.own(c, start, end)

    def keep_rest(self, c: int, end: int) -> None:
        """Leave the lease its pages of component ``c`` from page ``end`` on; those before have another owner now."""
        lease, passed = self.lease, end - self.lease.own_from[c]
        if passed > 0:
            lease.own[c] = lease.own[c][passed * SLOT_BYTES :]
            lease.own_from[c] = end


def _end(node: Node) -> int:
    return node.end


class Commits:
    """Publishes the pages of leases in one world."""

    def __init__(self, world: World, transfers: Transfers, matches: Matches) -> None:
        self._world = world
        self._transfers = transfers
        self._matches = matches
        self._count = world.count
        self._page_size = world.config.page_size
        self._policy = world.config.write_policy
        self._swa = world.swa
        self._mamba = world.mamba

    def commit(
        self, lease: CoreLease, key: bytes, hashes: bytes, checkpoint: tuple[int, int] | None, computed: bool
    ) -> Committed | Wait:
        world, size, page = self._world, self._page_size, self._world.page_bytes
        begin, total = lease.length // size, min(len(key) // page, lease.reserved // size)
        path, reached = walk(lease.hold.end, key, begin * page, page, total * page)
        window = world.components[self._swa].first_page(total) if self._swa else 0
        if path and (blockers := _loading(path, self._swa, window)):
            return Wait(world.plan(), blockers)
        work = _Commit(lease, key, hashes, begin, total, window, [b""] * self._count, None if computed else {})
        if path and path[-1].end > reached // page:
            path[-1] = split_at(world, path[-1], reached // page)
        end = lease.hold.end
        for node in path:
            end = self._merge(work, node)
        fresh = self._grow(work, end)
        end = fresh[-1] if fresh else end
        # The hold moves before new nodes are filled: a cell that is pinned when its data comes need not enter an order.
        old, released = lease.hold, lease.own_from[self._swa] if self._swa else 0
        lease.hold = take_hold(world, end, end.end, floor=released if released > begin else 0)
        if end.parent is not None:
            world.recency.touch(end, 0)
        for node in fresh:
            self._fill(work, node)
        took = checkpoint is not None and bool(self._mamba) and self._attach(work, end, checkpoint)
        release_hold(world, old)
        work.keep_rest(0, end.end)
        if self._swa:
            work.keep_rest(self._swa, end.end)
        lease.length = end.end * size
        if any(work.spares):
            retire(world, work.spares)
        computing = 0 if work.filled is None else self._await_engine(lease, work.filled)
        self._write_out(lease, end, begin, took)
        return Committed(world.plan(), lease.length, took, computing)

    def _merge(self, work: _Commit, node: Node) -> Node:
        """Merge the lease's pages into ``node``, which the tree has already, and return the node. The node takes over
        the pages that it lacks on the device; the lease's other pages for this node are duplicates."""
        start = node.parent.end  # type: ignore[union-attr]
        swa = self._swa
        if swa:
            first = max(work.window, work.lease.own_from[swa])
            if start < first < node.end and node.state[swa] == ABSENT:
                self._merge(work, split_at(self._world, node, first))
                start = first
        if node.state[0] == ABSENT:
            self._insert(work, node, 0, work.own(0, start, node.end))
        else:
            work.spare(0, start, node.end)
        if swa:
            if node.state[swa] == ABSENT and start >= max(work.window, work.lease.own_from[swa]):
                self._insert(work, node, swa, work.own(swa, start, node.end))
            else:
                work.spare(swa, start, node.end)
        return node

    def _insert(self, work: _Commit, node: Node, c: int, slots: bytes) -> None:
        """Fill a device cell with ``slots`` of the lease. If they are not enough for it, because the commit reaches
        beyond the lease's SWA pages, they are retired like duplicates: the engine may still use them."""
        if len(slots) == SLOT_BYTES * self._world.pages(node, c):
            self._world.fill(node, c, slots, PRESENT)
            work.note(node, c)
            if c == 0:
                self._world.publish(Medium.GPU, True, node)
        else:
            work.spares[c] += slots

    def _grow(self, work: _Commit, end: Node) -> list[Node]:
        """Add new nodes, still empty, below ``end`` for what the tree does not have, and return them.

        They are cut at three places: where released SWA pages end, where the window begins, and where the part begins
        that is private to the conversation. Nothing is added if the lease has released all SWA pages up to the end.
        """
        total = work.total
        if end.end >= total:
            return []
        cuts = [total]
        if self._swa:
            released = work.lease.own_from[self._swa]
            if released >= total:
                return []
            cuts = sorted((released, work.window, total))
        if end.end < work.lease.shared < total:
            cuts = sorted((work.lease.shared, *cuts))
        if end.children is not None:
            work.lease.forked = end.end
        fresh = []
        for cut in cuts:
            while cut > end.end:
                end = self._new_node(work, end, cut)
                fresh.append(end)
        return fresh

    def _new_node(self, work: _Commit, parent: Node, end: int) -> Node:
        """Add a node below ``parent`` and return it. It ends at page ``end``, or where a node ended that began with the
        same page and has left the tree, if the eviction policy remembers that."""
        start, page = parent.end, self._world.page_bytes
        if self._world.policy.learns:
            known = self._world.policy.recall(parent, work.key[start * page : (start + 1) * page])
            end = known if start < known < end else end
        key, hashes = work.key[start * page : end * page], work.hashes[start * HASH_BYTES : end * HASH_BYTES]
        node = self._world.add(parent, key, hashes)
        for c in range(1, self._count):
            self._world.recency.idle(node, c)
        return node

    def _fill(self, work: _Commit, node: Node) -> None:
        world, swa = self._world, self._swa
        start = node.parent.end  # type: ignore[union-attr]
        world.fill(node, 0, work.own(0, start, node.end), PRESENT)
        work.note(node, 0)
        world.publish(Medium.GPU, True, node)
        if swa and start >= work.lease.own_from[swa]:
            self._insert(work, node, swa, work.own(swa, start, node.end))

    def _attach(self, work: _Commit, end: Node, checkpoint: tuple[int, int]) -> bool:
        """Give the checkpoint to the node that ends at its position, splitting one if need be. Return True if the tree
        took it; False if there is a state already, or FULL or SWA is missing there."""
        lease = work.lease
        position, slot = checkpoint[0] // self._page_size, checkpoint[1].to_bytes(SLOT_BYTES, "little")
        node = end
        while node.parent is not None and node.parent.end >= position:
            node = node.parent
        if node.parent is None or position > node.end or node.state[0] != PRESENT:
            return False
        if self._swa and node.state[self._swa] == ABSENT:
            return False
        if position < node.end:
            suffix, node = node, split_at(self._world, node, position)
            if work.filled and suffix in work.filled:
                work.filled[node] = work.filled[suffix]
        if node.state[self._mamba] != ABSENT:
            return False
        at = SLOT_BYTES * memoryview(lease.states).cast("i").tolist().index(checkpoint[1])
        lease.states = lease.states[:at] + lease.states[at + SLOT_BYTES :]
        self._world.fill(node, self._mamba, slot, PRESENT)
        work.note(node, self._mamba)
        self._world.recency.touch(node, self._mamba)
        return True

    def _await_engine(self, lease: CoreLease, filled: dict[Node, int]) -> int:
        """Open the COMPUTE that lasts until it is known whether the engine has computed the cells in ``filled``; return
        its id. If it fails the lease is told, even if the tree took none of its pages: its later commits may rest on
        the same batch."""
        op = self._world.ledger.open(COMPUTE)
        op.leases.append(lease)
        for node in sorted(filled, key=_end):
            self._world.cover(op, node, filled[node])
        self._world.effect(Compute(op.id))
        return op.id

    # write policies

    def _write_out(self, lease: CoreLease, end: Node, begin: int, took: bool) -> None:
        """Start the backups that the write policy asks for after a commit."""
        world = self._world
        if not world.has_host or end.root.dead:
            return
        due: Node | None = end if took or end.end > begin else None
        if self._policy is _SELECTIVE:
            due = self._count_pass(lease, end)
        elif self._policy is _WRITE_BACK:
            due = None
        if due is not None:
            self._transfers.backup_or_defer(due, begin)
        self._transfers.backup_coldest()

    def _count_pass(self, lease: CoreLease, end: Node) -> Node | None:
        """Count one pass of this lease through each node on the path to ``end`` that has no host copy. Return the
        deepest node with two passes or more, which is due for a backup; else the first one with a host copy on the way
        up; None if there is neither."""
        due = None
        node = end
        while node.parent is not None:
            if node.state[self._count] != ABSENT:
                return due or node
            if node.passer == lease.id:
                return due
            node.passer = lease.id
            node.passes += 1
            if node.passes > 1 and due is None:
                due = node
            node = node.parent
        return due
