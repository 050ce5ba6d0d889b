"""What ``on_event`` hears beside the core's events: that a cache begins, and which keys its stores hold.

Laws:
* A key is there from the moment that the first of the attached stores has it until the last of them has lost it or was
  detached.
* The name of a namespace is known for as long as it has pages or is asked for, and while ``NAMES`` others are named
  after that. However many namespaces there have been, no more names than these are kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from asynccache.core.keys import Adapter
from asynccache.events import Notice, Opened, StorageReport
from asynccache.storage.tiers import Attached
from asynccache.storage.watching import watch

if TYPE_CHECKING:
    from asynccache.runtime.poolmap import PoolMap

NAMES = 1 << 15
_SLICE = 4096


class Watched:
    """A store that is watched. ``keys``: what it has; ``end``: no more is told of it from then on."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.end: Callable[[], None]


class Announcing:
    """Passes the stores' reports on. ``stores``: whether there can be any. ``alive``: namespaces that have pages."""

    def __init__(
        self, put: Callable[[Notice], None], page_size: int, pools: PoolMap, *, stores: bool, alive: Container[bytes]
    ) -> None:  # fmt: skip
        self._named: dict[bytes, str | bytes] = {}
        self._named_before: dict[bytes, str | bytes] = {}
        self._alive = alive
        self._put = put
        self._key_of = _key_of(pools) if stores else None
        self._watched: dict[Attached, Watched] = {}
        put(Opened(page_size, self._key_of, self.extra_key_of))

    def __repr__(self) -> str:
        return f"Announcing({len(self._watched)} stores)"

    def name(self, space: bytes, extra_key: str | bytes) -> None:
        """What the namespace ``space`` is called; once it is known as an adapter's it stays that."""
        known = None if isinstance(extra_key, Adapter) else self.extra_key_of(space)
        self._named[space] = extra_key if known is None else known
        if len(self._named) >= NAMES:
            before = {space: name for space, name in self._named_before.items() if space in self._alive}
            self._named_before, self._named = before | self._named, {}

    def extra_key_of(self, space: bytes) -> str | bytes | None:
        """What the namespace ``space`` is called; None if it has no name, or is forgotten."""
        known = self._named.get(space)
        return self._named_before.get(space) if known is None else known

    def begin(self, attached: Attached) -> None:
        """Tell of the keys that this store has, and of all that it gains and loses."""
        if self._key_of is None:
            return
        store, watched = attached.store, Watched()
        own, self._watched[attached] = store.backend, watched
        store.backend, end = watch(own, partial(self._report, watched))

        def give_back() -> None:
            end()
            store.backend = own

        watched.end = give_back

    def end(self, attached: Attached) -> None:
        """Listen to it no more; ``forget`` must follow."""
        if attached in self._watched:
            self._watched[attached].end()

    async def forget(self, attached: Attached) -> None:
        """Tell that the keys which no other store has are gone. Cancelling it leaves some of them untold."""
        if attached not in self._watched:
            return
        leaving = self._watched[attached]
        while keys := list(islice(leaving.keys, _SLICE)):
            self._report(leaving, False, keys)
            await asyncio.sleep(0)
        self._watched.pop(attached, None)

    def stop(self) -> None:
        """No store is watched any more."""
        while self._watched:
            _, watched = self._watched.popitem()
            watched.end()

    def _report(self, watched: Watched, there: bool, keys: Sequence[bytes]) -> None:
        if there:
            watched.keys.update(keys)
        else:
            watched.keys.difference_update(keys)
        others = [other.keys for other in self._watched.values() if other is not watched]
        news = [key for key in keys if not any(key in other for other in others)] if others else keys
        if news:
            self._put(StorageReport(there, news))


def _key_of(pools: PoolMap) -> Callable[[bytes], bytes] | None:
    """Where the last part of a page's FULL data is stored; None if FULL has no stored object."""
    if not pools.lead:
        return None
    name = pools.lead[-1].name
    return lambda page_hash: pools.key(name, page_hash).key
