"""The messages between ranks: int64, one constant length for the life of the process.

    header   kind, health, step, -step, digest, -digest, size, -size      size: operations in the ledger
    rows     ``window`` times: operation, status, go_on, a count per pool

Unequal lengths make gloo abort the process, so nothing here depends on what is in flight. The MIN over ranks of a field
and of its negation are each other's negation exactly where all ranks agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asynccache.ranks.progress import Progress

Words = npt.NDArray[np.int64]

WINDOW = 64
HEADER = 8
FIXED = 3


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
    """The layout for ``pools`` pools of the whole model. Every rank must use the same.

    From one step to the next hardly a row changes, so rows are kept, as they were written and as they were read: a
    tenth of the time of a step's own work.
    """

    def __init__(self, pools: int, window: int = WINDOW) -> None:
        self.pools = pools
        self.window = window
        self.row = FIXED + pools
        self.length = HEADER + window * self.row
        self._header = Struct(f"={HEADER}q")
        self._row = Struct(f"={self.row}q")
        self._written: dict[int, tuple[Progress, bytes]] = {}
        self._read: dict[bytes, tuple[int, Progress]] = {}

    def __repr__(self) -> str:
        return f"Frames({self.pools} pools, {self.window} operations, {self.length * 8} bytes)"

    def write(self, kind: Kind, health: Health, header: Header, rows: Mapping[int, Progress]) -> Words:
        """A frame; ``rows``: at most ``window`` operations, oldest first."""
        step, digest, size = header
        parts = [self._header.pack(kind, health, step, -step, digest, -digest, size, -size)]
        written, self._written = self._written, {}
        for op, progress in rows.items():
            row = written.get(op)
            if row is None or row[0] != progress:
                row = progress, self._row.pack(op, progress.status, progress.go_on, *progress.counts)
            self._written[op] = row
            parts.append(row[1])
        frame = bytearray().join(parts)
        frame += bytes(self.length * 8 - len(frame))
        return np.frombuffer(frame, np.int64)

    def bad(self, health: Health, header: Header) -> Words:
        """FAIL or DIVERGED."""
        kind = Kind.DIVERGED if health is Health.DIVERGED else Kind.FAIL
        return self.write(kind, health, header, {})

    def rows(self, words: Words) -> dict[int, Progress]:
        """What a frame says of each operation."""
        content = words[HEADER:].tobytes()
        read, self._read = self._read, {}
        found = {}
        for start in range(0, len(content), self._row.size):
            row = content[start : start + self._row.size]
            entry = read.get(row) or self._parse(row)
            op, progress = entry
            if op == 0:
                break
            self._read[row] = entry
            found[op] = progress
        return found

    def _parse(self, row: bytes) -> tuple[int, Progress]:
        op, status, go_on, *counts = self._row.unpack(row)
        return op, Progress(status, go_on, tuple(counts))


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
