"""How far one transfer is: on one rank, or, by the MIN of every field, on all of them.

Law: a status that is not PENDING is final, and says that this rank's I/O has let go of every buffer; so the MIN is
PENDING for as long as anybody may still touch one. A failure counts what arrived. A pool in which a rank has no part
by role (another stage's layers, another rank's to write) counts NEUTRAL there: 0 would speak for what it never held.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import NamedTuple

from asynccache.core.plan import Status

NEUTRAL = 1 << 40


class Progress(NamedTuple):
    """``status``: PENDING 0, FAILED 1, DONE 2 (the numbers of ``plan.Status``). ``go_on``: 1; 0 once a clock says stop.
    ``counts``: pages [0, n) in place, by pool of the whole model in configured order."""

    status: int
    go_on: int
    counts: tuple[int, ...]


PENDING = 0
FINAL = int(Status.DONE)


def pending(pools: int) -> Progress:
    """A transfer that has just begun, or of which nothing was heard yet."""
    return Progress(PENDING, 1, (0,) * pools)


def fold(parts: Iterable[Progress]) -> Progress:
    """What all of ``parts`` have reached."""
    return reduce(_fold_two, parts)


def _fold_two(one: Progress, other: Progress) -> Progress:
    status, go_on, counts = one
    status_, go_on_, counts_ = other
    lowest = tuple([a if a < b else b for a, b in zip(counts, counts_, strict=True)])
    return Progress(status if status < status_ else status_, go_on if go_on < go_on_ else go_on_, lowest)


def advances(before: Progress, after: Progress) -> bool:
    """Whether ``after`` may follow ``before`` on one rank: nothing final changes, nothing is taken back."""
    if before.status != PENDING:
        return before[0] == after[0] and before[2] == after[2]
    return after.go_on <= before.go_on and all(a <= b for a, b in zip(before.counts, after.counts, strict=True))
