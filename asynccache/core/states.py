"""The four states of a (node, component, tier), and the only steps between them.

    ABSENT   -> PRESENT   an insert brought the data
    ABSENT   -> ARRIVING  an operation will bring it
    ARRIVING -> PRESENT   that operation is DONE
    ARRIVING -> ABSENT    that operation FAILED
    ARRIVING -> LEAVING   doomed: what it hangs below failed; its own I/O still runs
    LEAVING  -> ABSENT    its own outcome, whichever: only now are the slots free
    PRESENT  -> ABSENT    evicted

Any other step is a bug: ``MAY`` says no before anything changes. States are small ints because they are read on
every step of a walk.
"""

from __future__ import annotations

from typing import Final

from asynccache.errors import InvariantViolation

ABSENT: Final = 0
ARRIVING: Final = 1
PRESENT: Final = 2
LEAVING: Final = 3

HERE = (PRESENT, ARRIVING)

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

# MAY[old][new]: whether that step is legal.
MAY = tuple(tuple((old, new) in _LEGAL for new in range(4)) for old in range(4))


def illegal(old: int, new: int) -> InvariantViolation:
    """What to raise where ``MAY`` says no."""
    return InvariantViolation(f"illegal step {NAMES[old]} -> {NAMES[new]}")
