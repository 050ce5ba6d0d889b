"""Which pools hold a component's pages, what they weigh, and under which keys they are stored.

A component's slots index its own pool and every sidecar derived from it; a logical pool has no bytes and is left out.
FULL *is* its own pool or, where that is logical, all pools that derive from it (``lead``); what else derives from it
(``follow``) is stored before it and read after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from asynccache.config import PoolSpec
from asynccache.core.plan import Move
from asynccache.core.settings import ComponentKind
from asynccache.runtime.hashing import HASH_BYTES
from asynccache.storage import PageKey
from asynccache.storage.records import pool_digest, storage_key

SLOT_BYTES = 4
FULL = int(ComponentKind.FULL)

Entry = tuple[PageKey, memoryview]


class HostPages(Protocol):
    """The part of a host pool that storage needs."""

    def page(self, slot: int) -> memoryview: ...


class PoolMap:
    """The pools with bytes, by component index.

    ``of``: by component; ``all_of``: with those that have bytes on other ranks only. ``sidecars``: whether the model
    has pools that derive from FULL. ``written``: what this rank stores, in two steps: the auxiliary components with
    what derives from them and what follows FULL, in the order of the configuration; then FULL.
    """

    def __init__(self, specs: Sequence[PoolSpec], page_size: int, host: Mapping[str, HostPages]) -> None:
        solid = [spec for spec in specs if spec.bytes_per_page]
        self.components = tuple(sorted({int(spec.component) for spec in specs}))
        self.of = {c: tuple(spec for spec in solid if spec.component == c) for c in self.components}
        own = tuple(spec for spec in self.of[FULL] if spec.indices_from is None)
        self.lead = own or self.of[FULL]
        self.follow = tuple(spec for spec in self.of[FULL] if spec not in self.lead)
        self.sidecars = any(spec.component == FULL and spec.indices_from is not None for spec in specs)
        self.written = (_to_write({**self.of, FULL: self.follow}), _to_write({FULL: self.lead}))
        self.all_of = {c: tuple(spec for spec in specs if spec.component == c) for c in self.components}
        self._digests = {spec.name: pool_digest(spec, page_size) for spec in solid}
        self._weights = {c: sum(spec.bytes_per_page for spec in pools) for c, pools in self.of.items()}
        self._host = host

    def __repr__(self) -> str:
        return f"PoolMap({', '.join(self._digests)})"

    def named(self) -> list[tuple[str, int]]:
        """Every pool that has stored objects, and its component."""
        return [(spec.name, c) for c, pools in self.of.items() for spec in pools]

    def counts(self, pool: str) -> bool:
        """Whether a page of ``pool`` stands for a page of FULL, of which it is the last part to be stored."""
        return bool(self.lead) and pool == self.lead[-1].name

    def weight(self, component: int) -> int:
        """Bytes of one page of ``component`` in all of its pools."""
        return self._weights[component]

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

    def entries(self, pool: str, hashes: bytes, slots: bytes) -> Iterator[Entry]:
        """The storage key and host bytes of each page: ``hashes[i]`` at ``slots[i]``."""
        host = self._host[pool]
        for i, slot in enumerate(np.frombuffer(slots, np.int32).tolist()):
            yield self.key(pool, hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]), host.page(slot)


def _to_write(pools: Mapping[int, tuple[PoolSpec, ...]]) -> Mapping[int, tuple[PoolSpec, ...]]:
    return {c: tuple(spec for spec in specs if spec.writes) for c, specs in pools.items()}
