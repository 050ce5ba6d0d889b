"""A backend that takes its time: for seeing what a cache does with a distant or busy store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from asynccache.storage import PageKey, Record, Result, StorageBackend
from asynccache.testing.wrapped_backend import WrappedBackend


class SlowBackend(WrappedBackend):
    """Every call waits ``latency`` seconds, and those that carry pages their bytes / ``bandwidth`` (bytes a second)
    longer, before ``inner`` does it. Time is the loop's, so a virtual clock works."""

    def __init__(self, inner: StorageBackend, latency: float, bandwidth: float | None = None) -> None:
        super().__init__(inner)
        self.latency = latency
        self.bandwidth = bandwidth

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        """Late. Cancelling it while it waits: ``inner`` was not asked."""
        await self._wait(())
        return await self.inner.exists(keys)

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Late. Cancelling it while it waits: no buffer was touched."""
        await self._wait(records)
        return await self.inner.get(keys, records)

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Late. Cancelling it while it waits: nothing was stored."""
        await self._wait(records)
        return await self.inner.put(keys, records)

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        """Late. Cancelling it while it waits: nothing was deleted."""
        await self._wait(())
        return await self.inner.delete(keys)

    async def _wait(self, records: Sequence[Record]) -> None:
        moving = sum(record.payload.nbytes for record in records) / self.bandwidth if self.bandwidth else 0.0
        await asyncio.sleep(self.latency + moving)
