"""The wait of a lease for its pages. The lease waits for its prefetch as the policy says, stands in line, and tries
until it is granted.

Law: who waits holds nothing. A lease that has to wait for its prefetch waits beside the line, so that it blocks nobody,
and joins the line with the ticket that it drew on arrival. It waits so in two cases: to the prefetch's end under
wait_complete, and until the deadline under timeout; and again when it is its turn, its pages could be granted and the
prefetch still runs. Then it tells the prefetch to stop, which ends within ``prefetch.GRACE`` seconds. So everybody's
deadlines and graces run beside each other.

The parts of a cache that its leases share are ``LeaseParts``. Mutable state: ``holders``, which has the core's leases,
each with the task to which it was granted, and the prefixes that are kept. ``holders`` keeps neither a request's
``Lease`` nor its task alive.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

from asynccache import checks
from asynccache.checks import flag, integer
from asynccache.core.cache import EVERYTHING, Grant, LeaseRequest
from asynccache.core.plan import Wait
from asynccache.core.settings import ComponentKind, PrefetchPolicy
from asynccache.errors import AsyncCacheError, CacheFull, ConfigError
from asynccache.runtime.driver import Driver, LinePlace
from asynccache.runtime.driving import holding, slices, woken
from asynccache.runtime.prefetch import CachedOnArrival, Prefetch
from asynccache.runtime.prefetching import Prefetching
from asynccache.runtime.tokens import TOKEN_BYTES, Namespaces, Tokens, as_key
from asynccache.worker.local import LocalWorker

if TYPE_CHECKING:
    from asynccache.runtime.engine_batches import EngineBatches
    from asynccache.runtime.lookups import Lookups

Granted = Callable[[Grant], None]


def ask_for(
    parts: LeaseParts, tokens: Tokens, new_tokens: object, extra_key: str | bytes | None, states: object, chunk: object,
    swa_chunk: object, shorter: object, shared_tokens: object,
) -> LeaseRequest:  # fmt: skip
    """Check the arguments of a lease, and return the request for the core.

    Raises:
        ConfigError: an argument is unusable; the message names it and its value.
    """
    key = as_key(tokens)
    if not key:
        raise ConfigError("tokens: a lease needs at least one")
    length = len(key) // TOKEN_BYTES
    reserve = length + integer("new_tokens", new_tokens, 0)
    slots = parts.default_states if states is None else parts.check_states(states)
    most = EVERYTHING if chunk is None else integer("chunk", chunk, 1)
    most_swa = most if swa_chunk is None else integer("swa_chunk", swa_chunk, 1)
    shared = EVERYTHING if shared_tokens is None else integer("shared_tokens", shared_tokens, 0)
    return LeaseRequest(
        parts.namespaces.space(extra_key), key, length - 1, reserve, reserve if parts.has_swa else 0, slots, True, most,
        most_swa, flag("shorter", shorter), shared,
    )  # fmt: skip


CHECKPOINTS = 2
"""The number of MAMBA slots for checkpoints of a lease that does not say how many; one more is its working copy."""


class LeaseParts:
    """The parts of a cache that its leases use. ``hashes``: True if pages are hashed when they are committed, for
    storage or for events. ``commits``: how many commits there were. ``default_states``: how many MAMBA slots a lease
    has if it does not say; 0 if the model has no recurrent states. ``has_swa``: True if the model has a sliding
    window."""

    def __init__(
        self, driver: Driver, worker: LocalWorker, prefetching: Prefetching, namespaces: Namespaces,
        engine: EngineBatches, lookups: Lookups, *, hashes: bool,
    ) -> None:  # fmt: skip
        self.driver = driver
        self.engine = engine
        self.hashes = hashes
        self.commits = 0
        self.lookups = lookups
        self.loop = asyncio.get_running_loop()
        self.worker = worker
        self.prefetching = prefetching
        self.namespaces = namespaces
        self.holders: dict[object, weakref.ref[asyncio.Task[Any]] | None] = {}
        kinds = {component.kind for component in driver.core.config.components}
        self.has_swa = ComponentKind.SWA in kinds
        self.default_states = 1 + CHECKPOINTS if ComponentKind.MAMBA in kinds else 0

    def __repr__(self) -> str:
        return f"LeaseParts({len(self.holders)} leases)"

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

    def idle(self) -> bool:
        """Return True if nobody holds a lease, no prefix is kept, and no operation is under way that may be awaited:
        then nothing could give pages back."""
        return not self.holders and not self.driver.core.something_ends()

    def shut(self, error: Callable[[], AsyncCacheError]) -> None:
        """Send every request in line away with an ``error()`` of its own."""
        self.driver.line.fail(error)


class GrantAttempt(Enum):
    """The result of one attempt to get a lease granted."""

    GRANTED = "the lease holds everything"
    NOT_YET = "wait for something to be given back"
    STOPPING = "its pages are there; its prefetch was told to stop"


class LeaseWait:
    """The wait of one lease until it is granted: for a prefetch, for the tree lock, for pages.

    ``handle``: the lease's prefetch; None: it has none. ``arrival``: what the tiers held when the lease came; None:
    nobody looked. ``wait``, ``timeout``: as in ``AsyncCache.lease``.
    """

    def __init__(
        self, parts: LeaseParts, ask: LeaseRequest, handle: Prefetch | None, wait: bool, timeout: float | None
    ) -> None:
        self.handle = handle
        self._parts = parts
        self._ask = ask
        self._wait = wait
        self._timeout = timeout
        self._own_handle = parts.worker.has_stores and wait and handle is None
        if self._own_handle:
            self.handle = parts.prefetching.begin(ask.space, ask.key)
        if self.handle is not None:
            self.handle.take()
        self._granted = False
        self._line = parts.driver.line
        self.ticket = self._line.ticket()
        self._place: LinePlace | None = None
        self.arrival: CachedOnArrival | None = self.handle.arrival if self.handle is not None else None

    async def run(self, granted: Granted) -> None:
        """Wait until the lease is granted, and call ``granted`` with the grant. Cancelling it gives up the place in
        line, and the prefetch if the lease has begun it itself.

        Raises:
            CacheFull: the pages can never be had, or not now and ``wait`` is False.
            TimeoutError: ``timeout`` seconds went by.
            RuntimeError: see ``_stay``.
            CacheClosed: the cache is closed.
        """

        def entered(grant: Grant) -> None:
            granted(grant)
            self._granted = True

        try:
            if self.handle is not None and self.handle.done() and self._parts.driver.lease_at_once(self._ask, entered):
                return
            if self._timeout is None:
                await self._run(entered)
            else:
                async with asyncio.timeout(self._timeout):
                    await self._run(entered)
        finally:
            self._leave()

    async def _run(self, granted: Granted) -> None:
        self._parts.driver.core.check_possible(self._ask)
        if self.handle is not None:
            if self._own_handle and self.handle.done():
                self.handle.claim()
            await self._beside(self.handle)
        await self._in_line(granted)

    def _leave(self) -> None:
        """Leave the line, and give up the prefetch if the lease has begun it itself."""
        self._step_aside()
        if self.handle is not None:
            counted = self.handle.let_go(self._granted)
            if self._own_handle:
                self.handle.give_up()
            if counted:
                self.handle = self.arrival = None

    def _step_aside(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            self._line.leave(place)

    async def _beside(self, handle: Prefetch) -> None:
        policy = self._parts.prefetching.policy
        if handle.done() or policy is PrefetchPolicy.BEST_EFFORT or not self._wait:
            return
        if policy is PrefetchPolicy.WAIT_COMPLETE:
            await handle
            return
        try:
            async with asyncio.timeout_at(self._parts.prefetching.deadline(handle)):
                await handle
        except TimeoutError:
            return

    async def _in_line(self, granted: Granted) -> None:
        driver = self._parts.driver
        while True:
            async with holding(driver.lock):
                driver.apply_outcomes()
                turn = await self._turn(granted)
                if turn is GrantAttempt.GRANTED:
                    return
                self._stay(turn)
            if self._place is not None:
                await woken(self._place)
            elif self.handle is not None:
                await self.handle

    async def _turn(self, granted: Granted) -> GrantAttempt:
        """Make one attempt, under the lock."""
        if self._line.must_wait(self.ticket):
            return GrantAttempt.NOT_YET
        if self.handle is not None and not self.handle.done():
            return await self._probe(self.handle)
        return await self._try(granted)

    async def _probe(self, handle: Prefetch) -> GrantAttempt:
        """Find out whether the pages could be granted without loading anything, and keep none of them. If they could,
        tell the prefetch to stop. For a lease that does not wait nothing is found out: its prefetch is told to stop if
        the policy allows that."""
        if not self._wait:
            if self._parts.prefetching.may_stop(handle):
                handle.stop()
            return GrantAttempt.NOT_YET
        driver = self._parts.driver
        core, ask = driver.core, self._ask._replace(load=False)
        answer: Grant | Wait
        answer, cancelled = await slices(driver, lambda: core.lease(ask))
        driver.perform(answer.plan)
        if isinstance(answer, Grant):
            driver.perform(driver.give_back(core.release, answer.lease, used=False))
        if cancelled is not None:
            raise cancelled
        if isinstance(answer, Wait):
            return GrantAttempt.NOT_YET
        handle.stop()
        return GrantAttempt.STOPPING

    async def _try(self, granted: Granted) -> GrantAttempt:
        driver = self._parts.driver
        answer: Grant | Wait
        answer, cancelled = await slices(driver, lambda: driver.core.lease(self._ask))
        if isinstance(answer, Grant):
            granted(answer)
        driver.perform(answer.plan)
        if cancelled is not None:
            raise cancelled
        return GrantAttempt.GRANTED if isinstance(answer, Grant) else GrantAttempt.NOT_YET

    def _stay(self, turn: GrantAttempt) -> None:
        """Stand in line after an attempt that failed, or beside it while the prefetch stops. The caller still has the
        lock and has not awaited anything since the attempt; so whatever is given back from now on wakes this lease.

        Raises:
            CacheClosed: the cache was closed during the attempt.
            CacheFull: the lease is not to wait, or nothing is under way that could end its waiting.
            RuntimeError: this task holds a lease, whose pages may be those that it would wait for.
        """
        if self._parts.driver.closed is not None:
            self._parts.driver.refuse()
        if not self._wait:
            raise CacheFull("the pages cannot be had without waiting")
        if turn is GrantAttempt.NOT_YET and self._parts.idle() and not self._line.must_wait(self.ticket):
            raise CacheFull("the pages cannot be had: nothing is in flight that could free them")
        if self._parts.holds(asyncio.current_task()):
            raise RuntimeError("this task holds a lease and would wait for another: release it first")
        if turn is GrantAttempt.STOPPING:
            self._step_aside()
        else:
            self._line.sleep(self._join())

    def _join(self) -> LinePlace:
        """Stand in line with the ticket that was drawn on arrival, and return the place."""
        if self._place is None:
            self._place = self._line.join(self.ticket)
            if self.arrival is None:
                driver = self._parts.driver
                match = driver.unlocked(driver.core.match, self._ask.space, self._ask.key)
                self.arrival = CachedOnArrival(match.device, match.host)
        return self._place
