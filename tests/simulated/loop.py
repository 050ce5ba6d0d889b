"""An event loop for simulated worlds: virtual time, adversarial order, and nothing real.

Law: every choice is drawn from one seed, so a world that fails once fails again, step for step. Time jumps to the next
timer when nothing is ready, so nothing ever sleeps; when there is no timer either the world is dead, and ``Deadlock``
says what every task waits for.

Order. asyncio runs ready callbacks in the order of ``call_soon``. ``Order.FIFO`` keeps that promise. ``Order.SHUFFLED``
breaks it on purpose: any ready callback may run next. Code that passes shuffled relies on no order that it did not
make itself (a lock, a queue, an await); one task's own steps still come one after the other, because a task has at
most one step waiting. Every callback takes a little virtual time, so timers also fire between callbacks.

Mutable state: the ready list, the heap of timers and the clock, all in ``SimulatedLoop``.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import random
import sys
import threading
import warnings
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from enum import Enum
from typing import Any, TypeVar, TypeVarTuple, Unpack

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

MICROSECOND = 1e-6


class Order(Enum):
    """Which ready callback runs next."""

    FIFO = "fifo"
    SHUFFLED = "shuffled"


class Strike(Enum):
    """How ``cancel_at`` hits the await it was told to hit."""

    WAITING = "waiting"     # what is awaited has not happened
    RACING = "racing"       # it has just happened: the task was about to go on with its result


class Deadlock(RuntimeError):
    """Nothing is ready, no timer is set, and the world has not ended. The message lists the waiting tasks."""


class Livelock(RuntimeError):
    """The world ran more callbacks than it was allowed to."""


class SimulatedLoop(asyncio.AbstractEventLoop):
    """An asyncio event loop whose clock, order and executor come out of ``seed``.

    ``random`` is the loop's own source; ``entropy(name)`` makes further ones, each a function of seed and name, so that
    what one part of a world draws does not move what another part draws.
    """

    def __init__(self, seed: int, *, order: Order = Order.SHUFFLED, step_limit: int = 5_000_000) -> None:
        self.seed = seed
        self.order = order
        self.steps = 0
        self.unhandled: list[dict[str, Any]] = []
        self.random = self.entropy("loop")
        self._step_limit = step_limit
        self._now = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._serial = 0
        self._stopping = False
        self._closed = False
        self._thread: int | None = None
        self._factory: Callable[..., asyncio.Future[Any]] | None = None
        self._debug = False

    def __repr__(self) -> str:
        return f"<SimulatedLoop seed={self.seed} {self.order.value} t={self._now:.6f} steps={self.steps}>"

    def entropy(self, name: str) -> random.Random:
        """A source of randomness that depends on the seed and ``name`` alone."""
        return random.Random(f"{self.seed}/{name}")

    # time and callbacks

    def time(self) -> float:
        """Virtual seconds since the world began."""
        return self._now

    def call_soon(
        self, callback: Callable[[Unpack[_Ts]], object], *args: *_Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Make ``callback`` ready."""
        self._check_open()
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[_Ts]], object], *args: *_Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """The same as ``call_soon``: a simulated world has one thread, and another one's call is an error."""
        if self._thread not in (None, threading.get_ident()):
            raise RuntimeError("a second thread called into a simulated world: its timing cannot be replayed")
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[Unpack[_Ts]], object], *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Make ``callback`` ready ``delay`` virtual seconds from now."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[Unpack[_Ts]], object], *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Make ``callback`` ready at ``when``."""
        self._check_open()
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, self._number(), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """asyncio tells; a cancelled timer is skipped when its time comes."""

    # futures and tasks

    def create_future(self) -> asyncio.Future[Any]:
        """A future that sets hash alike in every run."""
        return _Future(self, self._number())

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """A task that counts its awaits, for ``cancel_at``."""
        self._check_open()
        counted = _Counted(coro)
        task = _Task(counted, self, self._number(), options)
        counted.task = task
        return task

    def cancel_at(self, task: asyncio.Task[Any], n: int, strike: Strike | None = None) -> None:
        """Cancel ``task`` at its ``n``-th await from now on (1: the next). ``strike`` is drawn if it is not given.

        A task that ends before that is left alone.
        """
        assert isinstance(task, _Task)
        task.counted.arm(n, strike or self.random.choice(list(Strike)))

    def run_in_executor(
        self, executor: object, func: Callable[[Unpack[_Ts]], _T], *args: *_Ts
    ) -> asyncio.Future[_T]:
        """Run ``func`` inline, but later: as with a thread, nobody knows when.

        Cancelling the future before the call has started prevents it. Afterwards it does not: the call still happens,
        some time after its waiter has gone. Whoever frees what ``func`` uses too early is found out.
        """
        future: asyncio.Future[_T] = self.create_future()
        self.call_later(self._delay(), self._start_call, future, func, args)
        return future

    def _start_call(self, future: asyncio.Future[_T], func: Callable[..., _T], args: tuple[Any, ...]) -> None:
        if not future.cancelled():
            self.call_later(self._delay(), _finish_call, future, func, args)

    def _delay(self) -> float:
        return self.random.choice((0.0, 20.0, 200.0, 2000.0)) * self.random.random() * MICROSECOND

    # running

    def run_forever(self) -> None:
        """Run until ``stop``.

        Raises:
            Deadlock: nothing can happen any more.
            Livelock: too much has happened.
        """
        self._check_open()
        if self.is_running():
            raise RuntimeError("this loop is running already")
        hooks = sys.get_asyncgen_hooks()
        self._thread = threading.get_ident()
        asyncio._set_running_loop(self)
        sys.set_asyncgen_hooks(finalizer=self._finalize_generator)
        try:
            while not self._stopping:
                self._step()
        finally:
            self._stopping = False
            self._thread = None
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def run_until_complete(self, future: Awaitable[_T]) -> _T:  # type: ignore[override, unused-ignore]
        """Run until ``future`` is done and return its result.

        Raises:
            Deadlock: it can never be done.
            Livelock: too much has happened.
        """
        goal: asyncio.Future[_T] = asyncio.ensure_future(future, loop=self)
        goal.add_done_callback(self._goal_reached)
        try:
            self.run_forever()
        finally:
            goal.remove_done_callback(self._goal_reached)
        return goal.result()

    def _goal_reached(self, future: asyncio.Future[Any]) -> None:
        self.stop()

    def _step(self) -> None:
        self._move_due_timers()
        if not self._ready:
            self._jump()
            return
        handle = self._take()
        if handle.cancelled():
            return
        self.steps += 1
        if self.steps > self._step_limit:
            raise Livelock(f"{self!r}: {_describe(asyncio.all_tasks(self))}")
        self._now += self.random.random() * 10 * MICROSECOND
        handle._run()

    def _take(self) -> asyncio.Handle:
        if self.order is Order.SHUFFLED and len(self._ready) > 1:
            self._ready.rotate(-self.random.randrange(len(self._ready)))
        return self._ready.popleft()

    def _move_due_timers(self) -> None:
        while self._timers and self._timers[0][0] <= self._now:
            self._ready.append(heapq.heappop(self._timers)[2])

    def _jump(self) -> None:
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if not self._timers:
            raise Deadlock(f"{self!r}: {_describe(asyncio.all_tasks(self))}")
        self._now = max(self._now, self._timers[0][0])

    def stop(self) -> None:
        """Return from ``run_forever`` after this callback."""
        self._stopping = True

    def is_running(self) -> bool:
        """Whether ``run_forever`` is on the stack."""
        return self._thread is not None

    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def close(self) -> None:
        """Drop everything that has not run."""
        if self.is_running():
            raise RuntimeError("a running loop cannot be closed")
        self._closed = True
        self._ready.clear()
        self._timers.clear()

    async def shutdown_asyncgens(self) -> None:
        """Nothing to do: a generator is closed when it is dropped."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Nothing to do: there is no thread."""

    def _finalize_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self._closed:
            self.create_task(generator.aclose())

    # errors and the rest of the protocol

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep what nobody caught in ``unhandled``; ``simulate`` raises it."""
        self.unhandled.append(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """The same."""
        self.unhandled.append(context)

    def set_exception_handler(self, handler: object) -> None:
        """Ignored: a world never swallows an error."""

    def get_exception_handler(self) -> None:
        """There is none."""

    def get_debug(self) -> bool:
        """asyncio's debug mode."""
        return self._debug

    def set_debug(self, enabled: bool) -> None:
        """Turn asyncio's debug mode on or off."""
        self._debug = enabled

    def get_task_factory(self) -> None:
        """There is none: the loop's own tasks count their awaits."""

    def set_task_factory(self, factory: object) -> None:
        """Only ``None`` is possible."""
        if factory is not None:
            raise NotImplementedError("tasks of a simulated world are the loop's own")

    def _number(self) -> int:
        self._serial += 1
        return self._serial

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("Event loop is closed")


