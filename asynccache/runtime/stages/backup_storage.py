"""backup_storage: host to storage. Several batches in flight; an operation is DONE only if every page of it is stored.

Auxiliary components and sidecars go before FULL (``PoolMap.written``): an order that helps a reader who looks at FULL
alone, never a proof. Of an operation that has failed, nothing more is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from asynccache.config import PoolSpec
from asynccache.core.plan import BackupStorage, Outcome, Status
from asynccache.runtime.poolmap import PoolMap
from asynccache.runtime.stages.queue import Inbox
from asynccache.runtime.stats import Meter
from asynccache.storage import PageKey, Result

WORKERS = 4
BATCH_OPS = 16
BATCH_PAGES = 128


class Store(Protocol):
    """The part of ``CheckedStore`` that this stage uses."""

    async def put(self, keys: Sequence[PageKey], payloads: Sequence[memoryview]) -> list[Result]: ...


class Queued(NamedTuple):
    effect: BackupStorage
    at: float


class Page(NamedTuple):
    """One page on its way: which operation it belongs to, its key and its bytes."""

    op: int
    key: PageKey
    payload: memoryview


class BackupStorageStage:
    """A queue of ``BackupStorage`` effects and its workers."""

    def __init__(
        self, store: Store, pools: PoolMap, post: Callable[[Outcome], None], clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._pools = pools
        self._post = post
        self._clock = clock
        self._inbox: Inbox[Queued] = Inbox()
        self.meter = Meter()

    def __repr__(self) -> str:
        return f"BackupStorageStage({len(self._inbox)} queued, {self.meter!r})"

    def __len__(self) -> int:
        return len(self._inbox)

    def put(self, effect: BackupStorage) -> None:
        """Queue the effect; its outcome is posted exactly once."""
        self._inbox.put(Queued(effect, self._clock()))

    async def run(self) -> None:
        """Store batch after batch, for ever. Cancelling it returns after the store has let go of the pages; their
        outcomes are abandoned."""
        while True:
            await self._inbox.filled()
            await self._store_batch(self._inbox.take(BATCH_OPS))

    async def _store_batch(self, batch: Sequence[Queued]) -> None:
        failed: set[int] = set()
        for pools in self._pools.written:
            pages = self._pages(batch, failed, pools)
            while part := list(islice(pages, BATCH_PAGES)):
                await self._put(part, failed)
        now = self._clock()
        for effect, at in batch:
            self.meter.took(now - at)
            self._post(Outcome(effect.op, Status.FAILED if effect.op in failed else Status.DONE))
        self.meter.errors += len(failed)
        self.meter.count(len(batch) - len(failed), 0, 0, 0)

    async def _put(self, part: Sequence[Page], failed: set[int]) -> None:
        results = await self._store.put([page.key for page in part], [page.payload for page in part])
        for page, result in zip(part, results, strict=True):
            if result is Result.HIT:
                self.meter.count(0, 1, int(self._pools.counts(page.key.pool)), page.payload.nbytes)
            else:
                failed.add(page.op)

    def _pages(
        self, batch: Sequence[Queued], failed: set[int], pools: Mapping[int, Sequence[PoolSpec]]
    ) -> Iterator[Page]:
        """The pages of ``pools``, by component; of operations that have not failed yet."""
        for effect, _ in batch:
            for component, hashes, slots in effect.pages:
                for spec in pools.get(component, ()):
                    if effect.op not in failed:
                        for key, payload in self._pools.entries(spec.name, hashes, slots):
                            yield Page(effect.op, key, payload)
