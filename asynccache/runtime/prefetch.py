"""One request's prefetch, which users have as a ``PrefetchHandle``, and its claim on pages once it has ended.

Laws:
* A prefetch has a *wish*: to run, to stop, or to be cancelled. The fetch that serves it looks at the wish between two
  I/Os and acts on it then, so no buffer is given back while I/O still owns it.
* A prefetch that is told to stop, or is cancelled, ends within ``GRACE`` seconds, or at once if the stores refuse calls
  by now. If the store has not answered by then, the prefetch ends without its fetch, which is left to the other
  prefetches that share it, or is revoked when the store has let go.
* A prefetch that has ended without being cancelled has a claim: the pages of its prompt that the host has stay there.
* A claim ends when the lease that was given the handle is granted, when the handle is cancelled, when nobody refers to
  the handle any more, and after ``HELD_FOR`` seconds in which no lease with the handle was in line. The core may end it
  earlier, for want of room.
* Prefetches of the same pages share one fetch. Any of them may stop the fetch: what it has read is committed, and the
  others fetch the rest. The fetch is cancelled when the last prefetch that shares it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import suppress
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from asynccache import checks
from asynccache.core.cache import EVERYTHING
from asynccache.errors import ConfigError
from asynccache.runtime.tokens import Chain

if TYPE_CHECKING:
    from asynccache.runtime.driver import Driver
    from asynccache.runtime.fetching import Fetch


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
    """The result of a prefetch. ``tokens``: how many tokens storage added to what host and device held when the
    prefetch was asked for. ``reason``: why it was skipped, stopped or cancelled; may be empty."""

    status: PrefetchStatus
    tokens: int
    reason: str = ""


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


HELD_FOR = 30.0
GRACE = 0.5
"""Seconds within which a prefetch ends that was told to end."""


class HandleClaims:
    """The claims of one cache, by the ticket of their handle. All methods but ``abandon`` are for the cache's
    thread."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._loop = asyncio.get_running_loop()
        self._timers: dict[int, asyncio.TimerHandle | None] = {}

    def __repr__(self) -> str:
        return f"HandleClaims({len(self._timers)} held)"

    def take(self, ticket: int, space: bytes, key: bytes, leases: int) -> None:
        """Claim the pages of ``key`` that the host has. ``leases``: how many leases are in line with the handle."""
        if self._driver.closed is None:
            self._driver.perform(self._driver.give_back(self._driver.core.claim, ticket, space, key))
            self.note(ticket, leases)

    def note(self, ticket: int, leases: int) -> None:
        """Note that a claim was taken, or that the number of ``leases`` in line with its handle has changed. Starts or
        stops the time that the claim has left."""
        self._stop(ticket)
        if not self._driver.broken:
            self._driver.unlocked(self._driver.core.confirm_claim, ticket, leases > 0)
        self._timers[ticket] = None if leases else self._loop.call_later(HELD_FOR, self.drop, ticket)

    def holds(self, ticket: int) -> bool:
        """Return True if the handle has a claim that was not dropped. The core may have ended it all the same."""
        return ticket in self._timers

    def drop(self, ticket: int) -> None:
        """Give up the claim. Idempotent."""
        if ticket in self._timers:
            self._stop(ticket)
            del self._timers[ticket]
            self._driver.perform(self._driver.give_back(self._driver.core.drop_claim, ticket))

    def abandon(self, ticket: int) -> None:
        """Have the cache's loop ``drop`` the claim soon. For any thread: the garbage collector calls this."""
        if ticket in self._timers:
            with suppress(RuntimeError):  # the loop is closed, and the cache with it
                self._loop.call_soon_threadsafe(self.drop, ticket)

    def wake(self) -> None:
        """Wake whoever waits for room: a prefetch has ended, and the first lease in line may be waiting for it."""
        self._driver.wake()

    def drop_all(self) -> None:
        """Give up every claim: the cache closes."""
        for ticket in tuple(self._timers):
            self.drop(ticket)

    def _stop(self, ticket: int) -> None:
        timer = self._timers.get(ticket)
        if timer is not None:
            timer.cancel()


