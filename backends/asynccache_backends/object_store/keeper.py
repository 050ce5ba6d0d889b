"""The work in the background of an open store: it finds packs of other processes and stores snapshots of the index.

All of it is done by one task. The task wakes every ``refresh`` seconds, and when something is due, but then at least a
second (or ``refresh`` seconds, if that is less) after the last time. After an error it waits twice as long as before,
up to a minute. Only ``stop`` waits for the task.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from asynccache.errors import Unavailable
from asynccache.storage import settled
from asynccache_backends.object_store.catalog import PackCatalog

FULL_EVERY = 600.0
SHORTEST = 1.0
LONGEST = 60.0
_NEVER = 1e9


class CatalogKeeper:
    """The owner of the background task. ``refresh``: seconds between two looks for packs of other processes; 0: they
    are not looked for."""

    def __init__(self, catalog: PackCatalog, refresh: float) -> None:
        self._catalog = catalog
        self._refresh = refresh
        self._due = asyncio.Event()
        self._delay = min(SHORTEST, refresh or SHORTEST)
        self._full_at = asyncio.get_running_loop().time() + FULL_EVERY
        self._task: asyncio.Task[None] | None = None

    def start(self, full: bool) -> None:
        """Start the task. ``full``: whether it begins with a list of everything, unless ``refresh`` is 0."""
        if full:
            self._full_at = 0.0
            self._due.set()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def missed(self) -> None:
        """Look for packs of other processes soon, because a key was asked for that is not known here."""
        if self._refresh:
            self._due.set()

    def stored(self) -> None:
        """Note that a pack was stored, so that a snapshot may be due."""
        if self._catalog.save_due:
            self._due.set()

    async def stop(self) -> None:
        """Cancel the task and wait until it has ended. Cancelling it does not shorten the waiting."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await settled([task])

    async def _run(self) -> None:
        loop, wait = asyncio.get_running_loop(), self._delay
        while True:
            await asyncio.sleep(wait)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, (self._refresh or _NEVER) - wait)):
                    await self._due.wait()
            self._due.clear()
            try:
                async with self._catalog.lock:
                    if self._refresh:
                        now = loop.time()
                        full = now >= self._full_at
                        await self._catalog.refresh(full)
                        if full:
                            self._full_at = now + FULL_EVERY
                    if self._catalog.save_due:
                        await self._catalog.save()
                wait = self._delay
            except (Unavailable, FileNotFoundError):
                self._catalog.counts["errors"] += 1
                wait = min(2 * wait, LONGEST)
