"""What ``--faults`` does to a device and to the stores of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from asynccache.storage import ParsedUrl, StorageBackend, StoreLayout, opening
from asynccache.testing.faulty_backend import FaultyBackend

if TYPE_CHECKING:
    from asynccache.memory.faults import Faults


def device_faults(share: float, seed: int) -> Faults:
    """Of all copies."""
    from asynccache.memory.faults import Faults  # torch comes with it

    return Faults(seed=seed, delayed=share / 2, failing=share / 4)


@contextmanager
def faulty_stores(share: float, seed: int) -> Iterator[None]:
    """Stores that are opened meanwhile fail now and then, the first with this seed, each other with the next one.
    ``share``: of their calls; 0: they do not."""
    known, seeds = opening.backend_class, iter(range(seed, seed + (1 << 30)))
    if share:
        opening.backend_class = lambda scheme: _Faulty(known(scheme), share, next(seeds))
    try:
        yield
    finally:
        opening.backend_class = known


class _Faulty:
    """A backend class of which every backend has faults."""

    def __init__(self, kind: opening.BackendClass, share: float, seed: int) -> None:
        self._kind = kind
        self._share = share
        self._seed = seed

    async def open(self, url: ParsedUrl, layout: StoreLayout) -> StorageBackend:
        """As the class does."""
        return FaultyBackend(await self._kind.open(url, layout), self._share, self._seed)
