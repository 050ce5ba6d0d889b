"""The driver makes all core calls that change anything once the cache is open, performs their plans and applies
outcomes. Here are also the tree lock, and the lines in which others wait for room.

Nothing in this module waits, so that it can be compiled; ``core_calls`` has the coroutines around it.

**Core calls.** There is no await between a core call and ``perform``: effects are in their queues before anybody else
can run. A call that may split a node holds the tree lock, even when nobody else wants it (``call_locked``). A call that
only gives something back may be made without it (``call_unlocked``): the core refuses to split in such a call, and
leaves what it would evict or back up to the next holder.

**Acks.** Whoever takes the lock first applies what waits in the queue of acks: the outcomes, then the commits of
fetches that have read their pages. A commit that must wait for an operation is queued again when that has ended, and
nothing waits behind it.

**Errors.** A core call may refuse (``REFUSALS``), and then nothing has changed. If it raises anything else, or a plan
cannot be performed, the cache is closed with that error: the core's books may be wrong, so no core call is made again,
not even for the next slice of a call that is under way.

**The lock** is handed over first come, first served. ``release`` hands it to whoever has waited longest, and it is
never free in between; so nobody overtakes, not even by ``take``. A waiter that is cancelled takes nothing, and passes
the lock on if it was handed it by then.

**Waiting for room.** Whoever waits for a lease or a prefetch stands in a ``Line`` and holds nothing. Only the first in
line may try. A place keeps the ticket that its owner drew on arrival, so an owner that leaves the line to wait for a
prefetch comes back to the same position. Whoever waits to grow a lease holds pages, so it stands in no line and tries
again at every wake-up. All are woken in one way, ``Driver.wake``: after every plan that gives something back or says
that storage is late, and after every prefetch that ends. Each waiter awaits a future of its own, so cancelling one
never touches another. An operation that is not in flight (``Operations``) has ended. When the cache closes, every
waiter gets the reason.

Mutable state: the core, the acks that wait (in ``acks``, and in the hands of the ack task), ``saving`` (backups in
flight), ``draining``, ``closed`` and ``broken``; who holds the lock, and who waits (in the lines and in ``growing``).
"""

from __future__ import annotations

import asyncio
import copy
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from typing import NoReturn, ParamSpec, Protocol, TypeVar

from asynccache.core.cache import CacheCore, CoreLease, Grant, LeaseRequest
from asynccache.core.plan import (
    EMPTY,
    BackupHost,
    BackupStorage,
    Cleared,
    Compute,
    Copy,
    Effect,
    Event,
    Failing,
    Outcome,
    Plan,
    Publish,
    Retire,
    Status,
    operations,
)
from asynccache.errors import (
    AsyncCacheError,
    CacheClosed,
    CacheFull,
    ConfigError,
    InvariantViolation,
    RankFailure,
)

T = TypeVar("T")
P = ParamSpec("P")

REFUSALS = (ConfigError, CacheFull)
"""The errors that a core call raises to refuse its arguments. Such a call has changed nothing."""


class TreeLock:
    """Orders the core calls that may split nodes: like ``asyncio.Lock``, but it can be taken without an await while it
    is free. Belongs to one loop."""

    __slots__ = ("_held", "_waiters")

    def __init__(self) -> None:
        self._held = False
        self._waiters: deque[asyncio.Future[None]] = deque()

    def __repr__(self) -> str:
        return f"TreeLock({'held' if self._held else 'free'}, {len(self._waiters)} waiting)"

    def locked(self) -> bool:
        """Return True while somebody holds the lock."""
        return self._held

    def take(self) -> bool:
        """Take the lock if it is free. Returns True if the caller holds it now; it then has to ``release`` it."""
        if self._held:
            return False
        self._held = True
        return True

    def wait(self) -> asyncio.Future[None]:
        """Stand behind those who came before. Returns a future, which is done when its owner holds the lock. An owner
        that does not want the lock any more has to ``withdraw``."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def withdraw(self, waiter: asyncio.Future[None]) -> None:
        """The owner of ``waiter`` waits no longer. If the lock was handed over to it by then, it is passed on."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        else:
            self.release()

    def release(self) -> None:
        """Hand the lock to the next waiter, or leave it free.

        Raises:
            RuntimeError: nobody holds the lock.
        """
        if not self._held:
            raise RuntimeError("the tree lock is released by somebody who does not hold it")
        for _ in range(len(self._waiters)):
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
            self._waiters.append(waiter)  # it was cancelled, and removes itself when it runs
        self._held = False


