"""The only place where the runtime drives the core: one lock, calls in slices, plans performed, outcomes applied.

Laws:
* No await between a core call and ``perform``: effects are in their queues before anybody else can run.
* Whoever takes the lock settles first: outcomes that wait are applied before anything is decided on top of them.
* Under the lock there is the core's own work and ``sleep(0)`` between its slices; nothing else.
* A cancellation that arrives between two slices is kept until the last one is done.

Mutable state: the core (under the lock; release, advance, truncate and claims are single transactions that split
nothing and need none; nor does a call that one slice suffices for while nobody has the lock or waits for it), the
outcomes that wait, ``saving`` (backups in flight), ``closed``, and ``unsettled`` (what a store was at then).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, NoReturn, TypeVar

from asynccache.core.cache import CacheCore
from asynccache.core.plan import (
    BackupHost,
    BackupStorage,
    Cleared,
    Effect,
    More,
    Outcome,
    Plan,
    Publish,
    Retire,
    Status,
)
from asynccache.errors import AsyncCacheError, CacheClosed, RankDivergence, RankFailure
from asynccache.ranks import Agreement
from asynccache.runtime.line import Line
from asynccache.runtime.operations import Operations

T = TypeVar("T")

Sink = Callable[[Any], None]


class TreeLock(asyncio.Lock):
    """Orders the calls that may split or evict. ``users``: how many hold it or wait for it; at 0, a call that does not
    await may go ahead without it, and overtakes nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.users = 0

    async def acquire(self) -> Literal[True]:
        """As ``asyncio.Lock``: first come, first served. Cancelling it takes nothing."""
        self.users += 1
        try:
            return await super().acquire()
        except BaseException:
            self.users -= 1
            raise

    def release(self) -> None:
        """As ``asyncio.Lock``."""
        super().release()
        self.users -= 1


