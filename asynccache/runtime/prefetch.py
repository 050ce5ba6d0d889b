"""A prefetch: what one request wants of storage, from the question to the commit on the host.

The way of a page: ``Prefetches.begin`` makes a task, which looks what the tree lacks (``Prefetches._work``). A
``Fetch`` brings that, for this prefetch and for those that want the same pages. ``Fetch.run`` asks the stores, has the
core open an operation, reads FULL, its sidecars and the auxiliary components, and puts its completion into the queue in
which acks travel (``Driver.acks``). Whoever takes the tree lock next makes the commit (``Fetch._commit``). If another
operation must end before that (a backup of the same pages), the driver queues the commit again.

**Asking.** A prefetch asks before it takes: while the stores are asked which pages they have, it has no page, pin or
operation. So a request of which the stores have nothing never waits for the fetches of others. The answers are noted
(``Fetch._present``). Once the fetch has begun, only pages are asked for that the tree has lost since then and that were
not asked for before.

**How far.** Where there are windows or states, pages are fetched up to an end that a lease of the same tokens can use.
That lease leaves at least one token to be computed, so the window or state of a later end would be of no use; pages of
FULL are of use whatever the end is. When the end has to move (there is no room on the host, a page failed, or the fetch
is to stop), it becomes the longest shorter end at which every pool has what it needs.

**Room.** A fetch that the core refuses for want of room waits in the prefetches' line, first come, first served, and
claims nothing meanwhile. The first in line waits for room on the host, and for others' fetches to leave some of the
quota, for ``PATIENCE`` seconds. Then it takes what it can get: the room may be held by claims of requests that wait for
leases themselves, and the quota by a fetch whose store hangs.

**Stopping.** A prefetch has a *wish*: to run, to stop, or to be cancelled. Its fetch acts on the wish between two I/Os,
so no buffer is given back while I/O still owns it. After a stop or a cancellation the prefetch ends within ``GRACE``
seconds, or at once if the stores refuse calls by now. If the store has not answered by then, the prefetch ends without
its fetch, which is left to the others that share it, or is released when the store has let go.

**Sharing.** Prefetches of the same pages share one fetch. Any of them may stop it: what it has read is committed, and
the others fetch the rest. It is cancelled when the last prefetch that shares it is.

**Claims.** A prefetch that has ended without being cancelled has a *claim*: the pages of its prompt that the host has
stay there. The claim ends when the lease that was given the handle is granted, when the handle is cancelled or nobody
refers to it any more, and after ``HELD_FOR`` seconds in which no lease with the handle was in line. The core may end it
earlier, for want of room.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from enum import Enum, IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from asynccache import checks
from asynccache.core.cache import EVERYTHING, Begin, PrefetchBegun, PrefetchShape, Skip, Taken, needed_pages, usable_end
from asynccache.core.keys import HASH_BYTES, TOKEN_BYTES
from asynccache.core.plan import SLOT_BYTES, More, Status, Wait
from asynccache.core.settings import ComponentKind, PrefetchPolicy
from asynccache.core.tree import common_pages
from asynccache.errors import ConfigError
from asynccache.runtime.core_calls import drive, holding, woken
from asynccache.runtime.save import StoreCall
from asynccache.runtime.tokens import Chain
from asynccache.worker.local import Result
from asynccache.worker.pool_layout import FULL
from asynccache.worker.stages import StageMeter
from asynccache.worker.work import ReadOrder, StoreQuestion

if TYPE_CHECKING:
    from asynccache.config import CacheConfig, PoolSpec
    from asynccache.runtime.announcer import StartSpan
    from asynccache.runtime.driver import Driver, LinePlace
    from asynccache.runtime.save import Backups
    from asynccache.runtime.supervisor import Supervisor
    from asynccache.worker.local import LocalWorker
    from asynccache.worker.pool_layout import PoolLayout

GRACE = 0.5
"""Seconds within which a prefetch ends that was told to end."""
HELD_FOR = 30.0
PATIENCE = 0.5
MOST_SAVES = 4
"""The most times that a fetch waits until the pages before its own are copied to the host. They may be gone again when
it looks: of two fetches whose pages the host cannot hold together, each may take the other's room again and again."""
BATCH_BYTES = 4 << 20
BATCH_PAGES = 128

_HITS = bytes(result == Result.HIT for result in range(256))


class PrefetchStatus(Enum):
    """The status with which a prefetch ended. COMPLETE: with all pages that it was to bring. PARTIAL: with some of
    them. MISS: with none. SKIPPED: it fetched nothing, for the ``reason`` in its result. CANCELLED: it was given up, or
    the cache was closed."""

    COMPLETE = "complete"
    PARTIAL = "partial"
    MISS = "miss"
    SKIPPED = "skipped"
    CANCELLED = "cancelled"


class PrefetchResult(NamedTuple):
    """The result of a prefetch."""

    status: PrefetchStatus
    tokens: int
    """How many tokens storage added to what host and device held when the prefetch was asked for."""
    reason: str = ""
    """Why the prefetch was skipped, stopped or cancelled; may be empty."""


