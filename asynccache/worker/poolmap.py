"""The pools of one worker: the bytes of their pages, where these lie on the host, and their storage keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from asynccache.config import PoolSpec
from asynccache.core.keys import HASH_BYTES
from asynccache.core.plan import Move
from asynccache.core.slots import SLOT_BYTES
from asynccache.storage import PageKey
from asynccache.storage.records import pool_digest, storage_key
from asynccache.worker.layout import FULL, PoolLayout

Entry = tuple[PageKey, memoryview]


class HostPages(Protocol):
    """The part of a host pool that storage needs."""

    def page(self, slot: int) -> memoryview: ...


class PoolMap(PoolLayout):
    """The layout, bytes and keys of a worker's pools. ``written``: the pools that are stored, by component, in two
    steps: first the auxiliary components with the pools that derive from them, and the pools that follow FULL; then the
    pools that are FULL."""

    def __init__(self, specs: Sequence[PoolSpec], page_size: int, host: Mapping[str, HostPages]) -> None:
        super().__init__(specs)
        self.written: tuple[Mapping[int, tuple[PoolSpec, ...]], ...]
        self.written = ({**self.of, FULL: self.follow}, {FULL: self.lead})
        solid = [spec for pools in self.of.values() for spec in pools]
        self._digests = {spec.name: pool_digest(spec, page_size) for spec in solid}
        self._weights = {c: sum(spec.bytes_per_page for spec in pools) for c, pools in self.of.items()}
        self._host = host

    def size_of(self, moves: Sequence[Move]) -> tuple[int, int, int]:
        """Return how much ``moves`` copy: all pages, those of FULL among them, and bytes."""
        pages = full_pages = size = 0
        for move in moves:
            count = len(move.src) // SLOT_BYTES
            pages += count
            full_pages += count if move.component == FULL else 0
            size += count * self._weights[move.component]
        return pages, full_pages, size

    def key(self, pool: str, page_hash: bytes) -> PageKey:
        """Return the key under which a page of ``pool`` is stored."""
        return PageKey(pool, storage_key(page_hash, self._digests[pool]))

    def has(self, pool: str) -> bool:
        """Return True if this worker has bytes of ``pool``."""
        return pool in self._digests

    @property
    def digest(self) -> bytes:
        """The digest that turns a page's hash into its key in the last pool of FULL; empty if FULL has no stored
        object."""
        return self._digests[self.lead[-1].name] if self.lead else b""

    def keys(self, pool: str, hashes: bytes) -> list[PageKey]:
        """Return the keys of several pages of ``pool``, whose ``hashes`` are joined."""
        digest = self._digests[pool]
        return [PageKey(pool, storage_key(hashes[at : at + HASH_BYTES], digest))
                for at in range(0, len(hashes), HASH_BYTES)]

    @property
    def key_of(self) -> Callable[[bytes], bytes] | None:
        """A function from a page's hash to the storage key of the last part of its FULL data; None if FULL has no
        stored object."""
        if not self.lead:
            return None
        name = self.lead[-1].name
        return lambda page_hash: self.key(name, page_hash).key

    def payloads(self, pool: str, slots: bytes) -> list[memoryview]:
        """Return the host bytes of each page of ``pool`` in ``slots`` (int32)."""
        return list(map(self._host[pool].page, np.frombuffer(slots, np.int32).tolist()))

    def entries(self, pool: str, hashes: bytes, slots: bytes) -> Iterator[Entry]:
        """Return the storage key and host bytes of each page: page i has the i-th hash and lies in the i-th slot."""
        return zip(self.keys(pool, hashes), self.payloads(pool, slots), strict=True)
