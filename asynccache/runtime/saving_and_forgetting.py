"""Calls that concern many pages at once: to save all pages of a cache, or to forget a namespace or all of them.

Law: they go over the tree in slices, and hold the tree lock for one slice at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from asynccache.core.cache import Listing, Unsaved
from asynccache.core.plan import More, Plan, Status
from asynccache.errors import BackendError
from asynccache.runtime.driving import all_ended, in_turns
from asynccache.worker.local import MOMENT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asynccache.runtime.driver import Driver
    from asynccache.runtime.outbox import Outbox
    from asynccache.runtime.prefetching import Prefetching
    from asynccache.worker.local import LocalWorker

HOPELESS_ROUNDS = 3
"""After so many rounds in a row in which no backup was DONE, nothing more is tried."""


async def drain(driver: Driver) -> Unsaved:
    """Back everything up to host and storage. Returns what could not be saved, for want of room or because every
    attempt of ``HOPELESS_ROUNDS`` rounds failed.

    Cancelling it stops the waiting; backups that began go on.
    """
    failures, core = 0, driver.core
    while failures < HOPELESS_ROUNDS:
        await in_turns(driver, lambda: partial(core.drain, core.walk()))
        if not driver.saving:
            break
        statuses = await all_ended(driver.ops, tuple(driver.saving))
        failures = 0 if Status.DONE in statuses else failures + 1
    return await unsaved(driver)


async def unsaved(driver: Driver) -> Unsaved:
    """Return how many pages a close would lose now, if it saved nothing. Works on a closed cache, too. Cancelling it
    changes nothing."""
    return await in_turns(driver, lambda: driver.core.survey().unsaved, reads=True)


async def flush(driver: Driver, worker: LocalWorker) -> Unsaved:
    """``drain``, then have the stores make durable what they were given. See ``AsyncCache.flush``."""
    left = await drain(driver)
    if worker.has_stores:
        await worker.flush()
    return left


async def forget(
    driver: Driver, worker: LocalWorker, prefetching: Prefetching, outbox: Outbox, space: bytes
) -> None:
    """Drop a namespace on device, host and, as far as the tree knows it, in storage.

    ``space``: the digest that the namespace had; the caller has given it another one, so nobody finds these pages any
    more. Leases finish undisturbed and publish nothing more. Cancelling it may leave the pages where they are, out of
    reach.

    Writes of these pages that are under way are waited for no longer than ``longest_write`` says. A page that is
    written later stays in storage, out of reach.
    """
    prefetching.cancel(space)
    listing: Listing | None = None

    def invalidate() -> Plan | More:
        nonlocal listing
        if worker.has_stores:
            listing = driver.core.listing(space)  # in the same step: no page comes in between, and none is left out
        return driver.core.invalidate(space)

    await _invalidate(driver, invalidate)
    if (begun := listing) is not None:
        pages, writes = await in_turns(driver, lambda: begun.some)
        outbox.outdate(writes)
        await _ended_in_time(driver, writes, worker)
        await worker.delete(pages)


async def forget_all(driver: Driver, worker: LocalWorker, prefetching: Prefetching, outbox: Outbox) -> None:
    """Drop every namespace on every tier. Pages that are published meanwhile go to storage afterwards.

    Leases finish undisturbed and publish nothing more. If it is cancelled while it waits for the tree lock, no page is
    forgotten. Cancelling it later leaves no page of device and host in reach, and may leave storage as it was.

    Raises:
        BackendError: a store could not be cleared, or it still writes pages of the old tree after the time that
            ``longest_write`` says; these pages may be in it.
    """
    prefetching.cancel()
    if not worker.takes_stores:
        await _invalidate(driver, lambda: driver.core.invalidate(None))
        return
    under_way: set[int] = set()

    def invalidate() -> Plan | More:
        outbox.outdate()
        under_way.update(driver.saving - outbox.waiting, prefetching.operations())
        return driver.core.invalidate(None)

    with outbox.held_back():
        await _invalidate(driver, invalidate)
        ended = await _ended_in_time(driver, under_way, worker)
        await worker.clear()
    if not ended:
        raise BackendError("reset: a store has not ended its writes in time: pages from before may be found in it")


async def _invalidate(driver: Driver, begin: Callable[[], Plan | More]) -> None:
    """Make the core call ``begin``, which invalidates something, and drop the dead nodes. If it is cancelled after that
    call, the dead nodes leave with the calls that follow."""
    call = begin

    def some() -> Plan | More:
        nonlocal call
        now, call = call, driver.core.sweep
        return now()

    await in_turns(driver, lambda: some)


def longest_write(worker: LocalWorker) -> float:
    """Return for how many seconds a write may be under way after the outbox has given it up: it waits for its place,
    and then for the store, for ``timeout`` seconds each. A store that takes longer does not let go of its buffers."""
    return 2 * max((entry.options.timeout for entry in worker.stores), default=0.0) + MOMENT


async def _ended_in_time(driver: Driver, ops: Iterable[int], worker: LocalWorker) -> bool:
    """Wait until the operations ``ops`` have ended, but not longer than ``longest_write``. Returns whether they have
    ended. Cancelling it stops the waiting."""
    try:
        async with asyncio.timeout(longest_write(worker)):
            await all_ended(driver.ops, tuple(ops))
    except TimeoutError:
        return False
    return True
