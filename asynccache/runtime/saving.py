"""What the cache does to all of its pages at once: save them, or forget them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from asynccache.core.cache import Survey, Unsaved
from asynccache.core.plan import More, Plan, Status
from asynccache.runtime.prefetch import Wish
from asynccache.runtime.together import together

if TYPE_CHECKING:
    from asynccache.runtime.clearing import Clearing
    from asynccache.runtime.machine import Machine
    from asynccache.storage import PageKey

T = TypeVar("T")

DELETE_BATCH = 128
HOPELESS_ROUNDS = 3


async def drain(machine: Machine) -> Unsaved:
    """Back everything up to host and storage; what could not be saved, because every attempt of several rounds failed
    or there was no room.

    Cancelling it stops the waiting; backups that began go on.
    """
    driver, failures = machine.driver, 0
    while failures < HOPELESS_ROUNDS:
        await driver.transact(machine.core.drain)
        if not driver.saving:
            break
        statuses = await driver.all_ended(tuple(driver.saving))
        failures = 0 if Status.DONE in statuses else failures + 1
    return await unsaved(machine)


async def unsaved(machine: Machine) -> Unsaved:
    """What would be lost if the process ended now. Cancelling it does nothing."""
    return await _survey(machine, None, Survey.unsaved)


async def _survey(machine: Machine, space: bytes | None, question: Callable[[Survey], T | More]) -> T:
    """Begun and ended under one hold of the lock; also when the cache is closed."""
    driver = machine.driver
    async with driver.lock:
        if driver.closed is None:
            driver.settle()
        survey = machine.core.survey(space)
        answer: T
        answer, cancelled = await driver.slices(lambda: question(survey))
    if cancelled is not None:
        raise cancelled
    return answer


async def flush(machine: Machine) -> Unsaved:
    """``drain``, and what storage has is durable. See ``AsyncCache.flush``."""
    left = await drain(machine)
    if machine.store:
        await together(machine.driver, "flush", machine.store.flush)
    return left


async def forget(machine: Machine, space: bytes) -> None:
    """Drop a namespace on device, host and, as far as the tree knows it, in storage.

    Leases finish undisturbed and publish nothing more. Cancelling it may leave stored pages undeleted.
    """
    _cancel_prefetches(machine, space)
    stored = await _survey(machine, space, Survey.hashes) if machine.stores else []
    await machine.driver.transact(lambda: machine.core.invalidate(space))
    if machine.stores:
        await machine.driver.all_ended(tuple(machine.driver.saving))
        await together(machine.driver, "invalidate", lambda: _delete(machine, stored))


async def forget_all(machine: Machine) -> None:
    """Drop every namespace on every tier. What is published meanwhile goes to storage afterwards.

    Leases finish undisturbed and publish nothing more. Cancelling it may leave storage as it was.
    """
    _cancel_prefetches(machine, None)
    if machine.clearing is None:
        await machine.driver.transact(lambda: machine.core.invalidate(None))
        return
    machine.clearing.begin()
    try:
        await _clear(machine, machine.clearing)
    finally:
        machine.clearing.end()


async def _clear(machine: Machine, clearing: Clearing) -> None:
    assert machine.store is not None
    assert machine.prefetching is not None

    def invalidate() -> Plan | More:
        clearing.outdate()
        return machine.core.invalidate(None)

    await machine.driver.transact(invalidate)
    under_way = machine.driver.saving - clearing.held
    await machine.driver.all_ended((*under_way, *machine.prefetching.operations()))
    await together(machine.driver, "reset", machine.store.clear)


def _cancel_prefetches(machine: Machine, space: bytes | None) -> None:
    if machine.prefetching is not None:
        for handle in tuple(machine.prefetching.handles):
            if space is None or handle.space == space:
                handle.tell(Wish.CANCEL)


async def _delete(machine: Machine, hashes: list[bytes]) -> None:
    assert machine.store is not None
    keys: Iterator[PageKey] = (machine.pools.key(pool, page) for page in hashes for pool, _ in machine.pools.named())
    while batch := list(islice(keys, DELETE_BATCH)):
        await machine.store.delete(batch)
        await asyncio.sleep(0)
