"""A slow backend, to see what a cache does with a distant or busy store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from asynccache.storage import PageKey, Record, Result, StorageBackend
from asynccache.testing.wrapped_backend import WrappedBackend


class SlowBackend(WrappedBackend):
    """A backend around ``inner`` that waits before each call with keys: ``latency`` seconds, and for calls with
    payloads in addition their bytes divided by ``bandwidth`` (bytes a second; None: no limit). Calls without keys and
    probes are not delayed. It waits by the event loop's clock, which may be a virtual one."""

    def __init__(self, inner: StorageBackend, latency: float, bandwidth: float | None = None) -> None:
        super().__init__(inner)
        self.latency = latency
        self.bandwidth = bandwidth

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        """The same as the method of ``inner``, later. If it is cancelled while it waits, ``inner`` is not asked."""
        await self._wait(())
        return await self.inner.exists(keys)

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """The same as the method of ``inner``, later. If it is cancelled while it waits, no buffer was touched."""
        await self._wait(records)
        return await self.inner.get(keys, records)

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """The same as the method of ``inner``, later. If it is cancelled while it waits, nothing was stored."""
        await self._wait(records)
        return await self.inner.put(keys, records)

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        """The same as the method of ``inner``, later. If it is cancelled while it waits, nothing was deleted."""
        await self._wait(())
        return await self.inner.delete(keys)

    async def _wait(self, records: Sequence[Record]) -> None:
        moving = sum(record.payload.nbytes for record in records) / self.bandwidth if self.bandwidth else 0.0
        await asyncio.sleep(self.latency + moving)
