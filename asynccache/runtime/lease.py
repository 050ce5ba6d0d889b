"""A lease: what one request has of the cache, as an async context manager.

Entering is ``Lease._enter``, in three phases: the lease waits for its prefetch as the policy says, stands in line, and
tries until it is granted. What the request has computed is published by ``commit`` (``Publishing``).

**Entering and leaving.** Entering takes everything or holds nothing, whatever interrupts it. The grant is written into
the lease in the turn of the core's answer, so a cancellation that comes later finds it there and undoes it.
``__aexit__`` contains no await: nothing can keep pages from going back. A lease that is dropped without being released
warns, and the loop gives back what it held.

**Waiting.** A waiting lease pins no pages. Leases are granted in the order in which they arrived, even if some wait for
a prefetch first: a lease waits for its prefetch beside the line, so that it blocks nobody, and then joins the line with
the ticket that it drew on arrival. Under ``wait_complete`` it waits for the prefetch's end, under ``timeout`` until the
deadline. When its turn has come, its pages could be granted and the prefetch still runs, it tells the prefetch to stop
and waits once more; the prefetch ends within ``prefetch.GRACE`` seconds. So everybody's deadlines and graces run beside
each other.

**Publishing.** A commit takes its tokens, its checkpoint and its event ``after`` in the call itself, in whatever thread
that is made. A lease's commits are made in the order of the calls.

* Nothing is published below pages whose load may still fail. A lease with loads publishes nothing before somebody has
  waited for them, since what was computed earlier is wrong.
* No slot is free while the engine may still touch it, and a backup waits for the batch that computes the pages it
  copies: ``EngineBatches`` hears of that batch before the commit's plan is performed.
* A commit stands on all batches that its lease's commits have named and that are not known to have run. If one of them
  fails, the commit is undone.
* The tree may have some of the pages already. The lease's own copies of these are *duplicates*. They are free once the
  engine uses the new page table and has let go of the old one (``adopt``).
"""

from __future__ import annotations

import asyncio
import warnings
import weakref
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asynccache.checks import flag, integer, shown, text
from asynccache.config import POOL_NAME
from asynccache.core.cache import EVERYTHING, Committed, CoreLease, Grant, LeaseRequest
from asynccache.core.keys import TOKEN_BYTES
from asynccache.core.plan import More, Plan, Wait
from asynccache.core.settings import ComponentKind, PrefetchPolicy
from asynccache.errors import CacheFull, ConfigError, CopyFailed, LoadFailed
from asynccache.runtime.core_calls import drive, first_ended, holding, slices, woken
from asynccache.runtime.engine_batches import not_over
from asynccache.runtime.prefetch import CachedOnArrival, Prefetch, Wish
from asynccache.runtime.tokens import Chain, Tokens, as_key

if TYPE_CHECKING:
    from asynccache.runtime.driver import LinePlace
    from asynccache.runtime.head import Head
    from asynccache.runtime.sanitizer import Commit
    from asynccache.worker.work import BatchInFlight

Pages = npt.NDArray[np.int32]

_COMPONENT = {POOL_NAME[kind]: int(kind) for kind in (ComponentKind.FULL, ComponentKind.SWA)}


class Hits(NamedTuple):
    """Cached tokens, each once, by the nearest tier that held them when the request arrived."""

    device: int
    host: int
    storage: int


CodePlace = tuple[CodeType, int]
"""The place in the code where a lease was taken: a function, and an offset in its bytecode. The number of the line is
worked out only for a warning, since that takes some µs in a long function."""