class Driver:
    """Turns core calls into effects, and outcomes into core calls. Belongs to one loop."""

    def __init__(self, core: CacheCore, agreement: Agreement) -> None:
        self.core = core
        self.agreement = agreement
        self.turns = turns = agreement.turns
        self.lock = TreeLock()
        self.ops = Operations(turns)
        self.line = Line(turns)
        self.prefetch_line = Line(turns)
        self.posted = asyncio.Event()
        self.closed: CacheClosed | None = None
        self.scheduler: asyncio.Task[Any] | None = None
        self._one_step = asyncio.Lock()
        self._last = False
        self._cut = "a step was cancelled on this rank"
        self.saving: set[int] = set()
        self.unsettled: list[asyncio.Task[None]] = []
        self._outcomes: list[Outcome] = []
        self._sinks: dict[type, Sink] = {}
        self.at_step: Callable[[], Awaitable[None]] = _nothing
        self.on_failure: Callable[[BaseException], None] = self.close

    def __repr__(self) -> str:
        return f"Driver({self.ops!r}, {self.line!r}, {len(self._outcomes)} outcomes wait)"

    def route(self, effect: type, sink: Sink) -> None:
        """Effects of this type go to ``sink``, which must not block and may not fail."""
        self._sinks[effect] = sink

    def post(self, outcome: Outcome) -> None:
        """An operation's I/O has let go; the next one to take the lock applies it, or, with several ranks, the step in
        which all have said so."""
        if self.turns.lockstep:
            self.agreement.report((outcome,))
            return
        self._outcomes.append(outcome)
        self.posted.set()

    def settle(self) -> None:
        """Under the lock, before anything else: apply every outcome that waits.

        Raises:
            CacheClosed: the cache is closed.
        """
        if self.closed is not None:
            self.refuse()
        if self._outcomes:
            waiting, self._outcomes = self._outcomes, []
            self.decide(self.agreement.report(waiting))

    def settled(self) -> bool:
        """Whether a call that does not await may go ahead now: nobody has the tree or waits for it, and every outcome
        is applied.

        Raises:
            CacheClosed: the cache is closed.
        """
        if self.lock.users:
            return False
        self.settle()
        return True

    def decide(self, outcomes: Sequence[Outcome]) -> None:
        """Apply outcomes that all ranks agree on. A core that refuses them is broken, and so is the cache."""
        if not outcomes:
            return
        try:
            plan = self.core.complete(outcomes)
        except BaseException as error:
            self.on_failure(error)
            raise
        self.perform(plan)

    async def step(self) -> None:
        """Agree with the other ranks and apply what was decided; whoever waited for it goes on, in one order on all of
        them. Cancelling it in the middle closes the cache.

        Raises:
            RankFailure, RankDivergence: the cache is closed.
            CacheClosed: a worker of this rank died meanwhile, or the cache is closing.
            RuntimeError: another task is in a step.
        """
        self.check_open()
        self._check_turn()
        async with self._one_step:
            self.scheduler = asyncio.current_task()
            try:
                await self._step()
            except asyncio.CancelledError:
                if self.turns.lockstep and self.closed is None:  # what the others did in it this rank has not done
                    self.on_failure(RankFailure(self._cut))
                raise

    def _check_turn(self) -> None:
        if self._last and asyncio.current_task() is not self.scheduler:
            raise CacheClosed("the cache is closing")
        if self.turns.lockstep and self._one_step.locked():
            raise RuntimeError("step: another task of this rank is in a step; one task calls the cache")

    async def step_last(self, cut: str) -> None:
        """From now on nobody steps but this task; of a step that it is cancelled in, ``cut`` is said. Returns when the
        step under way has ended. Cancelling it stops the waiting."""
        self.scheduler = asyncio.current_task()
        self._last = True  # already: whoever waits for the lock behind this task would step after it
        async with self._one_step:
            self._cut = cut

    async def _step(self) -> None:
        try:
            decided = await self.agreement.step()
        except (RankFailure, RankDivergence) as error:
            self.on_failure(error)
            raise
        self.check_open()
        if decided:
            async with self.lock:
                self.settle()
                self.decide(decided)
        await self.turns.run()
        await self.at_step()

    def stepping(self) -> bool:
        """Whether this task is the one that steps: then waiting is stepping, and nobody else would."""
        return self.turns.lockstep and asyncio.current_task() is self.scheduler

    async def ended(self, ops: Sequence[int]) -> None:
        """Return when one of ``ops`` has ended. Cancelling it stops the waiting and nothing else."""
        if not self.stepping():
            await self.ops.any(ops)
            return
        while ops and all(op in self.ops for op in ops):
            await self.step()

    async def all_ended(self, ops: Sequence[int]) -> list[Status]:
        """Return when each of ``ops`` has ended, with the statuses of those that were in flight. Cancelling it stops
        the waiting and nothing else."""
        if not self.stepping():
            return await self.ops.all(ops)
        with self.ops.watching(ops) as waiters:
            while not all(waiter.done() for waiter in waiters):
                await self.step()
            return [waiter.result() for waiter in waiters]

    def perform(self, plan: Plan, retiring: list[int] | None = None) -> None:
        """Hand every effect to its stage and wake who waits for what ended or was freed.

        ``retiring`` collects the operations that the caller answers itself, once the engine's events have fired.
        """
        effects, ended, freed = plan
        for effect in effects:
            self._begin(effect, retiring)
        for op, status in ended:
            self.saving.discard(op)
            self.ops.end(op, status)
        if freed or ended:
            self.line.wake()
            self.prefetch_line.wake()

    def _begin(self, effect: Effect, retiring: list[int] | None) -> None:
        if isinstance(effect, (Publish, Cleared)):
            sink = self._sinks.get(Publish)
            if sink is not None:
                sink(effect)
            return
        self.ops.open(effect.op)
        self.agreement.opened(effect.op, storing=isinstance(effect, BackupStorage))
        if isinstance(effect, (BackupHost, BackupStorage)):
            self.saving.add(effect.op)
        if not isinstance(effect, Retire):
            self._sinks[type(effect)](effect)
        elif retiring is None:
            self.post(Outcome(effect.op, Status.DONE))
        else:
            retiring.append(effect.op)

    async def slices(self, call: Callable[[], T | More]) -> tuple[T, asyncio.CancelledError | None]:
        """Under the lock: ``call`` until it answers, with a turn of the loop between slices.

        The caller performs the answer's plan first and raises the cancellation, if one came, then.
        """
        cancelled: asyncio.CancelledError | None = None
        while isinstance(result := call(), More):
            self.perform(result.plan)
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError as error:
                cancelled = error
            if self.closed is None:
                self.settle()
        return result, cancelled

    async def run(self, call: Callable[[], T | More], done: Callable[[T], None]) -> T:
        """Under the lock: settle, ``call`` in slices, and ``done`` with the answer, which performs its plan.

        Where the lock is free and one slice suffices there is no await at all. Cancelling it before the first slice
        does nothing; later, the call is finished first, and ``done`` is told.
        """
        if self.settled():
            first = call()
            if not isinstance(first, More):
                done(first)
                return first
            self.perform(first.plan)
        async with self.lock:
            self.settle()
            answer, cancelled = await self.slices(call)
            done(answer)
        if cancelled is not None:
            raise cancelled
        return answer

    async def transact(self, call: Callable[[], Plan | More]) -> None:
        """``run``, for calls whose answer is a plan."""
        await self.run(call, self.perform)

    def close(self, cause: BaseException | None) -> None:
        """From now on every call is refused, and everybody who waits here is told why."""
        self.closed = CacheClosed("a worker died" if cause else "the cache is closed")
        self.closed.__cause__ = cause
        for waiting in (self.ops, self.line, self.prefetch_line):
            waiting.fail(self.closed_error)
        self.turns.stop()

    def closed_error(self) -> AsyncCacheError:
        """A new ``CacheClosed`` for one waiter, from the error that closed the cache; that error, if ranks failed."""
        assert self.closed is not None
        cause = self.closed.__cause__
        if isinstance(cause, (RankFailure, RankDivergence)):
            return type(cause)(*cause.args)
        error = CacheClosed(*self.closed.args)
        error.__cause__ = self.closed.__cause__
        return error

    def check_open(self) -> None:
        """Raise why the cache is closed, if it is."""
        if self.closed is not None:
            self.refuse()

    def refuse(self) -> NoReturn:
        """Raise why the cache is closed."""
        raise self.closed_error()


async def _nothing() -> None:
    pass
