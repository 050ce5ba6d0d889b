"""Plans, the decisions of core calls: effects for the runtime to perform, and the operations that ended.

Values only. A core call that decides anything returns one frozen ``Plan``, or a value that carries one. The
runtime enqueues the plan's effects before the next ``await``, performs them, and answers each operation with exactly
one ``Outcome``. The outcome of a ``Retire`` is always DONE. Slot lists are ``bytes`` of little-endian int32 slots, in
token order. Hashes are 32 bytes a page, joined.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Final, NamedTuple

SLOT_BYTES: Final = 4
NO_SLOT: Final = b"\xff\xff\xff\xff"  # what a page table has where a page has no slot


class Status(IntEnum):
    """How an operation ended."""

    FAILED = 1
    DONE = 2


class Medium(Enum):
    """The tiers as KV events name them."""

    GPU = "GPU"
    CPU = "CPU"
    STORAGE = "STORAGE"


class Move(NamedTuple):
    """Copy the page in slot ``src[i]`` to slot ``dst[i]``, in every pool whose slots are those of ``component``. Both
    are slot lists.
    """

    component: int
    """A ``ComponentKind``."""
    src: bytes
    dst: bytes


class StoredPages(NamedTuple):
    """Host pages of one component and the prefix hashes they are stored under."""

    component: int
    """A ``ComponentKind``."""
    hashes: bytes
    slots: bytes


MOST_OPS: Final = 256
MOST_BYTES: Final = 1 << 20
"""Bounds of a ``BackupHost`` with several operations: their number, and the bytes of slots on either side. They keep
the message to a worker short."""


class BackupHost(NamedTuple):
    """Copy from device to host. Until the outcomes nobody changes the sources of ``moves`` or takes their destinations.

    Backups that a call decides one after the other, with no other copy in between, are one effect with all their
    operations, so that later steps cost about as much for many as for one. Each of ``ops`` has an outcome of its own.
    In the slot lists of ``moves`` the slots of an operation stand together, in the order of ``ops``.
    """

    ops: tuple[int, ...]
    moves: tuple[Move, ...]


class LoadBack(NamedTuple):
    """Copy from host to device."""

    op: int
    moves: tuple[Move, ...]


class Clone(NamedTuple):
    """Copy within the device: a request's private copy."""

    op: int
    moves: tuple[Move, ...]
    after: int
    """The id of the LoadBack that fills the source; 0 if the source is on the device already."""


class BackupStorage(NamedTuple):
    """Write from host to storage. ``pages`` has the auxiliary components before FULL."""

    op: int
    pages: tuple[StoredPages, ...]


class Retire(NamedTuple):
    """Keep the slots of the ``Operation`` on the device from being taken until the engine's batches that may use them
    are over, and, if they are duplicates of a commit, the engine uses the page table as it is after the commit. Then
    the runtime answers DONE."""

    op: int


class Compute(NamedTuple):
    """The engine computes pages of a commit in batches that may not be over. The runtime answers when all of them are:
    DONE if all ran, FAILED if one did not. As soon as it knows that one fails, it says so with ``Failing``."""

    op: int


class Publish(NamedTuple):
    """A KV event: FULL pages appeared on ``medium`` (``stored``), or left it.

    For STORAGE it says that pages were written to a store or read from one, perhaps not all of them: only the store
    knows which ones it has.
    """

    medium: Medium
    stored: bool
    parent: bytes
    """The hash of the page before the first one, b"" at the root."""
    hashes: bytes
    tokens: bytes
    """The pages' tokens as int32 bytes, b"" if the pages left."""
    space: bytes
    """The digest of the pages' namespace."""


class Cleared(NamedTuple):
    """A KV event: no page is on any medium any more, whatever was published before."""


Event = Publish | Cleared
Copy = BackupHost | LoadBack | Clone
Effect = Copy | BackupStorage | Retire | Compute | Event


def operations(effect: Effect) -> tuple[int, ...]:
    """Return the ids of the operations that begin with ``effect``; none if it is a KV event."""
    if isinstance(effect, BackupHost):
        return effect.ops
    return () if isinstance(effect, (Publish, Cleared)) else (effect.op,)


class Ended(NamedTuple):
    """An operation that has left the ledger, and how it ended."""

    op: int
    status: Status


class Plan(NamedTuple):
    """The decisions of one core call."""

    effects: tuple[Effect, ...] = ()
    ended: tuple[Ended, ...] = ()
    freed: bool = False
    """True if pages, pins or operations were given back, so that a lease that waits may fit now."""


EMPTY = Plan()
FREED = Plan(freed=True)


class Outcome(NamedTuple):
    """The runtime's report of how an operation ended, made when its I/O has let go of every buffer."""

    op: int
    status: Status


class Failing(NamedTuple):
    """The runtime's report that a ``Compute`` will fail. Its outcome follows when the engine has let go of the
    pages."""

    op: int


class Wait(NamedTuple):
    """Nothing was taken. Perform ``plan``, and try again when any of ``ops`` has ended; if ``ops`` is empty, when any
    plan says ``freed``."""

    plan: Plan = EMPTY
    ops: tuple[int, ...] = ()


class More(NamedTuple):
    """One slice of a long call is done, a whole transaction. Perform ``plan``, and call again with the same
    arguments."""

    plan: Plan
