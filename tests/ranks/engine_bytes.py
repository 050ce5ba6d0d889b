"""What an engine would write on one rank, and what it must read: every rank has bytes of its own, but for what is
replicated, and a page's are a function of everything up to its end."""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from asynccache.config import POOL_NAME, CacheConfig
from asynccache.core.settings import ComponentKind
from asynccache.ranks import Place
from asynccache.runtime.cache import AsyncCache
from asynccache.runtime.lease import Lease
from asynccache.testing.simulated_world import WrongBytes


class EngineBytes:
    """The pages of one cache at ``place``. ``verified``: how many were compared."""

    def __init__(self, cache: AsyncCache, config: CacheConfig, place: Place) -> None:
        self.verified = 0
        self._place = place
        self._page = config.page_size
        self._pools = {spec.name: spec for spec in config.pools() if spec.bytes_per_page}
        self._states = [name for name, spec in self._pools.items() if spec.component is ComponentKind.MAMBA]
        self._has_states = any(spec.component is ComponentKind.MAMBA for spec in config.pools())
        self._window = max(component.window for component in config.core().components)
        self._rows: dict[str, list[npt.NDArray[np.uint8]]] = {
            name: [cache.pools[name].layer(layer).numpy() for layer in range(spec.layers)]
            for name, spec in self._pools.items()
        }
        parts = {name: (0, 0) if spec.replicated else (place.tp, place.cp) for name, spec in self._pools.items()}
        self._parts = {name: f"{name}/{part}".encode() for name, part in parts.items()}

    def checkpoint(self, lease: Lease, space: str | None, text: list[int]) -> tuple[int, int] | None:
        """Write a state after ``text``, if there may be one."""
        if not self._has_states or len(lease.states) < 2 or not text or len(text) % self._page:
            return None
        slot = int(lease.states[-1])
        content = self._content(space, text, len(text) // self._page - 1)
        for name in self._states:
            self._put(name, slot, content)
        return len(text), slot

    def write(self, lease: Lease, space: str | None, text: list[int], first: int) -> None:
        """Pages of ``text`` from ``first`` on, also one that is not whole."""
        tables = self._tables(lease)
        for i in range(first, -(-len(text) // self._page)):
            content = self._content(space, text, i)
            for name, table in tables.items():
                if table[i] >= 0:
                    self._put(name, table[i], content)

    def verify(self, lease: Lease, space: str | None, text: list[int], end: int, *, state: bool = False) -> None:
        """All that an engine would read which goes on at ``end``."""
        whole = end // self._page
        tables = self._tables(lease)
        start = max(0, end - self._window) // self._page
        for i in range(whole):
            content = self._content(space, text, i)
            for name, table in tables.items():
                if i >= start or self._pools[name].component is ComponentKind.FULL:
                    self._check(name, table[i], content, f"page {i}")
        for name in self._states if state and end else ():
            self._check(name, int(lease.states[0]), self._content(space, text, whole - 1), "state")

    def _tables(self, lease: Lease) -> dict[str, list[int]]:
        tables = {
            spec.component: lease.page_table(POOL_NAME[spec.component]).tolist()
            for spec in self._pools.values() if spec.component is not ComponentKind.MAMBA
        }  # fmt: skip
        return {
            name: tables[spec.component] for name, spec in self._pools.items() if spec.component in tables
        }

    def _content(self, space: str | None, text: list[int], page: int) -> bytes:
        return f"{space}{text[: (page + 1) * self._page]}".encode()

    def _expected(self, pool: str, layer: int, content: bytes, size: int) -> bytes:
        seed = _seed(content, self._parts[pool])
        turn = self._pools[pool].model_layers[layer] % len(seed)
        return ((seed[turn:] + seed[:turn]) * (size // len(seed) + 1))[:size]

    def _put(self, pool: str, slot: int, content: bytes) -> None:
        for layer, rows in enumerate(self._rows[pool]):
            row = rows[slot]
            row[:] = np.frombuffer(self._expected(pool, layer, content, len(row)), np.uint8)

    def _check(self, pool: str, slot: int, content: bytes, what: str) -> None:
        self.verified += 1
        if slot < 0:
            raise WrongBytes(f"{pool} {what} has no slot")
        for layer, rows in enumerate(self._rows[pool]):
            row = rows[slot].tobytes()
            if row != self._expected(pool, layer, content, len(row)):
                raise WrongBytes(f"{self._place}: {pool} {what}, slot {slot}, layer {layer}: {row[:8].hex()}")


@lru_cache(1 << 14)
def _seed(content: bytes, part: bytes) -> bytes:
    return sha256(content + part).digest()
