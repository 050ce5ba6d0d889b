"""Work that uses the caller's buffers: waiting for it, counting it, and the threads that do it.

A waiter that is cancelled still returns only when the work has ended: until then the buffers are in use. A future is
*settled* once it is done: with a result, with an error, or cancelled.

A ``ThreadPool`` has a few threads that do blocking work for one event loop. Work begins in the order in which it was
handed in. This is what ``loop.run_in_executor`` does with a ``ThreadPoolExecutor``, at half the price: a call takes
30 µs of CPU instead of 60 on the machine of docs/performance.md. It has one future instead of two, and one wake-up of
the loop for all calls that have ended since the last one.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from asynccache import checks
from asynccache.errors import ConfigError, Unavailable

P = ParamSpec("P")
T = TypeVar("T")


async def settled(futures: Sequence[asyncio.Future[Any]]) -> None:
    """Wait until every future is done. Their results and errors are left in them.

    If it is cancelled it cancels none of the futures, waits until all of them are done, and then raises CancelledError.

    Raises:
        ConfigError: ``futures`` is not a list or tuple of futures.
    """
    for future in checks.instance("futures", futures, (list, tuple)):
        if not asyncio.isfuture(future):
            raise ConfigError(f"futures: {checks.shown(future)} is none")
    cancelled: asyncio.CancelledError | None = None
    while waiting := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(waiting)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        try:
            raise cancelled
        finally:
            del cancelled  # else it and this frame would keep each other and the caller's buffers alive


async def completed(work: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine ``work`` to its end, and return what it returns or raise what it raises.

    If this is cancelled, ``work`` is not: it is waited for, its result or error is dropped, and then CancelledError is
    raised.

    Raises:
        ConfigError: ``work`` is not a coroutine.
    """
    work = checks.instance("work", work, Coroutine)
    return await _ended(asyncio.get_running_loop().create_task(work))


