"""Knows which pages the watched stores of all workers have, and reports them by the keys of one worker.

A worker's stores know a page by a key that depends on the worker's shard. From a page's hash the head can compute every
worker's key of it. So it keeps the keys that workers tell, and compares them when it *names* a page: when it asks for
the page, reads it or has stored it.

A page is there when every *writer* of the store has it, and gone when one of them has lost it. Every worker with bytes
of FULL is a writer; but in a shared store, workers that hold the same bytes are one writer together. That writer has a
page as long as one of its ranks says so: what one of them has lost, another may have stored anew before the loss was
heard.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from asynccache.core.keys import HASH_BYTES
from asynccache.storage.checked import storage_key

Report = Callable[[int, bool, Sequence[bytes]], None]


class _Store:
    """One watched store."""

    def __init__(self, digests: Mapping[int, bytes], *, shared: bool) -> None:
        ranks: dict[Hashable, list[int]] = {}
        for rank, digest in sorted(digests.items()):
            ranks.setdefault(digest if shared else rank, []).append(rank)
        self.writers = [(digests[own[0]], own) for own in ranks.values()]
        """The digest and the ranks of each writer."""
        self.has: dict[int, set[bytes]] = {rank: set() for rank in digests}
        """The keys that each rank says it has. Not kept where one rank is the only writer, which is believed."""
        self.told: set[bytes] = set()
        """The keys of the pages that were reported as being there."""

    def holds(self, ranks: Sequence[int], key: bytes) -> bool:
        """Return True if one of ``ranks`` has ``key``."""
        return any(key in self.has[rank] for rank in ranks)


class WatchedKeys:
    """The keys of the watched stores of all ranks. ``report(store, there, keys)``: called with the pages that a store
    has got (``there``) or lost; ``keys`` are those of the lowest rank in ``digests``.
    """

    def __init__(self, report: Report) -> None:
        self.digests: dict[int, bytes] = {}
        """For each rank with bytes of FULL, the digest that turns a page's hash into that rank's key."""
        self._report = report
        self._stores: dict[int, _Store] = {}
        self._named: dict[bytes, bytes] = {}

    def __repr__(self) -> str:
        return f"WatchedKeys({len(self._stores)} stores, {len(self._named)} keys named)"

    @property
    def watches(self) -> bool:
        """True while any store is watched."""
        return bool(self._stores)

    @property
    def key_of(self) -> Callable[[bytes], bytes] | None:
        """A function from a page's hash to the key that the page is reported by; None if no worker has bytes of
        FULL."""
        if not self.digests:
            return None
        digest = self.digests[min(self.digests)]
        return lambda page_hash: storage_key(page_hash, digest)

    def watch(self, store: int, *, shared: bool) -> None:
        """Begin to keep what workers tell of this store. ``shared``: see ``is_shared``."""
        self._stores[store] = _Store(self.digests, shared=shared)

    def unwatch(self, store: int) -> bool:
        """Forget what was told of this store. Returns True if it was watched."""
        own = self._stores.pop(store, None)
        if not any(len(other.writers) > 1 for other in self._stores.values()):
            self._named.clear()
        elif own is not None:
            for key in own.told:
                if key in self._named:
                    self._forget(self._named[key], key)
        return own is not None

    def told(self, store: int, rank: int, there: bool, keys: Sequence[bytes]) -> None:
        """Note that ``rank`` has these keys in this store or, if ``there`` is False, has lost them."""
        own = self._stores.get(store)
        if own is None or rank not in own.has:
            return
        if len(own.has) > 1:
            held = own.has[rank]
            (held.update if there else held.difference_update)(keys)
        if len(own.writers) == 1:
            ranks = own.writers[0][1]
            news = keys if there or len(ranks) == 1 else [key for key in keys if not own.holds(ranks, key)]
            if news:
                self._report(store, there, news)
            return
        self._look(store, own, dict.fromkeys(self._named[key] for key in keys if key in self._named))

    def name(self, hashes: Iterable[bytes]) -> None:
        """Note the hashes of pages that the head names; each item of ``hashes`` is one or more, joined. If every store
        has one writer, this does nothing: what the writer tells is reported as it is."""
        if not any(len(own.writers) > 1 for own in self._stores.values()):
            return
        pages = [
            some[at : at + HASH_BYTES] for some in hashes for at in range(0, len(some), HASH_BYTES)
        ]  # fmt: skip
        for page in pages:
            for digest in set(self.digests.values()):
                self._named[storage_key(page, digest)] = page
        for store, own in self._stores.items():
            if len(own.writers) > 1:
                self._look(store, own, pages)

    def _look(self, store: int, own: _Store, pages: Iterable[bytes]) -> None:
        key_of = self.key_of
        assert key_of is not None
        come, gone = [], []
        for page in pages:
            key = key_of(page)
            there = all(own.holds(ranks, storage_key(page, digest)) for digest, ranks in own.writers)
            if there and key not in own.told:
                own.told.add(key)
                come.append(key)
            elif not there and key in own.told:
                own.told.discard(key)
                gone.append(key)
                self._forget(page, key)
        for keys, there in ((come, True), (gone, False)):
            if keys:
                self._report(store, there, keys)

    def _forget(self, page: bytes, key: bytes) -> None:
        """Forget the name of a page that no store has any more. It is named again when it is stored again."""
        if not any(key in own.told for own in self._stores.values()):
            for digest in set(self.digests.values()):
                self._named.pop(storage_key(page, digest), None)