def simulate(
    main: Callable[[SimulatedLoop], Coroutine[Any, Any, _T]],
    seed: int,
    *,
    order: Order = Order.SHUFFLED,
    step_limit: int = 5_000_000,
) -> _T:
    """Run one world to its end and return what ``main`` returned.

    A world fails if ``main`` raises, if it can never end, if it leaves a task behind, or if anything raised where
    nobody looked. Whatever it fails with carries the seed as a note.
    """
    # typeshed calls every optional part of a loop (sockets, signals, processes) abstract; a world has none of them
    loop = SimulatedLoop(seed, order=order, step_limit=step_limit)  # type: ignore[abstract]
    try:
        result = loop.run_until_complete(main(loop))
        left = asyncio.all_tasks(loop)
        if left:
            raise RuntimeError(f"tasks left behind: {_describe(left)}")
        if loop.unhandled:
            raise _first_error(loop.unhandled)
        return result
    except Deadlock as error:
        reason = _first_error(loop.unhandled) if loop.unhandled else error
        reason.add_note(f"simulated world: seed {seed}, order {order.value}, {loop!r}")
        raise reason from None
    except BaseException as error:
        error.add_note(f"simulated world: seed {seed}, order {order.value}, {loop!r}")
        raise
    finally:
        _abandon(asyncio.all_tasks(loop))
        loop.close()