async def completed_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``function`` in a thread of the loop's default executor, wait for its end, and return what it returns or
    raise what it raises.

    If this is cancelled, the function is waited for, its result or error is dropped, and then CancelledError is raised.
    That also holds when all tasks are cancelled, as ``asyncio.run`` does at its end: no task stands for the thread.

    Raises:
        ConfigError: ``function`` is not callable.
    """
    call = partial(checks.function("function", function), *args, **kwargs)
    return await _ended(asyncio.get_running_loop().run_in_executor(None, call))


async def _ended(future: asyncio.Future[T]) -> T:
    """Wait until ``future`` is done, and return its result or raise its error. If this is cancelled, ``future`` is
    waited for, its result or error is dropped, and then CancelledError is raised."""
    try:
        await settled([future])
    except asyncio.CancelledError:
        if not future.cancelled():
            future.exception()  # else asyncio would log that nobody has read it
        raise
    try:
        return future.result()
    finally:
        del future  # for the same reason as in ``settled``


async def each(items: Sequence[T], work: Callable[[T], Awaitable[object]], at_once: int) -> None:
    """Do ``work`` for each of ``items``, in their order, for ``at_once`` of them at a time. After the first error, or
    if this is cancelled, what is under way is cancelled and waited for."""
    left = iter(items)

    async def some() -> None:
        for item in left:
            await work(item)

    tasks = [asyncio.get_running_loop().create_task(some()) for _ in range(min(at_once, len(items)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await settled(tasks)


class OpenCalls:
    """The calls under way in something that can be closed. Every call runs in ``with calls:``, which raises Unavailable
    once ``closed`` is true. ``name`` is what that error calls the thing. ``ended`` is set while no call is under
    way."""

    def __init__(self, name: str) -> None:
        self.closed = False
        self.running = 0
        self.ended = asyncio.Event()
        self.ended.set()
        self._name = checks.text("name", name)

    def __enter__(self) -> None:
        if self.closed:
            raise Unavailable(f"{self._name} is closed")
        self.running += 1
        self.ended.clear()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.running -= 1
        if not self.running:
            self.ended.set()

    async def close(self) -> None:
        """Refuse new calls, and wait until none is under way. Cancelling it does not shorten the waiting."""
        self.closed = True
        await completed(self.ended.wait())


MOST_THREADS = 1024
INLINE_BYTES = 128 << 10
"""Up to this many bytes are copied or checksummed on the loop: handing them to a thread would cost more."""
BATCH_BYTES = 4 << 20


class ThreadPool(Executor):
    """``count`` threads, which are started at the first call. They are daemon threads, so the process can end even if
    ``close`` was never called. ``name`` is the beginning of the threads' names. With a ``count`` of 0 all work is done
    on the loop, for simulations.

    It is an ``Executor``, so that ``loop.run_in_executor`` and libraries such as ``aiofiles`` can use its threads. Even
    then it belongs to one loop."""

    def __init__(self, count: int, name: str) -> None:
        self._count = checks.integer("count", count, 0, MOST_THREADS)
        self._name = checks.text("name", name)
        self._closed = False
        self._loop: asyncio.AbstractEventLoop
        self._calls: SimpleQueue[tuple[asyncio.Future[Any], partial[Any]] | None] = SimpleQueue()
        self._done: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._waking = False
        self._threads: list[Thread] = []

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Call ``function`` in a thread. Returns a future of what it returns.

        Cancelling the future does not stop the function. A caller whose buffers it uses has to wait for it by
        ``settled``.

        Raises:
            ConfigError: ``function`` is not callable.
            Unavailable: ``close`` was called.
        """
        checks.function("function", function)
        if not self._threads:
            self._start()
        future: asyncio.Future[T] = self._loop.create_future()
        work = partial(function, *args, **kwargs)
        if self._count:
            self._calls.put((future, work))
        else:
            self._done.append((future, *_outcome(work)))
            self._deliver()
        return future

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` in a thread, wait for its end, and return what it returns or raise what it raises. If this
        is cancelled, it waits for that end all the same, so that the function's buffers are free. Raises as ``call``
        does."""
        return await _ended(self.call(function, *args, **kwargs))

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call ``function`` in a thread, for those who want an ``Executor``. The call cannot be cancelled. Raises as
        ``call`` does."""
        checks.function("function", function)
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        self.call(lambda: _end(future, *_outcome(partial(function, *args, **kwargs))))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do the same as ``close``. No call is cancelled."""
        self.close()

    async def run_for(self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do the same as ``run`` for work on ``size`` bytes; up to ``INLINE_BYTES`` it is done on the loop."""
        if checks.integer("size", size) > INLINE_BYTES:
            return await self.run(function, *args, **kwargs)
        return checks.function("function", function)(*args, **kwargs)

    async def spread(self, function: Callable[..., T], sizes: Sequence[int], *columns: Sequence[Any]) -> list[T]:
        """Divide a list of things among several calls of ``function``, so that all threads have work, and return what
        the calls returned, in order.

        ``sizes`` has the bytes of each thing, and each of ``columns`` has one item for each thing. A call is for a run
        of things and gets that slice of every column. Up to ``INLINE_BYTES`` in all are done in one call on the loop,
        and so is everything once the threads are closed. Cancelling it waits until no thread uses the things any more.
        Raises what ``function`` raises.
        """
        checks.function("function", function)
        if sum(sizes) <= INLINE_BYTES or self._closed:
            return [function(*columns)]
        futures = [self.call(function, *(column[part] for column in columns)) for part in _batches(sizes)]
        await settled(futures)
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads once they have made all calls that were handed in. Blocks the event loop. Futures that are
        not done by then may never be, so nobody may be waiting for one. Calling it twice is fine.

        Once the loop is closed, or the interpreter ends, the threads are not waited for: one of them may hang, and it
        must not keep the process from ending."""
        self._closed = True
        for _ in self._threads:
            self._calls.put(None)
        if self._threads and not self._loop.is_closed() and not sys.is_finalizing():
            for thread in self._threads:
                thread.join()
        self._threads.clear()

    def _start(self) -> None:
        if self._closed:
            raise Unavailable(f"{self._name}: closed")
        self._loop = asyncio.get_running_loop()
        self._threads = [Thread(target=self._work, name=f"{self._name}-{i}", daemon=True) for i in range(self._count)]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            self._done.append((call[0], *_outcome(call[1])))
            del call  # or an idle thread would keep the last call's buffers alive
            if not self._waking:
                self._waking = True
                with suppress(RuntimeError):  # the loop was closed, so nobody waits for the future any more
                    self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        """Make the futures of the calls that have ended done. Runs on the loop."""
        self._waking = False  # first, so that a call which ends from now on wakes the loop again
        while self._done:
            future, result, error = self._done.popleft()
            if not future.cancelled():
                _end(future, result, error)


def _batches(sizes: Sequence[int]) -> Iterator[slice]:
    """Cut things of these sizes into runs of about ``BATCH_BYTES``, with at least one thing each."""
    start = total = 0
    for i, size in enumerate(sizes):
        total += size
        if total >= BATCH_BYTES:
            yield slice(start, i + 1)
            start, total = i + 1, 0
    if start < len(sizes):  # not ``if total``: things of no bytes may be all that is left
        yield slice(start, len(sizes))


def _end(future: Any, result: object, error: BaseException | None) -> None:
    """Make a future of asyncio or of ``concurrent.futures`` done."""
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def _outcome(work: partial[Any]) -> tuple[Any, BaseException | None]:
    """Call ``work``. Returns its result and its error."""
    try:
        return work(), None
    except StopIteration as error:  # a future takes no StopIteration, so its waiter would wait for ever
        return None, RuntimeError(f"{work.func!r} raised {error!r}")
    except BaseException as error:
        return None, error
