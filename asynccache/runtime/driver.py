"""The only place where the runtime drives the core: one lock, calls in slices, plans performed, outcomes applied.

Laws:
* No await between a core call and ``perform``: effects are in their queues before anybody else can run.
* A core call that may split a node holds the tree lock, also when nobody else wants it (``locked``). Calls that only
  give something back may be made without it (``unlocked``): the core refuses to split in them, and leaves what it would
  evict or back up to the next holder.
* Whoever takes the lock settles first: outcomes that wait are applied before anything is decided on top of them.
* Under the lock there is the core's own work and ``sleep(0)`` between its slices; nothing else.
* A cancellation that arrives between two slices is kept until the last one is done.
* Fail-stop: a core call that raises anything but a refusal (``REFUSALS``, raised before anything has changed), and a
  plan that cannot be performed, close the cache with that error. Its books may be wrong: no call is made of them
  again, also not for the next slice of one that is under way.

Mutable state: the core, the outcomes that wait (in ``acks``, and in the hands of the ack task), ``saving`` (backups in
flight), ``draining``, ``closed`` and ``broken``.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NoReturn, ParamSpec, TypeVar

from asynccache.core.cache import CacheCore
from asynccache.core.plan import (
    EMPTY,
    BackupHost,
    BackupStorage,
    Cleared,
    Copy,
    Effect,
    Event,
    More,
    Outcome,
    Plan,
    Publish,
    Retire,
    Status,
)
from asynccache.errors import (
    AsyncCacheError,
    CacheClosed,
    CacheFull,
    ConfigError,
    InvariantViolation,
    RankFailure,
)
from asynccache.runtime.line import Line
from asynccache.runtime.operations import Operations
from asynccache.runtime.treelock import TreeLock

T = TypeVar("T")
P = ParamSpec("P")

REFUSALS = (ConfigError, CacheFull)
"""What a core call raises to refuse its arguments. It has changed nothing then."""


class Nudge(Enum):
    """An item of the queue of outcomes that stands for no operation."""

    FOLLOW_UP = "something was given back without the lock: whoever takes it next follows up"


Ack = Outcome | Nudge


def nothing(*_: object) -> None:
    """For who has nothing to do, or nothing to check."""


class Driver:
    """Turns core calls into effects, and outcomes into core calls. Belongs to one loop.

    ``lock``: the tree lock. ``acks``: what the transfer stages report, on its way to the ack task; it has no bound of
    its own, the core bounds the operations in flight. ``draining``: whether the cache is about to be closed, and takes
    no new requests. ``closed``: why every call is refused, once the cache is closed. ``copy``: what takes the copies of
    each plan; ``store``, ``publish``: what take a backup to storage, and a KV event. None of them blocks or fails.
    ``clock``: seconds, told to the core with each call. ``broken``: whether the core's books may be wrong.
    """

    copy: Callable[[Sequence[Copy]], None]
    store: Callable[[BackupStorage], None]
    publish: Callable[[Event], None] = staticmethod(nothing)

    def __init__(self, core: CacheCore) -> None:
        self.core = core
        self.lock = TreeLock()
        self.acks: asyncio.Queue[Ack] = asyncio.Queue()
        self.ops = Operations()
        self.line = Line()
        self.prefetch_line = Line()
        self.draining = False
        self.closed: CacheClosed | None = None
        self.broken = False
        self.saving: set[int] = set()
        self._in_hand: list[Ack] = []
        self._waiting = False
        self._nudged = False
        self.on_failure: Callable[[BaseException], None] = self.close
        self._thread = threading.get_ident()
        self.clock: Callable[[], float] = time.monotonic
        core.world.may_split = False

    def __repr__(self) -> str:
        return f"Driver({self.ops!r}, {self.line!r}, {self.unapplied} outcomes wait)"

    @property
    def unapplied(self) -> int:
        """How many outcomes wait to be applied, those in the hands of the ack task among them."""
        return len(self._in_hand) + self.acks.qsize()

    def post(self, outcome: Outcome) -> None:
        """An operation's I/O has let go; the next one to take the lock applies it."""
        self._waiting = True
        self.acks.put_nowait(outcome)

    async def run_acks(self, then: Callable[[], object] = nothing) -> None:
        """The ack task, which applies outcomes when nobody else comes by: for ever, wait for one, take the lock once,
        apply all that wait by then, and call ``then``. An acquisition for each outcome would starve behind calls in
        slices. Cancelling it leaves what waits to the next holder of the lock.

        Raises:
            CacheClosed: the cache is closed.
        """
        while True:
            ack = await self.acks.get()  # first: somebody else may replace the list meanwhile
            self._in_hand.append(ack)
            async with self.lock:
                self.settle()
            then()

    def settle(self) -> None:
        """Under the lock, before anything else: apply every outcome that waits, and follow up what was given back.

        Raises:
            CacheClosed: the cache is closed.
        """
        if self.closed is not None:
            self.refuse()
        if self._waiting and (outcomes := self._take_acks()):
            self.perform(self.locked(self.core.complete, outcomes))
        if self.core.behind:
            self.perform(self.locked(self.core.follow_up))

    def _take_acks(self) -> list[Outcome]:
        """Everything that waits, in the order in which it came."""
        acks, self._in_hand, self._nudged, self._waiting = self._in_hand, [], False, False
        while not self.acks.empty():
            acks.append(self.acks.get_nowait())
        return [ack for ack in acks if not isinstance(ack, Nudge)]

    # calls of the core

    def locked(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
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

    def unlocked(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make a core call that splits nothing, with or without the tree lock: somebody else may hold it between two of
        its slices. The caller performs the plan before it awaits anything.

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
        if self.core.behind:
            self._nudge()
        return answer

    def give_back(self, call: Callable[P, Plan], *args: P.args, **kwargs: P.kwargs) -> Plan:
        """As ``unlocked``, for what a holder of pins or pages must always be able to do, and what is never refused.
        Where the books may be wrong nothing is given back to anybody, and the plan is empty."""
        if self.broken:
            return EMPTY
        try:
            self.core.at(self.clock())
            plan = call(*args, **kwargs)
        except BaseException as error:
            self._break(error)
            raise
        if self.core.behind:
            self._nudge()
        return plan

    def _nudge(self) -> None:
        """Have the ack task take the lock and follow up, if nobody else comes first."""
        if not self._nudged:
            self._nudged = self._waiting = True
            self.acks.put_nowait(Nudge.FOLLOW_UP)

    def _break(self, error: BaseException) -> None:
        """The books may be wrong."""
        self.broken = True
        self.on_failure(error)

    def perform(self, plan: Plan, retiring: list[int] | None = None) -> None:
        """Hand every effect to its stage, all copies at once, and wake who waits for what ended or was freed.

        ``retiring`` collects the operations that the caller answers itself, once the engine's events have fired.
        """
        effects, ended, freed = plan
        try:
            if effects:
                self._begin(effects, retiring)
            for op, status in ended:
                self.saving.discard(op)
                self.ops.end(op, status)
            if freed or ended:
                self.line.wake()
                self.prefetch_line.wake()
        except BaseException as error:  # an operation that nobody performs would never end
            self._break(error)
            raise

    def _begin(self, effects: Sequence[Effect], retiring: list[int] | None) -> None:
        copies: list[Copy] = []
        for effect in effects:
            if isinstance(effect, (Publish, Cleared)):
                self.publish(effect)
                continue
            self.ops.open(effect.op)
            if isinstance(effect, (BackupHost, BackupStorage)):
                self.saving.add(effect.op)
            if isinstance(effect, BackupStorage):
                self.store(effect)
            elif not isinstance(effect, Retire):
                copies.append(effect)
            elif retiring is None:
                self.post(Outcome(effect.op, Status.DONE))
            else:
                retiring.append(effect.op)
        if copies:
            self.copy(copies)

    async def slices(
        self, call: Callable[[], T | More], check: Callable[[], object] = nothing
    ) -> tuple[T, asyncio.CancelledError | None]:
        """Under the lock: make the core call ``call`` until it answers, with a turn of the loop between slices.
        ``check`` is called before each slice, and raises if there is no point in it any more.

        The caller performs the answer's plan first and raises the cancellation, if one came, then.
        """
        cancelled: asyncio.CancelledError | None = None
        while True:
            check()
            if not isinstance(result := self.locked(call), More):
                return result, cancelled
            self.perform(result.plan)
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError as error:
                cancelled = error
            if self.closed is None:
                self.settle()

    async def run(
        self, call: Callable[[], T | More], done: Callable[[T], None], check: Callable[[], object] = nothing
    ) -> T:
        """Take the lock, settle, make the core call ``call`` in slices, and ``done`` with the answer, which performs
        its plan.

        Where the lock is free and one slice suffices nothing is waited for. Cancelling it before the first slice does
        nothing; later, the call is finished first, and ``done`` is told. ``check``: as in ``slices``.
        """
        if not self.lock.take():
            await self.lock.acquire()
        try:
            self.settle()
            answer, cancelled = await self.slices(call, check)
            done(answer)
        finally:
            self.lock.release()
        if cancelled is not None:
            raise cancelled
        return answer

    async def transact(self, call: Callable[[], Plan | More]) -> None:
        """``run``, for calls whose answer is a plan."""
        await self.run(call, self.perform)

    def close(self, cause: BaseException | None) -> None:
        """From now on every call is refused, and everybody who waits here is told why."""
        self.closed = CacheClosed(self._why(cause))
        self.closed.__cause__ = cause
        for waiting in (self.ops, self.line, self.prefetch_line):
            waiting.fail(self.closed_error)

    def _why(self, cause: BaseException | None) -> str:
        if cause is None:
            return "the cache is closed"
        what = "the cache's books may be wrong" if self.broken else "a worker died"
        return f"{what}: {type(cause).__name__}: {cause}"

    def closed_error(self) -> AsyncCacheError:
        """A new ``CacheClosed`` for one waiter, from the error that closed the cache; that error, if a rank failed."""
        assert self.closed is not None
        cause = self.closed.__cause__
        if isinstance(cause, RankFailure):
            return copy.copy(cause)
        error = CacheClosed(*self.closed.args)
        error.__cause__ = self.closed.__cause__
        return error

    def check_thread(self) -> None:
        """Raises ``RuntimeError`` in any thread but the loop's."""
        if threading.get_ident() != self._thread:
            raise RuntimeError("the cache belongs to the thread of its loop; use the *_threadsafe calls of a lease")

    def check_ready(self) -> None:
        """Whether a new call may be made. Raises ``CacheClosed`` if the cache is closed or about to be, and
        ``RuntimeError`` in another thread."""
        if threading.get_ident() != self._thread or self.closed is not None:
            self.check_thread()
            self.refuse()
        if self.draining:
            raise CacheClosed("the cache is closing")

    def refuse(self) -> NoReturn:
        """Raise why the cache is closed."""
        raise self.closed_error()

