"""Builds the parts of one open cache. Only ``AsyncCache`` has all of them; each part gets what it uses.

This module has no mutable state of its own. The state of the parts belongs to one loop and one thread.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from asynccache.config import CacheConfig, PoolSpec
from asynccache.core.cache import CacheCore
from asynccache.events import Notice
from asynccache.runtime.announcing import Announcing
from asynccache.runtime.attaching import StoreAttachments
from asynccache.runtime.driver import Driver, nothing
from asynccache.runtime.driving import run_acks
from asynccache.runtime.engine_batches import EngineBatches
from asynccache.runtime.kept_prefixes import KeptPrefixes
from asynccache.runtime.lease_wait import LeaseParts
from asynccache.runtime.lookups import Lookups
from asynccache.runtime.outbox import TASKS, Backlog, Lateness, Outbox
from asynccache.runtime.prefetch import HandleClaims
from asynccache.runtime.prefetching import Prefetching
from asynccache.runtime.supervisor import Supervisor
from asynccache.runtime.tokens import Namespaces
from asynccache.worker.local import Reports
from asynccache.worker.pool_layout import PoolLayout
from asynccache.worker.stats import StageMeter

if TYPE_CHECKING:
    from asynccache.worker.local import LocalWorker

OnEvent = Callable[[Notice], None]

REMEMBERED = 1 << 14
"""The most nodes that the core remembers of those that left the tree, to tell why a request missed."""
FREEZE_EVERY = 2048
"""Commits from one freezing of the garbage collector's objects to the next, at least."""


class CacheParts:
    """All parts of a cache, built when it opens. ``start`` makes their tasks; after ``close`` every call is refused."""

    def __init__(
        self, config: CacheConfig, pools: Sequence[PoolSpec], worker: LocalWorker, on_event: OnEvent | None
    ) -> None:  # fmt: skip
        settings = replace(config.core(), storage=False, publish=on_event is not None, remember=REMEMBERED)
        self.core = CacheCore(settings)
        self.worker = worker
        self.pools = PoolLayout(pools)
        self.lookups = Lookups(self.core)
        self.driver = driver = Driver(self.core)
        driver.clock = asyncio.get_running_loop().time
        self.supervisor = Supervisor(self.close)
        driver.on_failure = self.supervisor.fail
        self.engine = EngineBatches(worker, self.core, pools, driver.post, self.supervisor.spawn)
        self.announcing: Announcing | None = None
        if on_event is not None:
            self.announcing = Announcing(on_event, config.page_size, worker, self.core.world.roots)
            driver.publish = self.announcing.put
        self.namespaces = Namespaces(config, self.announcing)
        self.claims = HandleClaims(driver)
        clock = time.perf_counter  # uvloop's own clock counts milliseconds
        backlog = Backlog({int(c.kind): int(c.host * config.backup_quota) for c in self.core.config.components})
        lateness = Lateness(self._tell_late)
        self.outbox = Outbox(worker, driver.post, clock, backlog, lateness)
        self.prefetching = Prefetching(
            config, driver, worker, self.pools, self.claims, self.outbox, lateness, self.supervisor.spawn, clock
        )
        driver.copy, driver.store = self.engine.begin, self.outbox.put
        driver.note_failures = self.engine.note_failures
        hashes = worker.takes_stores or on_event is not None  # a store may be attached at any time
        self.lease_parts = LeaseParts(
            driver, worker, self.prefetching, self.namespaces, self.engine, self.lookups, hashes=hashes
        )
        self.kept_prefixes = KeptPrefixes(config, self.lease_parts)
        self.stores = StoreAttachments(driver, worker, self.announcing, self.supervisor, self.outbox.backlog.limits[0])
        self._after_acks = Freezer(lambda: self.lease_parts.commits).look if config.freeze_gc else nothing

    def __repr__(self) -> str:
        return f"CacheParts({self.driver!r}, {self.lease_parts!r}, {self.supervisor!r})"

    def _tell_late(self, late: bool) -> None:
        """Tell the core whether storage is ``late``. A timer calls this, too, and nobody would see its error; so an
        error of the core is not raised here if it has closed the cache, whose users are told the reason."""
        try:
            self.driver.perform(self.driver.unlocked(self.core.note_late_storage, late))
        except Exception:
            if self.driver.closed is None:
                raise

    # tasks

    async def start(self) -> None:
        """Start the cache's tasks. Cancelling it leaves none behind."""
        await self.supervisor.start()
        reports = Reports(self.driver.ended, self.supervisor.fail, self._keys)
        for name, work in [*self.worker.start(reports), *self._tasks()]:
            self.supervisor.spawn(work, f"asynccache-{name}")
        await self.stores.begin()

    def _tasks(self) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        tasks: list[tuple[str, Coroutine[Any, Any, None]]] = [("acks", run_acks(self.driver, self._after_acks))]
        if self.announcing is not None:
            tasks.append(("events", self.announcing.run()))
        if self.worker.takes_stores:
            tasks += [("backup-storage", self.outbox.run()) for _ in range(TASKS)]
        return tasks

    def _keys(self, store: int, there: bool, keys: Sequence[bytes]) -> None:
        if self.announcing is not None:
            self.announcing.report(store, there, keys)

    def close(self, cause: BaseException | None) -> None:
        """Refuse every call from now on, and tell everybody who waits why. ``cause``: the error that closes the cache;
        None: it is closed on purpose."""
        driver = self.driver
        if driver.closed is None:
            driver.close(cause)
            self.lease_parts.shut(driver.closed_error)
            if self.announcing is not None:
                self.announcing.stop()
            self.prefetching.fail(driver.closed_error)

    # looking at it

    def meters(self) -> Mapping[str, StageMeter]:
        """Return the counters of the transfer stages, by stage."""
        return {
            **self.worker.meters(), "backup_storage": self.outbox.meter, "prefetch": self.prefetching.meter,
        }  # fmt: skip

    def queues(self) -> Mapping[str, int]:
        """Return how much waits in each queue: operations for their stages, prefetches, acks for the core, leases in
        line, and backups in flight."""
        return {
            **self.worker.queues(),
            "backup_storage": len(self.outbox),
            "prefetch": len(self.prefetching.handles),
            "acks": self.driver.unapplied,
            "line": len(self.driver.line),
            "saving": len(self.driver.saving),
        }


class Freezer:
    """Moves the tree out of the garbage collector's sight every few thousand commits (a commit makes a node or two).
    Without this, one full collection takes seconds at a million nodes.

    ``gc.freeze`` moves all objects of the process. The core makes no reference cycles, so of its objects none would
    ever have been collected.
    """

    def __init__(self, commits: Callable[[], int]) -> None:
        self._commits = commits
        self._frozen_at = 0

    def look(self) -> None:
        """Freeze if enough has been published since the last time."""
        commits = self._commits()
        if commits - self._frozen_at >= FREEZE_EVERY:
            self._frozen_at = commits
            gc.freeze()
