"""The memory that is registered with the client, which it may read and write directly. Each run of memory is registered
once, however many caches share it.

The client refuses memory that overlaps registered memory. Pages in memory that it has refused are copied through a
*stage* (see ``transfers``). Mutable state: the runs, and how many users each has. It is used from several threads.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections import Counter
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from asynccache_backends.mooncake.client import MooncakeClient


class Region(NamedTuple):
    """A run of memory, by its first address and the one past its last."""

    start: int
    end: int


class Regions:
    """The memory that is registered with ``client``."""

    def __init__(self, client: MooncakeClient) -> None:
        self._client = client
        self._wanted: Counter[Region] = Counter()
        self._sorted: tuple[list[int], list[int]] = ([], [])  # replaced, never changed: look-ups need no lock
        self._lock = Lock()

    def add(self, region: Region) -> bool:
        """Register a region, or add a user to one that is registered. Returns False if the client refuses it. Each
        ``add`` that returned True needs a ``remove``."""
        with self._lock:
            if not self._wanted[region]:
                with self._client as store:
                    code: int = store.register_buffer(region.start, region.end - region.start)
                if code != 0:
                    del self._wanted[region]
                    return False
            self._wanted[region] += 1
            self._sort()
            return True

    def remove(self, region: Region) -> None:
        """Take one user from a region. Without users it is unregistered."""
        with self._lock:
            self._wanted[region] -= 1
            if not self._wanted[region]:
                del self._wanted[region]
                self._sort()
                with self._client as store:
                    store.unregister_buffer(region.start)

    def covers(self, start: int, length: int) -> bool:
        """Return True if the ``length`` bytes from the address ``start`` on are in one registered region."""
        starts, ends = self._sorted
        i = bisect_right(starts, start) - 1
        return i >= 0 and start + length <= ends[i]

    def _sort(self) -> None:
        runs = sorted(self._wanted)
        self._sorted = ([run.start for run in runs], [run.end for run in runs])


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of ``view``."""
    if view.readonly:
        address: int = np.frombuffer(view, np.uint8).ctypes.data
        return address
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def region_of(memory: memoryview) -> Region:
    """Return the region of ``memory``."""
    start = address_of(memory)
    return Region(start, start + memory.nbytes)


def copy(to: Any, source: memoryview) -> None:
    """Copy bytes. The GIL is released meanwhile."""
    np.copyto(np.frombuffer(to, np.uint8), np.frombuffer(source, np.uint8))
