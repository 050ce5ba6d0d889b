"""The four states of a (node, component, tier), and the only steps between them.

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

from typing import Final

from asynccache.errors import InvariantViolation

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
