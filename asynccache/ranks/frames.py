"""The messages between ranks: int64, one constant length for the life of the process.

    header   kind, health, step, -step, digest, -digest, size, -size      size: operations in the ledger
    rows     ``window`` times: operation, status, go_on, a count per pool

DIVERGED says, in place of where its rank is, where those are who were found apart, as far as that is known (``Apart``).
Unequal lengths make gloo abort the process, so nothing here depends on what is in flight. The MIN over ranks of a field
and of its negation are each other's negation exactly where all ranks agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import zip_longest
from struct import Struct
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from asynccache.ranks.progress import Progress

Words = npt.NDArray[np.int64]

WINDOW = 64
HEADER = 8
FIXED = 3

_HEADER = Struct(f"={HEADER}q")
_FIELDS = slice(2, HEADER)
_NOBODY = 0, Progress(0, 0, ())  # the rest of a frame


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

    From one step to the next few rows change, so the last ones written and the last ones read are kept, and only what
    differs is packed or parsed. In ``struct``, not numpy: a step comes after a pause, and each of numpy's calls is
    then a long way through cold code.
    """

    def __init__(self, pools: int, window: int = WINDOW) -> None:
        self.pools = pools
        self.window = window
        self.row = FIXED + pools
        self.length = HEADER + window * self.row
        self._row = Struct(f"={self.row}q")
        self._rows = Struct(f"={HEADER * 8}x" + f"{self._row.size}s" * window)
        self._written: list[tuple[int, Progress]] = []
        self._packed: list[bytes] = []
        self._read: list[tuple[int, Progress]] = [_NOBODY] * window
        self._parsed = (bytes(self._row.size),) * window

    def __repr__(self) -> str:
        return f"Frames({self.pools} pools, {self.window} operations, {self.length * 8} bytes)"

    def write(self, kind: Kind, health: Health, header: Header, rows: Mapping[int, Progress]) -> Words:
        """A frame; ``rows``: at most ``window`` operations, oldest first."""
        step, digest, size = header
        self._pack(list(rows.items()))
        frame = bytearray(_HEADER.pack(kind, health, step, -step, digest, -digest, size, -size))
        frame += b"".join(self._packed)
        frame += bytes(self.length * 8 - len(frame))
        return np.frombuffer(frame, np.int64)

    def _pack(self, rows: list[tuple[int, Progress]]) -> None:
        del self._packed[len(rows) :]
        for at, (row, before) in enumerate(zip_longest(rows, self._written[: len(rows)])):
            if row != before:
                op, progress = row
                self._packed[at : at + 1] = [self._row.pack(op, progress.status, progress.go_on, *progress.counts)]
        self._written = rows

    def bad(self, health: Health, header: Header) -> Words:
        """FAIL or DIVERGED."""
        kind = Kind.DIVERGED if health is Health.DIVERGED else Kind.FAIL
        return self.write(kind, health, header, {})

    def rows(self, words: Words) -> dict[int, Progress]:
        """What a frame says of each operation."""
        packed = self._rows.unpack(words.data)
        for at, (row, before) in enumerate(zip(packed, self._parsed, strict=True)):
            if row != before:
                op, status, go_on, *counts = self._row.unpack(row)
                self._read[at] = op, Progress(status, go_on, tuple(counts))
        self._parsed = packed
        found = dict(self._read)
        found.pop(_NOBODY[0], None)
        return found


Apart: TypeAlias = tuple[int, ...]
"""The header's pairs after a MIN over ranks."""

UNKNOWN: Apart = (2**63 - 1,) * (HEADER - 2)  # after which a MIN says what others say


def found_apart(words: Words, mine: Header) -> Apart:
    """What a VECTOR or DECIDE that was judged says beside this rank's header."""
    pairs = _pairs(mine)
    told = tuple(words[_FIELDS].tolist()) if words[0] in (Kind.VECTOR, Kind.DECIDE) else UNKNOWN
    return tuple(map(min, told, pairs)) if told not in (UNKNOWN, tuple(pairs)) else UNKNOWN


def told_apart(words: Words) -> Apart:
    """What a DIVERGED says."""
    return tuple(words[_FIELDS].tolist())


def tell_apart(words: Words, apart: Apart) -> None:
    """Write it into a DIVERGED."""
    words[_FIELDS] = apart


def in_words(apart: Apart) -> str | None:
    """Where ranks are apart, but for what they have done."""
    if apart == UNKNOWN:
        return None
    step, step_below, _, _, size, size_below = apart
    steps = [f"ranks are at steps {step} and {-step_below}"] if step != -step_below else []
    sizes = [f"they have {size} and {-size_below} operations in flight"] if size != -size_below else []
    return ", ".join(steps + sizes) or None


def judge(words: Words, mine: Header) -> Health:
    """What a VECTOR that all have gone into, or a DECIDE, says of the group to a rank that is at ``mine``."""
    kind, health, *pairs = _HEADER.unpack_from(words.data)
    if kind == Kind.DIVERGED or health == Health.DIVERGED:
        return Health.DIVERGED
    if kind == Kind.FAIL or health == Health.FAILED:
        return Health.FAILED
    return Health.OK if pairs == _pairs(mine) else Health.DIVERGED


def _pairs(header: Header) -> Sequence[int]:
    return [word for value in header for word in (value, -value)]
