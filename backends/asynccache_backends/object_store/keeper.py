"""What goes on in the background of an open store: finding others' pages, keeping the capacity, saving the index.

One task. It wakes every ``refresh`` seconds, or when something is due, but never more than once a second; after an
error it waits twice as long as before, a minute at most. Nothing waits for it but ``stop``.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from asynccache.errors import Unavailable
from asynccache.storage import settled
from asynccache_backends.object_store.catalog import Catalog
from asynccache_backends.object_store.client import Client
from asynccache_backends.object_store.names import PACKS

FULL_EVERY = 600.0
SHORTEST = 1.0
LONGEST = 60.0
_NEVER = 1e9


class Keeper:
    """``refresh`` 0: others' pages are not looked for. ``capacity`` None: no limit."""

    def __init__(self, catalog: Catalog, client: Client, refresh: float, capacity: int | None) -> None:
        self._catalog = catalog
        self._client = client
        self._refresh = refresh
        self._capacity = capacity
        self._due = asyncio.Event()
        self._delay = min(SHORTEST, refresh or SHORTEST)
        self._full_at = asyncio.get_running_loop().time() + FULL_EVERY
        self._task: asyncio.Task[None] | None = None

    def start(self, full: bool) -> None:
        """Begin; ``full``: with a list of everything."""
        if full:
            self._full_at = 0.0
            self._due.set()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def missed(self) -> None:
        """A key was asked for that is not known: somebody else may have stored it."""
        if self._refresh:
            self._due.set()

    def stored(self) -> None:
        """A pack was stored."""
        if self._full or self._catalog.save_due:
            self._due.set()

    async def stop(self) -> None:
        """Stop, whatever it does. Cancelling it waits for that first."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await settled([task])

    async def make_room(self) -> None:
        """Remove the earliest packs while there are more bytes than the capacity.

        Raises:
            Unavailable: the store refuses. Cancelling it may leave any of them.
        """
        if not self._full:
            return
        index, victims, stored = self._catalog.index, [], self._catalog.index.stored
        for pack in index.packs():
            if self._capacity is None or stored <= self._capacity:
                break
            victims.append(pack)
            stored -= pack.size
        await self._client.delete([f"{PACKS}/{pack.name}" for pack in victims])
        for pack in victims:
            index.drop(pack.name)
        self._catalog.counts["evicted_packs"] += len(victims)

    @property
    def _full(self) -> bool:
        return self._capacity is not None and self._catalog.index.stored > self._capacity

    async def _run(self) -> None:
        wait = self._delay
        while True:
            await asyncio.sleep(wait)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, (self._refresh or _NEVER) - wait)):
                    await self._due.wait()
            self._due.clear()
            try:
                async with self._catalog.lock:
                    await self._once()
                wait = self._delay
            except (Unavailable, FileNotFoundError):
                self._catalog.counts["errors"] += 1
                wait = min(2 * wait, LONGEST)

    async def _once(self) -> None:
        if self._refresh:
            now = asyncio.get_running_loop().time()
            full = now >= self._full_at
            await self._catalog.refresh(full)
            if full:
                self._full_at = now + FULL_EVERY
        await self.make_room()
        if self._catalog.save_due:
            await self._catalog.save()
