"""The pools that hold each component's pages (``PoolLayout``), and on a worker the bytes of these pages, where they lie
on the host, and their storage keys (``PoolMap``). Plain arithmetic over the pools' specifications, for the head and for
workers.

A component's slots index its own pool and every sidecar derived from it; a logical pool has no bytes and is left out.
FULL's data is in its own pool or, where that is logical, in all pools that derive from it (``lead``). The other pools
that derive from FULL (``follow``) are stored before it and read after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from asynccache.config import PoolSpec
from asynccache.core.keys import HASH_BYTES
from asynccache.core.plan import SLOT_BYTES, Move
from asynccache.core.settings import ComponentKind
from asynccache.storage import PageKey
from asynccache.storage.checked import pool_digest, storage_key

FULL = int(ComponentKind.FULL)


class PoolLayout:
    """The pools, by component index."""

    def __init__(self, specs: Sequence[PoolSpec]) -> None:
        solid = [spec for spec in specs if spec.bytes_per_page]
        self.components = tuple(sorted({int(spec.component) for spec in specs}))
        """The indices of the model's components, FULL's first."""
        self.of = {c: tuple(spec for spec in solid if spec.component == c) for c in self.components}
        """The pools with bytes of each component."""
        own = tuple(spec for spec in self.of[FULL] if spec.indices_from is None)
        self.lead = own or self.of[FULL]
        self.follow = tuple(spec for spec in self.of[FULL] if spec not in self.lead)
        self.sidecars = any(spec.component == FULL and spec.indices_from is not None for spec in specs)
        """True if the model has pools that derive from FULL."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(name for name, _ in self.named())})"

    def named(self) -> list[tuple[str, int]]:
        """Return the name and the component's index of every pool that has stored objects."""
        return [(spec.name, c) for c, pools in self.of.items() for spec in pools]

    def counts(self, pool: str) -> bool:
        """Return True if stored pages of ``pool`` count as pages of FULL: it is the last to be stored of the pools that
        make up FULL."""
        return bool(self.lead) and pool == self.lead[-1].name


def size_of(moves: Iterable[Move], weights: Mapping[int, tuple[int, int]]) -> tuple[int, int, int]:
    """Return how much ``moves`` copy: pages, FULL's pages among them, and bytes. ``weights``: for each component, how
    many pages a slot stands for, and their bytes. FULL's pages are counted once, however many pools and workers have
    them, because they hold the same tokens everywhere."""
    pages = full_pages = size = 0
    for component, slots, _ in moves:
        count, (each, weight) = len(slots) // SLOT_BYTES, weights[component]
        pages += count * each
        full_pages += count if component == FULL else 0
        size += count * weight
    return pages, full_pages, size


class HostPages(Protocol):
    """The part of a host pool that storage needs."""

    def page(self, slot: int) -> memoryview: ...


class PoolMap(PoolLayout):
    """The layout, bytes and keys of a worker's pools."""

    def __init__(self, specs: Sequence[PoolSpec], page_size: int, host: Mapping[str, HostPages]) -> None:
        super().__init__(specs)
        self.written: tuple[Mapping[int, tuple[PoolSpec, ...]], ...]
        """The pools that are stored, by component, in two steps. First come the auxiliary components with the pools
        that derive from them, and the pools that follow FULL; then the pools that are FULL."""
        self.written = ({**self.of, FULL: self.follow}, {FULL: self.lead})
        solid = [spec for pools in self.of.values() for spec in pools]
        self._digests = {spec.name: pool_digest(spec, page_size) for spec in solid}
        self._weights = {c: (1, sum(spec.bytes_per_page for spec in pools)) for c, pools in self.of.items()}
        self._host = host

    def size_of(self, moves: Sequence[Move]) -> tuple[int, int, int]:
        """Return how much ``moves`` copy: slots of all components, how many of these are FULL's, and bytes in all
        pools."""
        return size_of(moves, self._weights)

    def key(self, pool: str, page_hash: bytes) -> PageKey:
        """Return the key under which a page of ``pool`` is stored."""
        return PageKey(pool, storage_key(page_hash, self._digests[pool], named=self.counts(pool)))

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
        digest, named = self._digests[pool], self.counts(pool)
        return [PageKey(pool, storage_key(hashes[at : at + HASH_BYTES], digest, named=named))
                for at in range(0, len(hashes), HASH_BYTES)]

    @property
    def key_of(self) -> Callable[[bytes], bytes] | None:
        """A function from a page's hash to the storage key of the last part of its FULL data; None if FULL has no
        stored object."""
        digest = self.digest
        return (lambda page_hash: storage_key(page_hash, digest)) if digest else None

    def payloads(self, pool: str, slots: bytes) -> list[memoryview]:
        """Return the host bytes of each page of ``pool`` in ``slots`` (int32)."""
        return list(map(self._host[pool].page, np.frombuffer(slots, np.int32).tolist()))