class Wish(IntEnum):
    """The wish of a prefetch's holder for its fetch. A wish only ever rises."""

    RUN = 0
    STOP = 1
    CANCEL = 2


class Cut(Enum):
    """The reason why a fetch ended before it had everything that storage had, or had said to have."""

    NOTHING = "nothing"
    BACKEND = "the backend failed"
    CHECKSUM = "a page did not verify"
    ROOM = "the host had no room"


class CachedOnArrival(NamedTuple):
    """The number of a prompt's tokens that were cached when its request arrived: on the device, and on device and host
    together."""

    device: int
    host: int


# one request's prefetch


class Prefetch:
    """One request's prefetch, as the rest of the runtime knows it. ``await`` it for its result.

    The user's handle, a lease and the task that serves the prefetch refer to it. When none of them does any more, its
    claim is dropped.
    """

    def __init__(self, prefetches: Prefetches, space: bytes, key: bytes, arrival: CachedOnArrival) -> None:
        self._prefetches = prefetches
        self.space = space
        self.key = key
        self.chain = Chain(space, prefetches.page_size)
        self.arrival = arrival
        """What was cached when the prefetch was asked for."""
        self.started = prefetches.loop.time()
        """When the prefetch was asked for, in the loop's time."""
        self.ticket = prefetches.driver.prefetch_line.ticket()
        """The prefetch's number, also in the prefetches' line."""
        self.wish = Wish.RUN
        self.cut = Cut.NOTHING
        self.reached = 0
        """The end, in tokens, of the fetches for this prefetch that were committed."""
        self.began = 0.0
        """When the prefetch's task began, by ``time.perf_counter``."""
        self.result: PrefetchResult | None = None
        self.asleep: asyncio.Future[Any] | None = None
        """What the task awaits while the prefetch shares the fetch of another."""
        self.fetch: Fetch | None = None
        """The fetch that serves this prefetch now."""
        self.spent = False
        """True once a lease was granted with this prefetch, or its holder has cancelled it."""
        self._granted = False
        self._elsewhere = 0
        self._leases = 0
        self._timer: asyncio.TimerHandle | None = None
        self._waiters: list[asyncio.Future[PrefetchResult]] = []

    def __repr__(self) -> str:
        state = self.result.status.value if self.result else f"running, wish {self.wish.name}"
        return f"{len(self.key) // TOKEN_BYTES} tokens, {state}"

    def __await__(self) -> Generator[Any, None, PrefetchResult]:
        self._prefetches.driver.check_thread()
        if self.result is not None:
            return self.result
        waiter: asyncio.Future[PrefetchResult] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            return (yield from waiter.__await__())
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def __del__(self) -> None:
        self._prefetches.abandon_claim(self.ticket)

    def done(self) -> bool:
        """Return True if the prefetch has ended."""
        return self.result is not None

    # to stop it

    def cancel(self) -> None:
        """Give up the prefetch, and its claim."""
        self.tell(Wish.CANCEL)
        self.unclaim()

    def tell(self, wish: Wish) -> None:
        """Raise the wish, and wake whoever acts on it."""
        if wish <= self.wish or self.result is not None:
            return
        if self._timer is None:
            self._timer = self._prefetches.loop.call_later(self._prefetches.grace(), self._end_without_answer)
        self._raise(wish)

    def _raise(self, wish: Wish) -> None:
        self.wish = wish
        if self.fetch is not None:
            self.fetch.told(self)
        self.wake()

    def wake(self) -> None:
        """Wake the task that waits for the fetch which this prefetch shares: the fetch is over, or there is a new
        wish."""
        if self.asleep is not None and not self.asleep.done():
            self.asleep.set_result(None)

    def _end_without_answer(self) -> None:
        if self.wish is Wish.CANCEL:
            status = PrefetchStatus.CANCELLED
        else:
            self.claim()
            status = PrefetchStatus.PARTIAL if self.tokens() else PrefetchStatus.MISS
        self.finish(status, "storage did not answer")
        self._raise(Wish.CANCEL)

    # its claim

    def claim(self) -> None:
        """Claim the pages of the key that the host has, for the lease to come."""
        driver = self._prefetches.driver
        if self.wish is not Wish.CANCEL and driver.closed is None:
            driver.perform(driver.give_back(driver.core.claim, self.ticket, self.space, self.key))
            self.claimed()

    def claimed(self) -> None:
        """Note that the core has claimed pages for this prefetch."""
        self._prefetches.note_claim(self.ticket, self._leases)

    def unclaim(self) -> None:
        """Drop the claim: while a prefetch waits in line it keeps nothing."""
        self._prefetches.drop_claim(self.ticket)

    def enter_line(self) -> None:
        """Note that a lease is in line with this prefetch. ``leave_line`` must follow."""
        self._leases += 1
        if self.ticket in self._prefetches.claims:
            self.claimed()

    def leave_line(self, granted: bool) -> bool:
        """Note that the lease of ``enter_line`` was granted or, if ``granted`` is False, has given up. Returns True if
        another lease with this prefetch was granted before: what it has brought counts as a hit once."""
        self._leases -= 1
        before = self._granted
        if granted:
            self.spent = self._granted = True
            self.unclaim()
        elif self.ticket in self._prefetches.claims:
            self.claimed()
        return before

    # what it has brought, and its end

    def reach(self, covered: int, end: int) -> None:
        """Note that a fetch for this prefetch was committed. A match that would have ended at ``covered`` tokens
        without the fetch now ends at ``end``."""
        self._elsewhere += max(0, covered - max(self.reached, self.arrival.host))
        self.reached = max(self.reached, end)

    def tokens(self, cached: int = EVERYTHING) -> int:
        """Return how many of the first ``cached`` tokens of the prompt storage has added. Tokens that came from
        elsewhere after the request had arrived are not counted."""
        return max(0, min(cached, self.reached) - self.arrival.host - self._elsewhere)

    def finish(self, status: PrefetchStatus, reason: str = "") -> None:
        """End the prefetch with ``status`` and ``reason``, and tell everybody who awaits it. The first lease in line
        may be waiting for it, too. Does nothing if it has ended."""
        if self.result is None:
            result = self._end(status, reason)
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(result)
            self._prefetches.driver.wake()

    def fail(self, error: Callable[[], BaseException]) -> None:
        """End the prefetch because the cache is closed: everybody who awaits it gets an ``error()`` of its own."""
        if self.result is None:
            self._end(PrefetchStatus.CANCELLED, "the cache is closed")
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_exception(error())

    def _end(self, status: PrefetchStatus, reason: str) -> PrefetchResult:
        self.result = PrefetchResult(status, self.tokens(), reason)
        if self._timer is not None:
            self._timer.cancel()
        return self.result