class Prefetch:
    """One request's prefetch, as the rest of the runtime knows it. ``await`` it for its result.

    ``arrival``: what was cached when it was asked for; ``started``: when that was, in the loop's time. ``ticket``: its
    number, also in the prefetches' line. ``wish``, ``cut``: see ``Wish`` and ``Cut``. ``reached``: the end, in tokens,
    of the fetches for it that were committed. ``began``: when its task began, by the runtime's clock. ``asleep``: what
    its task awaits while it shares the fetch of another. ``fetch``: the fetch that serves it now. ``grace``: returns
    for how many seconds an end is waited for that was asked for now. ``spent``: True once a lease with it was granted,
    or its holder has cancelled it.

    The user's handle, a lease and the task that serves the prefetch refer to it. When none of them does any more, its
    claim is dropped.
    """

    def __init__(
        self, space: bytes, key: bytes, chain: Chain, arrival: CachedOnArrival, started: float, ticket: int,
        check: Callable[[], None], claims: HandleClaims, grace: Callable[[], float],
    ) -> None:
        self.space = space
        self.key = key
        self.chain = chain
        self.arrival = arrival
        self.started = started
        self.ticket = ticket
        self.wish = Wish.RUN
        self.cut = Cut.NOTHING
        self.reached = 0
        self.began = 0.0
        self.result: PrefetchResult | None = None
        self.asleep: asyncio.Future[Any] | None = None
        self.fetch: Fetch | None = None
        self._check = check
        self.spent = False
        self._granted = False
        self._claims = claims
        self._grace = grace
        self._elsewhere = 0
        self._leases = 0
        self._timer: asyncio.TimerHandle | None = None
        self._waiters: list[asyncio.Future[PrefetchResult]] = []

    def __repr__(self) -> str:
        state = self.result.status.value if self.result else f"running, wish {self.wish.name}"
        return f"{len(self.key) // 4} tokens, {state}"

    def __await__(self) -> Generator[Any, None, PrefetchResult]:
        self._check()
        if self.result is not None:
            return self.result
        waiter: asyncio.Future[PrefetchResult] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            return (yield from waiter.__await__())
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def belongs_to(self, claims: HandleClaims) -> bool:
        """Return True if this is a prefetch of the cache that has these claims."""
        return self._claims is claims

    def done(self) -> bool:
        """Return True if the prefetch has ended."""
        return self.result is not None

    def cancel(self) -> None:
        """See ``PrefetchHandle.cancel``."""
        self._check()
        self.spent = True
        self.give_up()

    def stop(self) -> None:
        """See ``PrefetchHandle.stop``."""
        self._check()
        self.tell(Wish.STOP)

    def give_up(self) -> None:
        """The same as ``cancel``, for callers that are known to be on the cache's thread."""
        self.tell(Wish.CANCEL)
        self._claims.drop(self.ticket)

    def tell(self, wish: Wish) -> None:
        """Raise the wish, and wake whoever acts on it."""
        if wish <= self.wish or self.result is not None:
            return
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._grace(), self._end_without_answer)
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

    def claim(self) -> None:
        """Claim the pages of the key that the host has, for the lease to come."""
        if self.wish is not Wish.CANCEL:
            self._claims.take(self.ticket, self.space, self.key, self._leases)

    def claimed(self) -> None:
        """Note that the core has claimed the pages of a commit for this prefetch."""
        self._claims.note(self.ticket, self._leases)

    def unclaim(self) -> None:
        """Drop the claim: while a prefetch waits in line it keeps nothing."""
        self._claims.drop(self.ticket)

    def take(self) -> None:
        """Note that a lease is in line with this prefetch. ``let_go`` must follow."""
        self._leases += 1
        self._note()

    def let_go(self, granted: bool) -> bool:
        """Note that the lease of ``take`` was granted or, if ``granted`` is False, has given up. Returns True if
        another lease with this prefetch was granted before: what it has brought counts as a hit once."""
        self._leases -= 1
        before = self._granted
        if granted:
            self.spent = self._granted = True
            self._claims.drop(self.ticket)
        else:
            self._note()
        return before

    def _note(self) -> None:
        if self._claims.holds(self.ticket):
            self._claims.note(self.ticket, self._leases)

    def __del__(self) -> None:
        self._claims.abandon(self.ticket)

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
        """End the prefetch with ``status`` and ``reason``, and tell everybody who awaits it. Does nothing if it has
        ended."""
        if self.result is None:
            result = PrefetchResult(status, self.tokens(), reason)
            self._end(result)
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(result)
            self._claims.wake()

    def _end(self, result: PrefetchResult) -> None:
        self.result = result
        if self._timer is not None:
            self._timer.cancel()

    def skip(self, reason: str) -> None:
        """End the prefetch before it has begun, and before anybody can wait for it, for ``reason``."""
        self.result = PrefetchResult(PrefetchStatus.SKIPPED, self.tokens(), reason)

    def fail(self, error: Callable[[], BaseException]) -> None:
        """End the prefetch because the cache is closed: everybody who awaits it gets an ``error()`` of its own."""
        if self.result is None:
            self._end(PrefetchResult(PrefetchStatus.CANCELLED, self.tokens(), "the cache is closed"))
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_exception(error())


class PrefetchHandle:
    """A handle of a prefetch, which ``AsyncCache.prefetch`` returns. ``await handle`` returns a ``PrefetchResult`` when
    the prefetch has ended.

    Cancelling a task that awaits it stops the waiting only; ``cancel()`` gives up the prefetch.
    """

    __slots__ = ("_extra_key", "_key", "_prefetch")

    def __init__(self, prefetch: Prefetch, key: bytes, extra_key: str | bytes | None) -> None:
        """``AsyncCache.prefetch`` makes one. ``key``: the tokens that it was called with."""
        self._prefetch = checks.instance("prefetch", prefetch, Prefetch)
        self._key = key
        self._extra_key = extra_key

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
        self._prefetch.stop()

    def cancel(self) -> None:
        """Give up the prefetch. Its fetch is revoked after the I/O has let go, unless another prefetch shares the
        fetch. Pages that it has brought may be evicted."""
        self._prefetch.cancel()


def prefetch_of(handle: PrefetchHandle, claims: HandleClaims) -> Prefetch:
    """Return the prefetch that ``handle`` stands for.

    Raises:
        ConfigError: ``handle`` is no handle, or is one of another cache: ``claims`` are those of this one.
    """
    prefetch = checks.instance("prefetch", handle, PrefetchHandle)._prefetch
    if not prefetch.belongs_to(claims):
        raise ConfigError(f"prefetch={handle!r} is a handle of another cache")
    return prefetch


def check_serves(handle: PrefetchHandle, key: bytes, extra_key: str | bytes | None) -> None:
    """Check that ``handle`` is of use for a lease of ``key``: it may stop before the lease's end, or go on behind it.

    Raises:
        ConfigError: it is a handle of another namespace, or of other tokens.
    """
    if handle._extra_key != extra_key:
        raise ConfigError(f"prefetch={handle!r} is a handle of another namespace, extra_key={handle._extra_key!r}")
    if not (key.startswith(handle._key) or handle._key.startswith(key)):
        raise ConfigError(f"prefetch={handle!r} is a handle of other tokens")
