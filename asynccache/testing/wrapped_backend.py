"""A backend around a backend. Wrappers override what they change; the rest passes through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asynccache.storage import PageKey, Probeable, Record, Result, StorageBackend, Watchable


class WrappedBackend:
    """Passes every call on to ``inner``, with its laws: cancelling a call is cancelling ``inner``'s."""

    def __init__(self, inner: StorageBackend) -> None:
        self.inner = inner
        if isinstance(inner, Watchable):
            self.watch = inner.watch
        if isinstance(inner, Probeable):
            self.probe = inner.probe

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        """As ``inner``."""
        return await self.inner.exists(keys)

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """As ``inner``."""
        return await self.inner.get(keys, records)

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """As ``inner``."""
        return await self.inner.put(keys, records)

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        """As ``inner``."""
        return await self.inner.delete(keys)

    async def clear(self) -> None:
        """As ``inner``."""
        await self.inner.clear()

    def register(self, pool: str, memory: memoryview) -> None:
        """As ``inner``."""
        self.inner.register(pool, memory)

    def stats(self) -> Mapping[str, int | float]:
        """As ``inner``."""
        return self.inner.stats()

    async def flush(self) -> None:
        """As ``inner``."""
        await self.inner.flush()

    async def aclose(self) -> None:
        """As ``inner``."""
        await self.inner.aclose()