class PrefetchHandle:
    """A handle of a prefetch, which ``AsyncCache.prefetch`` returns. ``await handle`` returns a ``PrefetchResult`` when
    the prefetch has ended.

    Cancelling a task that awaits it stops the waiting only; ``cancel()`` gives up the prefetch.
    """

    __slots__ = ("_key", "_namespace", "_prefetch")

    def __init__(self, prefetch: Prefetch, key: bytes, namespace: str | bytes | None) -> None:
        """``AsyncCache.prefetch`` makes one. ``key``: the tokens that it was called with."""
        self._prefetch = checks.instance("prefetch", prefetch, Prefetch)
        self._key = key
        self._namespace = namespace

    def __repr__(self) -> str:
        return f"PrefetchHandle({self._prefetch!r})"

    def __await__(self) -> Generator[Any, None, PrefetchResult]:
        return self._prefetch.__await__()

    def done(self) -> bool:
        """Return True if the prefetch has ended."""
        return self._prefetch.done()

    @property
    def result(self) -> PrefetchResult | None:
        """The result of the prefetch; None before it has ended."""
        return self._prefetch.result

    def stop(self) -> None:
        """Have the prefetch end with what it has brought by then, within half a second even if the store does not
        answer. What it has brought is kept for the lease to come. A lease stops the prefetch that it is given, as
        ``prefetch_policy`` says."""
        self._prefetch._prefetches.driver.check_thread()
        self._prefetch.tell(Wish.STOP)

    def cancel(self) -> None:
        """Give up the prefetch. Its fetch is released after the I/O has let go, unless another prefetch shares the
        fetch. Pages that it has brought may be evicted."""
        self._prefetch._prefetches.driver.check_thread()
        self._prefetch.spent = True
        self._prefetch.cancel()


# all of a cache


