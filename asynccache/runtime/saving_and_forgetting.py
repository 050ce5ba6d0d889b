"""Calls that concern many pages at once: to save all pages of a cache, or to forget a namespace or all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from asynccache.core.cache import Survey, Unsaved
from asynccache.core.plan import More, Plan, Status
from asynccache.runtime.driving import all_ended, holding, slices, transact

if TYPE_CHECKING:
    from asynccache.runtime.driver import Driver
    from asynccache.runtime.outbox import Outbox
    from asynccache.runtime.prefetching import Prefetching
    from asynccache.worker.contract import Worker

T = TypeVar("T")

HOPELESS_ROUNDS = 3
"""After so many rounds in a row in which no backup was DONE, nothing more is tried."""


async def drain(driver: Driver) -> Unsaved:
    """Back everything up to host and storage. Returns what could not be saved, for want of room or because every
    attempt of ``HOPELESS_ROUNDS`` rounds failed.

    Cancelling it stops the waiting; backups that began go on.
    """
    failures = 0
    while failures < HOPELESS_ROUNDS:
        await transact(driver, driver.core.drain)
        if not driver.saving:
            break
        statuses = await all_ended(driver.ops, tuple(driver.saving))
        failures = 0 if Status.DONE in statuses else failures + 1
    return await unsaved(driver)


async def unsaved(driver: Driver) -> Unsaved:
    """Return how many pages a close would lose now, if it saved nothing. Cancelling it changes nothing."""
    return await _survey(driver, None, Survey.unsaved)


async def _survey(driver: Driver, space: bytes | None, question: Callable[[Survey], T | More]) -> T:
    """Return the answer to ``question``, which is asked in slices while the tree lock is held. ``space``: the namespace
    that is looked at; None: all of them. Works on a closed cache, too. Cancelling it changes nothing."""
    async with holding(driver.lock):
        if driver.closed is None:
            driver.apply_outcomes()
        survey = driver.core.survey(space)
        answer: T
        answer, cancelled = await slices(driver, lambda: question(survey))
    if cancelled is not None:
        raise cancelled
    return answer


async def flush(driver: Driver, worker: Worker) -> Unsaved:
    """``drain``, then have the stores make durable what they were given. See ``AsyncCache.flush``."""
    left = await drain(driver)
    if worker.has_stores:
        await worker.flush()
    return left


async def forget(driver: Driver, worker: Worker, prefetching: Prefetching, space: bytes) -> None:
    """Drop a namespace on device, host and, as far as the tree knows it, in storage.

    ``space``: the digest that the namespace had; the caller has given it another one, so nobody finds these pages any
    more. Leases finish undisturbed and publish nothing more. Cancelling it may leave the pages where they are, out of
    reach.
    """
    prefetching.cancel(space)
    stored = await _survey(driver, space, Survey.hashes) if worker.has_stores else []
    await transact(driver, lambda: driver.core.invalidate(space))
    if worker.has_stores:
        await all_ended(driver.ops, tuple(driver.saving))
        await worker.delete(stored)


async def forget_all(driver: Driver, worker: Worker, prefetching: Prefetching, outbox: Outbox) -> None:
    """Drop every namespace on every tier. Pages that are published meanwhile go to storage afterwards.

    Leases finish undisturbed and publish nothing more. If it is cancelled while it waits for the tree lock, no page is
    forgotten. Cancelling it later leaves device and host empty, and may leave storage as it was.
    """
    prefetching.cancel()
    if not worker.takes_stores:
        await transact(driver, lambda: driver.core.invalidate(None))
        return

    def invalidate() -> Plan | More:
        outbox.outdate()
        return driver.core.invalidate(None)

    with outbox.held_back():
        await transact(driver, invalidate)
        under_way = driver.saving - outbox.waiting
        await all_ended(driver.ops, (*under_way, *prefetching.operations()))
        await worker.clear()
