"""Stores come and go while requests are in flight.

Laws:
* A store is opened, and told of the host's memory, before anybody waits for it; it is there from one core call on.
* It is gone from one core call on, and of no page is it known then that it is stored. Who reads from it or writes to it
  finishes; then it is closed, by a task of the cache's own.
* Neither makes a request wait or fail: what a store cannot give any more is computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from asynccache import checks
from asynccache.core.cache import Access, Backfill, Filled, Unsaved
from asynccache.core.plan import BackupStorage
from asynccache.errors import BackendError, CacheClosed, ConfigError, Unavailable
from asynccache.runtime.saving import drain, unsaved
from asynccache.runtime.together import on_all, together
from asynccache.storage import CheckedStore, StorageBackend
from asynccache.storage.attaching import close_unattached, open_attached
from asynccache.storage.records import store_layout
from asynccache.storage.tiers import Attached, TieredStore

if TYPE_CHECKING:
    from asynccache.runtime.machine import Machine

BACKFILL_OPS = 16
BACKFILL_SHARE = 0.25
"""What a backfill has in flight: so many backups to storage (one worker takes them at once), on such a share of the
pages that may wait for storage; who publishes new pages has the rest."""


def access_of(store: TieredStore) -> Access:
    """What may be done with all that is attached."""
    if not store:
        return Access.NONE
    return Access.WRITE if store.writes else Access.READ


def check_storage(name: str, storage: object) -> None:
    """Raises ``ConfigError`` if ``storage``, which an argument called ``name`` gave, is nothing that can be a store."""
    if isinstance(storage, str):
        checks.text(name, storage)
    elif not isinstance(storage, CheckedStore):
        checks.provider(name, storage, StorageBackend)  # type: ignore[type-abstract]


async def attach(
    machine: Machine, storage: str | StorageBackend | CheckedStore, options: Mapping[str, str], position: int | None,
    *, backfill: bool,
) -> str:  # fmt: skip
    """See ``AsyncCache.attach_storage``. On every rank or on none."""
    store = machine.tiers()
    opening = partial(_open, machine, storage, options, position)
    attached, cancelled = await on_all(machine.driver, "attach_storage", opening, close_unattached, Unavailable)
    try:
        machine.check_open()
        await _add(machine, attached, position, backfill=backfill)
    finally:
        if attached not in store.attached:
            await close_unattached(attached)
    if cancelled is not None:
        raise cancelled
    return attached.options.name


async def _open(
    machine: Machine, storage: str | StorageBackend | CheckedStore, options: Mapping[str, str], position: int | None
) -> Attached:
    """Everything that may fail on one rank alone."""
    store = machine.tiers()
    layout = store_layout(machine.config.pools())
    attached = await open_attached(storage, layout, options, lambda taken: store.check(taken, position))
    try:
        machine.introduce(attached)
        store.introduce(attached, position)
    except BaseException:
        await close_unattached(attached)
        raise
    return attached


async def _add(machine: Machine, attached: Attached, position: int | None, *, backfill: bool) -> None:
    """Whoever fails or is cancelled has attached nothing."""
    store, driver = machine.tiers(), machine.driver
    async with driver.lock:
        driver.settle()
        _note(machine, f"attach_storage {attached.options.name!r}", (attached.options.write, position, backfill))
        store.attach(attached, position)
        driver.perform(driver.locked(machine.core.attach_storage, access_of(store)))
        if machine.announcing is not None:
            machine.announcing.begin(attached)
        stores = backfill and attached.options.write
        if stores or machine.announcing is not None:
            walk = machine.core.backfill(store=stores)
            player = driver.turns.play(partial(_backfill, machine, attached, walk))
            machine.supervisor.spawn(player, "asynccache-backfill")


async def _backfill(machine: Machine, attached: Attached, walk: Backfill) -> None:
    """Have the new store told what the tree knows, some operations at a time. Cancelling it leaves the rest out."""
    driver, over = machine.driver, False
    host = machine.core.config.components[0].host
    pages = int(host * machine.config.backup_quota * BACKFILL_SHARE)

    def perform(filled: Filled) -> None:
        driver.perform(filled.plan)

    try:
        while attached.there and not over:
            filled = await driver.run(_slice(walk, pages), perform)
            plan, over = filled
            await driver.ops.all([effect.op for effect in plan.effects if isinstance(effect, BackupStorage)])
            await asyncio.sleep(0)
    except CacheClosed:
        pass  # and with it the store


def _slice(walk: Backfill, pages: int) -> Callable[[], Filled]:
    return lambda: walk.some(BACKFILL_OPS, pages)


async def detach(machine: Machine, name: str | None, deadline: float | None) -> Unsaved:
    """See ``AsyncCache.detach_storage``. ``deadline``: seconds that saving may take; None: nothing is saved."""
    store = machine.tiers()
    attached = store.find(name)
    if deadline is not None and attached.options.write:
        await _save(machine, deadline)
    left = await unsaved(machine)
    driver, failed = machine.driver, list[BackendError]()
    async with driver.lock:
        driver.settle()
        if not attached.there:
            raise ConfigError(f"storage: {attached.options.name!r} was detached by somebody else meanwhile")
        _note(machine, f"detach_storage {attached.options.name!r}", ())
        store.detach(attached)
        if machine.announcing is not None:
            machine.announcing.end(attached)
        closing = machine.supervisor.spawn(_leave(machine, store, attached, failed), "asynccache-detach")
        driver.perform(driver.locked(machine.core.detach_storage, access_of(store)))

    async def closed() -> None:
        if closing is not None:
            await asyncio.wait([closing])
        if failed:
            raise failed[0]

    await together(driver, "detach_storage", closed)
    return left


def _note(machine: Machine, what: str, terms: tuple[object, ...]) -> None:
    """Several ranks: they use the same store, by the same name, in the same way."""
    if machine.lockstep is not None:
        machine.lockstep.record(what, repr(terms).encode())


async def _save(machine: Machine, deadline: float) -> None:
    try:
        async with asyncio.timeout(None if machine.lockstep is not None else deadline):  # clocks differ
            await drain(machine)
    except TimeoutError:
        pass  # what is returned says what that leaves


async def _leave(machine: Machine, store: TieredStore, attached: Attached, failed: list[BackendError]) -> None:
    """See a detached store off. What goes wrong there is told to who waits for it, and ends nothing."""
    try:
        if machine.announcing is not None:
            await machine.announcing.forget(attached)
        await store.aclose_detached(attached)
    except Exception as error:  # a plug-in's bug, too, is its own affair
        failed.append(BackendError(f"{attached.options.name}: closing it failed: {error!r}"))
        failed[0].__cause__ = error