class Publishing:
    """The commits of one lease. Mutable state: the longest key committed so far, its hashes, the batches that may not
    be over, those among them that commits were made ``after`` and that may still fail or have failed (``_unsure``), and
    the duplicates that wait to be adopted.
    """

    __slots__ = ("_chain", "_core", "_head", "_key", "_ready", "_retiring", "_space", "_unsure", "order")

    def __init__(self, head: Head, core: CoreLease, ask: LeaseRequest, chain: Chain | None) -> None:
        self.order = asyncio.Lock()
        """A lock, for one commit after the other."""
        self._head = head
        self._core = core
        self._space = ask.space
        self._key = ask.key
        self._chain = chain or Chain(ask.space, head.driver.core.config.page_size)
        self._ready: list[BatchInFlight] = []
        self._unsure: list[BatchInFlight] = []
        self._retiring: list[int] = []

    def __repr__(self) -> str:
        return f"Publishing({self._core!r}, {len(self._ready)} batches, {len(self._retiring)} retiring)"

    def check(self, key: bytes, checkpoint: tuple[int, int] | None) -> None:
        """Check that the lease may commit ``key`` and ``checkpoint``.

        Raises:
            ConfigError: the key does not continue what the lease holds, or the checkpoint is not one of its own.
        """
        core, tokens = self._core, len(key) // TOKEN_BYTES
        if not (key.startswith(self._key) or self._key.startswith(key)):
            raise ConfigError("commit: tokens do not begin with the prompt of the lease")
        if tokens < core.length:
            raise ConfigError(f"commit: {tokens} tokens are fewer than the {core.length} committed")
        if tokens > core.reserved:
            raise ConfigError(f"commit: {tokens} tokens do not fit the {core.reserved} reserved")
        if checkpoint is not None:
            self._head.driver.core.check_checkpoint(core, tokens, checkpoint)

    def expect(self, ready: BatchInFlight) -> None:
        """Note that the engine writes into the lease's pages until ``ready`` is over. From now on a release waits for
        that, whatever becomes of the commit. So do copies into these pages, some of which the commit may hand to
        others. Later commits of the lease stand on ``ready``, too."""
        if not any(batch is ready for batch in self._unsure):
            self._unsure.append(ready)
        self._named(ready)

    def _named(self, batch: BatchInFlight) -> None:
        self._ready = [*not_over(*self._ready), batch]
        self._head.batches.fence(self._core, batch)

    async def publish(self, key: bytes, checkpoint: tuple[int, int] | None) -> None:
        """Commit ``key``, after a sanitizer has looked at it; the caller holds ``order``. Waits while pages of it are
        being loaded for others. Cancelling it has published everything or nothing. Raises as ``Lease.commit``."""
        hashes, chain = b"", self._chain
        if self._head.hashes:
            if not chain.covers(key):
                chain.known(key, self._head.driver.core.known_hashes(self._space, key))
            hashes = await chain.extend(key)
        self.adopt()
        sanitizer, commit = self._head.sanitizer, None
        if sanitizer is not None:
            commit = await sanitizer.committing(self._core, self._space, key, hashes, checkpoint, self._unsure)
        while isinstance(answer := await self._try(key, hashes, checkpoint, commit), Wait):
            await first_ended(self._head.driver.ops, answer.ops)

    async def _try(
        self, key: bytes, hashes: bytes, checkpoint: tuple[int, int] | None, commit: Commit | None
    ) -> Committed | Wait:
        driver, core = self._head.driver, self._core
        async with holding(driver.lock):
            if self._unsure:
                self._unsure = [batch for batch in self._unsure if not batch.done() or batch.failed]
            failed = any(batch.failed for batch in self._unsure)  # first: more is known when outcomes are applied
            driver.apply_outcomes()
            if core.released:
                raise RuntimeError("the lease is released")
            if core.valid is not None or failed:
                raise LoadFailed(core.length if core.valid is None else core.valid)
            answer = driver.call_locked(driver.core.commit, core, key, hashes, checkpoint, not self._unsure)
            if not isinstance(answer, Wait):
                if len(key) > len(self._key):
                    self._key = key
                if answer.computing:  # before the plan is performed: its backups must find the batches they stand on
                    self._head.batches.watch(answer.computing, self._unsure)
                self._head.commits += 1
                if commit is not None and self._head.sanitizer is not None:
                    self._head.sanitizer.committed(core, commit, self._unsure)
            driver.perform(answer.plan, self._retiring)
        return answer

    def adopt(self, after: BatchInFlight | None = None) -> None:
        """Note that the engine uses the table of the last commit. The duplicates are free when ``after`` and every
        batch of a commit are over."""
        if after is not None:
            self._named(after)
        if self._retiring:
            retiring, self._retiring = self._retiring, []
            self._head.batches.retire(retiring, not_over(*self._ready))

    def release(self, after: Sequence[BatchInFlight], ended: bool) -> None:
        """Give the lease's pages back when all of ``after`` and every batch of a commit are over."""
        driver, batches = self._head.driver, not_over(*self._ready, *after)
        self._head.batches.fence(self._core, *batches)
        plan = driver.give_back(driver.core.release, self._core, ended=ended, retire=bool(batches))
        driver.perform(plan, self._retiring)
        if self._retiring:
            self._head.batches.retire(self._retiring, batches)
            self._retiring = []


