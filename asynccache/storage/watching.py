"""Which keys a store holds, told as they come and leave. For those who publish it; nobody else pays for it.

A backend that knows when its own index changes is *watchable* and says so itself: then what is told is the truth at
every moment. For any other (a server that others write to and that evicts on its own) ``Reporting`` tells what its
answers show: a key is there once a put, a get or an exists has hit it, and gone once one has missed it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from asynccache.storage.contract import PageKey, Record, Result, StorageBackend, is_shared
from asynccache.storage.probing import Probeable

Tell = Callable[[bool, Sequence[bytes]], None]
"""``tell(there, keys)``: these keys are there from now on, or have left. Called on the loop, in order; it is quick."""


@runtime_checkable
class Watchable(Protocol):
    """A backend whose index can be watched. Optional."""

    def watch(self, tell: Tell | None) -> None:
        """``tell`` hears of all keys that are there, and then of every change. None: of nothing any more."""
        ...


class Reporting:
    """``inner``, with what its answers show of its keys told to ``tell``. Its laws are those of ``inner``."""

    def __init__(self, inner: StorageBackend, tell: Tell) -> None:
        self.inner = inner
        self._tell: Tell | None = tell
        self._there: set[bytes] = set()
        self.register = inner.register
        self.stats = inner.stats
        self.flush = inner.flush
        self.aclose = inner.aclose
        self.shared = is_shared(inner)
        if isinstance(inner, Probeable):
            self.probe = inner.probe

    def __repr__(self) -> str:
        return f"Reporting({self.inner!r})"

    def stop(self) -> None:
        """Tell nothing any more."""
        self._tell = None
        self._there.clear()

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        """As ``inner``."""
        results = await self.inner.exists(keys)
        self._seen(keys, results)
        return results

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """As ``inner``."""
        results = await self.inner.get(keys, records)
        self._seen(keys, results)
        return results

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """As ``inner``."""
        results = await self.inner.put(keys, records)
        self._seen(keys, results)
        return results

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        """As ``inner``."""
        results = await self.inner.delete(keys)
        self._seen(keys, [Result.FAILED if result is Result.FAILED else Result.MISS for result in results])
        return results

    async def clear(self) -> None:
        """As ``inner``."""
        await self.inner.clear()
        self._change(False, list(self._there))

    def _seen(self, keys: Sequence[PageKey], results: Sequence[Result]) -> None:
        there = self._there
        pairs = list(zip(keys, results, strict=False))  # a backend that answers too little is caught above
        self._change(False, [k.key for k, r in pairs if r is Result.MISS and k.key in there])
        self._change(True, [k.key for k, r in pairs if r is Result.HIT and k.key not in there])

    def _change(self, there: bool, keys: Sequence[bytes]) -> None:
        if keys and self._tell is not None:
            (self._there.update if there else self._there.difference_update)(keys)
            self._tell(there, keys)


def watch(backend: StorageBackend, tell: Tell) -> tuple[StorageBackend, Callable[[], None]]:
    """Have ``tell`` hear of the keys of ``backend``; the backend to use from now on, and what ends the telling."""
    if isinstance(backend, Watchable):
        backend.watch(tell)
        return backend, lambda: backend.watch(None)
    reporting = Reporting(backend, tell)
    return reporting, reporting.stop
