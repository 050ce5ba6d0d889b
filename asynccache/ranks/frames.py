"""The messages between ranks: int64, one constant length for the life of the process.

    header   kind, health, step, -step, digest, -digest, size, -size      size: operations in the ledger
    rows     ``window`` times: operation, status, go_on, a count per pool

Unequal lengths make gloo abort the process, so nothing here depends on what is in flight. The MIN over ranks of a field
and of its negation are each other's negation exactly where all ranks agree.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asynccache.ranks.progress import Progress

Words = npt.NDArray[np.int64]

WINDOW = 64
HEADER = 8
FIXED = 3


_progress: Callable[[tuple[int, int, tuple[int, ...]]], Progress] = partial(tuple.__new__, Progress)  # half the price


class Kind(IntEnum):
    """What a frame is. FAIL and DIVERGED may take the place of any frame that is due."""

    VECTOR = 5
    DECIDE = 4
    REPORT = 3
    FAIL = 2
    DIVERGED = 1


class Health(IntEnum):
    """What a rank knows of its group."""

    OK = 1
    FAILED = 0
    DIVERGED = -1


class Header(NamedTuple):
    """Where a rank is: what must be equal on all of them at one step."""

    step: int
    digest: int
    size: int


class Frames:
    """The layout for ``pools`` pools of the whole model. Every rank must use the same."""

    def __init__(self, pools: int, window: int = WINDOW) -> None:
        self.pools = pools
        self.window = window
        self.row = FIXED + pools
        self.length = HEADER + window * self.row

    def __repr__(self) -> str:
        return f"Frames({self.pools} pools, {self.window} operations, {self.length * 8} bytes)"

    def write(self, kind: Kind, health: Health, header: Header, rows: Mapping[int, Progress]) -> Words:
        """A frame; ``rows``: at most ``window`` operations, oldest first."""
        step, digest, size = header
        flat = [kind, health, step, -step, digest, -digest, size, -size]
        for op, (status, go_on, counts) in rows.items():
            flat += (op, status, go_on)
            flat += counts
        words = np.zeros(self.length, np.int64)
        words[: len(flat)] = array("q", flat)  # a third of the time that numpy takes for a list
        return words

    def bad(self, health: Health, header: Header) -> Words:
        """FAIL or DIVERGED."""
        kind = Kind.DIVERGED if health is Health.DIVERGED else Kind.FAIL
        return self.write(kind, health, header, {})

    def rows(self, words: Words) -> dict[int, Progress]:
        """What a frame says of each operation."""
        table = words[HEADER:].reshape(self.window, self.row)
        ops: list[int] = table[:, 0].tolist()
        size = self.window if ops[-1] else ops.index(0)
        status, go_on, counts = (table[:size, part].tolist() for part in (1, 2, slice(FIXED, None)))
        return dict(zip(ops, map(_progress, zip(status, go_on, map(tuple, counts), strict=True)), strict=False))


def judge(words: Words, mine: Header) -> Health:
    """What a VECTOR that all have gone into, or a DECIDE, says of the group to a rank that is at ``mine``."""
    kind, health, *pairs = words[:HEADER].tolist()
    if kind == Kind.DIVERGED or health == Health.DIVERGED:
        return Health.DIVERGED
    if kind == Kind.FAIL or health == Health.FAILED:
        return Health.FAILED
    return Health.OK if pairs == _pairs(mine) else Health.DIVERGED


def _pairs(header: Header) -> Sequence[int]:
    return [word for value in header for word in (value, -value)]
