"""What ``on_event`` hears beside the core's events: that a cache begins, and which keys its store holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from asynccache.events import Notice, Opened, StorageReport
from asynccache.storage import CheckedStore, watch

if TYPE_CHECKING:
    from asynccache.runtime.poolmap import PoolMap


class Announcing:
    """Passes the store's reports on, from now until ``stop``. ``extra_keys``: by namespace, where there is one."""

    def __init__(
        self, put: Callable[[Notice], None], page_size: int, pools: PoolMap, store: CheckedStore | None
    ) -> None:
        self.extra_keys: dict[bytes, str | bytes] = {}
        self._put = put
        self._end: Callable[[], None] | None = None
        key_of = _key_of(pools) if store is not None else None
        put(Opened(page_size, key_of, self.extra_keys.get))
        if store is not None and key_of is not None:
            self._watch(store)

    def __repr__(self) -> str:
        return f"Announcing({'ended' if self._end is None else 'watching'})"

    def _watch(self, store: CheckedStore) -> None:
        own = store.backend
        store.backend, end = watch(own, self._report)

        def give_back() -> None:
            end()
            store.backend = own

        self._end = give_back

    def stop(self) -> None:
        """The store is watched no more."""
        end, self._end = self._end, None
        if end is not None:
            end()

    def _report(self, there: bool, keys: Sequence[bytes]) -> None:
        if keys:
            self._put(StorageReport(there, keys))


def _key_of(pools: PoolMap) -> Callable[[bytes], bytes] | None:
    """Where the last part of a page's FULL data is stored; None if FULL has no stored object."""
    if not pools.lead:
        return None
    name = pools.lead[-1].name
    return lambda page_hash: pools.key(name, page_hash).key
