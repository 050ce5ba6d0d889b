"""Joins the backups of a plan that follow each other into one ``Work``, so that the later steps cost about as much for
many operations as for one. The module has plain functions only, and is compiled by mypyc."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from asynccache.core.plan import BackupHost, Clone, Copy, LoadBack, Move
from asynccache.worker.work import CopyKind, Work

MOST_OPS, MOST_BYTES = 256, 1 << 20
"""The most operations, and the most bytes of slots on either side, that are joined into one ``Work``. An operation that
is larger by itself is a work by itself."""

_KINDS: dict[type, CopyKind] = {BackupHost: CopyKind.BACKUP, LoadBack: CopyKind.LOAD, Clone: CopyKind.CLONE}


class Numbered(Protocol):
    """The part of a batch that is sent: its number."""

    number: int


def joined(effects: Sequence[Copy], before: Callable[[Copy], Sequence[Numbered]]) -> list[Work]:
    """Return ``effects`` as works, in their order: backups that follow each other are one work, every other effect is
    a work by itself. (A plan has one load at most. Private copies are not joined, because one may be made of what
    another private copy has copied.) ``before``: returns the batches that an effect has to wait for; of backups that
    are joined, it is called for the first only."""
    made: list[Work] = []
    alike: list[Copy] = []
    after: tuple[int, ...] = ()
    size = 0
    for effect in effects:
        own = sum([len(slots) for _, slots, _ in effect.moves])
        backup = isinstance(effect, BackupHost)
        if alike and not (backup and len(alike) < MOST_OPS and size + own <= MOST_BYTES):
            made.append(_together(alike, after))
            alike, size = [], 0
        if not alike:
            after = tuple([batch.number for batch in before(effect)])
        if backup:
            alike.append(effect)
            size += own
        else:
            made.append(_together([effect], after))
    if alike:
        made.append(_together(alike, after))
    return made


def _together(alike: list[Copy], after: tuple[int, ...]) -> Work:
    first = alike[0]
    moves = first.moves
    if len(alike) > 1:
        src: dict[int, list[bytes]] = {}
        dst: dict[int, list[bytes]] = {}
        for effect in alike:
            for component, source, target in effect.moves:
                if component not in src:
                    src[component], dst[component] = [], []
                src[component].append(source)
                dst[component].append(target)
        moves = tuple([Move(one, b"".join(src[one]), b"".join(dst[one])) for one in src])
    kind = _KINDS[type(first)]
    return Work(kind, [effect.op for effect in alike], moves, first.after if isinstance(first, Clone) else 0, after)
