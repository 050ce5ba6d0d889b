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
import threading
import warnings
from collections import deque
from collections.abc import Callable, Coroutine, Generator
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


class SimulatedLoop(asyncio.BaseEventLoop):
    """An asyncio event loop whose clock, order and executor come out of ``seed``.

    ``random`` is the loop's own source; ``entropy(name)`` makes further ones, each a function of seed and name, so that
    what one part of a world draws does not move what another part draws. ``unhandled``: what nobody caught, which
    ``simulate`` raises.
    """

    _ready: deque[asyncio.Handle]
    _thread_id: int | None

    def __init__(self, seed: int, *, order: Order = Order.SHUFFLED, step_limit: int = 5_000_000) -> None:
        super().__init__()
        self.seed = seed
        self.order = order
        self.steps = 0
        self.unhandled: list[dict[str, Any]] = []
        self.random = self.entropy("loop")
        self._step_limit = step_limit
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._serial = 0
        self.set_exception_handler(lambda _, context: self.unhandled.append(context))

    def __repr__(self) -> str:
        return f"<SimulatedLoop seed={self.seed} {self.order.value} t={self._now:.6f} steps={self.steps}>"

    def entropy(self, name: str) -> random.Random:
        """A source of randomness that depends on the seed and ``name`` alone."""
        return random.Random(f"{self.seed}/{name}")

    def time(self) -> float:
        """Virtual seconds since the world began."""
        return self._now

    def call_at(
        self, when: float, callback: Callable[[Unpack[_Ts]], object], *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Of two timers for one moment the first is the one that was set first."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, self._number(), handle))
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[_Ts]], object], *args: *_Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """The same as ``call_soon``: a simulated world has one thread, and another one's call is an error."""
        if self._thread_id not in (None, threading.get_ident()):
            raise RuntimeError("a second thread called into a simulated world: its timing cannot be replayed")
        return self.call_soon(callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        """A future that sets hash alike in every run."""
        return _Future(self, self._number())

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """A task that counts its awaits, for ``cancel_at``."""
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

    def _run_once(self) -> None:
        """One callback, or a jump to the next timer. asyncio's loop calls this until it is stopped.

        Raises:
            Deadlock: nothing can happen any more.
            Livelock: too much has happened.
        """
        while self._timers and self._timers[0][0] <= self._now:
            self._ready.append(heapq.heappop(self._timers)[2])
        if not self._ready:
            self._jump()
            return
        if self.order is Order.SHUFFLED and len(self._ready) > 1:
            self._ready.rotate(-self.random.randrange(len(self._ready)))
        handle = self._ready.popleft()
        if handle.cancelled():
            return
        self.steps += 1
        if self.steps > self._step_limit:
            raise Livelock(f"{self!r}: {_describe(asyncio.all_tasks(self))}")
        self._now += self.random.random() * 10 * MICROSECOND
        handle._run()

    def _jump(self) -> None:
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if not self._timers:
            raise Deadlock(f"{self!r}: {_describe(asyncio.all_tasks(self))}")
        self._now = max(self._now, self._timers[0][0])

    def _number(self) -> int:
        self._serial += 1
        return self._serial


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
    loop = SimulatedLoop(seed, order=order, step_limit=step_limit)
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