class Prefetches:
    """The prefetches of one cache. Mutable state: those that have not ended (``unended``), the fetches under way, the
    claims by their prefetch's ticket, each with the timer that ends it, and how many prefetches have ended in each
    way."""

    def __init__(
        self, config: CacheConfig, driver: Driver, worker: LocalWorker, pools: PoolLayout, backups: Backups,
        supervisor: Supervisor, span: StartSpan,
    ) -> None:  # fmt: skip
        self.driver = driver
        self.worker = worker
        self.pools = pools
        self.backups = backups
        self.page_size = config.page_size
        self.threshold = config.prefetch_threshold
        self.policy = config.prefetch_policy
        self.meter = StageMeter()
        self.unended: dict[Prefetch, None] = {}
        self.claims: dict[int, asyncio.TimerHandle | None] = {}
        self._config = config
        self._supervisor = supervisor
        self._span = span
        self.loop = asyncio.get_running_loop()
        self._fetches: dict[Fetch, None] = {}
        self._outcomes: Counter[PrefetchStatus] = Counter()

    def __repr__(self) -> str:
        return f"Prefetches({len(self.unended)} unended, {len(self._fetches)} fetches, {len(self.claims)} claims)"

    def begin(self, space: bytes, key: bytes) -> Prefetch:
        """Return a prefetch that has begun, or that has ended already because too little is missing, or because
        there is no storage or none that can be asked now."""
        if len(self.pools.components) > 1:
            key = usable_by_a_lease(key, self.page_size)
        match = self.driver.call_unlocked(self.driver.core.match, space, key)
        prefetch = Prefetch(self, space, key, CachedOnArrival(match.device, match.host))
        whole = len(key) // TOKEN_BYTES // self.page_size * self.page_size
        if not self.worker.has_stores:
            prefetch.result = PrefetchResult(PrefetchStatus.SKIPPED, 0, "no storage")
        elif self.backups.clearing:
            self._skip(prefetch, "storage is being cleared")
        elif whole - match.host < max(1, self.threshold):
            self._skip(prefetch, "below the threshold")
        elif self.worker.is_away(space):
            prefetch.cut = Cut.BACKEND
            self._skip(prefetch, "storage is away")
        else:
            self.unended[prefetch] = None
            prefetch.began = time.perf_counter()
            if self._supervisor.spawn(self._serve(prefetch), "asynccache-prefetch") is None:
                self._finish(prefetch, PrefetchStatus.CANCELLED, "the cache is closed")
        return prefetch

    def _skip(self, prefetch: Prefetch, reason: str) -> None:
        """End the prefetch before it has begun, and before anybody can wait for it."""
        self._outcomes[PrefetchStatus.SKIPPED] += 1
        prefetch.result = PrefetchResult(PrefetchStatus.SKIPPED, 0, reason)

    def of(self, handle: PrefetchHandle, key: bytes, namespace: str | bytes | None) -> Prefetch:
        """Return the prefetch of ``handle``, which is to serve a lease of ``key``. It may stop before the lease's end,
        or go on behind it.

        Raises:
            ConfigError: ``handle`` is no handle, or one of another cache, of another namespace or of other tokens.
        """
        prefetch = checks.instance("prefetch", handle, PrefetchHandle)._prefetch
        if prefetch._prefetches is not self:
            raise ConfigError(f"prefetch={handle!r} is a handle of another cache")
        if handle._namespace != namespace:
            raise ConfigError(f"prefetch={handle!r} is a handle of another namespace, {handle._namespace!r}")
        if not (key.startswith(handle._key) or handle._key.startswith(key)):
            raise ConfigError(f"prefetch={handle!r} is a handle of other tokens")
        return prefetch

    # the policy

    def deadline(self, prefetch: Prefetch) -> float:
        """Return the moment, in the loop's time, at which the timeout policy stops ``prefetch``."""
        config = self._config
        thousands = len(prefetch.key) / TOKEN_BYTES / 1024
        allowed = config.prefetch_timeout_base + config.prefetch_timeout_per_1k * thousands
        return prefetch.started + min(allowed, config.prefetch_timeout_max)

    def may_stop(self, prefetch: Prefetch) -> bool:
        """Return True if the policy lets a lease stop ``prefetch`` now."""
        if self.policy is PrefetchPolicy.TIMEOUT:
            return self.loop.time() >= self.deadline(prefetch)
        return self.policy is PrefetchPolicy.BEST_EFFORT

    def grace(self) -> float:
        """Return for how many seconds the end of a prefetch is waited for that was told to end now."""
        return 0.0 if self.worker.shut else GRACE

    # claims

    def note_claim(self, ticket: int, leases: int) -> None:
        """Note that a claim was taken, or that the number of ``leases`` in line with its prefetch has changed. Starts
        or stops the time that the claim has left."""
        if (timer := self.claims.get(ticket)) is not None:
            timer.cancel()
        if not self.driver.broken:
            self.driver.call_unlocked(self.driver.core.confirm_claim, ticket, leases > 0)
        self.claims[ticket] = None if leases else self.loop.call_later(HELD_FOR, self.drop_claim, ticket)

    def drop_claim(self, ticket: int) -> None:
        """Give up the claim. Idempotent. The core may have ended it before."""
        if ticket in self.claims:
            timer = self.claims.pop(ticket)
            if timer is not None:
                timer.cancel()
            self.driver.perform(self.driver.give_back(self.driver.core.release_claim, ticket))

    def abandon_claim(self, ticket: int) -> None:
        """Have the cache's loop ``drop_claim`` soon. For any thread: the garbage collector calls this."""
        if ticket in self.claims:
            with suppress(RuntimeError):  # the loop is closed, and the cache with it
                self.loop.call_soon_threadsafe(self.drop_claim, ticket)

    def drop_claims(self) -> None:
        """Give up every claim: the cache closes."""
        for ticket in tuple(self.claims):
            self.drop_claim(ticket)

    # those under way

    def outcomes(self) -> Mapping[str, int]:
        """Return how many prefetches ended with each status; empty where there can be no storage."""
        if not self.worker.takes_stores:
            return {}
        return {status.value: self._outcomes[status] for status in PrefetchStatus}

    def operations(self) -> tuple[int, ...]:
        """Return the operations of the fetches that are under way and have begun."""
        return tuple(fetch.op for fetch in self._fetches if fetch.op)

    def cancel(self, space: bytes | None = None) -> None:
        """Cancel all prefetches of the namespace ``space`` (None: of all namespaces)."""
        for prefetch in tuple(self.unended):
            if space is None or prefetch.space == space:
                prefetch.tell(Wish.CANCEL)

    def fail(self, error: Callable[[], BaseException]) -> None:
        """End all prefetches because the cache is closed: everybody who awaits one gets an ``error()`` of its own."""
        for prefetch in self.unended:
            prefetch.fail(error)

    async def _serve(self, prefetch: Prefetch) -> None:
        tokens = len(prefetch.key) // TOKEN_BYTES
        with self._span("asynccache.prefetch", attributes={"asynccache.tokens": tokens}) as span:
            try:
                status, reason = await self._work(prefetch)
            except BaseException:
                self._finish(prefetch, PrefetchStatus.CANCELLED, "the cache is closed")
                raise
            self._finish(prefetch, status, reason)
            if span is not None:
                span.set_attribute("asynccache.status", status.value)

    async def _work(self, prefetch: Prefetch) -> tuple[PrefetchStatus, str]:
        """Run fetches, or share those of others, until the prefetch has its pages or a new wish."""
        while prefetch.wish is Wish.RUN:
            shape = self.driver.call_unlocked(self.driver.core.prefetch_look, prefetch.space, prefetch.key)
            if isinstance(shape, Skip):
                return (PrefetchStatus.COMPLETE, "") if prefetch.tokens() else (PrefetchStatus.SKIPPED, shape.reason)
            alike = (one for one in self._fetches if one.space == prefetch.space and one.brings(prefetch.key, shape))
            fetch = next(alike, None)
            if fetch is None:
                fetch = Fetch(self, prefetch, shape)
                self._fetches[fetch] = None
                try:  # to its end, for everybody who shares it, even if this prefetch gives up
                    await fetch.run()
                finally:
                    del self._fetches[fetch]
                self.meter.count(1, 0, 0, 0)
            else:
                fetch.join(prefetch)
                while prefetch.fetch is fetch:
                    prefetch.asleep = self.loop.create_future()
                    try:
                        await prefetch.asleep
                    finally:
                        prefetch.asleep = None
            status = fetch.answer(prefetch)
            if status is not None:
                return status, fetch.skipped if status is PrefetchStatus.SKIPPED else ""
        if prefetch.wish is Wish.CANCEL:
            return PrefetchStatus.CANCELLED, ""
        return (PrefetchStatus.PARTIAL if prefetch.tokens() else PrefetchStatus.MISS), "stopped"

    def _finish(self, prefetch: Prefetch, status: PrefetchStatus, reason: str) -> None:
        self.meter.took(time.perf_counter() - prefetch.began)
        if prefetch.result is not None:  # it was ended before its fetch
            status = prefetch.result.status
        if status is PrefetchStatus.CANCELLED:
            prefetch.unclaim()
        elif prefetch.result is None:
            prefetch.claim()
        self.unended.pop(prefetch, None)  # only now: if the core fails in ``claim``, ``fail`` must find this prefetch
        prefetch.finish(status, reason)
        assert prefetch.result is not None
        self._outcomes[prefetch.result.status] += 1


