"""The assembled parts of one open cache: the core behind its driver, the pools, the stages, and who owns the tasks.

What everything below ``AsyncCache`` shares. Mutable state: who holds what (``holders``: the core's leases, each with
the task that was granted it, and kept prefixes; it keeps neither a request's ``Lease`` nor its task alive), the epochs
of invalidated namespaces; all of it belongs to one loop and one thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from asynccache import checks
from asynccache.config import CacheConfig, PoolSpec
from asynccache.core.cache import CacheCore
from asynccache.core.cache import Lease as CoreLease
from asynccache.core.plan import BackupHost, BackupStorage, Clone, LoadBack, Publish
from asynccache.core.settings import ComponentKind, PrefetchPolicy
from asynccache.errors import AsyncCacheError, CacheClosed, ConfigError, RankDivergence, RankFailure
from asynccache.events import Notice
from asynccache.memory.device import Event
from asynccache.memory.fences import unfired
from asynccache.memory.mover import Mover
from asynccache.ranks import Agreement, Ranks
from asynccache.runtime.acks import Freezer, run_acks
from asynccache.runtime.announcing import Announcing
from asynccache.runtime.attaching import access_of
from asynccache.runtime.claims import Claims
from asynccache.runtime.clearing import Clearing
from asynccache.runtime.driver import Driver
from asynccache.runtime.hashing import Chain, namespace_digest
from asynccache.runtime.lockstep import Lockstep
from asynccache.runtime.lookups import Lookups
from asynccache.runtime.poolmap import PoolMap
from asynccache.runtime.prefetch import Cut, Held, Prefetch, PrefetchHandle, prefetch_of
from asynccache.runtime.readiness import Readiness
from asynccache.runtime.recorded import recorded
from asynccache.runtime.stages.backlog import Backlog
from asynccache.runtime.stages.backup_host import BackupHostStage
from asynccache.runtime.stages.backup_storage import WORKERS, BackupStorageStage
from asynccache.runtime.stages.events import EventStage
from asynccache.runtime.stages.load_back import LoadBackStage
from asynccache.runtime.stages.prefetch import PrefetchStage
from asynccache.runtime.stages.retire import RetireStage
from asynccache.runtime.stats import Meter, StageStats
from asynccache.runtime.supervisor import Supervisor
from asynccache.runtime.tokens import TOKEN_BYTES
from asynccache.storage.tiers import Attached, TieredStore

Task = asyncio.Task[object]
OnEvent = Callable[[Notice], None]

class Waiting(Protocol):
    """A lease that waits, where ranks grant it in a step. ``over``: it does not wait any more."""

    over: bool

    async def attempt(self) -> bool:
        """Whether the next one may try."""
        ...

    def fail(self, error: AsyncCacheError) -> None:
        """The cache is closed."""
        ...


CHECKPOINTS = 2
REMEMBERED = 1 << 14


class Machine:
    """Built when a cache opens; ``start`` makes its tasks, ``stop`` ends them."""

    def __init__(
        self, config: CacheConfig, pools: Sequence[PoolSpec], mover: Mover, store: TieredStore | None,
        ranks: Ranks | None, agreement: Agreement, on_event: OnEvent | None,
    ) -> None:  # fmt: skip
        self.config = config
        self.mover = mover
        self.store = store
        self.loop = asyncio.get_running_loop()
        settings = replace(config.core(), storage=False, publish=on_event is not None, remember=REMEMBERED)
        self.lockstep = _lockstep(ranks, pools)
        self.core = CacheCore(settings) if self.lockstep is None else recorded(settings, self.lockstep.record)
        self.lookups = Lookups(self.core)
        self.driver = Driver(self.core, self.lockstep or agreement)
        self.driver.at_step = self.serve_line
        if self.lockstep is not None:
            self.lockstep.on_late = self._tell_late
        self.supervisor = Supervisor(self.close)
        self.driver.on_failure = self.supervisor.fail
        self.claims = Claims(self.driver)
        self.pools = PoolMap(pools, config.page_size, mover.host_pools)
        self.waiting: dict[int, Waiting] = {}
        self.readiness = Readiness()
        self.commits = 0
        self.resets = 0
        self.epochs: Counter[str | bytes | None] = Counter()
        self.draining = False
        self.has_swa = int(ComponentKind.SWA) in self.pools.components
        self._tables = [int(ComponentKind.FULL)] + [int(ComponentKind.SWA)] * self.has_swa
        self.default_states = 1 + CHECKPOINTS if int(ComponentKind.MAMBA) in self.pools.components else 0
        self.hashing = store is not None or on_event is not None  # a store may be attached at any time
        self._thread = threading.get_ident()
        self.holders: dict[object, weakref.ref[Task] | None] = {}
        self._build_stages(on_event)

    def __repr__(self) -> str:
        return f"Machine({self.driver!r}, {len(self.holders)} leases, {self.supervisor!r})"

    def _build_stages(self, on_event: OnEvent | None) -> None:
        post, size_of, clock = self.driver.post, self.pools.size_of, time.perf_counter
        self.backup_host = BackupHostStage(self.mover, self.readiness, post, size_of, clock)
        self.load_back = LoadBackStage(self.mover, post, size_of, clock, self.supervisor.fail)
        self.retire = RetireStage(post, self.supervisor.spawn)
        self.driver.route(BackupHost, self.backup_host.put)
        self.driver.route(LoadBack, self.load_back.put)
        self.driver.route(Clone, self.load_back.put)
        self.events = EventStage(on_event) if on_event is not None else None
        self.announcing: Announcing | None = None
        if self.events is not None:
            self.driver.route(Publish, self.events.put)
            self.announcing = Announcing(
                self.events.put, self.config.page_size, self.pools, stores=self.store is not None,
                alive=self.core.world.roots,
            )
        self.backup_storage: BackupStorageStage | None = None
        self.clearing: Clearing | None = None
        self.prefetching: PrefetchStage | None = None
        if self.store is not None:
            self._build_storage_stages(self.store)

    def _build_storage_stages(self, store: TieredStore) -> None:
        for attached in store.attached:
            self.introduce(attached)
            if self.announcing is not None:
                self.announcing.begin(attached)
        self.core.attach_storage(access_of(store))
        clock = time.perf_counter  # uvloop's own clock counts milliseconds
        quota = self.config.backup_quota
        backlog = Backlog({int(c.kind): int(c.host * quota) for c in self.core.config.components})
        self.backup_storage = BackupStorageStage(store, self.pools, self.driver.post, clock, backlog, self._note_late)
        self.clearing = Clearing(self.backup_storage.put, self.driver.post, backlog)
        self.driver.route(BackupStorage, self.clearing.put)
        self.prefetching = PrefetchStage(
            self.driver, store, self.pools, self.config.prefetch_threshold, self.supervisor.spawn, clock, self.late
        )

    def _note_late(self, late: bool) -> None:
        """One rank alone must not tell its core; several agree on it."""
        if self.lockstep is None:
            self._tell_late(late)
        else:
            self.lockstep.storage_is_late = late

    def _tell_late(self, late: bool) -> None:
        """Called by a timer, too, which nobody awaits: a core that fails here has closed the cache, and those who are
        told that are told why."""
        try:
            self.driver.perform(self.driver.unlocked(self.core.note_late_storage, late))
        except Exception:
            if self.driver.closed is None:
                raise

    # tasks

    async def start(self) -> None:
        """Make the workers. Cancelling it leaves none behind."""
        await self.supervisor.start()
        freezer = Freezer(lambda: self.commits) if self.config.freeze_gc else None
        acks = run_acks(self.driver, freezer) if self.lockstep is None else self.lockstep.read_reports()
        workers: list[tuple[str, Coroutine[Any, Any, None]]] = [
            ("acks", acks),
            ("backup-host", self.backup_host.run()),
            ("load-back", self.load_back.run()),
            ("clones", self.load_back.run_clones()),
        ]
        if self.events is not None:
            workers.append(("events", self.events.run()))
        if self.prefetching is not None and self.lockstep is None:
            workers.append(("prefetch-commits", self.prefetching.completions.run()))
        if self.backup_storage is not None:
            workers += [("backup-storage", self.backup_storage.run()) for _ in range(WORKERS)]
        for name, work in workers:
            self.supervisor.spawn(work, f"asynccache-{name}")

    def close(self, cause: BaseException | None) -> None:
        """Refuse every call from now on and tell everybody who waits: ``cause``, if a worker died of it."""
        if self.driver.closed is None:
            self.driver.close(cause)
            if self.lockstep is not None and _is_own(cause, self.lockstep):
                self.lockstep.resign()
            self.fail_waiting(self.driver.closed_error)
            if self.announcing is not None:
                self.announcing.stop()
            if self.prefetching is not None:
                self.prefetching.fail(self.driver.closed_error)

    def fail_waiting(self, error: Callable[[], AsyncCacheError]) -> None:
        """Every request in line gets an ``error()`` of its own."""
        self.driver.line.fail(error)
        waiting, self.waiting = self.waiting, {}
        for entry in waiting.values():
            entry.fail(error())

    # the engine's events

    def engine_event(self, name: str, event: object | None) -> Event | None:
        """``event``, the argument ``name`` of a call, as one of the device's; None if it is None. From any thread.

        Raises:
            ConfigError: the device's streams cannot wait for it.
        """
        if event is None:
            return None
        try:
            return self.mover.engine_event(event)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error

    def fence(self, lease: CoreLease, *events: Event) -> None:
        """The engine may use the lease's pages until ``events`` have fired: what is copied into one of them later, on
        whoever's behalf, waits for that on the device. What was asked for before does not: the engine may wait for it.
        """
        pending = unfired(*events)
        if pending:
            with suppress(Exception):  # the cache ends of it
                self.load_back.submit_now()
            slots = {kind: self.core.pages(lease, kind) for kind in self._tables}
            if self.default_states:
                slots[int(ComponentKind.MAMBA)] = lease.states
            for event in pending:
                self.mover.fence(event, slots)

    # guards

    def check_thread(self) -> None:
        """Raises ``RuntimeError`` in any thread but the loop's."""
        if threading.get_ident() != self._thread:
            raise RuntimeError("the cache belongs to the thread of its loop; use the *_threadsafe calls of a lease")

    def check_open(self) -> None:
        """Raises ``CacheClosed`` if the cache is closed, ``RuntimeError`` in another thread."""
        self.check_thread()
        if self.driver.closed is not None:
            self.driver.refuse()
        if self.draining:
            raise CacheClosed("the cache is closing")

    def own(self, handle: PrefetchHandle) -> Prefetch:
        """Its prefetch. Raises ``ConfigError`` if ``handle`` is no prefetch of this cache."""
        return prefetch_of(handle, self.claims)

    def check_states(self, states: object) -> int:
        """``states`` as a count of MAMBA slots.

        Raises:
            ConfigError: it is none, or there are no recurrent states in this cache.
        """
        count = checks.integer("states", states, 0)
        if count and not self.default_states:
            raise ConfigError(f"states={count}: there are no recurrent states in this cache")
        return count

    def check_layer(self, i: object) -> int:
        """``i`` as a layer of the model. Raises ``ConfigError`` if the model has no such layer."""
        return checks.integer("i", i, 0, self.mover.layers - 1)

    # leases

    def holds(self, task: Task | None) -> bool:
        """Whether ``task`` holds a lease. Asked by those who are about to wait; so it may look at all of them."""
        return any(holder is not None and holder() is task for holder in self.holders.values())

    def idle(self) -> bool:
        """Whether nothing is under way that could ever give anything back."""
        return not self.holders and not len(self.driver.ops)

    async def serve_line(self) -> None:
        """Several ranks, in each step: whoever waits for a lease tries, first come, first served."""
        for ticket in sorted(self.waiting):
            waiting = self.waiting.get(ticket)
            if waiting is None or not await waiting.attempt():  # the cache may have been closed meanwhile
                return
            if waiting.over:
                self.waiting.pop(ticket, None)

    # namespaces

    def space(self, extra_key: str | bytes | None) -> bytes:
        """The digest of a namespace, as of its last invalidation.

        Raises:
            ConfigError: ``extra_key`` is neither text nor bytes nor None.
        """
        if extra_key is not None:
            checks.namespace("extra_key", extra_key)
        epoch = self.epochs[extra_key] if self.epochs else 0
        space = namespace_digest(self.config.model, self.config.page_size, extra_key, epoch)
        if self.announcing is not None and extra_key is not None:
            self.announcing.name(space, extra_key)
        return space

    # prefetch

    @property
    def stores(self) -> bool:
        """Whether a store is attached."""
        return bool(self.store)

    def tiers(self) -> TieredStore:
        """The stores that are attached.

        Raises:
            ConfigError: there is no host tier, which they would need.
        """
        if self.store is None:
            raise ConfigError("storage: it needs a host tier, and host_tokens is 0")
        return self.store

    def introduce(self, attached: Attached) -> None:
        """Tell a store where the host's pages lie."""
        for name, pool in self.mover.host_pools.items():
            attached.store.register(name, pool.memory)

    def prefetch(self, space: bytes, key: bytes) -> Prefetch:
        """One whose work has begun, or that is over already because there is nothing worth fetching."""
        match = self.driver.unlocked(self.core.match, space, key)
        handle = Prefetch(
            space, key, Chain(space, self.config.page_size), Held(match.device, match.host), self.loop.time(),
            self.driver.prefetch_line.ticket(), self.check_thread, self.claims, self.driver.turns.wake,
        )  # fmt: skip
        whole = len(key) // TOKEN_BYTES // self.config.page_size * self.config.page_size
        if self.prefetching is None or not self.stores:
            handle.skip("no storage")
        elif self.clearing:
            self.prefetching.skip(handle, "storage is being cleared")
        elif whole - match.host < max(1, self.config.prefetch_threshold):
            self.prefetching.skip(handle, "below the threshold")
        elif self._storage_is_away(space):
            handle.cut = Cut.BACKEND
            self.prefetching.skip(handle, "storage is away")
        else:
            self.prefetching.start(handle)
        return handle

    def _storage_is_away(self, space: bytes) -> bool:
        """One rank alone must not leave out what the others do."""
        if self.lockstep is not None or self.store is None or not self.pools.lead:
            return False
        return self.store.is_away(self.pools.key(self.pools.lead[-1].name, space))

    def deadline(self, handle: Prefetch) -> float:
        """When the timeout policy stops ``handle``, in the loop's time."""
        config = self.config
        thousands = len(handle.key) / TOKEN_BYTES / 1024
        allowed = config.prefetch_timeout_base + config.prefetch_timeout_per_1k * thousands
        return handle.started + min(allowed, config.prefetch_timeout_max)

    def late(self, handle: Prefetch) -> bool:
        """Whether ``handle`` has had the time that the policy gives it."""
        return self.config.prefetch_policy is PrefetchPolicy.TIMEOUT and self.loop.time() >= self.deadline(handle)

    def may_stop(self, handle: Prefetch) -> bool:
        """Whether the policy lets a lease stop ``handle`` now."""
        if self.config.prefetch_policy is PrefetchPolicy.TIMEOUT:
            return self.lockstep is None and self.late(handle)  # several ranks stop it where they agree on the time
        return self.config.prefetch_policy is PrefetchPolicy.BEST_EFFORT

    # looking at it

    def meters(self) -> dict[str, Meter]:
        """The transfer stages' counters."""
        return {
            "backup_host": self.backup_host.meter,
            "load_back": self.load_back.meter,
            "backup_storage": self.backup_storage.meter if self.backup_storage is not None else Meter(),
            "prefetch": self.prefetching.meter if self.prefetching is not None else Meter(),
        }

    def dropped_backups(self) -> int:
        """Operations that storage was too slow for."""
        return self.backup_storage.backlog.dropped if self.backup_storage is not None else 0

    def queues(self) -> dict[str, int]:
        """What waits where: effects for their stages, prefetches, requests in line, outcomes for the core."""
        return {
            "backup_host": len(self.backup_host),
            "load_back": len(self.load_back),
            "backup_storage": len(self.backup_storage) if self.backup_storage is not None else 0,
            "prefetch": len(self.prefetching.handles) if self.prefetching is not None else 0,
            "acks": self.driver.unapplied,
            "completions": len(self.prefetching.completions) if self.prefetching is not None else 0,
            "line": len(self.driver.line),
            "saving": len(self.driver.saving),
        }

    def stage_stats(self) -> dict[str, StageStats]:
        """What each transfer stage did so far."""
        return {name: meter.read() for name, meter in self.meters().items()}


def _is_own(cause: BaseException | None, lockstep: Lockstep) -> bool:
    """Whether the other ranks do not know of it."""
    of_group = isinstance(cause, (RankFailure, RankDivergence)) and lockstep.failed
    return isinstance(cause, Exception) and not of_group


def _lockstep(ranks: Ranks | None, pools: Sequence[PoolSpec]) -> Lockstep | None:
    if ranks is None or ranks.topology.ranks == 1:  # alone there is nobody to agree with
        return None
    return Lockstep(ranks, [spec.name for spec in pools], {spec.name for spec in pools if spec.bytes_per_page})
