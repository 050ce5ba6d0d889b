"""Work: the copies that a worker is to make, as they are handed over and sent. Values only: msgspec reads their
types."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from asynccache.core.plan import Move


class CopyKind(IntEnum):
    """The direction in which an effect copies: from the device to the host, back, or on the device."""

    BACKUP = 0
    LOAD = 1
    CLONE = 2


class Work(NamedTuple):
    """One effect of the core, or several backups that follow each other. Its operations ``ops`` are copied together and
    end together. ``moves``: all that they copy. ``source``: the load whose pages a private copy is made of; 0: no
    load. ``after``: the numbers of the batches that must be over, on the device, before the copy begins."""

    kind: CopyKind
    ops: list[int]
    moves: tuple[Move, ...]
    source: int = 0
    after: tuple[int, ...] = ()
