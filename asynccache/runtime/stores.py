"""Stores come and go while requests are in flight.

What always holds:
* A store is opened, told of the host's memory, and asked for all of its keys if they are announced, before the tree
  lock is taken. One core call makes it usable.
* One core call ends its use, and with that call the tree forgets which pages are stored. Reads and writes that are
  under way finish; then a task of the cache closes the store.
* Neither makes a request wait or fail. What a store cannot give any more is computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from asynccache.core.cache import Access, Backfill, Filled, Unsaved
from asynccache.core.plan import BackupStorage
from asynccache.errors import BackendError, CacheClosed, ConfigError
from asynccache.runtime.core_calls import all_ended, drive, holding
from asynccache.runtime.forget import longest_write
from asynccache.runtime.save import drain, unsaved
from asynccache.worker.local import LocalWorker, Storage, StoreEntry

if TYPE_CHECKING:
    from asynccache.runtime.announcer import NoticeQueue
    from asynccache.runtime.driver import Driver
    from asynccache.runtime.supervisor import Supervisor

BACKFILL_OPS = 16
BACKFILL_SHARE = 0.25
"""The bounds of what a backfill has in flight: the number of backups to storage, and their share of the pages that may
wait for storage. The rest of that room is for pages that are published meanwhile."""


class StoreAttachments:
    """Attaches and detaches stores. ``backlog``: how many pages of FULL may wait for storage."""

    def __init__(
        self, driver: Driver, worker: LocalWorker, announcer: NoticeQueue | None, supervisor: Supervisor, backlog: int
    ) -> None:
        self._driver = driver
        self._worker = worker
        self._announcer = announcer
        self._supervisor = supervisor
        self._backfill_pages = int(backlog * BACKFILL_SHARE)

    def __repr__(self) -> str:
        return f"StoreAttachments({', '.join(entry.options.name for entry in self._worker.stores)})"

    async def begin(self) -> None:
        """Use the stores that were opened with the cache. Cancelling it uses none."""
        for store in self._worker.stores:
            if self._announcer is not None:
                await self._announcer.begin(store.number)
        self._driver.core.attach_storage(self._access())

    def _access(self) -> Access:
        """Return the access that the stores in use allow, taken together: writing, if one of them is written."""
        stores = self._worker.stores
        if not stores:
            return Access.NONE
        return Access.WRITE if any(store.options.write for store in stores) else Access.READ

    async def attach(
        self, storage: Storage, options: Mapping[str, str], position: int | None, *, backfill: bool
    ) -> str:
        self._check_host()
        driver, worker, announcer = self._driver, self._worker, self._announcer
        opened = await worker.open_store(storage, options, position)
        try:
            driver.check_ready()
            if announcer is not None:
                await announcer.begin(opened.number)
            async with holding(driver.lock):
                driver.apply_outcomes()
                worker.use_store(opened.number, position)
                driver.perform(driver.call_locked(driver.core.attach_storage, self._access()))
                stores = backfill and opened.options.write
                if stores or announcer is not None:
                    walk = driver.core.backfill(store=stores)
                    self._supervisor.spawn(self._backfill(opened.number, walk), "asynccache-backfill")
        finally:
            if not self._is_used(opened.number):
                try:
                    if announcer is not None:
                        announcer.end(opened.number)
                        await announcer.forget(opened.number)
                finally:
                    await worker.drop_store(opened.number)
        return opened.options.name

    def _check_host(self) -> None:
        if not self._worker.takes_stores:
            raise ConfigError("storage: it needs a host tier, and host_tokens is 0")

    async def _backfill(self, store: int, walk: Backfill) -> None:
        """Announce that the new store may have the pages of the tree and, if ``walk`` stores, write those on the host
        to it, some operations at a time. Cancelling it leaves the rest out."""
        driver, over = self._driver, False
        some: Callable[[], Filled] = partial(walk.some, BACKFILL_OPS, self._backfill_pages)
        try:
            while self._is_used(store) and not over:
                filled: Filled = await drive(driver, some, lambda filled: driver.perform(filled.plan))
                plan, over = filled
                await all_ended(driver.ops, [effect.op for effect in plan.effects if isinstance(effect, BackupStorage)])
                await asyncio.sleep(0)
        except CacheClosed:
            pass  # the store is closed with the cache

    def _is_used(self, store: int) -> bool:
        return any(entry.number == store for entry in self._worker.stores)

    async def detach(self, name: str | None, timeout: float) -> Unsaved:
        """Detach the store ``name``, after saving for ``timeout`` seconds; 0: nothing is saved. Cancelling and errors
        are those of ``AsyncCache.detach_storage``."""
        self._check_host()
        store = self._worker.find_store(name)
        if timeout and store.options.write:
            with suppress(TimeoutError):  # ``unsaved`` says what is left
                async with asyncio.timeout(timeout):
                    await drain(self._driver)
        left, patience = await unsaved(self._driver), longest_write(self._worker)
        driver, failed = self._driver, list[BackendError]()
        async with holding(driver.lock):
            driver.apply_outcomes()
            if not self._is_used(store.number):
                raise ConfigError(f"storage: {store.options.name!r} was detached by somebody else meanwhile")
            self._worker.leave_store(store.number)
            if self._announcer is not None:
                self._announcer.end(store.number)
            closing = self._supervisor.spawn(self._leave(store, failed), "asynccache-detach")
            driver.perform(driver.call_locked(driver.core.detach_storage, self._access()))
        if closing is not None:
            _, late = await asyncio.wait([closing], timeout=patience)
            if late:
                raise BackendError(f"{store.options.name}: a call does not end; the store is closed when it lets go")
        if failed:
            raise failed[0]
        return left

    async def _leave(self, store: StoreEntry, failed: list[BackendError]) -> None:
        """Close a detached store, unless the caller made its backend. An error is put into ``failed``, for the task
        that waits for the detaching, and ends nothing else."""
        try:
            if self._announcer is not None:
                await self._announcer.forget(store.number)
            await self._worker.close_store(store.number)
        except Exception as error:  # whatever a plug-in raises while it closes
            failed.append(BackendError(f"{store.options.name}: closing it failed: {error!r}"))
            failed[0].__cause__ = error
