"""What each rank does for itself, with one end for all: its store is opened, cleared, flushed, closed.

Laws:
* The vote is opened by the call, which every rank makes. The work runs in a task of its own and touches nothing that
  ranks share; how it ends is this rank's vote.
* The task that called steps until all have voted: a store may take longer than ranks wait for each other.
* All ranks go on at one step, with one answer: it went well everywhere, or everybody raises.
* Where the group ends meanwhile the call raises at once, however long the store holds on: ``settle`` waits for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from asynccache.errors import BackendError
from asynccache.ranks import Ballot
from asynccache.runtime.driver import Driver
from asynccache.settle import settled

T = TypeVar("T")

Work = Callable[[], Coroutine[Any, Any, T]]
Undo = Callable[[T], Coroutine[Any, Any, None]]
Cancelled = asyncio.CancelledError | None

PAUSE = 0.01


async def together(driver: Driver, what: str, work: Work[T]) -> T:
    """``work`` here, and on all other ranks what is theirs. Cancelling it cancels it on all of them; the second time,
    it leaves the group unusable.

    Raises:
        BackendError: it failed on another rank, or was cancelled there. If it failed here: its own error.
    """
    result, cancelled = await on_all(driver, what, work)
    if cancelled is not None:
        raise cancelled
    return result


async def on_all(
    driver: Driver, what: str, work: Work[T], undo: Undo[T] | None = None, error: type[BackendError] = BackendError
) -> tuple[T, Cancelled]:
    """``together``, for what is followed by calls that all ranks must make: the caller makes them first, and raises the
    cancellation, if one came too late to be heard by the others, then. ``undo``: of what went well in vain."""
    if not driver.lockstep:
        return await work(), None
    working = asyncio.get_running_loop().create_task(work(), name=f"asynccache-{what}")
    vote = driver.agreement.vote(working.cancel)
    working.add_done_callback(lambda task: vote.cast(_succeeded(task)))
    try:
        everywhere, cancelled = await _agreed(driver, vote)
    except BaseException:  # the group is over: the caller hears of it now, and who closes waits for the store
        working.cancel()
        driver.unsettled.append(asyncio.get_running_loop().create_task(_settled(working, undo)))
        raise
    if everywhere:
        return working.result(), cancelled
    if undo is not None:
        with suppress(BackendError):
            await together(driver, what, lambda: _undone(working, undo))
    if cancelled is not None:
        raise cancelled
    if not working.cancelled():
        working.result()
    raise error(f"{what}: another rank's store failed, or the call was cancelled there")


async def settle(driver: Driver) -> None:
    """Return when all that was under way when the group ended has let go. Cancelling it stops the waiting."""
    if driver.unsettled:
        await asyncio.wait(driver.unsettled)


async def _settled(working: asyncio.Task[T], undo: Undo[T] | None) -> None:
    await settled([working])
    with suppress(Exception):  # the cache has ended with another error
        await _undone(working, undo)


async def _agreed(driver: Driver, vote: Ballot) -> tuple[bool, Cancelled]:
    """What all ranks said. A cancellation is kept: half a step would be the end of the group."""
    stepping = asyncio.get_running_loop().create_task(_step(driver, vote), name="asynccache-stepping")
    cancelled: Cancelled = None
    while not stepping.done():
        try:
            await asyncio.wait([stepping])
        except asyncio.CancelledError as error:
            if cancelled is None:
                vote.withdraw()
            else:
                stepping.cancel()
            cancelled = error
    if driver.scheduler is stepping:
        driver.scheduler = asyncio.current_task()
    return stepping.result(), cancelled


async def _step(driver: Driver, vote: Ballot) -> bool:
    """At first as fast as others answer, then as steps are counted: opening may take minutes."""
    await driver.step()
    pause = PAUSE / 128
    while (said := vote.said) is None:
        await asyncio.sleep(pause)
        pause = min(PAUSE, 2 * pause)
        await driver.step()
    return said


def _succeeded(task: asyncio.Task[Any]) -> bool:
    return not task.cancelled() and task.exception() is None


async def _undone(working: asyncio.Task[T], undo: Undo[T] | None) -> None:
    if undo is not None and _succeeded(working):
        await undo(working.result())
