"""Operations in flight and the fragments of the tree that each one covers.

An operation opens once, is given exactly one outcome, and closes. It covers fragments, root first; when a covered node
splits, its fragment becomes two in place, so an operation always covers exactly the pages it was opened for. What it
pins is part of the fragment: pages under an operation are nobody else's until it closes.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

from asynccache.core.plan import Status

if TYPE_CHECKING:
    from asynccache.core.leases import Lease
    from asynccache.core.tree import Node


class Kind(IntEnum):
    """What an operation does."""

    BACKUP_HOST = 0
    LOAD_BACK = 1
    BACKUP_STORAGE = 2
    CLONE = 3
    RETIRE = 4
    PREFETCH = 5


DEVICE: Final = 0
HOST: Final = 1

# Reading a member from its Enum costs a quarter of a microsecond, a module's name almost nothing.
BACKUP_HOST, LOAD_BACK, BACKUP_STORAGE, CLONE, RETIRE, PREFETCH = Kind

# By kind: the tiers on which an operation pins what it covers.
# A clone pins the host too: if the load of its source fails, nothing else keeps the node that it covers.
PINNED_TIERS: tuple[tuple[int, ...], ...] = ((DEVICE, HOST), (DEVICE, HOST), (HOST,), (DEVICE, HOST), (), ())

# A covered node; a bit per component whose data moves; the last component that is pinned (with all before it).
Fragment = tuple["Node", int, int]


class Operation:
    """One transfer (or retirement) in flight.

    ``slots``: by component, slots that only this operation holds (of the tier that its kind implies). ``status`` is set
    when the outcome is known but must wait for an operation above it. ``doomed``: that one failed. ``leases``: who must
    hear of a failure.
    """

    __slots__ = ("doomed", "fragments", "id", "kind", "leases", "pages", "slots", "status")

    def __init__(self, op: int, kind: Kind) -> None:
        self.id = op
        self.kind = kind
        self.fragments: list[Fragment] = []
        self.slots: list[bytes] = []
        self.status: Status | None = None
        self.doomed = False
        self.leases: list[Lease] = []
        self.pages = 0

    def __repr__(self) -> str:
        return f"<{self.kind.name} {self.id} {[node.end for node, _, _ in self.fragments]}{' doomed' * self.doomed}>"


class Ledger:
    """All operations in flight, by id; ids rise and are never used again."""

    __slots__ = ("count", "next", "ops", "parked")

    def __init__(self) -> None:
        self.ops: dict[int, Operation] = {}
        self.parked: dict[int, Operation] = {}
        self.count = [0] * len(Kind)
        self.next = 1

    def open(self, kind: Kind) -> Operation:
        """A new operation that covers nothing yet."""
        op = Operation(self.next, kind)
        self.next += 1
        self.ops[op.id] = op
        self.count[kind] += 1
        return op

    def close(self, op: Operation) -> None:
        """Forget ``op``; its nodes forget it too."""
        del self.ops[op.id]
        self.parked.pop(op.id, None)
        self.count[op.kind] -= 1
        for node, _, _ in op.fragments:
            node.ops = tuple([other for other in node.ops if other is not op])

    def divide(self, prefix: Node, suffix: Node, dividing: int) -> None:
        """``suffix`` was split: every operation that covers it now covers ``prefix`` before it, without what does not
        divide (``dividing``: how many components, from the first on, do)."""
        prefix.ops = suffix.ops
        mask = (1 << dividing) - 1
        for op in suffix.ops:
            at = next(i for i, (node, _, _) in enumerate(op.fragments) if node is suffix)
            _, moves, top = op.fragments[at]
            op.fragments.insert(at, (prefix, moves & mask, min(top, dividing - 1)))
