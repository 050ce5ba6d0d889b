"""Which memory the client may read and write: runs that were registered with it, each once, however many caches share
them.

The client refuses memory that overlaps what is registered; what lies in it is copied through a stage (``transfers``).
Mutable state: the runs, and how often each is wanted. Used from threads.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections import Counter
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from asynccache_backends.mooncake.client import Client


class Region(NamedTuple):
    """A run of memory."""

    start: int
    end: int


class Regions:
    """What is registered with ``client``."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._wanted: Counter[Region] = Counter()
        self._sorted: tuple[list[int], list[int]] = ([], [])  # replaced, never changed: lookups need no lock
        self._lock = Lock()

    @property
    def bytes(self) -> int:
        """All that is registered."""
        return sum(region.end - region.start for region in list(self._wanted))

    def add(self, region: Region) -> bool:
        """Register it; whether that was possible. What was added is removed as often."""
        with self._lock:
            if not self._wanted[region] and not self._register(region):
                del self._wanted[region]
                return False
            self._wanted[region] += 1
            self._sort()
            return True

    def remove(self, region: Region) -> None:
        """Nobody uses it any more on behalf of who added it."""
        with self._lock:
            self._wanted[region] -= 1
            if not self._wanted[region]:
                del self._wanted[region]
                self._sort()
                with self._client as store:
                    store.unregister_buffer(region.start)

    def covers(self, start: int, length: int) -> bool:
        """Whether a buffer lies in registered memory."""
        starts, ends = self._sorted
        i = bisect_right(starts, start) - 1
        return i >= 0 and start + length <= ends[i]

    def _register(self, region: Region) -> bool:
        with self._client as store:
            code: int = store.register_buffer(region.start, region.end - region.start)
        return code == 0

    def _sort(self) -> None:
        runs = sorted(self._wanted)
        self._sorted = ([run.start for run in runs], [run.end for run in runs])


def address_of(view: memoryview) -> int:
    """Where the bytes of ``view`` lie."""
    if view.readonly:
        address: int = np.frombuffer(view, np.uint8).ctypes.data
        return address
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def region_of(memory: memoryview) -> Region:
    """The run of memory that ``memory`` is."""
    start = address_of(memory)
    return Region(start, start + memory.nbytes)


def copy(to: Any, source: memoryview) -> None:
    """Copy bytes, with the GIL released."""
    np.copyto(np.frombuffer(to, np.uint8), np.frombuffer(source, np.uint8))
