"""backup_storage: host to storage. Several batches in flight; an operation is DONE only if every page of it is stored.

Auxiliary components and sidecars go before FULL: an order that helps a reader who looks at FULL alone, never a proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from asynccache.core.plan import BackupStorage, Outcome, Status
from asynccache.runtime.poolmap import FULL_POOL, PoolMap, is_own_full_pool
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
        for full in (False, True):
            pages = self._pages(batch, failed, full)
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
                self.meter.count(0, 1, int(page.key.pool == FULL_POOL), page.payload.nbytes)
            else:
                failed.add(page.op)

    def _pages(self, batch: Sequence[Queued], failed: set[int], full: bool) -> Iterator[Page]:
        """FULL's own pages, or all others; of operations that have not failed yet."""
        for effect, _ in batch:
            for component, hashes, slots in effect.pages:
                for spec in self._pools.of[component]:
                    if is_own_full_pool(spec) is full and effect.op not in failed:
                        for key, payload in self._pools.entries(spec.name, hashes, slots):
                            yield Page(effect.op, key, payload)