class LinePlace:
    """One waiter's place in a line."""

    __slots__ = ("signal", "ticket")

    def __init__(self, ticket: int) -> None:
        self.ticket = ticket
        self.signal: asyncio.Future[None] | None = None
        """While the waiter sleeps, the future that wakes it; else None."""

    def __repr__(self) -> str:
        return f"LinePlace(ticket={self.ticket}, {'trying' if self.signal is None else 'asleep'})"

    def __lt__(self, other: LinePlace) -> bool:
        return self.ticket < other.ticket


class Line:
    """Places in order of their tickets."""

    def __init__(self) -> None:
        self._places: list[LinePlace] = []
        self._tickets = 0

    def __repr__(self) -> str:
        return f"Line({len(self._places)} waiting)"

    def __len__(self) -> int:
        return len(self._places)

    def ticket(self) -> int:
        """Draw a ticket: a number higher than all that were drawn before."""
        self._tickets += 1
        return self._tickets

    def join(self, ticket: int) -> LinePlace:
        """Enter the line at the position that ``ticket`` gives, and return the place."""
        place = LinePlace(ticket)
        insort(self._places, place)
        return place

    def leave(self, place: LinePlace) -> None:
        """Give up ``place``, with or without success. The next one may try."""
        if place in self._places:
            self._places.remove(place)
        self.wake()

    def is_first(self, place: LinePlace) -> bool:
        """Return True if ``place`` is the first in line, whose owner may try."""
        return self._places[0] is place

    def must_wait(self, ticket: int) -> bool:
        """Return True if somebody with an earlier ticket is in line."""
        return bool(self._places) and self._places[0].ticket < ticket

    def sleep(self, place: LinePlace) -> None:
        """Let a wake-up reach ``place`` from now on. There must be no await between the attempt that failed and this
        call."""
        place.signal = asyncio.get_running_loop().create_future()

    def wake(self) -> None:
        """Wake the first in line, which tries again: something was given back."""
        if self._places and (signal := self._places[0].signal) is not None and not signal.done():
            signal.set_result(None)

    def fail(self, error: Callable[[], BaseException]) -> None:
        """The cache is closed: everybody who sleeps here gets an ``error()`` of its own."""
        for place in self._places:
            signal = place.signal
            if signal is not None and not signal.done():
                signal.set_exception(error())


Waiter = asyncio.Future[Status]


class Operations:
    """The operations in flight, and the futures of those who wait for them; ``core_calls`` has the coroutines that
    wait."""

    def __init__(self) -> None:
        self._live: dict[int, list[Waiter]] = {}

    def __repr__(self) -> str:
        return f"Operations({len(self._live)} in flight)"

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, op: int) -> bool:
        return op in self._live

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._live))

    def open(self, op: int) -> None:
        """Note that ``op`` has begun; from now on it can be waited for."""
        self._live.setdefault(op, [])

    def end(self, op: int, status: Status) -> None:
        """Note that ``op`` has ended with ``status``, and wake everybody who waits for it."""
        for waiter in self._live.pop(op, ()):
            if not waiter.done():
                waiter.set_result(status)

    def fail(self, error: Callable[[], BaseException]) -> None:
        """The cache is closed: every waiter gets an ``error()`` of its own, and nothing is in flight any more."""
        live, self._live = self._live, {}
        for waiters in live.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(error())

    def watch(self, ops: Iterable[int]) -> Waiter | None:
        """Return a future that is set when the first of ``ops`` ends, and that the caller hands to ``unwatch``; None if
        one has ended before, or ``ops`` is empty."""
        ops = tuple(ops)
        if not ops or any(op not in self._live for op in ops):
            return None
        waiter: Waiter = asyncio.get_running_loop().create_future()
        for op in ops:
            self._live[op].append(waiter)
        return waiter

    def unwatch(self, ops: Iterable[int], waiter: Waiter) -> None:
        """Forget ``waiter``, which ``watch`` returned for ``ops``."""
        for op in ops:
            waiters = self._live.get(op)
            if waiters is not None and waiter in waiters:
                waiters.remove(waiter)


class Nudge(Enum):
    """An item of the queue of acks that stands for no operation."""

    FOLLOW_UP = "the core has left work to do: whoever takes the lock next follows up"


FetchCommit = Callable[[], Sequence[int]]
"""``prefetch.Fetch._commit`` with its argument bound. To be called under the tree lock: it hangs what the fetch has
read into the tree, or changes nothing and returns operations of which one must end first."""

