"""Prefetches, from storage to the host: a task for each, and the policy that says for how long a lease waits for one.

A task runs a fetch, or shares one that is to bring the same pages. When the fetch is over, it ends the prefetch. In
this module and in ``fetching`` a ``handle`` is a ``Prefetch``.

Laws:
* Where there are windows or states, pages are fetched up to an end that a lease of the same tokens can use. That lease
  leaves at least one token to be computed, so the window or state of a later end would be of no use. Pages of FULL are
  of use whatever the end is.
* A prefetch asks before it takes: the stores first say which pages they have. A request of which they have nothing
  never waits for the fetches of others.
* A prefetch that the core refuses for want of room waits in the prefetches' line, first come, first served, and claims
  nothing while it waits. When it is the first in line, it waits for room on the host, and for others' fetches to leave
  some of the quota, for ``PATIENCE`` seconds. Then it takes what it can get: the room may be held by claims of requests
  that wait for leases themselves, and the quota by a fetch whose store hangs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from asynccache.config import CacheConfig
from asynccache.core.cache import Begin, PrefetchBegun, PrefetchShape, Skip
from asynccache.core.plan import More, Wait
from asynccache.core.settings import PrefetchPolicy
from asynccache.runtime.driver import Driver, LinePlace
from asynccache.runtime.driving import holding, woken
from asynccache.runtime.fetching import Fetch
from asynccache.runtime.outbox import Lateness, Outbox
from asynccache.runtime.prefetch import (
    GRACE,
    CachedOnArrival,
    Cut,
    HandleClaims,
    Prefetch,
    PrefetchHandle,
    PrefetchStatus,
    Wish,
    prefetch_of,
)
from asynccache.runtime.tokens import TOKEN_BYTES, Chain
from asynccache.worker.local import LocalWorker
from asynccache.worker.pool_layout import PoolLayout
from asynccache.worker.stats import StageMeter

PATIENCE = 0.5
MOST_SAVES = 4
"""The most times that a prefetch waits until the pages before its own are copied to the host. They may be gone again
when it looks: of two prefetches whose pages the host cannot hold together, each may take the other's room again and
again."""

Spawn = Callable[[Coroutine[Any, Any, None], str], object | None]


class Prefetching:
    """Makes prefetches and runs them. Mutable state: the prefetches (``handles``) and the fetches that are under way,
    and how many prefetches have ended in each way (``outcomes``)."""

    def __init__(
        self, config: CacheConfig, driver: Driver, worker: LocalWorker, pools: PoolLayout, claims: HandleClaims,
        outbox: Outbox, lateness: Lateness, spawn: Spawn, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._config = config
        self._driver = driver
        self._worker = worker
        self._pools = pools
        self._claims = claims
        self._outbox = outbox
        self._lateness = lateness
        self._spawn = spawn
        self._clock = clock
        self._time = asyncio.get_running_loop().time
        self._fetches: dict[Fetch, None] = {}
        self.handles: dict[Prefetch, None] = {}
        self.outcomes: Counter[PrefetchStatus] = Counter()
        self.meter = StageMeter()

    def __repr__(self) -> str:
        return f"Prefetching({len(self.handles)} handles, {len(self._fetches)} fetches, {self.meter!r})"

    def begin(self, space: bytes, key: bytes) -> Prefetch:
        """Return a prefetch that has begun, or that has ended already because too little is missing, or because
        there is no storage or none that can be asked now."""
        driver, size = self._driver, self._config.page_size
        if len(self._pools.components) > 1:
            key = usable_by_a_lease(key, size)
        match = driver.unlocked(driver.core.match, space, key)
        handle = Prefetch(
            space, key, Chain(space, size), CachedOnArrival(match.device, match.host), self._time(),
            driver.prefetch_line.ticket(), driver.check_thread, self._claims, self._grace,
        )  # fmt: skip
        if not self._worker.has_stores:
            handle.skip("no storage")
        elif self._outbox.clearing:
            self._skip(handle, "storage is being cleared")
        elif len(key) // TOKEN_BYTES // size * size - match.host < max(1, self._config.prefetch_threshold):
            self._skip(handle, "below the threshold")
        elif self._worker.is_away(space):
            handle.cut = Cut.BACKEND
            self._skip(handle, "storage is away")
        else:
            self._start(handle)
        return handle

    def own(self, handle: PrefetchHandle) -> Prefetch:
        """Return the prefetch of ``handle``. Raises ``ConfigError`` if it is no prefetch of this cache."""
        return prefetch_of(handle, self._claims)

    # the policy

    @property
    def policy(self) -> PrefetchPolicy:
        """The policy that says what a lease does with a prefetch that has not ended."""
        return self._config.prefetch_policy

    def deadline(self, handle: Prefetch) -> float:
        """Return the moment, in the loop's time, at which the timeout policy stops ``handle``."""
        config = self._config
        thousands = len(handle.key) / TOKEN_BYTES / 1024
        allowed = config.prefetch_timeout_base + config.prefetch_timeout_per_1k * thousands
        return handle.started + min(allowed, config.prefetch_timeout_max)

    def may_stop(self, handle: Prefetch) -> bool:
        """Return True if the policy lets a lease stop ``handle`` now."""
        if self.policy is PrefetchPolicy.TIMEOUT:
            return self._time() >= self.deadline(handle)
        return self.policy is PrefetchPolicy.BEST_EFFORT

    def _grace(self) -> float:
        return 0.0 if self._worker.shut else GRACE

    # those under way

    def read_outcomes(self) -> Mapping[str, int]:
        """Return how many prefetches ended with each status; empty where there can be no storage."""
        if not self._worker.takes_stores:
            return {}
        return {status.value: self.outcomes[status] for status in PrefetchStatus}

    def operations(self) -> tuple[int, ...]:
        """Return the operations of the fetches that are under way and have begun."""
        return tuple(fetch.op for fetch in self._fetches if fetch.op)

    def _start(self, handle: Prefetch) -> None:
        self.handles[handle] = None
        handle.began = self._clock()
        if self._spawn(self._serve(handle), "asynccache-prefetch") is None:
            self._finish(handle, PrefetchStatus.CANCELLED, "the cache is closed")

    def _skip(self, handle: Prefetch, reason: str) -> None:
        self.outcomes[PrefetchStatus.SKIPPED] += 1
        handle.skip(reason)

    def cancel(self, space: bytes | None = None) -> None:
        """Cancel all prefetches of the namespace ``space`` (None: of all namespaces)."""
        for handle in tuple(self.handles):
            if space is None or handle.space == space:
                handle.tell(Wish.CANCEL)

    def fail(self, error: Callable[[], BaseException]) -> None:
        """End all prefetches because the cache is closed: everybody who awaits one gets an ``error()`` of its own."""
        for handle in self.handles:
            handle.fail(error)

    async def _serve(self, handle: Prefetch) -> None:
        try:
            status, reason = await self._work(handle)
        except BaseException:
            self._finish(handle, PrefetchStatus.CANCELLED, "the cache is closed")
            raise
        self._finish(handle, status, reason)

    def _finish(self, handle: Prefetch, status: PrefetchStatus, reason: str) -> None:
        self.meter.took(self._clock() - handle.began)
        if handle.result is not None:  # it was ended before its fetch
            status = handle.result.status
        if status is PrefetchStatus.CANCELLED:
            handle.unclaim()
        elif handle.result is None:
            handle.claim()
        self.handles.pop(handle, None)  # only now: if the core fails in ``claim``, ``fail`` must find this handle
        handle.finish(status, reason)
        assert handle.result is not None
        self.outcomes[handle.result.status] += 1

    async def _work(self, handle: Prefetch) -> tuple[PrefetchStatus, str]:
        while handle.wish is Wish.RUN:
            shape = self._driver.unlocked(self._driver.core.prefetch_look, handle.space, handle.key)
            if isinstance(shape, Skip):
                return (PrefetchStatus.COMPLETE, "") if handle.tokens() else (PrefetchStatus.SKIPPED, shape.reason)
            fetch = self._to_share(handle, shape)
            if fetch is None:
                fetch = await self._run(handle, shape)
            else:
                fetch.join(handle)
                await self._share(handle, fetch)
            status = fetch.answer(handle)
            if status is not None:
                return status, fetch.skipped if status is PrefetchStatus.SKIPPED else ""
        if handle.wish is Wish.CANCEL:
            return PrefetchStatus.CANCELLED, ""
        return (PrefetchStatus.PARTIAL if handle.tokens() else PrefetchStatus.MISS), "stopped"

    def _to_share(self, handle: Prefetch, shape: PrefetchShape) -> Fetch | None:
        """Return the fetch that is to bring pages of ``handle``; None if there is none."""
        for fetch in self._fetches:
            if fetch.space == handle.space and fetch.brings(handle.key, shape):
                return fetch
        return None

    async def _run(self, handle: Prefetch, shape: PrefetchShape) -> Fetch:
        """Run a fetch to its end for everybody who shares it, even if ``handle``, which begins it, gives up."""
        fetch = Fetch(
            self._driver, self._worker, self._pools, self.meter, self._lateness, handle, shape,
            self._config.prefetch_threshold,
        )
        self._fetches[fetch] = None
        try:
            if (key := await fetch.ask()) and await self._open(fetch, key, handle.ticket):
                await fetch.read()
                await fetch.committed()
        finally:
            fetch.close()
            del self._fetches[fetch]
        self.meter.count(1, 0, 0, 0)
        return fetch

    async def _share(self, handle: Prefetch, fetch: Fetch) -> None:
        """Wait until another handle's ``fetch`` is over, or ``handle`` gives up."""
        while handle.fetch is fetch:
            handle.asleep = asyncio.get_running_loop().create_future()
            try:
                await handle.asleep
            finally:
                handle.asleep = None

    async def _open(self, fetch: Fetch, key: bytes, ticket: int) -> bool:
        """Have the core begin ``fetch`` for the pages of ``key``, after waiting for room and for backups. Returns False
        if it does not begin, or was told to end first. ``ticket``: its number in the prefetches' line."""
        line = self._driver.prefetch_line
        place: LinePlace | None = None
        begin, until = Begin.NEXT, None
        saved = 0
        try:
            while fetch.wish is Wish.RUN:
                async with holding(self._driver.lock):
                    self._driver.apply_outcomes()
                    if fetch.wish is not Wish.RUN:  # told while it waited for the lock
                        return False
                    answer = self._try(fetch, key, Begin.LATER if line.must_wait(ticket) else begin)
                    if isinstance(answer, Wait):
                        place = self._give_way(fetch, ticket, place, answer)
                    elif not isinstance(answer, More):
                        return isinstance(answer, PrefetchBegun)
                if isinstance(answer, More):
                    await asyncio.sleep(0)
                    continue
                if place is None:
                    saved += 1
                    if saved > MOST_SAVES:
                        fetch.skipped = "the anchor does not stay on the host"
                        return False
                    await self._asleep(fetch, answer.ops)
                    continue
                if line.is_first(place) and until is None:
                    until = self._time() + PATIENCE
                if not await self._in_line(fetch, place, until if begin is Begin.NEXT else None):
                    begin = Begin.NOW
            return False
        finally:
            if place is not None:
                line.leave(place)

    def _try(self, fetch: Fetch, key: bytes, begin: Begin) -> PrefetchBegun | Skip | Wait | More:
        """Ask the core once, and perform its plan. The caller holds the lock."""
        answer = self._driver.locked(self._driver.core.prefetch_open, fetch.space, key, begin)
        if isinstance(answer, Skip):
            fetch.skipped = answer.reason
            return answer
        self._driver.perform(answer.plan)
        if isinstance(answer, PrefetchBegun):
            self._driver.ops.open(answer.op)
            fetch.begun(answer)
        return answer

    def _give_way(self, fetch: Fetch, ticket: int, place: LinePlace | None, answer: Wait) -> LinePlace | None:
        """Return the place where ``fetch`` waits after ``answer``: a place in line if anybody may free what it needs;
        None, and out of the line, if it waits for certain operations."""
        line = self._driver.prefetch_line
        if not answer.ops:
            for sharer in fetch.sharers:
                sharer.unclaim()
            place = place or line.join(ticket)
            line.sleep(place)
            return place
        if place is not None:
            line.leave(place)
        return None

    async def _asleep(self, fetch: Fetch, ops: tuple[int, ...]) -> None:
        """Return when one of ``ops`` has ended or ``fetch`` was told to end."""
        waiter = self._driver.ops.watch(ops)
        if waiter is None:
            return
        fetch.asleep = waiter
        try:
            await waiter
        finally:
            fetch.asleep = None
            self._driver.ops.unwatch(ops, waiter)

    async def _in_line(self, fetch: Fetch, place: LinePlace, until: float | None) -> bool:
        """Return True when ``place`` was woken or ``fetch`` was told to end; False if ``until`` came first."""
        fetch.asleep = place.signal
        try:
            await woken(place, until)
        except TimeoutError:
            return False
        finally:
            fetch.asleep = None
        return True


def usable_by_a_lease(key: bytes, page_size: int) -> bytes:
    """Return the whole pages of ``key`` that a lease of it can have cached: the lease leaves at least one token to be
    computed."""
    tokens = len(key) // TOKEN_BYTES
    return key[: max(0, tokens - 1) // page_size * page_size * TOKEN_BYTES]
