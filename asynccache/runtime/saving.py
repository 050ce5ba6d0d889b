"""What the cache does to all of its pages at once: save them, or forget them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from asynccache.core.cache import Unsaved
from asynccache.core.plan import Status
from asynccache.runtime.hashing import HASH_BYTES
from asynccache.runtime.prefetch import Wish

if TYPE_CHECKING:
    from asynccache.runtime.machine import Machine
    from asynccache.storage import PageKey

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
        statuses = await driver.ops.all(tuple(driver.saving))
        failures = 0 if Status.DONE in statuses else failures + 1
    return machine.core.unsaved()


async def forget(machine: Machine, space: bytes | None) -> None:
    """Drop a namespace (None: all of them) on device, host and, as far as the tree knows it, in storage.

    Leases finish undisturbed and publish nothing more. Cancelling it may leave stored pages undeleted.
    """
    if machine.prefetching is not None:
        for handle in tuple(machine.prefetching.handles):
            if space is None or handle.space == space:
                handle.tell(Wish.CANCEL)
    stored = list(_hashes(machine, space)) if machine.store is not None and space is not None else []
    await machine.driver.transact(lambda: machine.core.invalidate(space))
    if machine.store is None:
        return
    await machine.driver.ops.all(tuple(machine.driver.saving))
    if space is None:
        await machine.store.clear()
    else:
        await _delete(machine, stored)


def _hashes(machine: Machine, space: bytes | None) -> Iterator[bytes]:
    """The prefix hash of every page that the tree has in ``space``."""
    root = machine.core.world.roots.get(space) if space is not None else None
    nodes = list((root.children or {}).values()) if root is not None else []
    while nodes:
        node = nodes.pop()
        nodes.extend((node.children or {}).values())
        yield from (node.hashes[at : at + HASH_BYTES] for at in range(0, len(node.hashes), HASH_BYTES))


async def _delete(machine: Machine, hashes: list[bytes]) -> None:
    assert machine.store is not None
    keys: Iterator[PageKey] = (machine.pools.key(pool, page) for page in hashes for pool, _ in machine.pools.named())
    while batch := list(islice(keys, DELETE_BATCH)):
        await machine.store.delete(batch)
        await asyncio.sleep(0)
