"""The head: one open cache. It constructs the parts, starts their tasks, and in the end saves, stops and closes.

What always holds:
* A plan of the core goes through here (``Driver.perform``): copies to ``EngineBatches.begin``, backups to storage to
  ``Backups.put``, events to ``NoticeQueue.put``. The acks come back through one queue (``Driver.acks``).
* Closing frees no buffer that a store or a device still uses. If a store hangs, its buffers are left behind: tasks go
  on, and close the rest if it lets go after all. Neither the loop nor the process waits for them.

The state of all parts belongs to one loop and one thread.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from asynccache import checks
from asynccache.config import CacheConfig
from asynccache.core.cache import CacheCore, Unsaved
from asynccache.core.settings import ComponentKind
from asynccache.errors import BackendError, CacheClosed, ConfigError, RankFailure
from asynccache.events import Notice
from asynccache.runtime.announcer import NoticeQueue, StartSpan, no_span
from asynccache.runtime.core_calls import run_acks
from asynccache.runtime.driver import Driver
from asynccache.runtime.engine_batches import EngineBatches
from asynccache.runtime.kept import Kept, kept_among
from asynccache.runtime.lookups import Lookups
from asynccache.runtime.prefetch import Prefetches
from asynccache.runtime.sanitizer import Sanitizer
from asynccache.runtime.save import TASKS, Backups, drain, unsaved
from asynccache.runtime.stores import StoreAttachments
from asynccache.runtime.supervisor import Supervisor
from asynccache.runtime.tokens import Namespaces
from asynccache.worker.local import LATE, MOMENT
from asynccache.worker.pool_layout import PoolLayout
from asynccache.worker.stages import StageMeter
from asynccache.worker.work import Reports

if TYPE_CHECKING:
    from asynccache.core.plan import BackupStorage, Copy, Event
    from asynccache.worker.local import LocalWorker

LOG = logging.getLogger("asynccache")
OnEvent = Callable[[Notice], None]

REMEMBERED = 1 << 14
"""The most nodes that the core remembers of those that left the tree, to tell why a request missed."""
CHECKPOINTS = 2
"""The number of MAMBA slots for checkpoints of a lease that does not say how many; one more is its working copy."""
FREEZE_EVERY = 2048
"""The fewest commits between two calls of ``gc.freeze``."""


class CloseReport(NamedTuple):
    """The pages of FULL that ``aclose`` could not save."""

    unsaved_host: int = 0
    """Pages that neither the host nor a store has."""
    unsaved_storage: int = 0
    """Pages that the host has and no store; 0 if no store is written."""
    error: BaseException | None = None
    """The error with which the cache had closed itself; None: it had not. After an error of the core both counts are 0,
    because nobody knows them."""


class Head:
    """An open cache. ``start`` makes its tasks; after ``close`` every call is refused."""

    def __init__(
        self, config: CacheConfig, worker: LocalWorker, on_event: OnEvent | None, span: StartSpan = no_span, *,
        debug: bool = False,
    ) -> None:  # fmt: skip
        settings = replace(config.core(), storage=False, publish=on_event is not None, remember=REMEMBERED,
                           note_given=debug)
        self.core = core = CacheCore(settings)
        self.worker = worker
        self.span = span
        self.loop = asyncio.get_running_loop()
        self.pools = PoolLayout(config.pools())
        self.lookups = Lookups(core)
        self.driver = driver = Driver(core, self, self.loop.time)
        self.supervisor = Supervisor(self.close)
        self.batches = EngineBatches(worker, core, config.pools(), driver, self.supervisor)
        self.sanitizer = Sanitizer(worker, core, self.batches, self.supervisor) if debug else None
        """What looks for a program's mistakes; None: the cache is not debugged."""
        self.announcer: NoticeQueue | None = None
        if on_event is not None:
            self.announcer = NoticeQueue(on_event, config.page_size, worker, core.world.roots)
        self.namespaces = Namespaces(config, self.announcer)
        limits = {int(c.kind): int(c.host * config.backup_quota) for c in core.config.components}
        self.backups = Backups(worker, driver, limits, span)
        self.prefetches = Prefetches(config, driver, worker, self.pools, self.backups, self.supervisor, span)
        self.stores = StoreAttachments(driver, worker, self.announcer, self.supervisor, limits[0])
        self.hashes = worker.takes_stores or on_event is not None or debug  # a store may be attached at any time
        """True if pages are hashed when they are committed, for storage or for events."""
        self.commits = 0
        """How many commits there were."""
        self.holders: dict[object, weakref.ref[asyncio.Task[Any]] | None] = {}
        """The core's leases, each with the task to which it was granted, and the prefixes that are kept; it keeps
        neither a request's ``Lease`` nor its task alive."""
        kinds = {component.kind for component in core.config.components}
        self.has_swa = ComponentKind.SWA in kinds
        """True if the model has a sliding window."""
        self.default_states = 1 + CHECKPOINTS if ComponentKind.MAMBA in kinds else 0
        """How many MAMBA slots a lease has if it does not say; 0 if the model has no recurrent states."""
        self._freezes = config.freeze_gc
        self._frozen_at = 0
        self._stopper: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Head({len(self.holders)} leases, {self.driver!r}, {self.supervisor!r})"

    # what the driver performs plans with (``PlanPerformer``)

    def given_back(self) -> None:
        assert self.sanitizer is not None
        self.sanitizer.given_back()

    def copy(self, copies: Sequence[Copy]) -> None:
        self.batches.begin(copies)

    def store(self, backup: BackupStorage) -> None:
        self.backups.put(backup)

    def publish(self, event: Event) -> None:
        if self.announcer is not None:
            self.announcer.put(event)

    def note_failures(self) -> None:
        self.batches.note_failures()

    def fail(self, error: BaseException) -> None:
        self.supervisor.fail(error)

    # what leases ask

    def check_states(self, states: object) -> int:
        """Return ``states`` as a count of MAMBA slots.

        Raises:
            ConfigError: ``states`` is no count, or is above 0 in a cache without recurrent states.
        """
        count = checks.integer("states", states, 0)
        if count and not self.default_states:
            raise ConfigError(f"states={count}: there are no recurrent states in this cache")
        return count

    def holds(self, task: asyncio.Task[Any] | None) -> bool:
        """Return True if ``task`` holds a lease. Looks at all holders, which is fine for a caller that is about to
        wait."""
        return any(holder is not None and holder() is task for holder in self.holders.values())

    def kept(self) -> list[Kept]:
        """Return all prefixes that are kept now."""
        return kept_among(self.holders)

    def idle(self) -> bool:
        """Return True if nobody holds a lease, no prefix is kept, and no operation is under way that may be awaited:
        then nothing could give pages back."""
        return not self.holders and not self.core.something_ends()

    # from opening to closing

    async def start(self) -> None:
        """Start the cache's tasks. Cancelling it leaves none behind."""
        await self.supervisor.start()
        tasks = self.worker.start(Reports(self.driver.ended, self.supervisor.fail, self._keys))
        tasks.append(("acks", run_acks(self.driver, self._freeze)))
        if self.announcer is not None:
            tasks.append(("events", self.announcer.run()))
        if self.worker.takes_stores:
            tasks += [("backup-storage", self.backups.run()) for _ in range(TASKS)]
        for name, work in tasks:
            self.supervisor.spawn(work, f"asynccache-{name}")
        await self.stores.begin()

    def _keys(self, store: int, there: bool, keys: Sequence[bytes]) -> None:
        if self.announcer is not None:
            self.announcer.report(store, there, keys)

    def _freeze(self) -> None:
        """Every few thousand commits (a commit makes a node or two) move the tree out of the garbage collector's sight.
        Without this, one full collection takes seconds at a million nodes.

        ``gc.freeze`` moves all objects of the process. The core makes no reference cycles, so of its objects none would
        ever have been collected.
        """
        if self._freezes and self.commits - self._frozen_at >= FREEZE_EVERY:
            self._frozen_at = self.commits
            gc.freeze()

    def close(self, cause: BaseException | None) -> None:
        """Refuse every call from now on, and tell everybody who waits why. ``cause``: the error that closes the cache;
        None: it is closed on purpose."""
        driver = self.driver
        if driver.closed is None:
            driver.close(cause)
            if self.announcer is not None:
                self.announcer.stop()
            self.prefetches.fail(driver.closed_error)

    async def abandon(self) -> None:
        """Stop a cache that is not to be opened after all."""
        await self.supervisor.stop()
        self.close(None)

    async def aclose(self, limit: SavingLimit, late: float) -> CloseReport:
        """Save what is not saved yet, until ``limit``, and stop. See ``AsyncCache.aclose``. ``late``: for how many
        seconds beyond the limit the worker is waited for.

        Raises:
            BackendError: a store or a copy had not let go by then: a task goes on with it.
        """
        driver, saves = self.driver, self.worker.has_stores
        driver.draining = True
        driver.line.fail(lambda: CacheClosed("the cache is closing"))
        try:
            if driver.closed is None:
                await self._save(limit)
            left = await unsaved(driver)
        except (CacheClosed, RankFailure):  # the core's books may be wrong
            left = Unsaved(0, 0)
        finally:
            stopped = await self._stop_in_time(limit, late)
        if not stopped:
            raise BackendError(
                f"the cache is closed, but the host's memory is left behind, since it is still in use, by "
                f"{', '.join(self.worker.busy) or 'copies'}: what was stored last may be lost. Unsaved pages: "
                f"{left.host} neither on the host nor stored, {left.storage} not stored"
            )
        error = self.supervisor.error
        if isinstance(error, asyncio.CancelledError):
            LOG.info("closed, since all tasks were cancelled")
        elif error is not None:
            LOG.error("closed by an error: %r", error)
        elif saves and any(left):
            LOG.warning("closed; lost: %d pages neither on the host nor stored, %d not stored", *left)
        else:
            LOG.info("closed")
        if error is None and self.holders:
            LOG.warning("leases still held when the cache was closed: %d; leave every lease", len(self.holders))
        return CloseReport(left.host, left.storage, error)

    async def _save(self, limit: SavingLimit) -> None:
        """Cancel all prefetches, and save as many pages as ``limit`` leaves time for. Cancelling it stops the waiting;
        backups that began go on."""
        try:
            async with limit.timeout():
                prefetches = tuple(self.prefetches.unended)
                self.prefetches.cancel()
                for prefetch in prefetches:
                    await prefetch
                self.prefetches.drop_claims()
                await drain(self.driver)
        except TimeoutError:
            pass  # the report says what is left unsaved
        except (CacheClosed, RankFailure):
            pass  # a task or a rank died meanwhile; the report names the reason

    async def _stop_in_time(self, limit: SavingLimit, late: float) -> bool:
        """Stop everything. Returns False if a store or a copy had not let go of its buffers ``late`` seconds after the
        limit: then a task goes on with it."""
        if self._stopper is None or self._stopper.done():
            stop = self._stop(max(MOMENT, limit.left()))
            self._stopper = self.loop.create_task(stop, name="asynccache-stop")
        stopper = self._stopper
        try:
            async with limit.timeout(late):
                await asyncio.wait([stopper])
        except asyncio.CancelledError:
            stopper.cancel()
            await asyncio.wait([stopper], timeout=LATE)
            raise
        except TimeoutError:
            stopper.add_done_callback(lambda done: done.cancelled() or done.exception())
            self.close(None)
            leave_behind()
            return False
        stopper.result()
        return True

    async def _stop(self, patience: float) -> None:
        try:
            for kept in self.kept():
                kept.release()
            self.prefetches.drop_claims()
        finally:
            await self.supervisor.stop()
            if self.announcer is not None and self.driver.closed is None:
                try:
                    self.announcer.hand_on()  # what the last acks announced
                except Exception as error:  # as if the subscriber had raised earlier
                    self.supervisor.fail(error)
            self.close(None)
            await self.worker.aclose(patience)

    # looking at it

    def meters(self) -> Mapping[str, StageMeter]:
        """Return the counters of the transfer stages, by stage."""
        return {**self.worker.meters(), "backup_storage": self.backups.meter, "prefetch": self.prefetches.meter}

    def queues(self) -> Mapping[str, int]:
        """Return how much waits in each queue: operations for their stages, prefetches, acks for the core, leases in
        line, and backups in flight."""
        return {
            **self.worker.queues(), "backup_storage": len(self.backups), "prefetch": len(self.prefetches.unended),
            "acks": self.driver.unapplied, "line": len(self.driver.line), "saving": len(self.driver.saving),
        }  # fmt: skip