def _abandon(tasks: set[asyncio.Task[Any]]) -> None:
    """Close the coroutines of a world that failed, so that they do not speak up later, in somebody else's test."""
    for task in tasks:
        assert isinstance(task, _Task)
        task._log_destroy_pending = False
        with contextlib.suppress(BaseException), warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # of leases, say, that they drop
            task.counted.close()


class _Future(asyncio.Future[Any]):
    """Hashes to its number: the order of a set of futures does not depend on addresses."""

    def __init__(self, loop: SimulatedLoop, number: int) -> None:
        self.number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number


class _Task(asyncio.Task[Any]):
    """Hashes to its number, and knows the wrapper that counts its awaits."""

    _log_destroy_pending: bool

    def __init__(self, counted: _Counted, loop: SimulatedLoop, number: int, options: dict[str, Any]) -> None:
        self.number = number
        self.counted = counted
        super().__init__(counted, loop=loop, **options)

    def __hash__(self) -> int:
        return self.number


class _Counted(Coroutine[Any, Any, Any]):
    """A coroutine that counts how often it was suspended and has its task cancelled at a given count."""

    def __init__(self, inner: Coroutine[Any, Any, Any]) -> None:
        if not asyncio.iscoroutine(inner):
            raise TypeError(f"a coroutine was expected, got {inner!r}")
        self.inner = inner
        self.task: _Task | None = None
        self.left = 0
        self.strike = Strike.WAITING
        self.__name__ = getattr(inner, "__name__", type(inner).__name__)
        self.__qualname__ = getattr(inner, "__qualname__", self.__name__)

    def arm(self, n: int, strike: Strike) -> None:
        """Strike at the ``n``-th suspension from now."""
        self.left, self.strike = n, strike

    def send(self, value: Any) -> Any:
        return self._suspended(self.inner.send(value))

    def throw(self, *error: Any) -> Any:
        return self._suspended(self.inner.throw(*error))

    def close(self) -> None:
        self.inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise TypeError("only a task runs this")

    def _suspended(self, awaited: Any) -> Any:
        if self.left:
            self.left -= 1
            if not self.left:
                self._hit(awaited)
        return awaited

    def _hit(self, awaited: Any) -> None:
        assert self.task is not None
        if self.strike is Strike.WAITING:
            self.task.cancel()
        elif isinstance(awaited, asyncio.Future):
            awaited.add_done_callback(_Racer(self.task))
        else:
            self.task.get_loop().call_soon(self.task.cancel)


class _Racer:
    """Cancels a task when what it awaits is done: the result is there, and the task never sees it."""

    def __init__(self, task: _Task) -> None:
        self.task = task

    def __call__(self, awaited: asyncio.Future[Any]) -> None:
        self.task.cancel()


def _finish_call(future: asyncio.Future[_T], func: Callable[..., _T], args: tuple[Any, ...]) -> None:
    try:
        result = func(*args)
    except BaseException as error:
        if not future.cancelled():
            future.set_exception(error)
        elif not isinstance(error, Exception):
            raise
    else:
        if not future.cancelled():
            future.set_result(result)


def _first_error(unhandled: list[dict[str, Any]]) -> BaseException:
    for context in unhandled:
        error = context.get("exception")
        if isinstance(error, BaseException):
            error.add_note(f"nobody caught it: {context.get('message')}")
            return error
    return RuntimeError(f"nobody handled: {unhandled}")


def _describe(tasks: set[asyncio.Task[Any]]) -> str:
    lines = [f"  {task.get_name()}: {_chain(task)}" for task in sorted(tasks, key=lambda task: task.get_name())]
    return "\n".join([f"{len(lines)} tasks wait", *lines])


def _chain(task: asyncio.Task[Any]) -> str:
    """Where a task stands, outermost first."""
    assert isinstance(task, _Task)
    places: list[str] = []
    step: Any = task.counted.inner
    while step is not None:
        frame = getattr(step, "cr_frame", None) or getattr(step, "gi_frame", None) or getattr(step, "ag_frame", None)
        if frame is None:
            places.append(repr(step)[:80])
            break
        places.append(f"{step.__qualname__}:{frame.f_lineno}")
        step = getattr(step, "cr_await", None) or getattr(step, "gi_yieldfrom", None) or getattr(step, "ag_await", None)
    return " > ".join(places)
