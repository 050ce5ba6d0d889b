"""Core calls of tasks: holding the tree lock, calls in slices, the ack task, sleeping in line, waiting for operations.

What always holds:
* Under the tree lock there is the core's own work and ``sleep(0)`` between its slices; nothing else.
* A cancellation that arrives between two slices is kept until the last one is done. To cancel a mere wait stops the
  waiting and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TypeVar

from asynccache.core.plan import More, Plan, Status
from asynccache.runtime.driver import Driver, LinePlace, Operations, TreeLock

T = TypeVar("T")


class holding:
    """A context that holds the tree lock: ``async with holding(lock)`` takes the tree lock as ``acquire`` does, and
    releases it at the end."""

    __slots__ = ("_lock",)

    def __init__(self, lock: TreeLock) -> None:
        self._lock = lock

    async def __aenter__(self) -> None:
        await acquire(self._lock)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


async def acquire(lock: TreeLock) -> None:
    """Take the tree lock, after those who came before. Cancelling it takes nothing."""
    if lock.take():
        return
    waiter = lock.wait()
    try:
        await waiter
    except BaseException:  # a cancellation, or the coroutine is closed
        lock.withdraw(waiter)
        raise


async def slices(
    driver: Driver, call: Callable[[], T | More], check: Callable[[], object] | None = None
) -> tuple[T, asyncio.CancelledError | None]:
    """Under the lock: make the core call ``call`` until it answers, with a turn of the loop between slices. ``check``
    is called before each slice, and raises if there is no point in the call any more.

    Returns the answer, and the cancellation that came meanwhile; None: none came. The caller first performs the
    answer's plan, and then raises the cancellation.
    """
    cancelled: asyncio.CancelledError | None = None
    while True:
        if check is not None:
            check()
        if not isinstance(result := driver.call_locked(call), More):
            return result, cancelled
        driver.perform(result.plan)
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError as error:
            cancelled = error
        if driver.closed is None:
            driver.apply_outcomes()


async def drive(
    driver: Driver, call: Callable[[], T | More], done: Callable[[T], None], check: Callable[[], object] | None = None
) -> T:
    """Take the lock, apply outcomes, make the core call ``call`` in slices, and return its answer. ``done`` is called
    with the answer under the lock, and performs its plan.

    If the lock is free and one slice suffices, nothing is waited for. If ``drive`` is cancelled before the first slice,
    ``call`` is not made. If it is cancelled later, ``call`` is finished first, and ``done`` is called. ``check``: as in
    ``slices``.
    """
    async with holding(driver.lock):
        driver.apply_outcomes()
        answer, cancelled = await slices(driver, call, check)
        done(answer)
    if cancelled is not None:
        raise cancelled
    return answer


async def in_turns(driver: Driver, begin: Callable[[], Callable[[], T | More]], *, reads: bool = False) -> T:
    """Make the core call that ``begin`` returns until it answers, perform its plans, and return the answer. The lock is
    held for a slice at a time, and others go on between two slices. ``begin`` is a core call, too, and is made under
    the lock before the first slice. ``reads``: the call changes nothing, so it is made also if the cache is closed,
    unless the core's books may be wrong. Cancelling it leaves out the slices that were not made yet.

    Raises:
        CacheClosed: the cache is closed.
    """
    call: Callable[[], T | More] | None = None
    while True:
        async with holding(driver.lock):
            if driver.closed is None or not reads:
                driver.apply_outcomes()
            if call is None:
                call = driver.call_locked(begin)
            result = driver.call_locked(call)
            if isinstance(result, (Plan, More)):
                driver.perform(result.plan if isinstance(result, More) else result)
        if not isinstance(result, More):
            return result
        await asyncio.sleep(0)


async def run_acks(driver: Driver, freeze: Callable[[], object]) -> None:
    """The ack task, which applies outcomes and makes the commits of fetches when nobody else comes by: for ever, wait
    for an ack, take the lock once for all acks that wait by then, since taking it for each would starve behind calls in
    slices, apply them, and call ``freeze`` (``Head._freeze``). What the core leaves to the next slice is done after a
    turn of the loop. Cancelling it leaves what waits to the next holder of the lock.

    Raises:
        CacheClosed: the cache is closed.
    """
    while True:
        driver.take_in_hand(await driver.acks.get())
        async with holding(driver.lock):
            driver.apply_outcomes()
        freeze()
        if driver.core.behind:
            await asyncio.sleep(0)


async def woken(place: LinePlace, until: float | None = None) -> None:
    """Return when ``place`` was woken after ``Line.sleep``. Cancelling stops the waiting; the place stays taken.

    Raises:
        TimeoutError: ``until``, in the loop's time, came first.
    """
    signal = place.signal
    if signal is not None:
        try:
            async with asyncio.timeout_at(until):
                await signal
        finally:
            place.signal = None


async def first_ended(operations: Operations, ops: Iterable[int]) -> Status | None:
    """Return when one of ``ops`` has ended, with its status (None: one had ended before, or there are none)."""
    waiter = operations.watch(ops)
    if waiter is None:
        return None
    try:
        return await waiter
    finally:
        operations.unwatch(ops, waiter)


async def all_ended(operations: Operations, ops: Iterable[int]) -> list[Status]:
    """Return when each of ``ops`` has ended, with the statuses of those that were in flight."""
    watched = [(op, waiter) for op in ops if (waiter := operations.watch((op,))) is not None]
    try:
        return [await waiter for _, waiter in watched]
    finally:
        for op, waiter in watched:
            operations.unwatch((op,), waiter)
            if not waiter.cancel() and not waiter.cancelled():
                waiter.exception()  # else asyncio complains of an error that nobody has looked at
