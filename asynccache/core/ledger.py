"""The ledger: the operations in flight, with the fragments of the tree that each one covers; what requests hold of the
tree, and leases; the free slots of each component on each tier.

An operation opens once, is given exactly one outcome, and closes. It covers fragments, root first. A fragment is a
node, and when that node splits, both pieces take its place. So an operation always covers exactly the pages that it was
opened for. A fragment also says which cells the operation pins there. They are unpinned when the operation closes.

Slots are integers, handed out and taken back in bulk. The free slots are a stack of runs, each a slot list. A run that
was given back is handed out again as it is, so most takes and gives move one reference.
"""

from __future__ import annotations

from array import array
from enum import IntEnum
from typing import Final

from asynccache.core.plan import SLOT_BYTES, Status
from asynccache.core.tree import Node
from asynccache.errors import InvariantViolation


class Kind(IntEnum):
    """The kind of an operation says what it moves. Two kinds move nothing: RETIRE keeps slots from being taken until
    the engine is done with them, and COMPUTE covers published pages that the engine may still be computing."""

    BACKUP_HOST = 0
    LOAD_BACK = 1
    BACKUP_STORAGE = 2
    CLONE = 3
    RETIRE = 4
    PREFETCH = 5
    COMPUTE = 6


DEVICE: Final = 0
HOST: Final = 1

# The page number that stands for a border which does not exist. It is larger than every other.
NOWHERE: Final = 1 << 60

# Reading a member from its Enum costs a quarter of a microsecond, a module's name almost nothing.
BACKUP_HOST, LOAD_BACK, BACKUP_STORAGE, CLONE, RETIRE, PREFETCH, COMPUTE = Kind

# The tiers on which an operation of each kind pins what it covers. A prefetch keeps account of its pins itself.
# A clone pins the host too: if the load of its source fails, nothing else keeps the node that it covers.
# A COMPUTE pins nothing as long as it goes well: copies into a page wait for the engine on the device.
_PINNED_TIERS: tuple[tuple[int, ...], ...] = ((DEVICE, HOST), (DEVICE, HOST), (HOST,), (DEVICE, HOST), (), (), ())

# The kinds that pin device pages or have some of their own. All of them end without storage.
ON_DEVICE = (BACKUP_HOST, LOAD_BACK, CLONE, RETIRE)

# A covered node; a bit for each component whose data moves; the last component that is pinned, with all before it.
Fragment = tuple[Node, int, int]


class Operation:
    """A transfer in flight, slots being retired, or pages being computed."""

    __slots__ = ("doomed", "fragments", "id", "kind", "leases", "parked", "slots", "status", "tiers")

    def __init__(self, op: int, kind: Kind) -> None:
        self.id = op
        self.kind = kind
        self.tiers = _PINNED_TIERS[kind]
        """The tiers on which the operation pins what it covers."""
        self.fragments: list[Fragment] = []
        self.slots: list[bytes] = []
        """Device slots, by component, that belong to this operation alone until it closes."""
        self.status: Status | None = None
        """None until the outcome is known. Even then it may have to wait for an operation above this one in the
        tree."""
        self.doomed = False
        """True once another operation has failed on a node that this one covers, or above such a node: then this one
        fails, whatever its outcome. A COMPUTE is doomed once it is known that a batch fails."""
        self.leases: list[CoreLease] = []
        """The leases that must hear of a failure."""
        self.parked: list[Operation] = []
        """Operations whose outcome is known and waits for the end of this one."""

    def __repr__(self) -> str:
        return f"<{self.kind.name} {self.id} {[node.end for node, _, _ in self.fragments]}{' doomed' * self.doomed}>"


class Hold:
    """The pins on ``tier`` for a match that ends in the node ``end``.

    ``lows[c]``: auxiliary component ``c`` is pinned on the nodes from ``end`` upwards that end after page ``lows[c]``,
    which is a node's border; NOWHERE: on none.
    """

    __slots__ = ("end", "lows", "tier")

    def __init__(self, end: Node, tier: int, components: int) -> None:
        self.end = end
        self.tier = tier
        self.lows = [NOWHERE] * components


