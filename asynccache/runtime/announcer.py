"""The queue of KV events for the embedder's ``on_event``, the events that are not the core's, and spans of tracing.

The core tells which pages came and went. ``NoticeQueue`` adds that a cache begins and which keys its stores hold. It
hands all of it to the subscriber in order, and not within a call of the core.

Several stores may hold a key: it is reported as there when the first attached store gets it, and as gone when the last
one has lost it or was detached. A namespace's name is kept while the namespace has pages, and after its last request at
least until ``NAMES`` other namespaces were named; so the number of names is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

from asynccache.core.keys import Adapter
from asynccache.events import Notice, Opened, StorageReport
from asynccache.worker.local import LocalWorker
from asynccache.worker.stages import Inbox

NAMES = 1 << 15
_SLICE = 4096

StartSpan = Callable[..., AbstractContextManager[Any]]
"""Called with a name and ``attributes=``; the context manager lasts as long as the span."""


def no_span(name: str, attributes: object = None) -> AbstractContextManager[None]:
    """A ``StartSpan`` for a cache that is not traced."""
    return nullcontext()


class NoticeQueue:
    """The queue of notices, and the task that hands them to ``on_event``. A subscriber that raises closes the cache.
    ``alive``: the namespaces that have pages. Mutable state: the queue, names, and the keys of each store that is
    watched."""

    def __init__(
        self, on_event: Callable[[Notice], None], page_size: int, worker: LocalWorker, alive: Container[bytes]
    ) -> None:  # fmt: skip
        self._on_event = on_event
        self._inbox: Inbox[Notice] = Inbox()
        self.put = self._inbox.put
        self._named: dict[bytes, str | bytes] = {}
        self._named_before: dict[bytes, str | bytes] = {}
        self._alive = alive
        self._worker = worker
        self._key_of = worker.key_of if worker.takes_stores else None
        self._keys: dict[int, set[bytes]] = {}
        self.put(Opened(page_size, self._key_of, self.namespace_of))

    def __repr__(self) -> str:
        return f"Announcer({len(self._keys)} stores)"

    async def run(self) -> None:
        """Hand on notices as they come, for ever. Cancelling it leaves the rest in the queue."""
        while True:
            await self._inbox.filled()
            self.hand_on()

    def hand_on(self) -> None:
        """Hand on everything in the queue."""
        for notice in self._inbox.take():
            self._on_event(notice)

    def name(self, space: bytes, namespace: str | bytes) -> None:
        """Note that the namespace ``space`` is called ``namespace``. A namespace that is known as an adapter's keeps
        that name."""
        known = None if isinstance(namespace, Adapter) else self.namespace_of(space)
        self._named[space] = namespace if known is None else known
        if len(self._named) >= NAMES:
            before = {space: name for space, name in self._named_before.items() if space in self._alive}
            self._named_before, self._named = before | self._named, {}

    def namespace_of(self, space: bytes) -> str | bytes | None:
        """Return the name of the namespace ``space``; None if it has no name, or is forgotten."""
        known = self._named.get(space)
        return self._named_before.get(space) if known is None else known

    async def begin(self, store: int) -> None:
        """Report the keys that this store has, and those that it gains and loses from now on. Returns once all that it
        has are reported, since a page that is published before its key is would not be announced. If it is cancelled,
        ``end`` must follow."""
        if self._key_of is not None:
            self._keys[store] = set()
            await self._worker.watch_store(store)

    def end(self, store: int) -> None:
        """Watch the store no more. ``forget`` must follow. A second call does nothing."""
        self._worker.unwatch_store(store)

    async def forget(self, store: int) -> None:
        """Report that the keys of this store are gone, but for those that another store has. If it is cancelled, some
        of them are not reported."""
        while keys := list(islice(self._keys.get(store, ()), _SLICE)):
            self.report(store, False, keys)
            await asyncio.sleep(0)
        self._keys.pop(store, None)

    def stop(self) -> None:
        """Watch no store any more."""
        while self._keys:
            store, _ = self._keys.popitem()
            self._worker.unwatch_store(store)

    def report(self, store: int, there: bool, keys: Sequence[bytes]) -> None:
        """Report that a store has these keys from now on or, if ``there`` is False, has them no more. A key that
        another store has is left out."""
        own = self._keys.get(store)
        if own is None:
            return
        if there:
            own.update(keys)
        else:
            own.difference_update(keys)
        others = [other for number, other in self._keys.items() if number != store]
        news = [key for key in keys if not any(key in other for other in others)] if others else keys
        if news:
            self.put(StorageReport(there, news))