def ask_for(
    head: Head, tokens: Tokens, new_tokens: object, namespace: str | bytes | None, states: object, chunk: object,
    swa_chunk: object, shorter: object, shared_tokens: object,
) -> LeaseRequest:  # fmt: skip
    """Check the arguments of a lease, and return the request for the core.

    Raises:
        ConfigError: an argument is unusable; the message names it and its value.
        CacheFull: prompt and ``new_tokens`` are more than the device has room for.
    """
    key = as_key(tokens)
    if not key:
        raise ConfigError("tokens: a lease needs at least one")
    length = len(key) // TOKEN_BYTES
    reserve = length + integer("new_tokens", new_tokens, 0)
    slots = head.default_states if states is None else head.check_states(states)
    most = EVERYTHING if chunk is None else integer("chunk", chunk, 1)
    most_swa = most if swa_chunk is None else integer("swa_chunk", swa_chunk, 1)
    shared = EVERYTHING if shared_tokens is None else integer("shared_tokens", shared_tokens, 0)
    ask = LeaseRequest(
        head.namespaces.space(namespace), key, length - 1, reserve, reserve if head.has_swa else 0, slots, True, most,
        most_swa, flag("shorter", shorter), shared,
    )  # fmt: skip
    head.core.check_possible(ask)
    return ask


class LeaseState(Enum):
    """A lease is entered once and released once."""

    NEW = "new"
    ENTERING = "entering"
    HELD = "held"
    RELEASED = "released"


NEW, ENTERING, HELD, RELEASED = LeaseState


