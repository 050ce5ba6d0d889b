"""The stores of one worker, by the numbers that the head gives them. A store is opened, used, watched, left and closed.

Law: a store is told where the host's pages lie before its first read or write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from asynccache.storage import StoreLayout
from asynccache.storage.opening import close_unattached, open_all, open_attached
from asynccache.storage.tiers import AttachedStore, TieredStore
from asynccache.storage.wrapping import watch
from asynccache.worker.contract import Storage, StoreEntry

Told = Callable[[int, bool, Sequence[bytes]], None]


class HostMemory(Protocol):
    """The part of a host pool that stores are told of."""

    @property
    def memory(self) -> memoryview: ...


class OpenStores:
    """The ``WorkerStores`` of one worker. ``used``: True while any store is used. ``tell``: called with the keys of
    watched stores, as ``Reports.keys``; set before the first store is watched. Mutable state, by number: the stores,
    and for each store that is watched the function that ends the watching."""

    tell: Told

    def __init__(self, tiers: TieredStore, layout: StoreLayout, host: Mapping[str, HostMemory]) -> None:
        self.tiers = tiers
        self.used = False
        self._layout = layout
        self._host = host
        self._open: dict[int, AttachedStore] = {}
        self._watched: dict[int, Callable[[], None]] = {}
        self._last = 0
        self._changed: Callable[[], object] | None = None

    def __repr__(self) -> str:
        return f"OpenStores({self.tiers!r})"

    @property
    def entries(self) -> tuple[StoreEntry, ...]:
        """The stores that are used, nearest first."""
        return tuple(map(self._entry, self.tiers.attached))

    def find(self, name: str | None) -> StoreEntry:
        """See ``WorkerStores``."""
        return self._entry(self.tiers.find(name))

    def _entry(self, attached: AttachedStore) -> StoreEntry:
        number = next(number for number, opened in self._open.items() if opened is attached)
        return StoreEntry(number, attached.options)

    async def open_first(self, storages: Sequence[Storage], options: Mapping[str, str]) -> None:
        """Open and use the stores that the cache begins with. If it fails or is cancelled, the stores that were opened
        by then stay open until ``tiers`` is closed."""
        await open_all(self.tiers, storages, self._layout, options)
        for attached in self.tiers.attached:
            self._introduce(attached)
            self._number(attached)
        self.used = bool(self.tiers)

    async def open(
        self, storage: Storage, options: Mapping[str, str], position: int | None, *, number: int | None = None
    ) -> StoreEntry:
        """See ``WorkerStores``. ``number``: the number that the head has chosen; None: the next one."""
        names = [attached.options.name for attached in self._open.values()]  # some are not in ``tiers`` yet
        attached = await open_attached(storage, self._layout, options, self.tiers, position, names)
        try:
            self._introduce(attached)
        except BaseException:
            await close_unattached(attached)
            raise
        return StoreEntry(self._number(attached, number), attached.options)

    def knows(self, number: int) -> bool:
        """Return True if a store of this number is open."""
        return number in self._open

    def is_shared(self, number: int) -> bool:
        """See ``asynccache.storage.contract.is_shared``."""
        return self._open[number].shared

    def on_change(self, changed: Callable[[], object]) -> None:
        """Call ``changed`` from now on when a store, open now or later, begins or ceases to refuse calls."""
        self._changed = changed
        for attached in self._open.values():
            attached.store.breaker.changed = changed

    def use(self, number: int, position: int | None) -> None:
        """See ``WorkerStores``."""
        self.tiers.attach(self._open[number], position)
        self.used = True

    async def drop(self, number: int) -> None:
        """See ``WorkerStores``."""
        await close_unattached(self._open.pop(number))

    def leave(self, number: int) -> None:
        """See ``WorkerStores``."""
        self.tiers.detach(self._open[number])
        self.used = bool(self.tiers)

    async def close(self, number: int) -> None:
        """See ``WorkerStores``."""
        await self.tiers.aclose_detached(self._open.pop(number))

    async def watch(self, number: int) -> None:
        """See ``WorkerStores``."""
        store = self._open[number].store
        own = store.backend
        watched = watch(own, partial(self.tell, number))
        store.backend = watched.backend

        def give_back() -> None:
            watched.end()
            store.backend = own

        self._watched[number] = give_back
        for keys in watched.parts:
            if number not in self._watched:
                return
            self.tell(number, True, keys)
            await asyncio.sleep(0)

    def unwatch(self, number: int) -> None:
        """See ``WorkerStores``."""
        end = self._watched.pop(number, None)
        if end is not None:
            end()

    def _introduce(self, attached: AttachedStore) -> None:
        """Tell a store where the host's pages lie."""
        for name, pool in self._host.items():
            attached.store.register(name, pool.memory)

    def _number(self, attached: AttachedStore, number: int | None = None) -> int:
        self._last = number or self._last + 1
        self._open[self._last] = attached
        if self._changed is not None:
            attached.store.breaker.changed = self._changed
        return self._last