class SavingLimit:
    """The moment at which saving ends: ``seconds`` from now on (below 0: now), or earlier if ``shorten`` is called."""

    def __init__(self, seconds: float) -> None:
        self._clock = asyncio.get_running_loop().time
        self._end = self._clock() + max(0.0, float(seconds))
        self._beyond = 0.0
        self._timeout: asyncio.Timeout | None = None

    def left(self) -> float:
        """Return how many seconds are left; a negative number once the moment has passed."""
        return self._end - self._clock()

    def shorten(self, seconds: float) -> None:
        """Move the end to ``seconds`` from now on, if that is earlier."""
        self._end = min(self._end, self._clock() + max(0.0, float(seconds)))
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(self._end + self._beyond)

    @asynccontextmanager
    async def timeout(self, beyond: float = 0.0) -> AsyncIterator[None]:
        """A context that ends ``beyond`` seconds after the limit, with ``TimeoutError``. One is used at a time."""
        self._beyond = beyond
        async with asyncio.timeout_at(self._end + beyond) as self._timeout:
            try:
                yield
            finally:
                self._timeout = None


_LEFT: set[asyncio.Task[Any]] = set()
_SERVE_STORES = ("asynccache.storage", "asynccache_backends")


def leave_behind() -> None:
    """Take the tasks that serve stores off the list of tasks that the loop's owner waits for: ``asyncio.run`` cancels
    all tasks and waits until they have ended, and a call of a store that hangs never does. Tasks of other caches of
    this loop are taken off, too, which nobody notices as long as they are closed."""
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        frame = getattr(task.get_coro(), "cr_frame", None)
        module = "" if frame is None else str(frame.f_globals.get("__name__"))
        if task.get_name().startswith("asynccache-") or module.startswith(_SERVE_STORES):
            _LEFT.add(task)  # else the collector would end it, and with it the call
            task.add_done_callback(_LEFT.discard)
            asyncio.tasks._unregister_task(task)