# one fetch


class Fetch:
    """One fetch, for the prefetch that began it and for those that share it: from the first question to its end."""

    def __init__(self, prefetches: Prefetches, first: Prefetch, shape: PrefetchShape) -> None:
        self.op = 0
        """The fetch's operation; 0 before it has begun."""
        self.shape = shape
        """Which pages the fetch is to bring; once it has begun, those that storage has."""
        self.sharers: dict[Prefetch, None] = {}
        """The prefetches that this fetch serves."""
        self.wish = Wish.RUN
        """The wishes of all sharers, taken together."""
        self.cut = Cut.NOTHING
        """Why the fetch got less than storage had."""
        self.end = 0
        """How far the fetch was committed, in tokens; 0 before, or if it was released."""
        self.skipped = ""
        """Why the fetch did not begin although storage had something; may be empty."""
        self.over = False
        """True once the fetch was committed or released, or did not begin."""
        self.space = first.space
        self._first = first  # the prefetch whose task runs it
        self._key = first.key
        self._wanted_end = shape.length
        self._prefetches = prefetches
        self._driver = prefetches.driver
        self._worker = prefetches.worker
        self._pools = prefetches.pools
        self._threshold = max(prefetches.threshold, shape.page_size)
        self._asleep: asyncio.Future[Any] | None = None  # what it awaits until it may begin, or is committed
        self._queued = False  # its commit is in the queue of acks
        self._hashes = b""
        self._slots = b""  # of FULL's pages, from the anchor on
        pages = shape.length // shape.page_size
        self._present = {name: bytearray(pages) for name, _ in self._pools.named()}
        self._asked_from: dict[int, int] = {}
        self._hole = -1  # the first page of FULL that the stores lack
        self.join(first)

    def __repr__(self) -> str:
        return f"Fetch(op {self.op}, {self.shape.anchor}..{self.shape.length}, {len(self.sharers)} sharers)"

    # who shares it

    def brings(self, key: bytes, shape: PrefetchShape) -> bool:
        """Return True if a prefetch of ``key``, with this ``shape``, should share this fetch: somebody wants the fetch,
        and its key has more pages in common with ``key`` than the tree, or all of them."""
        if self.over or self.wish is Wish.CANCEL:
            return False
        common = self._common(key) * shape.page_size
        return common > shape.anchor or common == shape.length == shape.anchor

    def _common(self, key: bytes) -> int:
        return common_pages(self._key, 0, len(self._key), key, self.shape.page_size * TOKEN_BYTES)

    def join(self, prefetch: Prefetch) -> None:
        """Serve ``prefetch``, too."""
        self.sharers[prefetch] = None
        prefetch.fetch = self

    def _leave(self, prefetch: Prefetch) -> None:
        """Serve ``prefetch`` no more. The last one that leaves cancels the fetch."""
        self.sharers.pop(prefetch, None)
        prefetch.fetch = None
        if not self.sharers:
            self.wish = Wish.CANCEL
            if self._queued:  # all I/O has let go, and what the commit waits for may take long
                self._close()

    def told(self, prefetch: Prefetch) -> None:
        """Act on the wish of ``prefetch``, one of the sharers, which has changed. A cancellation holds for ``prefetch``
        alone, and a stop for all sharers. Before the fetch has begun, when there is nothing to keep, a stop holds for
        ``prefetch`` alone, too, unless its own task runs the fetch."""
        if prefetch.wish is Wish.CANCEL:
            self._leave(prefetch)
            if self.sharers:
                prefetch.finish(PrefetchStatus.CANCELLED)
        elif not self.op and prefetch is not self._first:
            self._leave(prefetch)
        else:
            self.wish = max(self.wish, Wish.STOP)
        if self.wish is not Wish.RUN:
            self._wake()

    def _wake(self) -> None:
        if self._asleep is not None and not self._asleep.done():
            self._asleep.set_result(None)

    def answer(self, prefetch: Prefetch) -> PrefetchStatus | None:
        """Return how ``prefetch`` ends with this fetch, which is over; None if it is to fetch the rest, or has stopped
        before the fetch began. What storage lacks of the pages that two prefetches have in common, it lacks for
        both."""
        if prefetch.wish is Wish.CANCEL:
            return PrefetchStatus.CANCELLED
        if not self.op and prefetch.wish is Wish.STOP:
            return None
        if prefetch.wish is Wish.RUN:
            alike = prefetch.key == self._key or 0 <= self._hole < self._common(prefetch.key)
            if self.wish is not Wish.RUN or not alike:
                return None
        if self.skipped:
            return PrefetchStatus.COMPLETE if prefetch.tokens() else PrefetchStatus.SKIPPED
        if not self.end:
            return PrefetchStatus.MISS
        return PrefetchStatus.COMPLETE if self.end == self._wanted_end else PrefetchStatus.PARTIAL

    # its course

    async def run(self) -> None:
        """Ask the stores, begin, read, and return when the commit was made, or nobody wants it any more. Cancelling it
        returns after the I/O has let go."""
        try:
            self._hashes = await self._first.chain.extend(self._key)
            await self._ask()
            end = self._usable(self.shape.length)
            if not self._worth(end) or self.wish is not Wish.RUN or not await self._begin(end):
                return
            if any(self._first_needed(component) < first for component, first in self._asked_from.items()):
                await self._ask()  # the tree has lost pages since they were not asked for
            end = await self._read()
            if self._worth(end):
                self._queued = True
                self._driver.post_commit(partial(self._commit, end))
                while not self.over:
                    await self._sleep(asyncio.get_running_loop().create_future())
        finally:
            self._close()

    async def _sleep(self, woken_by: asyncio.Future[Any]) -> None:
        """Return when ``woken_by`` is done, or the fetch was told to end or is over."""
        self._asleep = woken_by
        try:
            await woken_by
        finally:
            self._asleep = None

    def _usable(self, limit: int) -> int:
        """Return the longest end up to ``limit`` (tokens) at which every pool has what it needs."""
        return usable_end(self.shape, self._pools.named(), cast(Mapping[str, bytes], self._present), limit)

    def _worth(self, end: int) -> bool:
        """Return True if pages up to ``end`` are still wanted, and enough of them are new."""
        return self.wish is not Wish.CANCEL and end - self.shape.covered >= self._threshold

    def _close(self) -> None:
        """Revoke the operation if it is under way, and let the sharers go. Does nothing if the fetch is over."""
        if self.over:
            return
        self.over = True
        self._wake()
        if self.op and not self.end:
            self._driver.perform(self._driver.give_back(self._driver.core.prefetch_release, self.op))
        for sharer in self.sharers:
            sharer.cut = self.cut
            sharer.fetch = None
            sharer.wake()
        self.sharers.clear()

    # asking

    async def _ask(self) -> None:
        """Ask the stores which pages they have: FULL's, up to the first one that they lack or a stop, and the auxiliary
        pages up to there."""
        self._asked_from = {component: self._first_needed(component) for component in self._pools.components}
        full, last = self._asked_from[FULL], self._pages_of(self.shape.length)
        while full < last and self.wish is Wish.RUN:
            stop = min(last, full + BATCH_PAGES)
            await self._ask_pools([(spec, range(full, stop)) for spec in self._pools.of[FULL]])
            maps = [self._present[spec.name] for spec in self._pools.of[FULL]]
            full = next((page for page in range(full, stop) if not all(there[page] for there in maps)), stop)
            if full < stop:
                self._hole = full
                break
        auxiliary = [
            (spec, range(self._asked_from[component], full))
            for component in self._pools.components[1:] for spec in self._pools.of[component]
        ]  # fmt: skip
        if any(pages for _, pages in auxiliary):
            await self._ask_pools(auxiliary)

    def _first_needed(self, component: int) -> int:
        """Return the first page of ``component`` that an end of this fetch could need. It may lie before the anchor."""
        shape, anchor = self.shape, self._pages_of(self.shape.anchor)
        if component == FULL:
            return anchor
        first = self._pages_of(shape.covered)
        if component == ComponentKind.SWA:
            first = max(0, first + 1 - -(-shape.window // shape.page_size))
            behind = shape._replace(window=shape.anchor - first * shape.page_size)
            first = min(needed_pages(behind, component, shape.anchor), default=anchor)
        return min(first, anchor)

    async def _ask_pools(self, questions: Sequence[tuple[PoolSpec, range]]) -> None:
        """Ask for some pages of several pools, in one call."""
        asked = [StoreQuestion(spec.name, self._hashes_of(pages)) for spec, pages in questions]
        with self._prefetches.backups.lateness.call(StoreCall.READ):
            answers = await self._worker.ask(asked)
        for (spec, pages), results in zip(questions, answers, strict=True):
            self._look_at(results)
            self._present[spec.name][pages.start : pages.stop] = results.translate(_HITS)

    def _look_at(self, results: bytes) -> None:
        """Note in ``cut`` if a page was damaged or a store failed. A page that is not there is neither."""
        if Result.CORRUPT in results:
            self.cut = Cut.CHECKSUM
        elif Result.FAILED in results:
            self.cut = Cut.BACKEND

    # beginning

    async def _begin(self, end: int) -> bool:
        """Have the core open the operation for the pages up to ``end``, after waiting for room and for backups. Returns
        False if it does not begin, or was told to end first."""
        driver, line, ticket = self._driver, self._driver.prefetch_line, self._first.ticket
        key = self._key[: end * TOKEN_BYTES]
        place: LinePlace | None = None
        begin, until, saved = Begin.NEXT, None, 0
        try:
            while self.wish is Wish.RUN:
                async with holding(driver.lock):
                    driver.apply_outcomes()
                    if self.wish is not Wish.RUN:  # told while it waited for the lock
                        return False
                    now = Begin.LATER if line.must_wait(ticket) else begin
                    answer = driver.call_locked(driver.core.prefetch_open, self.space, key, now)
                    if isinstance(answer, Skip):
                        self.skipped = answer.reason
                        return False
                    driver.perform(answer.plan)
                    if isinstance(answer, PrefetchBegun):
                        driver.ops.open(answer.op)
                        self.op, self.shape = answer.op, answer.shape
                        return True
                    if isinstance(answer, Wait) and not answer.ops:  # anybody may free what it needs
                        for sharer in self.sharers:
                            sharer.unclaim()
                        place = place or line.join(ticket)
                        line.sleep(place)
                    elif isinstance(answer, Wait) and place is not None:  # certain operations do, beside the line
                        line.leave(place)
                        place = None
                if isinstance(answer, More):
                    await asyncio.sleep(0)
                elif place is None:
                    saved += 1
                    if saved > MOST_SAVES:
                        self.skipped = "the anchor does not stay on the host"
                        return False
                    waiter = self._driver.ops.watch(answer.ops)
                    if waiter is not None:
                        try:
                            await self._sleep(waiter)
                        finally:
                            self._driver.ops.unwatch(answer.ops, waiter)
                else:
                    if line.is_first(place) and until is None:
                        until = asyncio.get_running_loop().time() + PATIENCE
                    if not await self._woken(place, until if begin is Begin.NEXT else None):
                        begin = Begin.NOW
            return False
        finally:
            if place is not None:
                line.leave(place)

    async def _woken(self, place: LinePlace, until: float | None) -> bool:
        """Return True when ``place`` was woken or the fetch was told to end; False if ``until`` came first."""
        self._asleep = place.signal
        try:
            await woken(place, until)
        except TimeoutError:
            return False
        finally:
            self._asleep = None
        return True

    # reading

    async def _read(self) -> int:
        """Read pages, and return the end of a match, in tokens, that has all pages it needs; 0 if no such end is worth
        it."""
        size, anchor = self.shape.page_size, self._pages_of(self.shape.anchor)
        end = self._usable(self.shape.length)
        if not self._worth(end):
            return 0
        end = self._usable(await self._read_full(end) * size)
        if self._pools.sidecars and self._worth(end):
            end = self._usable(await self._read_run(self._pools.follow, anchor, self._pages_of(end)) * size)
        while self._worth(end):
            aux = (await self._take(partial(self._driver.core.prefetch_take_aux, self.op, end))).aux
            if aux is None:
                self.cut = Cut.ROOM
                end = self._usable(end - size)
                continue
            wanted = {component: needed_pages(self.shape, component, end) for component in aux}
            reads = [(spec, wanted[c], slots) for c, slots in aux.items() for spec in self._pools.of[c]]
            if not reads or not any(await self._get(reads, run=False)):
                return end
            end = self._usable(end)
        return 0

    async def _read_full(self, end: int) -> int:
        """Read FULL up to ``end``, or until a stop, a shortage of slots or a page that fails. Slots are taken batch by
        batch. Returns the first page that was not read."""
        page, last = self._pages_of(self.shape.anchor), self._pages_of(end)
        batch = _batch(self._pools.lead)
        while page < last and self.wish is Wish.RUN:
            stop = min(last, page + batch)
            take = partial(self._driver.core.prefetch_take_full, self.op, stop - page, last - stop)
            slots = (await self._take(take)).slots
            self._slots += slots
            held = page + len(slots) // SLOT_BYTES
            if held < stop:
                self.cut = Cut.ROOM
            page = await self._read_run(self._pools.lead, page, held)
            if page < stop:
                break
        return page

    async def _read_run(self, specs: Sequence[PoolSpec], page: int, last: int) -> int:
        """Read FULL's pages ``page`` to ``last`` in each of ``specs``, until one fails or the wish changes; a stop of
        before has shortened ``last`` already. Returns the first page that was not read."""
        if not specs:
            return last
        batch, wish, first = _batch(specs), self.wish, self._pages_of(self.shape.anchor)
        while page < last and self.wish is wish:
            stop = min(last, page + batch)
            slots = self._slots[(page - first) * SLOT_BYTES : (stop - first) * SLOT_BYTES]
            failed = await self._get([(spec, range(page, stop), slots) for spec in specs], run=True)
            page = min((stop, *(page for missing in failed for page in missing)))
            if page < stop:
                break
        return page

    async def _get(self, reads: Sequence[tuple[PoolSpec, Sequence[int], bytes]], *, run: bool) -> list[list[int]]:
        """Read pages of several pools into their slots, in one call. Returns for each pool the pages that failed.
        ``run``: see ``LocalWorker.read``. Of a run only the first pages may have results."""
        orders = [
            ReadOrder(spec.name, self._hashes_of(pages), slots[: len(pages) * SLOT_BYTES])
            for spec, pages, slots in reads
        ]
        with self._prefetches.backups.lateness.call(StoreCall.READ):
            answers = await self._worker.read(orders, run=run)
        meter, all_failed = self._prefetches.meter, []
        for (spec, pages, _), results in zip(reads, answers, strict=True):
            self._look_at(results)
            failed = [page for page, result in zip(pages, results, strict=False) if result != Result.HIT]
            for page in failed:
                self._present[spec.name][page] = 0
            good = len(results) - len(failed)
            meter.count(0, good, good if self._pools.counts(spec.name) else 0, good * spec.bytes_per_page)
            meter.errors += len(failed)
            all_failed.append(failed)
        return all_failed

    async def _take(self, call: Callable[[], Taken | More]) -> Taken:
        """Make the core call that gives host slots to the operation."""
        return await drive(self._driver, call, lambda taken: self._driver.perform(taken.plan))

    # the commit

    def _commit(self, end: int) -> Sequence[int]:
        """Under the lock: hang the pages up to ``end`` into the tree, and return no operations. If another operation
        must end first, nothing changes; returned are the operations of which one has to end before the next attempt.
        Nothing is done if the fetch was closed meanwhile. If the pages above its own have left the tree, since a batch
        of the engine failed, the core releases it instead."""
        if self.over:
            return ()
        hashes = self._hashes_of(range(self._pages_of(self.shape.anchor), self._pages_of(end)))
        holders = [sharer.ticket for sharer in self.sharers]
        answer = self._driver.call_locked(self._driver.core.prefetch_commit, self.op, end, hashes, holders)
        if isinstance(answer, Wait):
            self._driver.perform(answer.plan)
            return answer.ops
        self._driver.perform(answer)
        if (self.op, Status.FAILED) not in answer.ended:
            self.end = end
            for sharer in self.sharers:
                sharer.claimed()
                sharer.reach(self.shape.covered, min(end, self._common(sharer.key) * self.shape.page_size))
        self._close()
        return ()

    def _hashes_of(self, pages: Sequence[int]) -> bytes:
        if isinstance(pages, range):
            return self._hashes[pages.start * HASH_BYTES : pages.stop * HASH_BYTES]
        return b"".join(self._hashes[page * HASH_BYTES : (page + 1) * HASH_BYTES] for page in pages)

    def _pages_of(self, tokens: int) -> int:
        return tokens // self.shape.page_size


def _batch(specs: Sequence[PoolSpec]) -> int:
    """Return how many pages of each of ``specs`` are read before the fetch looks again whether it was told to stop."""
    return max(1, min(BATCH_PAGES, BATCH_BYTES // max(1, sum(spec.bytes_per_page for spec in specs))))


def usable_by_a_lease(key: bytes, page_size: int) -> bytes:
    """Return the whole pages of ``key`` that a lease of it can have cached: the lease leaves at least one token to be
    computed."""
    tokens = len(key) // TOKEN_BYTES
    return key[: max(0, tokens - 1) // page_size * page_size * TOKEN_BYTES]
