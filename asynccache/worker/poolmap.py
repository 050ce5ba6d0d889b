"""The pools of one worker: what their pages weigh, where they lie on the host, and under which keys they are stored."""

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
from asynccache.worker.layout import FULL, Layout

Entry = tuple[PageKey, memoryview]


class HostPages(Protocol):
    """The part of a host pool that storage needs."""

    def page(self, slot: int) -> memoryview: ...


class PoolMap(Layout):
    """``written``: what is stored, in two steps: the auxiliary components with what derives from them and what follows
    FULL, in the order of the configuration; then FULL."""

    def __init__(self, specs: Sequence[PoolSpec], page_size: int, host: Mapping[str, HostPages]) -> None:
        super().__init__(specs)
        self.written: tuple[Mapping[int, tuple[PoolSpec, ...]], ...]
        self.written = ({**self.of, FULL: self.follow}, {FULL: self.lead})
        solid = [spec for pools in self.of.values() for spec in pools]
        self._digests = {spec.name: pool_digest(spec, page_size) for spec in solid}
        self._weights = {c: sum(spec.bytes_per_page for spec in pools) for c, pools in self.of.items()}
        self._host = host

    def size_of(self, moves: Sequence[Move]) -> tuple[int, int, int]:
        """Pages, those of FULL among them, and bytes that ``moves`` carry."""
        pages = full_pages = size = 0
        for move in moves:
            count = len(move.src) // SLOT_BYTES
            pages += count
            full_pages += count if move.component == FULL else 0
            size += count * self._weights[move.component]
        return pages, full_pages, size

    def key(self, pool: str, page_hash: bytes) -> PageKey:
        """Where a page of ``pool`` is stored."""
        return PageKey(pool, storage_key(page_hash, self._digests[pool]))

    def has(self, pool: str) -> bool:
        """Whether this worker has bytes of ``pool``."""
        return pool in self._digests

    @property
    def digest(self) -> bytes:
        """What a page's hash becomes a key with in the last pool of FULL; empty, if FULL has no stored object."""
        return self._digests[self.lead[-1].name] if self.lead else b""

    def keys(self, pool: str, hashes: bytes) -> list[PageKey]:
        """The same for several pages, ``hashes`` joined."""
        digest = self._digests[pool]
        return [PageKey(pool, storage_key(hashes[at : at + HASH_BYTES], digest))
                for at in range(0, len(hashes), HASH_BYTES)]

    @property
    def key_of(self) -> Callable[[bytes], bytes] | None:
        """Where the last part of a page's FULL data is stored, from its hash; None if FULL has no stored object."""
        if not self.lead:
            return None
        name = self.lead[-1].name
        return lambda page_hash: self.key(name, page_hash).key

    def payloads(self, pool: str, slots: bytes) -> list[memoryview]:
        """The host bytes of each page."""
        return list(map(self._host[pool].page, np.frombuffer(slots, np.int32).tolist()))

    def entries(self, pool: str, hashes: bytes, slots: bytes) -> Iterator[Entry]:
        """The storage key and host bytes of each page: ``hashes[i]`` at ``slots[i]``."""
        return zip(self.keys(pool, hashes), self.payloads(pool, slots), strict=True)
