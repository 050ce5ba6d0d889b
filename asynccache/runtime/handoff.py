"""Work that another thread hands to the loop: it runs among the workers, and its outcome comes by a thread's future.

Law: a future that was handed out is answered, whatever happens: with the result, the error, or ``CacheClosed``. An
engine that gives up before the work begins stops it; from then on it cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from asynccache.errors import CacheClosed

if TYPE_CHECKING:
    from asynccache.runtime.machine import Machine

T = TypeVar("T")

Work = Callable[[], Coroutine[Any, Any, T]]


def hand_over(machine: Machine, work: Work[T]) -> Future[T]:
    """Have the loop run ``work`` soon, behind what was handed over before. For any thread."""
    future: Future[T] = Future()
    machine.loop.call_soon_threadsafe(_spawn, machine, work, future)
    return future


def _spawn(machine: Machine, work: Work[T], future: Future[T]) -> None:
    task = machine.supervisor.spawn(_deliver(work, future), "asynccache-handoff")
    if task is None:
        _closed(future)
    else:
        task.add_done_callback(lambda _: _closed(future))  # a task may be cancelled before it begins


async def _deliver(work: Work[T], future: Future[T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = await work()
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def _closed(future: Future[T]) -> None:
    if not future.done():
        with suppress(InvalidStateError):  # its thread gave up just now
            future.set_exception(CacheClosed("the cache was closed before the work was done"))