class CoreLease:
    """A lease: the part of the cache that one request holds. The core owns and changes it; others read it. Lengths are
    in tokens.
    """

    __slots__ = (
        "border", "cached", "forked", "full", "hold", "id", "length", "loaded_tokens", "loads", "own", "own_from",
        "released", "reserved", "shared", "states", "valid",
    )  # fmt: skip

    def __init__(self, lease_id: int, hold: Hold) -> None:
        self.id = lease_id
        self.hold = hold
        """The pins of the path that the lease holds."""
        self.own: list[bytes] = []
        self.own_from: list[int] = []
        """By component: ``own`` has the slots that belong to this lease alone, ``own_from`` the number of the first
        page in them."""
        self.border = self.cached = self.forked = self.full = self.length = self.reserved = self.loaded_tokens = 0
        """At the grant, ``cached`` tokens were matched, FULL alone went as far as ``full``, and the lease's own load
        brings ``loaded_tokens`` of FULL. FULL pages exist up to ``reserved``, and ``length`` tokens are committed so
        far. ``forked``: the page at which the text left the texts of earlier requests; 0: at none. ``border``: the page
        before which decoding needs no window any more."""
        self.loads: tuple[int, ...] = ()
        """The operations that must be DONE before the lease's pages may be read."""
        self.shared = NOWHERE
        """The page from which on the text is private to its conversation; NOWHERE: that page is not known."""
        self.states = b""
        """The lease's MAMBA slots, the working copy first."""
        self.valid: int | None = None
        """None, or how many tokens are still good after a load or a batch of the engine failed."""
        self.released = False

    def __repr__(self) -> str:
        return f"<Lease {self.id} cached={self.cached} length={self.length} reserved={self.reserved}>"


class Ledger:
    """All operations in flight."""

    __slots__ = ("count", "next", "ops")

    def __init__(self) -> None:
        self.ops: dict[int, Operation] = {}
        """The operations by id; ids rise and are never used again."""
        self.count = [0] * len(Kind)
        """How many operations there are of each kind."""
        self.next = 1
        """The id of the next operation."""

    def open(self, kind: Kind) -> Operation:
        """Open an operation that covers nothing yet, and return it."""
        op = Operation(self.next, kind)
        self.next += 1
        self.ops[op.id] = op
        self.count[kind] += 1
        return op

    def close(self, op: Operation) -> None:
        """Forget ``op``; its nodes forget it too."""
        del self.ops[op.id]
        self.count[op.kind] -= 1
        for node, _, _ in op.fragments:
            node.ops = tuple([other for other in node.ops if other is not op])

    def forget(self, node: Node) -> None:
        """Have no operation cover ``node``, which leaves the tree. Only COMPUTEs can: all others pin what they
        cover."""
        for op in node.ops:
            op.fragments = [fragment for fragment in op.fragments if fragment[0] is not node]
        node.ops = ()

    def divide(self, prefix: Node, suffix: Node, dividing: int) -> None:
        """Have every operation that covers ``suffix`` also cover ``prefix``, which a split has just taken off its
        front. There it moves and pins only the components that divide, which are the first ``dividing`` ones."""
        prefix.ops = suffix.ops
        mask = (1 << dividing) - 1
        for op in suffix.ops:
            at = next(i for i, (node, _, _) in enumerate(op.fragments) if node is suffix)
            _, moves, top = op.fragments[at]
            op.fragments.insert(at, (prefix, moves & mask, min(top, dividing - 1)))


# In bytes: the length of a run in a new pool, and the longest run that ``give`` makes by joining slots to the run on
# top of the stack. Without joining, slots that are given back one by one would make a long stack. Runs are short, since
# a take that divides one copies the rest of it.
_RUN = 256 * SLOT_BYTES
_SHORT = 16 * SLOT_BYTES


class SlotPool:
    """The slots ``0 .. capacity - 1``, free until they are taken. The pool is a stack: what was given back last is
    taken first.
    """

    __slots__ = ("_runs", "capacity", "given", "left")

    def __init__(self, capacity: int, given: list[bytes] | None = None) -> None:
        self.capacity = self.left = capacity
        """``left`` slots are free."""
        self.given = given
        """What was given back since somebody emptied the list; None: nobody asks."""
        slots = array("i", range(capacity)).tobytes()
        self._runs = [slots[at : at + _RUN] for at in range(0, len(slots), _RUN)][::-1]

    def take(self, count: int) -> bytes:
        """Take ``count`` free slots and return them.

        Raises:
            InvariantViolation: fewer are free; callers make room first.
        """
        if not count:
            return b""
        if count > self.left:
            raise InvariantViolation(f"took {count} slots, {self.left} are free")
        self.left -= count
        run = self._runs.pop()
        wanted = count * SLOT_BYTES
        if len(run) < wanted:
            runs, size = [run], len(run)
            while size < wanted:
                runs.append(self._runs.pop())
                size += len(runs[-1])
            run = b"".join(runs)
        if len(run) > wanted:
            self._runs.append(run[wanted:])
            run = run[:wanted]
        return run

    def give(self, slots: bytes) -> None:
        """Make ``slots`` free again. They are the next to be taken, in the same order."""
        if not slots:
            return
        self.left += len(slots) // SLOT_BYTES
        if self.given is not None:
            self.given.append(slots)
        runs = self._runs
        if runs and len(slots) + len(runs[-1]) <= _SHORT:
            runs[-1] = slots + runs[-1]
        else:
            runs.append(slots)

    def free(self) -> array[int]:
        """Return every free slot, for the audit."""
        return array("i", b"".join(self._runs))
