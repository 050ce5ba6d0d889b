"""The parts that a run is given by its options: a device, and the faults of ``--faults``. torch and cupy are only
imported when a device is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from asynccache.memory.device import parse_device
from asynccache.storage import ParsedUrl, StorageBackend, StoreLayout, attachment
from asynccache.testing.faulty_backend import FaultyBackend

if TYPE_CHECKING:
    from asynccache.memory.cpu import CpuDevice
    from asynccache.memory.cuda.device import CudaDevice
    from asynccache.memory.host_copies import Faults


def make_device(name: str, faults: Faults) -> CpuDevice | CudaDevice:
    """A new device with these faults, which the caller closes.

    Raises:
        ConfigError: there is no such GPU, or what it needs is not installed.
    """
    if parse_device(name).kind == "cpu":
        from asynccache.memory.cpu import CpuDevice

        return CpuDevice(faults=faults)
    from asynccache.memory.cuda.device import open_device

    return open_device(name, faults=faults)


def device_faults(share: float, seed: int) -> Faults:
    """Faults for a device: of all copies, ``share / 2`` are delayed and ``share / 4`` fail."""
    from asynccache.memory.host_copies import Faults  # here, because it imports torch

    return Faults(seed=seed, delayed=share / 2, failing=share / 4)


@contextmanager
def faulty_stores(share: float, seed: int) -> Iterator[None]:
    """Give faults to all stores that are opened while this lasts. ``share``: of their calls, see ``FaultyBackend``; 0:
    no faults. The first store draws its faults with ``seed``, and each further one with the next number."""
    known, seeds = attachment.backend_class, iter(range(seed, seed + (1 << 30)))
    if share:
        attachment.backend_class = lambda scheme: _Faulty(known(scheme), share, next(seeds))
    try:
        yield
    finally:
        attachment.backend_class = known


class _Faulty:
    """Stands for a backend class, and gives faults to every backend that it opens."""

    def __init__(self, kind: attachment.BackendClass, share: float, seed: int) -> None:
        self._kind = kind
        self._share = share
        self._seed = seed

    async def open(self, url: ParsedUrl, layout: StoreLayout) -> StorageBackend:
        """Open a backend as the class does. Cancelling is as for the class."""
        return FaultyBackend(await self._kind.open(url, layout), self._share, self._seed)
