"""A worker's part of backup_storage: it writes a batch of host pages to the stores.

Of pages that several workers hold alike, one worker writes to the stores that they share; to a store of its own each
worker writes.

Auxiliary components and sidecars are written before FULL (``PoolMap.written``), so that a reader who finds FULL mostly
finds the rest; it is no proof. Of an operation that has failed, nothing more is written. The head decides which
operations make a batch, and when a batch is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from asynccache.config import PoolSpec
from asynccache.core.keys import HASH_BYTES
from asynccache.core.plan import BackupStorage
from asynccache.core.slots import SLOT_BYTES
from asynccache.storage import PageKey, Result
from asynccache.worker.contract import StoredBatch
from asynccache.worker.pool_layout import PoolMap

BATCH_PAGES = 128


class WritableStore(Protocol):
    """The part of ``TieredStore`` that this stage uses."""

    async def put(
        self, keys: Sequence[PageKey], payloads: Sequence[memoryview], *, shared: bool = True
    ) -> list[Result]: ...
    def writers(self, *, shared: bool = True) -> Sequence[object]: ...


class WriteRun(NamedTuple):
    """Neighbouring pages of one operation in one pool, which are written together. ``ours``: True if this worker writes
    them to the stores that workers share. ``full``: True if they count as pages of FULL."""

    op: int
    ours: bool
    keys: list[PageKey]
    payloads: list[memoryview]
    full: bool


class WritingStage:
    """Writes batches. Mutable state: the batches that were given up while they were written, by first operation."""

    def __init__(self, store: WritableStore, pools: PoolMap) -> None:
        self._store = store
        self._pools = pools
        self._given_up: set[int] = set()

    def __repr__(self) -> str:
        return f"WritingStage({self._pools!r})"

    def give_up(self, op: int) -> None:
        """Write nothing more of the batch that begins with ``op``, after the call of the store that is under way."""
        self._given_up.add(op)

    async def store(self, batch: Sequence[BackupStorage]) -> StoredBatch:
        """Write the batch, and return what was stored. Cancelling it returns after the store has let go of the
        pages."""
        first = batch[0].op
        try:
            return await _Batch(self._store, self._pools, batch).write(lambda: first in self._given_up)
        finally:
            self._given_up.discard(first)


class _Batch:
    """One batch while it is written. ``left``: for each operation, how many pages are not stored yet. ``failed``: the
    operations of which a page could not be stored. ``pages``, ``full_pages``, ``bytes``: as in ``StoredBatch``."""

    def __init__(self, store: WritableStore, pools: PoolMap, batch: Sequence[BackupStorage]) -> None:
        self._store = store
        self._pools = pools
        self._batch = batch
        self.left = {effect.op: self._weight(effect) for effect in batch}
        self.failed: set[int] = set()
        self.pages = self.full_pages = self.bytes = 0

    async def write(self, given_up: Callable[[], bool]) -> StoredBatch:
        for pools in self._pools.written:
            for part in self._parts(pools):
                await self._put(part)
                if given_up():
                    self.failed.update(op for op, left in self.left.items() if left)
        return StoredBatch(frozenset(self.failed), self.pages, self.full_pages, self.bytes)

    async def _put(self, part: Sequence[WriteRun]) -> None:
        theirs = [run for run in part if not run.ours]
        if len(theirs) < len(part):
            await self._put_in([run for run in part if run.ours], shared=True)
        if not theirs:
            return
        if self._store.writers(shared=False) or not self._store.writers():
            await self._put_in(theirs, shared=False)
        else:  # all stores are shared: another worker writes them
            for run in theirs:
                self.left[run.op] -= len(run.keys)

    async def _put_in(self, part: Sequence[WriteRun], *, shared: bool) -> None:
        keys = [key for run in part for key in run.keys]
        payloads = [payload for run in part for payload in run.payloads]
        results = await self._store.put(keys, payloads, shared=shared)
        begin = 0
        for run in part:
            count = len(run.keys)
            hits = results[begin : begin + count].count(Result.HIT)
            begin += count
            self.left[run.op] -= hits
            self.pages += hits
            self.full_pages += hits * run.full
            self.bytes += hits * run.payloads[0].nbytes
            if hits < count:
                self.failed.add(run.op)

    def _weight(self, effect: BackupStorage) -> int:
        """Return how many pages ``effect`` writes, in all pools."""
        return sum(
            len(pages.slots) // SLOT_BYTES * len(pools.get(pages.component, ()))
            for pools in self._pools.written
            for pages in effect.pages
        )

    def _parts(self, pools: Mapping[int, Sequence[PoolSpec]]) -> Iterator[list[WriteRun]]:
        """Yield the pages of ``pools``, at most ``BATCH_PAGES`` at a time, without those of operations that have failed
        by then."""
        part: list[WriteRun] = []
        room = BATCH_PAGES
        for effect in self._batch:
            for component, hashes, slots in effect.pages:
                for spec in pools.get(component, ()):
                    begin, count = 0, len(slots) // SLOT_BYTES
                    while begin < count and effect.op not in self.failed:
                        end = min(count, begin + room)
                        part.append(self._run(effect.op, spec, hashes, slots, slice(begin, end)))
                        room -= end - begin
                        begin = end
                        if not room:
                            yield part
                            part, room = [], BATCH_PAGES
        if part:
            yield part

    def _run(self, op: int, spec: PoolSpec, hashes: bytes, slots: bytes, which: slice) -> WriteRun:
        begin, end = which.start, which.stop
        keys = self._pools.keys(spec.name, hashes[begin * HASH_BYTES : end * HASH_BYTES])
        payloads = self._pools.payloads(spec.name, slots[begin * SLOT_BYTES : end * SLOT_BYTES])
        return WriteRun(op, spec.writes, keys, payloads, bool(self._pools.counts(spec.name)))
