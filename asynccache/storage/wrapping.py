"""Backends around a backend. ``WrappedBackend`` passes every call on; its subclasses override what they change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from asynccache.storage.contract import PageKey, Record, Result, StorageBackend, is_shared

if TYPE_CHECKING:
    from asynccache.storage.watching import Tell


class WrappedBackend:
    """Passes every call on to ``inner``. Cancelling a call cancels the call of ``inner``.

    It has the optional methods ``probe`` (see ``Probeable``) and ``watch`` (see ``Watchable``) only if ``inner`` has.
    """

    probe: Callable[[], Awaitable[None]]
    watch: Callable[[Tell | None], None]

    def __init__(self, inner: StorageBackend) -> None:
        self.inner = inner
        self.shared = is_shared(inner)
        for name in ("probe", "watch"):
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        """The same as the method of ``inner``."""
        return await self.inner.exists(keys)

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """The same as the method of ``inner``."""
        return await self.inner.get(keys, records)

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """The same as the method of ``inner``."""
        return await self.inner.put(keys, records)

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        """The same as the method of ``inner``."""
        return await self.inner.delete(keys)

    async def clear(self) -> None:
        """The same as the method of ``inner``."""
        await self.inner.clear()

    def register(self, pool: str, memory: memoryview) -> None:
        """The same as the method of ``inner``."""
        self.inner.register(pool, memory)

    def stats(self) -> Mapping[str, int | float]:
        """The same as the method of ``inner``."""
        return self.inner.stats()

    async def flush(self) -> None:
        """The same as the method of ``inner``."""
        await self.inner.flush()

    async def aclose(self) -> None:
        """The same as the method of ``inner``."""
        await self.inner.aclose()


class BorrowedBackend(WrappedBackend):
    """A backend that one cache, or one ``Pages``, uses for as long as it is open, and does not close."""

    async def aclose(self) -> None:
        """Do nothing: the backend's owner closes it. There is nothing to cancel."""
