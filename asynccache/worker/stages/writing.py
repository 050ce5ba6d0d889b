"""backup_storage, as a worker does it: one batch of host pages to the stores.

Pages that several workers hold alike: one of them writes to stores that they share, each of them to a store of its own.

Auxiliary components and sidecars go before FULL (``PoolMap.written``): an order that helps a reader who looks at FULL
alone, never a proof. Of an operation that has failed, nothing more is written. Which operations make a batch, and when
one is given up, the head decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from asynccache.config import PoolSpec
from asynccache.core.plan import BackupStorage
from asynccache.core.slots import SLOT_BYTES
from asynccache.storage import PageKey, Result
from asynccache.worker.contract import Stored
from asynccache.worker.poolmap import PoolMap

BATCH_PAGES = 128


class Store(Protocol):
    """The part of ``TieredStore`` that is written."""

    async def put(
        self, keys: Sequence[PageKey], payloads: Sequence[memoryview], *, shared: bool = True
    ) -> list[Result]: ...
    def writers(self, *, shared: bool = True) -> Sequence[object]: ...


class Page(NamedTuple):
    """One page on its way: which operation it belongs to, its key and its bytes. ``ours``: no other worker writes it to
    the stores that workers share."""

    op: int
    ours: bool
    key: PageKey
    payload: memoryview


class Writing:
    """Writes batches. Mutable state: those under way that were given up, by their first operation."""

    def __init__(self, store: Store, pools: PoolMap) -> None:
        self._store = store
        self._pools = pools
        self._given_up: set[int] = set()

    def __repr__(self) -> str:
        return f"Writing({self._pools!r})"

    def give_up(self, op: int) -> None:
        """Of the batch that begins with ``op``, write nothing after the call of the store that is under way."""
        self._given_up.add(op)

    async def store(self, batch: Sequence[BackupStorage]) -> Stored:
        """Write the batch. Cancelling it returns after the store has let go of the pages."""
        first = batch[0].op
        try:
            return await _Batch(self._store, self._pools, batch).write(lambda: first in self._given_up)
        finally:
            self._given_up.discard(first)


class _Batch:
    """``left``: by operation, the pages that are not stored yet. ``failed``: operations of which one could not be."""

    def __init__(self, store: Store, pools: PoolMap, batch: Sequence[BackupStorage]) -> None:
        self._store = store
        self._pools = pools
        self._batch = batch
        self.left = {effect.op: self._weight(effect) for effect in batch}
        self.failed: set[int] = set()
        self.pages = self.full_pages = self.bytes = 0

    async def write(self, given_up: Callable[[], bool]) -> Stored:
        for pools in self._pools.written:
            pages = self._pages(pools)
            while part := list(islice(pages, BATCH_PAGES)):
                await self._put(part)
                if given_up():
                    self.failed.update(op for op, left in self.left.items() if left)
        return Stored(frozenset(self.failed), self.pages, self.full_pages, self.bytes)

    async def _put(self, part: Sequence[Page]) -> None:
        theirs = [page for page in part if not page.ours]
        if len(theirs) < len(part):
            await self._put_in([page for page in part if page.ours] if theirs else part, shared=True)
        if not theirs:
            return
        if self._store.writers(shared=False) or not self._store.writers():
            await self._put_in(theirs, shared=False)
        else:  # all stores are shared: another worker writes them
            for page in theirs:
                self.left[page.op] -= 1

    async def _put_in(self, part: Sequence[Page], *, shared: bool) -> None:
        keys, payloads = [page.key for page in part], [page.payload for page in part]
        results = await self._store.put(keys, payloads, shared=shared)
        for page, result in zip(part, results, strict=True):
            if result is Result.HIT:
                self.left[page.op] -= 1
                self.pages += 1
                self.full_pages += self._pools.counts(page.key.pool)
                self.bytes += page.payload.nbytes
            else:
                self.failed.add(page.op)

    def _weight(self, effect: BackupStorage) -> int:
        """How many pages storing it writes, in all pools."""
        return sum(
            len(pages.slots) // SLOT_BYTES * len(pools.get(pages.component, ()))
            for pools in self._pools.written
            for pages in effect.pages
        )

    def _pages(self, pools: Mapping[int, Sequence[PoolSpec]]) -> Iterator[Page]:
        """The pages of ``pools``, by component; of operations that have not failed yet."""
        for effect in self._batch:
            for component, hashes, slots in effect.pages:
                for spec in pools.get(component, ()):
                    for key, payload in self._pools.entries(spec.name, hashes, slots):
                        if effect.op in self.failed:
                            break
                        yield Page(effect.op, spec.writes, key, payload)
