"""The memory that a host process shares with its clients, and which parts of it are free.

It is a memfd, which needs no file system and no ``/dev/shm``. It is sealed against a change of its size, so that no
client can be killed by a mapping that has lost its end. The server allocates all of it when it starts, so that memory
is charged to the server and not to whichever engine writes a page first; some hundred MiB at a time, in a thread, and
what is allocated can be used at once.

Payloads lie in *extents* of whole units, so each begins at a page of the system's memory, which direct I/O and pinning
for a GPU need, and copies to which are twice as fast as to odd places. The smallest extent that fits is taken, of equal
ones the one that came free last: every client has its pages mapped already. Free neighbours become one. Slabs of one
size each were tried instead, and lost 7 points of hit rate.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

from asynccache.errors import ConfigError
from asynccache.storage import HEADER_BYTES

UNIT = 4096
SLOT_BYTES = 16384
"""Bytes of memory for each slot. Pages smaller than this use up the slots before the payloads."""
INDEX_BYTES = 320
"""Bytes of the server's own memory for each slot. They come out of the memory that was asked for."""
GENERATION_BYTES, TAG_BYTES = 8, 4
HUGE = 2 << 20
ALLOCATED_AT_A_TIME = 128 << 20
LEAST_MEMORY = 1 << 20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def units_of(size: int) -> int:
    """Return how many units a payload of ``size`` bytes takes."""
    return -(-size // UNIT)


class Extents:
    """The owners of a memory's units, of ``units`` in all. ``free``: how many are free.

    ``tags`` has a number at the first and at the last unit of every extent, so that its neighbours are found from
    there: that of the owner (above 0), or the negative size of a free extent. Units that were never given have 0.
    """

    def __init__(self, units: int) -> None:
        self.free = 0
        self.tags = array("i", [0]) * (units + 1)
        self._starts: dict[int, dict[int, None]] = {}
        self._sizes: list[int] = []

    @property
    def largest(self) -> int:
        """The units of the largest free extent."""
        return self._sizes[-1] if self._sizes else 0

    def take(self, units: int, owner: int) -> int | None:
        """Take ``units`` that lie in a row for ``owner`` (above 0). Returns the first of them; None if there is no such
        extent."""
        at = bisect_left(self._sizes, units)
        if at == len(self._sizes):
            return None
        size = self._sizes[at]
        start = next(reversed(self._starts[size]))
        self._remove(start, size)
        if size > units:
            self._add(start + units, size - units)
        self.free -= units
        self.tags[start] = self.tags[start + units - 1] = owner
        return start

    def give(self, start: int, units: int) -> None:
        """Give ``units`` from ``start`` on back, or add them for the first time."""
        self.free += units
        after, before = self.tags[start + units], self.tags[start - 1] if start else 0
        if after < 0:
            self._remove(start + units, -after)
            units -= after
        if before < 0:
            start += before
            self._remove(start, -before)
            units -= before
        self._add(start, units)

    def give_all_but(self, taken: Iterable[tuple[int, int, int]], until: int) -> None:
        """Add the units below ``until`` that are not ``taken`` (start, units and owner of each extent). To be called
        once, first."""
        at = 0
        for start, units, owner in sorted(taken):
            self.tags[start] = self.tags[start + units - 1] = owner
            if start > at:
                self.give(at, start - at)
            at = start + units
        if until > at:
            self.give(at, until - at)

    def _add(self, start: int, size: int) -> None:
        self.tags[start] = self.tags[start + size - 1] = -size
        starts = self._starts.get(size)
        if starts is None:
            starts = self._starts[size] = {}
            insort(self._sizes, size)
        starts[start] = None

    def _remove(self, start: int, size: int) -> None:
        starts = self._starts[size]
        del starts[start]
        if not starts:
            del self._starts[size], self._sizes[bisect_left(self._sizes, size)]


class MemoryLayout(NamedTuple):
    """Where things lie in the memory, in bytes."""

    size: int
    slots: int
    headers_at: int
    payloads_at: int

    @property
    def units(self) -> int:
        """How many units there are for payloads."""
        return (self.size - self.payloads_at) // UNIT


def layout_of(size: int, *, huge: bool = False) -> MemoryLayout:
    """Return the layout of ``size`` bytes in all, the server's index of the pages among them.

    Raises:
        ConfigError: that is too little to be of use.
    """
    grain = HUGE if huge else UNIT
    if size < max(LEAST_MEMORY, 2 * grain):
        raise ConfigError(f"memory={size}: a host process needs {max(LEAST_MEMORY, 2 * grain)} bytes at least")
    slots = size // SLOT_BYTES
    size = max(grain, (size - slots * INDEX_BYTES - size // UNIT * TAG_BYTES) // grain * grain)
    headers_at = -(-slots * GENERATION_BYTES // UNIT) * UNIT
    return MemoryLayout(size, slots, headers_at, -(-(headers_at + slots * HEADER_BYTES) // UNIT) * UNIT)


class HostMemory:
    """The shared memory. ``view``: all of it. ``fd``: what clients get. ``allocated``: how many bytes, from the start,
    are allocated by now."""

    def __init__(self, layout: MemoryLayout, fd: int, allocated: int) -> None:
        self.layout = layout
        self.fd = fd
        self.allocated = allocated
        self._map = mmap.mmap(fd, layout.size)
        self._map.madvise(mmap.MADV_DONTFORK)
        self.view = memoryview(self._map)
        self.generations = self.view[: layout.slots * GENERATION_BYTES].cast("Q")

    @classmethod
    def make(cls, size: int, *, huge: bool = False) -> HostMemory:
        """Make memory of ``size`` bytes. Nothing of it is allocated yet, but with ``huge`` pages it is reserved.

        Raises:
            ConfigError: there can be no such memory; the message says why.
        """
        layout = layout_of(size, huge=huge)
        fd = os.memfd_create("asynccache-host", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if huge else 0))
        try:
            os.ftruncate(fd, layout.size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            return cls(layout, fd, 0)
        except (OSError, ValueError) as error:
            os.close(fd)
            hint = "; reserve huge pages first, as by sysctl vm.nr_hugepages" if huge else ""
            raise ConfigError(f"memory={size}: {error}{hint}") from None

    def allocate(self) -> int:
        """Allocate the next part. Returns how many units can be used now. It blocks for some 0.1 s. Raises OSError:
        there is no memory for it."""
        layout, step = self.layout, max(ALLOCATED_AT_A_TIME, self.layout.payloads_at)
        more = min(step, layout.size - self.allocated)
        if more:
            os.posix_fallocate(self.fd, self.allocated, more)
            self.allocated += more
        return max(0, self.allocated - layout.payloads_at) // UNIT

    def payload(self, start: int, size: int) -> memoryview:
        """Return the first ``size`` bytes of the extent that begins at unit ``start``."""
        at = self.layout.payloads_at + start * UNIT
        return self.view[at : at + size]

    def header(self, slot: int) -> memoryview:
        """Return the header of a slot."""
        at = self.layout.headers_at + slot * HEADER_BYTES
        return self.view[at : at + HEADER_BYTES]

    def close(self) -> None:
        """Give the memory up. Clients that have it mapped keep it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