class Lease:
    """A lease: the pages that one request holds. See ``AsyncCache.lease``. It belongs to the cache's loop and thread;
    ``commit`` says how other threads call it."""

    __slots__ = (
        "_arrival", "_ask", "_asked", "_by_layer", "_core", "_entering", "_head", "_namespace",
        "_prefetch", "_publishing", "_since", "_state", "_taken", "_timeout", "_to_commit", "_wait",
    )  # fmt: skip

    def __init__(
        self, head: Head, ask: LeaseRequest, namespace: str | bytes | None, prefetch: Prefetch | None, wait: bool,
        timeout: float | None, taken: CodePlace,
    ) -> None:  # fmt: skip
        self._state = NEW
        self._head = head
        self._ask = ask
        self._namespace = namespace
        self._since = head.namespaces.changes
        self._prefetch = prefetch
        self._wait = wait
        self._timeout = timeout
        self._taken = taken
        self._core: CoreLease
        self._arrival: CachedOnArrival | None = None
        self._publishing: Publishing | None = None
        self._entering: asyncio.Task[object] | None = None
        self._by_layer = False  # somebody has waited for a layer
        self._asked = 0  # calls that wait, or have waited, for all loads
        self._to_commit: list[object] = []  # the events of commits that were called and have not begun

    def __repr__(self) -> str:
        if self._state is not HELD:
            return f"Lease({self._state.value})"
        core = self._core
        return f"Lease({core.cached} cached, {core.length} committed, {core.reserved} reserved tokens)"

    # entering and leaving

    async def __aenter__(self) -> Lease:
        """Match, wait for pages in line, reserve, start load_back, pin.

        Cancelling it at any point leaves nothing reserved or pinned for this lease.

        Raises:
            CacheFull: the pages can never be had, or not now and ``wait`` is False.
            TimeoutError: ``timeout`` seconds went by while the lease waited for its prefetch or in line.
            CacheClosed: the cache is closed.
            RuntimeError: the lease was entered before, or it would have to wait and this task holds a lease already.
            RankFailure: a rank was lost, which has ended the cache.
        """
        head = self._head
        head.driver.check_ready()
        if self._state is not NEW:
            raise RuntimeError(f"a lease is entered once; this one is {self._state.value}")
        if self._since != head.namespaces.changes:  # its namespace was invalidated: it enters the new one
            self._since = head.namespaces.changes
            self._ask = self._ask._replace(space=head.namespaces.space(self._namespace))
        prefetch = self._prefetch
        if prefetch is not None and (prefetch.spent or prefetch.space != self._ask.space):
            self._prefetch = None  # it has had its lease, or was given up: this lease prefetches by itself
        self._state = ENTERING
        try:
            if (
                self._prefetch is not None or head.worker.has_stores
                or not head.driver.lease_at_once(self._ask, self._granted)
            ):  # fmt: skip
                with head.span("asynccache.lease", attributes={"asynccache.tokens": self._ask.reserve}):
                    await self._enter()
            head.lookups.count(self._core, self._ask, self._found(), self._prefetch)
            if head.sanitizer is not None and not self._core.loads:
                await head.sanitizer.entered(self._core, self._ask.space, self._ask.key)
        except BaseException:
            self.release()
            self._state = RELEASED
            raise
        return self

    async def _enter(self) -> None:
        """Wait until the lease is granted. Cancelling it gives up the place in line, and the prefetch if the lease has
        begun it itself. Raises as ``__aenter__``."""
        head, ask, driver, line = self._head, self._ask, self._head.driver, self._head.driver.line
        prefetch, arrival, held = self._prefetch, None, False
        own = prefetch is None and self._wait and head.worker.has_stores
        if own:
            prefetch = head.prefetches.begin(ask.space, ask.key)
        if prefetch is not None:
            prefetch.enter_line()
            arrival = prefetch.arrival
        ticket = line.ticket()
        place: LinePlace | None = None

        def granted(grant: Grant) -> None:
            nonlocal held
            self._granted(grant)
            held = True

        self._entering = asyncio.current_task()
        try:
            if prefetch is not None and prefetch.done() and driver.lease_at_once(ask, granted):
                return
            async with asyncio.timeout(self._timeout):
                # beside the line, as long as the policy lets the prefetch run
                if prefetch is not None:
                    if own and prefetch.done():
                        prefetch.claim()
                    await self._prefetched(prefetch)

                while True:
                    # an attempt, under the lock
                    async with holding(driver.lock):
                        driver.apply_outcomes()
                        stopping = False
                        if not line.must_wait(ticket):
                            if prefetch is not None and not prefetch.done():
                                stopping = await self._probe(prefetch)
                            elif await self._try(granted):
                                return

                        # in line; or beside it, while the prefetch stops. Nothing was awaited since the attempt, and
                        # the lock is still held: so whatever is given back from now on wakes this lease
                        self._check_may_wait(stopping, ticket)
                        if stopping and place is not None:
                            line.leave(place)
                            place = None
                        elif not stopping:
                            if place is None:
                                place = line.join(ticket)
                                if arrival is None:
                                    match = driver.call_unlocked(driver.core.match, ask.space, ask.key)
                                    arrival = CachedOnArrival(match.device, match.host)
                            line.sleep(place)
                    if place is not None:
                        await woken(place)
                    elif prefetch is not None:
                        await prefetch
        finally:
            self._entering = None
            if place is not None:
                line.leave(place)
            if prefetch is not None:
                counted = prefetch.leave_line(held)
                if own:
                    prefetch.cancel()
                if counted:
                    prefetch = arrival = None
            if held:
                self._prefetch, self._arrival = prefetch, arrival

    async def _prefetched(self, prefetch: Prefetch) -> None:
        """Wait for the prefetch, for as long as the policy says."""
        prefetches = self._head.prefetches
        if prefetch.done() or prefetches.policy is PrefetchPolicy.BEST_EFFORT or not self._wait:
            return
        until = None if prefetches.policy is PrefetchPolicy.WAIT_COMPLETE else prefetches.deadline(prefetch)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await prefetch

    async def _probe(self, prefetch: Prefetch) -> bool:
        """Under the lock: find out whether the pages could be granted without loading anything, and keep none of them.
        If they could, tell the prefetch to stop, and return True. For a lease that does not wait nothing is found out:
        its prefetch is told to stop if the policy allows that."""
        if not self._wait:
            if self._head.prefetches.may_stop(prefetch):
                prefetch.tell(Wish.STOP)
            return False
        driver, ask = self._head.driver, self._ask._replace(load=False)
        answer: Grant | Wait
        answer, cancelled = await slices(driver, lambda: driver.core.lease(ask))
        driver.perform(answer.plan)
        if isinstance(answer, Grant):
            driver.perform(driver.give_back(driver.core.release, answer.lease, used=False))
        if cancelled is not None:
            raise cancelled
        if isinstance(answer, Wait):
            return False
        prefetch.tell(Wish.STOP)
        return True

    async def _try(self, granted: Callable[[Grant], None]) -> bool:
        """Under the lock: ask the core once. Returns True if the lease was granted."""
        driver = self._head.driver
        answer: Grant | Wait
        answer, cancelled = await slices(driver, lambda: driver.core.lease(self._ask))
        if isinstance(answer, Grant):
            granted(answer)
        driver.perform(answer.plan)
        if cancelled is not None:
            raise cancelled
        return isinstance(answer, Grant)

    def _check_may_wait(self, stopping: bool, ticket: int) -> None:
        """Check that this lease may wait after an attempt that failed. ``stopping``: it will wait for its prefetch.

        Raises:
            CacheClosed: the cache was closed during the attempt.
            CacheFull: the lease is not to wait, or nothing is under way that could end its waiting.
            RuntimeError: this task holds a lease, whose pages may be those that it would wait for.
        """
        head = self._head
        if head.driver.closed is not None:
            head.driver.refuse()
        if not self._wait:
            raise CacheFull("the pages cannot be had without waiting")
        if not stopping and head.idle() and not head.driver.line.must_wait(ticket):
            raise CacheFull("the pages cannot be had: nothing is in flight that could free them")
        if head.holds(asyncio.current_task()):
            raise RuntimeError("this task holds a lease and would wait for another: release it first")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release. There is nothing to await in it, so nothing can cancel it."""
        self.release()

    def _granted(self, grant: Grant) -> None:
        """Take over the grant, in the same turn as the core's answer: from here on ``release`` undoes it."""
        self._core = grant.lease
        self._state = HELD
        head = self._head
        task = asyncio.current_task(head.loop)
        head.holders[grant.lease] = None if task is None else weakref.ref(task)
        if head.sanitizer is not None:
            head.sanitizer.granted(grant.lease, partial(_place, *self._taken))

    def release(self, after: object | None = None, ended: bool = False) -> None:
        """Give everything back. Idempotent, synchronous.

        ``after``: an event behind the engine's work on these pages; own pages are retiring, not free, until it has
        fired, and later loads into any of them wait for it on the device. It is an event of the cache's device or, on a
        GPU, a ``torch.cuda.Event`` or a ``cupy.cuda.Event``. In a cache with ``workers`` it is the number of a batch.
        ``ended``: True if this conversation will not come back.

        Raises:
            ConfigError: the device cannot wait for ``after``, or ``ended`` is no truth value; the lease holds what it
                held.
        """
        head = self._head
        head.driver.check_thread()
        ended = flag("ended", ended)
        if self._state is not HELD:
            return
        event = head.batches.event("release: after", after)
        self._state = RELEASED
        events = self._to_commit if event is None else [event, *self._to_commit]
        _give_back(head, self._core, self._own_publishing() if events else self._publishing, events, ended)

    def __del__(self) -> None:
        """Have the loop give back what the lease holds. The garbage collector calls this in any thread and at any
        moment, also within a call of the core."""
        head = self._head
        if self._state is not HELD or head.driver.closed is not None:
            return
        what = f"{self!r}, taken at {_place(*self._taken)}"
        self._state = RELEASED
        with suppress(RuntimeError):  # the loop is closed, and nobody wants the pages any more
            publishing = self._own_publishing() if self._to_commit else self._publishing
            head.loop.call_soon_threadsafe(_give_back, head, self._core, publishing, self._to_commit, False)
            warnings.warn(
                f"{what}, was dropped without being released: use 'async with', or release()",
                ResourceWarning, source=self, stacklevel=2,
            )  # fmt: skip

    def abort(self) -> None:
        """Give up: cancel the task that waits to enter the lease, or release a lease that was entered. Idempotent,
        synchronous."""
        self._head.driver.check_thread()
        entering, self._entering = self._entering, None
        if entering is not None:
            entering.cancel()
        self.release()
        self._state = RELEASED

    def _held(self) -> CoreLease:
        if self._state is not HELD:
            raise RuntimeError(f"the lease is {self._state.value}")
        return self._core

    def _own_publishing(self) -> Publishing:
        """Return the ``Publishing`` of this lease, which is made when it is first needed."""
        if self._publishing is None:
            prefetch = self._prefetch
            chain = prefetch.chain.copy() if prefetch is not None and prefetch.space == self._ask.space else None
            self._publishing = Publishing(self._head, self._core, self._ask, chain)
        return self._publishing

    # what it holds

    @property
    def cached(self) -> int:
        """Tokens of the prompt that need no computing: whole pages, and fewer than the prompt has."""
        return self._core.cached

    @property
    def pages(self) -> Pages:
        """FULL's page table, from token 0 to the end of the reservation."""
        return self._table(int(ComponentKind.FULL))

    def page_table(self, component: str) -> Pages:
        """The page table of ``"full"`` or ``"swa"``; -1 where it has no page (SWA outside the window)."""
        kind = _COMPONENT.get(text("component", component))
        if kind is None or (kind and not self._head.has_swa):
            raise ConfigError(f"component={component!r}: no component with a page table is called so")
        return self._table(kind)

    def _table(self, component: int) -> Pages:
        return np.frombuffer(self._head.driver.core.pages(self._held(), component), np.int32)

    @property
    def states(self) -> Pages:
        """MAMBA slots: the working copy, then those for checkpoints."""
        return np.frombuffer(self._held().states, np.int32)

    @property
    def checkpoint_at(self) -> int:
        """The length at which the engine should take a MAMBA checkpoint (tokens, whole pages): where FULL alone
        matched, so that the next request with this prefix hits. 0: none is wanted but at the prompt's end."""
        core = self._core
        return core.full if self._head.default_states and core.full > core.cached else 0

    @property
    def hits(self) -> Hits:
        """The cached tokens by the tier that had them when the request arrived."""
        return Hits(*self._found())

    def _found(self) -> tuple[int, int, int]:
        core, arrival = self._core, self._arrival
        cached = core.cached
        if arrival is None:
            loaded = core.loaded_tokens
            if loaded > cached:
                loaded = cached
            return cached - loaded, loaded, 0
        device = min(cached, arrival.device)
        host = max(0, min(cached, arrival.host) - device)
        storage = self._prefetch.tokens(cached) if self._prefetch is not None else 0
        return cached - host - storage, host, storage

    # loads

    @property
    def loading(self) -> bool:
        """True if ``loaded`` would have to wait."""
        ops = self._head.driver.ops
        return any(op in ops for op in self._held().loads)

    async def loaded(self) -> None:
        """Return when every page of the lease is on the device. Cancelling it stops the waiting only.

        Raises:
            LoadFailed: a load failed, or a batch that was to compute pages of the lease; release and enter again.
            CacheClosed: the cache was closed, and nobody knows what has arrived.
        """
        self._head.driver.check_thread()
        core = self._held()
        first, waits = not self._asked and not self._by_layer, self.loading
        self._asked += 1
        try:
            if waits:
                with self._head.span("asynccache.load", attributes={"asynccache.tokens": core.loaded_tokens}):
                    for op in core.loads:
                        await first_ended(self._head.driver.ops, (op,))
        except BaseException:
            self._asked -= 1
            raise
        self._check_loads(core)
        if core.loads and self._head.sanitizer is not None and not core.released:
            await self._head.sanitizer.arrived(core, self._ask.space, self._ask.key, first=first, waited=waits)

    def _check_loads(self, core: CoreLease) -> None:
        """Raise ``LoadFailed`` if a load of ``core``, or a batch that was to compute its pages, has failed. If the
        cache is closed and ``core`` has loads, raise why it is closed: nobody knows then what has arrived."""
        if core.valid is not None:
            raise LoadFailed(core.valid)
        if core.loads and self._head.driver.closed is not None:
            self._head.driver.refuse()

    async def layer(self, i: int) -> None:
        """Return when layer ``i`` of every page is on the device, and with it all layers before ``i``; for engines
        without streams. Cancelling it stops the waiting only.

        Raises:
            LoadFailed: a load failed, or a batch that was to compute pages of the lease; release and enter again.
            CacheClosed: the cache was closed, and nobody knows what has arrived.
            ConfigError: the model has no layer ``i``.
        """
        self._head.driver.check_thread()
        i = self._check_layer(i)
        core = self._held()
        self._by_layer = True
        asks = self._asks(i)
        self._asked += asks
        try:
            for op in core.loads:
                try:
                    await self._head.worker.layer(op, i)
                except CopyFailed:
                    await self.loaded()
        except BaseException:
            self._asked -= asks
            raise
        self._check_loads(core)

    def wait_layer(self, stream: object, i: int) -> None:
        """Hold later work of the engine's ``stream``, on the device, until layer ``i`` of every page is there. On a GPU
        that is a stream of torch or cupy, or anything with ``__cuda_stream__``; elsewhere a ``Stream`` of the device.

        The call does not block for longer than it takes to hand the load to the GPU's driver. It does not tell of a
        failed load: ``loaded()`` does, before anything is published.

        Raises:
            ConfigError: ``stream`` is no stream, or the model has no layer ``i``.
            AsyncCacheError: the GPU's driver refused (a stream of another GPU, one that is captured); ``stream`` does
                not wait.
        """
        i = self._check_layer(i)
        self._head.worker.wait_layers(stream, self._held().loads, i)
        self._by_layer = True
        self._asked += self._asks(i)

    def _asks(self, i: int) -> bool:
        """Return True if ``i`` is the last layer: whoever waits for it waits for all."""
        return i == self._head.worker.layers - 1

    def _check_layer(self, i: object) -> int:
        """Return ``i`` as a layer of the model. Raises ``ConfigError`` if the model has no such layer."""
        return integer("i", i, 0, self._head.worker.layers - 1)

    # growing and shrinking

    async def extend(self, tokens: int, states: int = 0, wait: bool = False) -> Pages:
        """Reserve ``tokens`` tokens (and ``states`` MAMBA slots) more than the lease has. Returns the new page table.

        ``wait``: True to wait while copies or backups in flight may make room; what another lease holds is never
        waited for, nor is a store that is late. Cancelling it leaves the old reservation, or the new one if it was
        granted already.

        Raises:
            CacheFull: there is no room now.
            CacheClosed: the cache is closed.
            ConfigError: an argument is unusable; nothing was reserved.
        """
        core, head, driver = self._held(), self._head, self._head.driver
        driver.check_thread()
        tokens, states, wait = integer("tokens", tokens, 0), head.check_states(states), flag("wait", wait)

        def grow() -> Plan | More | Wait:
            reserve = core.reserved + tokens
            return driver.core.extend(core, reserve, reserve if head.has_swa else 0, states)

        waiter: asyncio.Future[None] | None = None

        def done(answer: Plan | Wait) -> None:  # in the turn of the answer, so that no wake-up is missed
            nonlocal waiter
            driver.perform(answer.plan if isinstance(answer, Wait) else answer)
            waiter = driver.wait_to_grow() if isinstance(answer, Wait) and wait and answer.ops else None

        while True:
            try:
                answer: Plan | Wait = await drive(driver, grow, done, self._held)
                if not isinstance(answer, Wait):
                    if head.sanitizer is not None:
                        head.sanitizer.granted(core)
                    return self.pages
                if waiter is None:
                    raise CacheFull(f"extend: there is no room for {tokens} tokens more now")
                await waiter
            finally:
                if waiter is not None:
                    driver.growing.discard(waiter)

    def advance(self, position: int, after: object | None = None) -> None:
        """Give back the pages and pins that the sliding window leaves behind: all tokens before ``position`` are
        computed, and the next one is computed there. To be called between two steps, of prefill (after the commit) and
        decoding alike.

        ``after``: an event (see ``release``) behind the engine's last work that reads these pages; loads into them wait
        for it on the device.

        Raises:
            ConfigError: ``position`` lies beyond what is reserved, or the device cannot wait for ``after``.
        """
        self._head.driver.check_thread()
        position = integer("position", position, 0, self._held().reserved)
        self._fence("advance: after", after)
        driver = self._head.driver
        driver.perform(driver.call_unlocked(driver.core.advance, self._core, position))

    def truncate(self, length: int, after: object | None = None) -> None:
        """Give back the lease's own pages that lie wholly beyond ``length`` tokens, such as those of speculative tokens
        that were rejected.

        ``after``: as for ``advance``.

        Raises:
            ConfigError: ``length`` is less than what is committed.
        """
        self._head.driver.check_thread()
        length = integer("length", length, self._held().length)
        self._fence("truncate: after", after)
        driver = self._head.driver
        driver.perform(driver.call_unlocked(driver.core.truncate, self._core, length))

    def _fence(self, name: str, after: object | None) -> None:
        batch = self._head.batches.batch(name, after)
        if batch is not None:
            self._head.batches.fence(self._held(), batch)

    # committing

    def commit(
        self, tokens: Tokens, after: object | None = None, checkpoint: tuple[int, int] | None = None
    ) -> Coroutine[Any, Any, Pages]:
        """Publish the whole pages of ``tokens``, all of which are computed or will be when ``after`` (an event as for
        ``release``) fires. To be awaited. Returns the page table that the engine uses from now on. If others have
        published some of these pages before, the table has theirs. If the namespace was invalidated since the lease was
        entered, nothing is published, and the table is as it was.

        The arguments are taken in the call itself, before the coroutine is awaited: the caller may go on writing into
        the buffer of ``tokens``, and from then on a release waits for ``after``. So any thread may make the call, and
        hand the coroutine to the cache's loop: ``asyncio.run_coroutine_threadsafe(lease.commit(tokens, event), loop)``.
        Release the lease when the commit has ended; after a release it publishes nothing, and raises ``RuntimeError``.

        ``after`` may fail: the event carries an error, or the engine of a rank could not run the batch. Then all that
        the commit has published, and all that hangs below it, leaves the cache: it is not served, saved or announced
        any more. Leases that hold some of it keep their pages, learn of it by ``LoadFailed``, and publish nothing more.
        A commit also stands on each ``after`` that the lease has named before. For batches that were named by no commit
        the caller vouches.

        ``checkpoint``: the position of a MAMBA state (tokens, whole pages), and its slot, which is one of ``states``.
        Cancelling it publishes everything or nothing.

        Raises:
            LoadFailed: a load of the lease, or a batch that was to compute its pages, failed.
            CacheClosed: the cache is closed.
            RuntimeError: the lease is not held, or it has loads and nobody has waited for them.
            ConfigError: ``tokens`` do not continue what the lease holds, or the checkpoint's position is not the end of
                a page of them, or its slot is none of ``states``, or the device cannot wait for ``after``. Nothing was
                published, and ``after`` was not taken, unless another commit of the lease was under way.
        """
        key = as_key(tokens)
        if checkpoint is not None:
            if not isinstance(checkpoint, (tuple, list)) or len(checkpoint) != 2:
                raise ConfigError(
                    f"checkpoint={shown(checkpoint)} must be a pair: a position, a slot out of lease.states"
                )
            checkpoint = integer("checkpoint: position", checkpoint[0]), integer("checkpoint: slot", checkpoint[1])
        event = self._head.batches.event("commit: after", after)
        if event is not None:
            self._to_commit.append(event)
        return self._commit(key, event, checkpoint)

    async def _commit(self, key: bytes, event: object | None, checkpoint: tuple[int, int] | None) -> Pages:
        self._head.driver.check_thread()
        try:
            core = self._held()
            if core.loads and not self._asked:
                self._check_loads(core)
                raise RuntimeError(_NOT_AWAITED)
            publishing = self._own_publishing()
            try:
                publishing.check(key, checkpoint)
            except ConfigError:
                if self._head.sanitizer is not None:
                    self._head.sanitizer.diverged(core)
                raise
            batch = None if event is None else self._head.worker.batch(event)
            if batch is not None:
                publishing.expect(batch)
        finally:
            if event is not None:
                self._to_commit.remove(event)
        async with publishing.order:
            if core.loads:
                await self.loaded()
            if self._head.namespaces.valid(self._namespace, self._since):
                publishing.check(key, checkpoint)  # again: another commit may have gone elsewhere meanwhile
                await publishing.publish(key, checkpoint)
            return self.pages

    def adopt(self, after: object | None = None) -> None:
        """Note that the engine uses the page table that the last ``commit`` returned. The pages that it used before are
        free once ``after`` (an event as for ``release``) has fired. The next commit and the release imply this call."""
        self._head.driver.check_thread()
        batch = self._head.batches.batch("adopt: after", after)
        if self._publishing is not None:
            self._publishing.adopt(batch)


_NOT_AWAITED = (
    "commit: nobody has waited for the pages that the lease loads to the device, so what was computed is wrong: before "
    "the engine computes, await loaded(), or layer(i) or wait_layer(stream, i) up to the last layer, or name the lease "
    "in send_batch"
)


def _place(code: CodeType, at: int) -> str:
    lines = (line for start, end, line in code.co_lines() if start <= at < end)
    return f"{code.co_filename}:{next(lines, None) or code.co_firstlineno}"


def _give_back(
    head: Head, core: CoreLease, publishing: Publishing | None, events: Sequence[object], ended: bool
) -> None:
    """Give back all that a lease holds, when ``events`` have fired. ``publishing``: that of the lease; it may be None
    if there are no events and the lease has made no commit."""
    del head.holders[core]
    if head.sanitizer is not None:
        head.sanitizer.released(core)
    if publishing is None:
        head.driver.release(core, ended)
    else:
        publishing.release([head.worker.batch(event) for event in events], ended)
