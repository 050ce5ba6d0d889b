"""What a core call decided: effects for the runtime to perform, and the operations that ended.

Values only. Every core call returns one frozen ``Plan``; the runtime enqueues its effects before the next ``await``,
performs them, and answers each ``op`` with exactly one ``Outcome`` (a RETIRE too: DONE once its events have fired).
Slot lists are ``bytes`` of little-endian int32 page ids, in token order; hashes are 32 bytes a page, joined.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import NamedTuple


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
    """Copy page ``src[i]`` to page ``dst[i]`` in every pool whose slots are those of ``component``."""

    component: int
    src: bytes
    dst: bytes


class StoredPages(NamedTuple):
    """Host pages of one component and the prefix hashes they are stored under."""

    component: int
    hashes: bytes
    slots: bytes


class BackupHost(NamedTuple):
    """Device to host. ``moves``' sources stay untouched and their destinations owned until the outcome."""

    op: int
    moves: tuple[Move, ...]


class LoadBack(NamedTuple):
    """Host to device."""

    op: int
    moves: tuple[Move, ...]


class Clone(NamedTuple):
    """Device to device: a request's private copy. ``after``: the LoadBack that fills its source, or 0."""

    op: int
    moves: tuple[Move, ...]
    after: int


class BackupStorage(NamedTuple):
    """Host to storage; auxiliary components come before FULL."""

    op: int
    pages: tuple[StoredPages, ...]


class Retire(NamedTuple):
    """Slots that nobody may take before the engine's events have fired (``adoption``: and before the engine uses
    the page table that a commit returned). The runtime answers DONE then."""

    op: int
    adoption: bool


class Publish(NamedTuple):
    """A KV event. ``stored``: pages appeared on ``medium`` (``parent``: the hash before them, b"" at the root;
    ``tokens``: their int32 bytes); else they left it. ``space``: the digest of their namespace.

    STORAGE: they were written to it or read from it, as far as that went; the store itself knows which are there."""

    medium: Medium
    stored: bool
    parent: bytes
    hashes: bytes
    tokens: bytes
    space: bytes


class Cleared(NamedTuple):
    """A KV event: all that was published of every medium is forgotten."""


Event = Publish | Cleared
Copy = BackupHost | LoadBack | Clone
Effect = Copy | BackupStorage | Retire | Event


class Ended(NamedTuple):
    """An operation that has left the ledger, and how."""

    op: int
    status: Status


class Plan(NamedTuple):
    """The result of one core call. ``freed``: some pages, pins or operations were given back, so a waiting lease may
    fit now."""

    effects: tuple[Effect, ...] = ()
    ended: tuple[Ended, ...] = ()
    freed: bool = False


EMPTY = Plan()


class Outcome(NamedTuple):
    """What the runtime reports: this operation's I/O has let go of every buffer, and this is how it went."""

    op: int
    status: Status


class Wait(NamedTuple):
    """Nothing was taken. Try again when any of ``ops`` has ended (empty: when anything was freed)."""

    plan: Plan = EMPTY
    ops: tuple[int, ...] = ()


class More(NamedTuple):
    """A slice of a long call is done (a whole transaction); perform ``plan`` and call again with the same arguments."""

    plan: Plan
