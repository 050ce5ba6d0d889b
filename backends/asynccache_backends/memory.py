"""A store in this process's memory, for tests and for machines with memory to spare.

Its URL is ``memory:?capacity=1GiB``. When it is full, the least recently used records are evicted; without a capacity
it grows without limit. Large copies are made in threads, in batches, so that they do not hold up the event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

from asynccache.errors import ConfigError, Unavailable
from asynccache.settings import Settings
from asynccache.storage import (
    HEADER_BYTES,
    MOST_SIZE,
    PageKey,
    ParsedUrl,
    Record,
    Result,
    Size,
    Stored,
    StoreLayout,
    Tell,
    ThreadPool,
)

LISTED = 1000

_Bytes = npt.NDArray[np.uint8]


class MemorySettings(Settings, frozen=True):
    """The options in a URL."""

    capacity: Size = MOST_SIZE
    """Bytes of headers and payloads that the store may hold."""


class MemoryBackend:
    """The store. ``capacity`` is the bytes of headers and payloads that it holds at most; by default
    there is no limit."""

    def __init__(self, capacity: int = MOST_SIZE) -> None:
        self._capacity = capacity
        self._stored: OrderedDict[bytes, _Bytes] = OrderedDict()
        self._bytes = 0
        self._evicted = 0
        self._threads = ThreadPool(2, "asynccache-memory")
        self._closed = False
        self._tell: Tell | None = None

    @classmethod
    def check(cls, url: ParsedUrl, layout: StoreLayout) -> None:
        """Raise the ConfigError that ``open`` would raise for ``url``, if any."""
        _capacity_of(url, layout)

    @classmethod
    async def open(cls, url: ParsedUrl, layout: StoreLayout) -> Self:
        """Make the store for ``memory:?capacity=SIZE``. Raises ConfigError if the capacity does not hold one page."""
        return cls(_capacity_of(url, layout))

    def __repr__(self) -> str:
        return f"MemoryBackend(pages={len(self._stored)}, bytes={self._bytes}, capacity={self._capacity})"

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        """Return for each key whether it is stored: HIT or MISS. The call never waits."""
        self._check_open()
        return [Result.HIT if key.key in self._stored else Result.MISS for key in keys]

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Copy each stored record into the given buffers. Cancelling it returns after the copies have ended."""
        self._check_open()
        results = [self._lookup(key, record) for key, record in zip(keys, records, strict=True)]
        pairs = [(records[i], self._stored[keys[i].key]) for i, r in enumerate(results) if r is Result.HIT]
        await self._copy(_copy_out, pairs)
        return results

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Store a copy of each new record. Cancelling it returns after the copies have ended; none is stored then."""
        self._check_open()
        new = {key.key: record for key, record in zip(keys, records, strict=True) if key.key not in self._stored}
        pairs = [(record, _aligned(HEADER_BYTES + record.payload.nbytes)) for record in new.values()]
        await self._copy(_copy_in, pairs)
        for key, (_, data) in zip(new, pairs, strict=True):
            self._keep(key, data)
        return [Result.HIT] * len(keys)

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        """Delete the record of each key. It never waits."""
        self._check_open()
        return [Result.HIT if self._drop(key.key) else Result.MISS for key in keys]

    async def clear(self) -> None:
        """Delete every record. It never waits."""
        self._changed(False, list(self._stored))
        self._stored.clear()
        self._bytes = 0

    def register(self, pool: str, memory: memoryview) -> None:
        """Do nothing: this store copies from and into any memory."""

    def watch(self, tell: Tell | None) -> Iterable[Sequence[bytes]]:
        """Call ``tell`` from now on at every change; None ends that. Returns the keys that are stored now, in parts."""
        self._tell = tell
        keys = list(self._stored)
        return ([key for key in keys[at : at + LISTED] if key in self._stored] for at in range(0, len(keys), LISTED))

    def stats(self) -> Mapping[str, int | float]:
        """Return how many pages and bytes are stored, and how many records were evicted."""
        return {"pages": len(self._stored), "bytes": self._bytes, "errors": 0, "evicted": self._evicted}

    async def listing(self) -> AsyncIterator[Sequence[Stored]]:
        """Yield all stored pages, the least recently used first."""
        self._check_open()
        keys = list(self._stored)
        for at in range(0, len(keys), LISTED):
            part = keys[at : at + LISTED]
            yield [Stored(key, self._stored[key].nbytes, 0.0) for key in part if key in self._stored]
            await asyncio.sleep(0)

    async def flush(self) -> None:
        """Do nothing: no record survives the process."""

    async def aclose(self) -> None:
        """Delete every record and end the threads. Calling it twice is fine."""
        self._closed = True
        await self.clear()
        self._threads.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the memory store is closed")

    def _lookup(self, key: PageKey, record: Record) -> Result:
        data = self._stored.get(key.key)
        if data is None:
            return Result.MISS
        self._stored.move_to_end(key.key)
        return Result.HIT if data.nbytes == HEADER_BYTES + record.payload.nbytes else Result.CORRUPT

    def _keep(self, key: bytes, data: _Bytes) -> None:
        if key in self._stored:
            return
        self._stored[key] = data
        self._bytes += data.nbytes
        self._changed(True, (key,))
        while self._bytes > self._capacity:
            self._drop(next(iter(self._stored)))
            self._evicted += 1

    def _drop(self, key: bytes) -> bool:
        data = self._stored.pop(key, None)
        if data is None:
            return False
        self._bytes -= data.nbytes
        self._changed(False, (key,))
        return True

    def _changed(self, there: bool, keys: Sequence[bytes]) -> None:
        if self._tell is not None and keys:
            self._tell(there, keys)

    async def _copy(
        self, work: Callable[[Sequence[tuple[Record, _Bytes]]], None], pairs: Sequence[tuple[Record, _Bytes]]
    ) -> None:
        await self._threads.spread(work, [data.nbytes for _, data in pairs], pairs)


def _capacity_of(url: ParsedUrl, layout: StoreLayout) -> int:
    """Return the capacity in ``url``. Raises ConfigError if it does not hold one page."""
    capacity = url.settings(MemorySettings).capacity
    needed = HEADER_BYTES + layout.largest
    if capacity < needed:
        raise ConfigError(f"storage option capacity={capacity} is less than one page of {needed} bytes")
    return capacity


def _aligned(size: int) -> _Bytes:
    """Return new memory that begins at a multiple of 64 bytes, as the payload behind its header does then. NumPy's own
    begins 16 bytes behind one, where copies run at half the speed on some processors."""
    memory = np.empty(size + HEADER_BYTES, np.uint8)
    start = -memory.__array_interface__["data"][0] % HEADER_BYTES
    return memory[start : start + size]


def _copy_in(pairs: Sequence[tuple[Record, _Bytes]]) -> None:
    for record, data in pairs:
        data[:HEADER_BYTES] = np.frombuffer(record.header, np.uint8)
        data[HEADER_BYTES:] = np.frombuffer(record.payload, np.uint8)


def _copy_out(pairs: Sequence[tuple[Record, _Bytes]]) -> None:
    for record, data in pairs:
        np.frombuffer(record.header, np.uint8)[:] = data[:HEADER_BYTES]
        np.frombuffer(record.payload, np.uint8)[:] = data[HEADER_BYTES:]
