"""The orders that a worker gets, its answers, and how it reports: values of integers, bytes and names, which can be
sent. A copy of a plan becomes a ``Work``. They are not values of the compiled core: msgspec reads their types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from asynccache.core.plan import Move, Status, StoredPages


class CopyKind(IntEnum):
    """The direction in which an effect copies: from the device to the host, back, or on the device."""

    BACKUP = 0
    LOAD = 1
    CLONE = 2


class Work(NamedTuple):
    """One copy of a plan. Its operations ``ops`` end together; only a backup has more than one."""

    kind: CopyKind
    ops: tuple[int, ...]
    moves: tuple[Move, ...]
    source: int = 0
    """The load whose pages a private copy is made of; 0: no load."""
    after: tuple[int, ...] = ()
    """The numbers of the batches that must be over, on the device, before the copy begins."""


class StoreQuestion(NamedTuple):
    """A question: which pages of ``pool`` do the stores have? ``hashes``: 32 bytes for each page, joined."""

    pool: str
    hashes: bytes


class ReadOrder(NamedTuple):
    """An order to read pages of ``pool`` into host slots. For each page ``hashes`` has 32 bytes, and ``slots`` an
    int32."""

    pool: str
    hashes: bytes
    slots: bytes


class PageQuestion(NamedTuple):
    """A question of ``AsyncCache(debug=True)``: what do these device pages of ``component`` hold? ``slots``: int32."""

    component: int
    slots: bytes


class PageBytes(NamedTuple):
    """The content of pages, in the order of their slots."""

    sums: bytes
    """A checksum of each page, all of the same length."""
    tokens: bytes
    """The bits of each token (``asynccache.memory.poison``), as many for each page; empty: no pool here has bytes."""
    untouched: list[str]
    """The layers in which nobody has written any of the pages."""


class DamagedPage(NamedTuple):
    """A device page that was free when somebody wrote it."""

    component: int
    slot: int
    pool: str


class Inspected(NamedTuple):
    """The answer to questions, one for each, and the free pages that were found written since the last answer."""

    pages: list[PageBytes]
    damaged: list[DamagedPage]


class WriteOrder(NamedTuple):
    """A ``BackupStorage`` of the core as it is handed over. A decoder cannot use the annotations of ``BackupStorage``
    itself: of ``tuple[StoredPages, ...]`` a compiled core keeps only that it is a tuple."""

    op: int
    pages: tuple[StoredPages, ...]


class StoredBatch(NamedTuple):
    """What was stored of a batch of backups."""

    failed: frozenset[int]
    """The operations of which at least one page was not stored."""
    pages: int
    """How many pages were stored, of all pools."""
    full_pages: int
    """How many of the pages count as pages of FULL (``PoolLayout.counts``)."""
    bytes: int
    """The size of the pages."""


class BatchInFlight(Protocol):
    """A piece of the engine's work, from the moment that the head knows of it. It is *over* when the engine uses no
    page for it any more, whether it ran or failed."""

    number: int

    @property
    def failed(self) -> bool:
        """True once it is known that the batch failed, perhaps on one worker while others are not over yet. Final once
        ``done`` says True."""
        ...

    def done(self) -> bool:
        """Return True once the batch is over. Never blocks."""
        ...

    async def wait(self) -> None:
        """Return when the batch is over."""
        ...

    async def settled(self) -> None:
        """Return when the batch is over, or has failed."""
        ...


class Reports(NamedTuple):
    """The functions that a worker calls to report to its owner. The head gives ``Driver.ended``, ``Supervisor.fail``
    and ``Head._keys``, in ``Head.start``; a ``RankServer`` gives its own, which send messages to the head.

    ``ended(status, ops)``: the operations of one ``Work`` have ended, all with this status, and their buffers are let
    go. ``failed(error)``: the worker cannot go on, and so the cache cannot either. ``keys(store, there, keys)``: the
    watched store of this number has these storage keys from now on or, if ``there`` is False, has them no more.
    ``health()``: ``shut`` may have changed. By default nobody is told, as before ``LocalWorker.start``."""

    ended: Callable[[Status, Sequence[int]], None] = lambda status, ops: None
    failed: Callable[[BaseException], None] = lambda error: None
    keys: Callable[[int, bool, Sequence[bytes]], None] = lambda store, there, keys: None
    health: Callable[[], None] = lambda: None