Ack = Outcome | Failing | FetchCommit | Nudge


class PlanPerformer(Protocol):
    """The head (``asynccache.runtime.head.Head``) as the driver, which is compiled without it, knows it. It hands each
    effect of a plan on to one of its parts. No method blocks or fails.
    """

    def given_back(self) -> None:
        """Called after a core call and before its plan is performed, if the core notes which slots are given back."""

    def copy(self, copies: Sequence[Copy]) -> None:
        """Take all copies of a plan, for ``EngineBatches.begin``."""

    def store(self, backup: BackupStorage) -> None:
        """Take one backup to storage, for ``Backups.put``."""

    def publish(self, event: Event) -> None:
        """Take one KV event, for ``Announcer.put``."""

    def note_failures(self) -> None:
        """Post which batches of the engine are known to have failed: ``EngineBatches.note_failures``."""

    def fail(self, error: BaseException) -> None:
        """Close the cache with ``error``: ``Supervisor.fail``."""


class Driver:
    """Turns core calls into effects, and outcomes into core calls. Belongs to one loop."""

    def __init__(self, core: CacheCore, head: PlanPerformer, clock: Callable[[], float]) -> None:
        self.core = core
        self.clock = clock
        """Returns seconds, which the core is told with each call."""
        self._head = head
        self.lock = TreeLock()
        self.acks: asyncio.Queue[Ack] = asyncio.Queue()
        """What the transfer stages and the fetches report, on its way to the ack task; the queue has no bound of its
        own, because the core bounds the operations in flight."""
        self.ops = Operations()
        self.line = Line()
        self.prefetch_line = Line()
        """Where prefetches wait for room, as leases do in ``line``."""
        self.growing: set[asyncio.Future[None]] = set()
        """The futures of those who wait for room to grow a lease."""
        self.draining = False
        """True once the cache is about to be closed, and takes no new requests."""
        self.closed: CacheClosed | None = None
        """Why every call is refused; None until the cache is closed."""
        self.broken = False
        """True once the core's books may be wrong."""
        self.saving: set[int] = set()
        """The backups in flight, by operation."""
        self._in_hand: list[Ack] = []
        self._waiting = False
        self._nudged = False
        self._notes_given = core.config.note_given
        self._owner = threading.get_ident()
        core.world.may_split = False

    def __repr__(self) -> str:
        return f"Driver({self.ops!r}, {self.line!r}, {self.unapplied} acks wait)"

    @property
    def unapplied(self) -> int:
        """The number of acks that wait to be applied, including those in the hands of the ack task. A nudge counts,
        too."""
        return len(self._in_hand) + self.acks.qsize()

    def post(self, outcome: Outcome | Failing) -> None:
        """Queue the outcome of an operation whose I/O has let go of its buffers, or the news that a batch fails.
        Whoever takes the lock next applies it."""
        self._waiting = True
        self.acks.put_nowait(outcome)

    def post_commit(self, commit: FetchCommit) -> None:
        """Queue the commit of a fetch that has read its pages. Whoever takes the lock next makes it."""
        self._waiting = True
        self.acks.put_nowait(commit)

    def ended(self, status: Status, ops: Sequence[int]) -> None:
        """Post the outcome ``status`` for each of the operations ``ops``."""
        for op in ops:
            self.post(Outcome(op, status))

    def apply_outcomes(self) -> None:
        """Under the lock, before anything else: apply the acks that wait, and follow up what the core has left to do.
        Of outcomes and of what is left, the core does a slice.

        Raises:
            CacheClosed: the cache is closed.
        """
        if self.closed is not None:
            self.refuse()
        self._head.note_failures()
        if not (self._waiting and self._apply(self._take_acks())) and self.core.behind:
            self.perform(self.call_locked(self.core.follow_up))

    def take_in_hand(self, ack: Ack) -> None:
        """Note that the ack task has taken ``ack`` out of the queue, and waits for the lock. The next holder of the
        lock, which may be another task, applies ``ack``."""
        self._in_hand.append(ack)

    def _apply(self, acks: Sequence[Ack]) -> bool:
        """Apply the outcomes among ``acks`` first, since a commit may wait for one of them; then make the commits.
        Return True if there were outcomes: then the core has followed up, too."""
        outcomes = [ack for ack in acks if isinstance(ack, (Outcome, Failing))]
        if outcomes:
            self.perform(self.call_locked(self.core.complete, outcomes))
        for ack in acks:
            if not isinstance(ack, (Outcome, Failing, Nudge)):
                self._commit(ack)
        return bool(outcomes)

    def _commit(self, commit: FetchCommit) -> None:
        ops = commit()
        if ops:
            waiter = self.ops.watch(ops)
            if waiter is None:
                self.post_commit(commit)
            else:
                waiter.add_done_callback(partial(self._commit_again, commit, ops))

    def _commit_again(self, commit: FetchCommit, ops: Sequence[int], waiter: Waiter) -> None:
        self.ops.unwatch(ops, waiter)
        if waiter.exception() is None:  # else the cache is closed: those who wait for the fetch hear it elsewhere
            self.post_commit(commit)

    def _take_acks(self) -> list[Ack]:
        acks, self._in_hand, self._nudged, self._waiting = self._in_hand, [], False, False
        while not self.acks.empty():
            acks.append(self.acks.get_nowait())
        return acks

    # calls of the core

    def call_locked(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make a core call that may split nodes. The caller holds the tree lock, and performs the plan before it
        awaits anything.

        Raises:
            CacheClosed: the core's books may be wrong, and ``call`` was not made.
            InvariantViolation: nobody holds the lock. The cache is closed.
            Exception: whatever ``call`` raises; unless it is one of ``REFUSALS``, the cache is closed.
        """
        if self.broken:
            self.refuse()
        world = self.core.world
        try:
            if not self.lock.locked():
                raise InvariantViolation(f"{call!r} may split nodes, and nobody holds the tree lock")
            world.may_split = True
            self.core.at(self.clock())
            return call(*args, **kwargs)
        except REFUSALS:
            raise
        except BaseException as error:
            self._break(error)
            raise
        finally:
            world.may_split = False

    def call_unlocked(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make a core call that splits nothing. The caller need not hold the tree lock; another task may hold it,
        between two slices of a call of its own. The caller performs the plan before it awaits anything.

        Raises:
            CacheClosed: the core's books may be wrong, and ``call`` was not made.
            Exception: whatever ``call`` raises; unless it is one of ``REFUSALS``, the cache is closed.
        """
        if self.broken:
            self.refuse()
        try:
            self.core.at(self.clock())
            answer = call(*args, **kwargs)
        except REFUSALS:
            raise
        except BaseException as error:
            self._break(error)
            raise
        return answer

    def give_back(self, call: Callable[P, Plan], *args: P.args, **kwargs: P.kwargs) -> Plan:
        """Make a core call as ``call_unlocked`` does, by which a holder of pins or pages gives them back. This must
        always be possible, so it never raises ``CacheClosed``: if the core's books may be wrong, the call is not made,
        and the plan that is returned is empty. Whatever ``call`` raises closes the cache."""
        if self.broken:
            return EMPTY
        try:
            self.core.at(self.clock())
            plan = call(*args, **kwargs)
        except BaseException as error:
            self._break(error)
            raise
        return plan

    def lease_at_once(self, ask: LeaseRequest, granted: Callable[[Grant], None]) -> bool:
        """Make the core's ``lease`` in the common case: nobody is in line, the tree lock is free, and one slice
        suffices. ``granted`` is called with the grant in the same turn of the loop. Returns True if the lease was
        granted, and False in any other case.

        Raises:
            CacheClosed: the cache is closed.
            CacheFull: the reservation is larger than the device.
        """
        if self.line or not self.lock.take():
            return False
        try:
            self.apply_outcomes()
            answer = self.call_locked(self.core.lease, ask)
            if isinstance(answer, Grant):
                granted(answer)
            self.perform(answer.plan)
        finally:
            self.lock.release()
        return isinstance(answer, Grant)

    def release(self, lease: CoreLease, ended: bool = False) -> None:
        """Make the core's ``release``, and perform its plan."""
        call = self.core.release
        self.perform(self.give_back(call, lease, ended=True) if ended else self.give_back(call, lease))

    def _nudge(self) -> None:
        """The core has left work to ``follow_up``: have the ack task take the lock and do a slice of it, if nobody else
        comes first."""
        if not self._nudged:
            self._nudged = self._waiting = True
            self.acks.put_nowait(Nudge.FOLLOW_UP)

    def note_late_storage(self, late: bool) -> None:
        """Tell the core whether storage is ``late``. A timer calls this, too, and nobody would see its error; so an
        error of the core is not raised here if it has closed the cache, whose users are told the reason."""
        try:
            self.perform(self.call_unlocked(self.core.note_late_storage, late))
        except Exception:
            if self.closed is None:
                raise

    def _break(self, error: BaseException) -> None:
        self.broken = True
        self._head.fail(error)

    def perform(self, plan: Plan, retiring: list[int] | None = None) -> None:
        """Hand every effect of ``plan`` to its stage, all copies at once, and wake whoever waits for what has ended or
        was freed. If the core call has left work to ``follow_up``, the ack task hears of it.

        ``retiring``: a list that gets the operations of ``Retire`` effects. The caller posts their outcomes itself,
        once the engine's events have fired; with None they are done at once.
        """
        effects, ended, freed = plan
        try:
            if self._notes_given:
                self._head.given_back()
            if effects:
                self._begin(effects, retiring)
            for op, status in ended:
                self.saving.discard(op)
                self.ops.end(op, status)
            if freed or ended:
                self.wake()
            if self.core.behind:
                self._nudge()
        except BaseException as error:  # an operation that nobody performs would never end
            self._break(error)
            raise

    def wake(self) -> None:
        """Wake whoever waits for room: something was given back, or something is not waited for any more."""
        self.line.wake()
        self.prefetch_line.wake()
        for waiter in self.growing:
            if not waiter.done():
                waiter.set_result(None)

    def wait_to_grow(self) -> asyncio.Future[None]:
        """Return a future that the next wake-up sets, and that the caller discards from ``growing`` in the end. There
        must be no await between the attempt that failed and this call.

        Raises:
            CacheClosed: the cache is closed.
        """
        if self.closed is not None:
            self.refuse()
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.growing.add(waiter)
        return waiter

    def _begin(self, effects: Sequence[Effect], retiring: list[int] | None) -> None:
        copies: list[Copy] = []
        for effect in effects:
            if isinstance(effect, (Publish, Cleared)):
                self._head.publish(effect)
                continue
            if isinstance(effect, Compute):  # who made the commit has its batches watched; no pages come with its end
                continue
            began = operations(effect)
            for op in began:
                self.ops.open(op)
            if isinstance(effect, (BackupHost, BackupStorage)):
                self.saving.update(began)
            if isinstance(effect, BackupStorage):
                self._head.store(effect)
            elif not isinstance(effect, Retire):
                copies.append(effect)
            elif retiring is None:
                self.post(Outcome(effect.op, Status.DONE))
            else:
                retiring.append(effect.op)
        if copies:
            self._head.copy(copies)

    def close(self, cause: BaseException | None) -> None:
        """Refuse every call from now on, and tell everybody who waits here why. ``cause``: the error that closes the
        cache; None: it is closed on purpose."""
        why = "the cache is closed"
        if cause is not None:
            what = "the cache's books may be wrong" if self.broken else "a task of the cache died"
            why = f"{what}: {type(cause).__name__}: {cause}"
        self.closed = CacheClosed(why)
        self.closed.__cause__ = cause
        for waiting in (self.ops, self.line, self.prefetch_line):
            waiting.fail(self.closed_error)
        self.wake()  # who grows tries again, and is refused

    def closed_error(self) -> AsyncCacheError:
        """Return a new error for one waiter: a ``CacheClosed`` with the error that closed the cache as its cause, or a
        copy of that error if it is a ``RankFailure``."""
        assert self.closed is not None
        cause = self.closed.__cause__
        if isinstance(cause, RankFailure):
            return copy.copy(cause)
        error = CacheClosed(*self.closed.args)
        error.__cause__ = self.closed.__cause__
        return error

    def check_thread(self) -> None:
        """Raise ``RuntimeError`` in any thread but the loop's."""
        if threading.get_ident() != self._owner:
            raise RuntimeError(
                "the cache belongs to the thread of its loop: from another thread, use "
                "asyncio.run_coroutine_threadsafe or loop.call_soon_threadsafe"
            )

    def check_ready(self) -> None:
        """Check that a new call may be made. Raises ``CacheClosed``, or ``RankFailure`` if a rank failed, if the cache
        is closed or about to be; and ``RuntimeError`` in any thread but the loop's."""
        if threading.get_ident() != self._owner or self.closed is not None:
            self.check_thread()
            self.refuse()
        if self.draining:
            raise CacheClosed("the cache is closing")

    def refuse(self) -> NoReturn:
        """Raise the error that says why the cache is closed."""
        raise self.closed_error()
