"""Which pages the watched stores of all workers have, told in one worker's keys.

A worker's stores know a page by a key that holds its shard; the head can compute every worker's key of a page, once it
has the page's hash. So keys are kept as they are told, and looked at when a page is *named*: asked for, read or stored.

Law: a page is there when every writer has it: each worker that has bytes of FULL, or one of those that hold the same
bytes, where the store is shared; it is gone when one of these has lost it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from asynccache.core.keys import HASH_BYTES
from asynccache.storage.records import storage_key

Report = Callable[[int, bool, Sequence[bytes]], None]


class _Store:
    """``has``: by writer the keys that were told. ``told``: the pages that were reported."""

    def __init__(self, writers: dict[Hashable, bytes], *, shared: bool) -> None:
        self.shared = shared
        self.writers = writers
        self.has: dict[Hashable, set[bytes]] = {writer: set() for writer in writers}
        self.told: set[bytes] = set()


class Holdings:
    """``digests``: by rank, what a page's hash becomes a key with; of ranks that have bytes of FULL. ``report``: is
    told of pages by the key that the first of these ranks has for them."""

    def __init__(self, report: Report) -> None:
        self.digests: dict[int, bytes] = {}
        self._report = report
        self._stores: dict[int, _Store] = {}
        self._named: dict[bytes, bytes] = {}

    def __repr__(self) -> str:
        return f"Holdings({len(self._stores)} stores, {len(self._named)} keys named)"

    @property
    def watches(self) -> bool:
        """Whether any store is watched."""
        return bool(self._stores)

    @property
    def key_of(self) -> Callable[[bytes], bytes] | None:
        """From a page's hash to the key that it is reported by; None, if no worker has bytes of FULL."""
        if not self.digests:
            return None
        digest = self.digests[min(self.digests)]
        return lambda page_hash: storage_key(page_hash, digest)

    def watch(self, store: int, *, shared: bool) -> None:
        """Keys of this store will be told."""
        writers: dict[Hashable, bytes] = {}
        for rank, digest in sorted(self.digests.items()):
            writers[digest if shared else rank] = digest
        self._stores[store] = _Store(writers, shared=shared)

    def unwatch(self, store: int) -> bool:
        """They will be told no more. Whether they were."""
        own = self._stores.pop(store, None)
        if not any(len(other.writers) > 1 for other in self._stores.values()):
            self._named.clear()
        elif own is not None:
            for key in own.told:
                if key in self._named:
                    self._forget(self._named[key], key)
        return own is not None

    def told(self, store: int, rank: int, there: bool, keys: Sequence[bytes]) -> None:
        """What ``rank`` says of this store."""
        own, digest = self._stores.get(store), self.digests.get(rank)
        if own is None or digest is None:
            return
        if len(own.writers) == 1:
            self._report(store, there, keys)
            return
        held = own.has[digest if own.shared else rank]
        (held.update if there else held.difference_update)(keys)
        self._look(store, own, dict.fromkeys(self._named[key] for key in keys if key in self._named))

    def name(self, hashes: Iterable[bytes]) -> None:
        """These pages, each of one or more hashes joined, are known to the head. Where every store has one writer, what
        it tells is told on, and no page has to be known."""
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
            there = all(storage_key(page, digest) in own.has[writer] for writer, digest in own.writers.items())
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
        """A page that no store has any more is named again when it is stored again."""
        if not any(key in own.told for own in self._stores.values()):
            for digest in set(self.digests.values()):
                self._named.pop(storage_key(page, digest), None)
