"""Backends around a backend. ``WrappedBackend`` passes every call on; its subclasses override what they change.

``WatchedBackend`` is one of them: for KV events, it watches which keys a store holds. Where nobody watches, it costs
nothing. A backend that knows when its own index changes is ``Watchable``: it tells every change itself, and what it has
told is true at every moment. Any other backend, say a server to which others write and which evicts on its own, is
wrapped in ``WatchedBackend``, which tells what the backend's answers show: a key is stored once a put, a get or an
exists has hit it, and gone once one of them has missed it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from asynccache.storage.contract import Hint, PageKey, Record, Result, StorageBackend, is_shared


class WrappedBackend:
    """Passes every call on to ``inner``. Cancelling a call cancels the call of ``inner``.

    It has the optional ``probe`` (see ``Probeable``), ``watch`` (see ``Watchable``), ``damaged`` (see ``Layered``),
    ``hint`` (see ``Hintable``) and ``longest_backoff`` only if ``inner`` has.
    """

    probe: Callable[[], Awaitable[None]]
    watch: Callable[[Tell | None], None]
    damaged: Callable[[Sequence[PageKey]], Awaitable[list[Result]]]
    hint: Callable[[Hint, Sequence[PageKey], float], Awaitable[list[Result]]]
    longest_backoff: float

    def __init__(self, inner: StorageBackend) -> None:
        self.inner = inner
        self.shared = is_shared(inner)
        for name in ("probe", "watch", "damaged", "hint", "longest_backoff"):
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        return await self.inner.exists(keys)

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        return await self.inner.get(keys, records)

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        return await self.inner.put(keys, records)

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        return await self.inner.delete(keys)

    async def clear(self) -> None:
        await self.inner.clear()

    def register(self, pool: str, memory: memoryview) -> None:
        self.inner.register(pool, memory)

    def stats(self) -> Mapping[str, int | float]:
        return self.inner.stats()

    async def flush(self) -> None:
        await self.inner.flush()

    async def aclose(self) -> None:
        await self.inner.aclose()


class BorrowedBackend(WrappedBackend):
    """A backend that one cache, or one ``Pages``, uses for as long as it is open, and does not close."""

    async def aclose(self) -> None:
        """Do nothing: the backend's owner closes it. There is nothing to cancel."""


Tell = Callable[[bool, Sequence[bytes]], None]
"""``tell(there, keys)`` hears that these keys are stored from now on (True), or that they have gone (False). It is
called on the event loop, in the order of the changes, and must return soon."""


@runtime_checkable
class Watchable(Protocol):
    """A backend that tells which keys it holds. Optional."""

    def watch(self, tell: Tell | None) -> Iterable[Sequence[bytes]]:
        """Call ``tell`` from now on at every change; None ends that. Return the keys that are stored now, a few
        thousand at a time. The caller takes one part in each turn of the loop, so each part leaves out what is not
        stored any more when it is taken."""
        ...


class WatchedBackend(WrappedBackend):
    """A wrapper that tells ``tell`` what the answers of ``inner`` show of its keys."""

    def __init__(self, inner: StorageBackend, tell: Tell) -> None:
        super().__init__(inner)
        self._tell: Tell | None = tell
        self._there: set[bytes] = set()

    def stop(self) -> None:
        """Tell nothing from now on."""
        self._tell = None
        self._there.clear()

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        results = await self.inner.exists(keys)
        self._note(keys, results)
        return results

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        results = await self.inner.get(keys, records)
        self._note(keys, results)
        return results

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        results = await self.inner.put(keys, records)
        self._note(keys, results)
        return results

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        results = await self.inner.delete(keys)
        self._note(keys, [Result.FAILED if result is Result.FAILED else Result.MISS for result in results])
        return results

    async def clear(self) -> None:
        await self.inner.clear()
        self._change(False, list(self._there))

    def _note(self, keys: Sequence[PageKey], results: Sequence[Result]) -> None:
        there = self._there
        pairs = list(zip(keys, results, strict=False))  # CheckedStore refuses a wrong number of answers
        self._change(False, [k.key for k, r in pairs if r is Result.MISS and k.key in there])
        self._change(True, [k.key for k, r in pairs if r is Result.HIT and k.key not in there])

    def _change(self, there: bool, keys: Sequence[bytes]) -> None:
        if keys and self._tell is not None:
            (self._there.update if there else self._there.difference_update)(keys)
            self._tell(there, keys)


class Watched(NamedTuple):
    """A backend that is watched."""

    backend: StorageBackend
    """The backend to use from now on, which may be a wrapper."""
    parts: Iterable[Sequence[bytes]]
    """The keys that the backend holds by now: only changes are told."""
    end: Callable[[], object]
    """Ends the telling."""


def watch(backend: StorageBackend, tell: Tell) -> Watched:
    """Begin to tell ``tell`` of every change of the keys that ``backend`` holds."""
    if isinstance(backend, Watchable):
        return Watched(backend, backend.watch(tell), lambda: backend.watch(None))
    watched = WatchedBackend(backend, tell)
    return Watched(watched, (), watched.stop)
