"""Forgetting: a namespace, or all of them, leaves every tier.

Forgetting goes over the tree in slices, and holds the tree lock for one slice at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from asynccache.core.cache import Listing
from asynccache.core.plan import More, Plan
from asynccache.errors import BackendError
from asynccache.runtime.core_calls import all_ended, in_turns
from asynccache.worker.local import MOMENT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asynccache.runtime.driver import Driver
    from asynccache.runtime.prefetch import Prefetches
    from asynccache.runtime.save import Backups
    from asynccache.worker.local import LocalWorker


async def forget(driver: Driver, worker: LocalWorker, prefetches: Prefetches, backups: Backups, space: bytes) -> None:
    """Drop a namespace on device, host and, as far as the tree knows it, in storage.

    ``space``: the digest that the namespace had; the caller has given it another one, so nobody finds these pages any
    more. Leases finish undisturbed and publish nothing more. Cancelling it may leave the pages where they are, out of
    reach.

    Writes of these pages that are under way are waited for no longer than ``longest_write`` says. A page that is
    written later stays in storage, out of reach.
    """
    prefetches.cancel(space)
    listing: Listing | None = None

    def invalidate() -> Plan | More:
        nonlocal listing
        if worker.has_stores:
            listing = driver.core.listing(space)  # in the same step: no page comes in between, and none is left out
        return driver.core.invalidate(space)

    await _invalidate(driver, invalidate)
    if (begun := listing) is not None:
        pages, writes = await in_turns(driver, lambda: begun.some)
        backups.outdate(writes)
        await _ended_in_time(driver, writes, worker)
        await worker.delete(pages)


async def forget_all(driver: Driver, worker: LocalWorker, prefetches: Prefetches, backups: Backups) -> None:
    """Drop every namespace on every tier. Pages that are published meanwhile go to storage afterwards.

    Leases finish undisturbed and publish nothing more. If it is cancelled while it waits for the tree lock, no page is
    forgotten. Cancelling it later leaves no page of device and host in reach, and may leave storage as it was.

    Raises:
        BackendError: a store could not be cleared, or it still writes pages of the old tree after the time that
            ``longest_write`` says; these pages may be in it.
    """
    prefetches.cancel()
    if not worker.takes_stores:
        await _invalidate(driver, lambda: driver.core.invalidate(None))
        return
    under_way: set[int] = set()

    def invalidate() -> Plan | More:
        backups.outdate()
        under_way.update(driver.saving - backups.waiting, prefetches.operations())
        return driver.core.invalidate(None)

    with backups.held_back():
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
    """Return for how many seconds a write may be under way after its backup was given up: it waits for its place,
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
