"""Records in this process's memory: L3 without a disk, for tests and for machines with memory to spare.

``memory:?capacity=1GiB``; without a capacity it grows. Least recently used records leave first. Large copies run in a
thread, in batches, so that the loop stays free.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from asynccache.errors import ConfigError, Unavailable
from asynccache.storage import (
    HEADER_BYTES,
    Collected,
    PageKey,
    ParsedUrl,
    Record,
    Result,
    Stored,
    StoreLayout,
    Tell,
    Workers,
    settled,
)

BATCH_BYTES = 2 << 20
INLINE_BYTES = 128 << 10
LISTED = 1000

_Bytes = npt.NDArray[np.uint8]


class _Kept(NamedTuple):
    """A record, header first, and when it came."""

    data: _Bytes
    written: float


class MemoryBackend:
    """``capacity`` counts headers and payloads; None: no limit."""

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        self._stored: OrderedDict[bytes, _Kept] = OrderedDict()
        self._bytes = 0
        self._counts: Counter[str] = Counter()
        self._workers = Workers(2, "asynccache-memory")
        self._closed = False
        self._tell: Tell | None = None

    @classmethod
    def check(cls, url: ParsedUrl, layout: StoreLayout) -> None:
        """Refuse what ``open`` would refuse of ``url``. Raises ConfigError."""
        _capacity_of(url, layout)

    @classmethod
    async def open(cls, url: ParsedUrl, layout: StoreLayout) -> Self:
        """``memory:?capacity=SIZE``. Raises ConfigError if the capacity does not hold one page."""
        return cls(_capacity_of(url, layout))

    def __repr__(self) -> str:
        return f"MemoryBackend(pages={len(self._stored)}, bytes={self._bytes}, capacity={self._capacity})"

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        """HIT or MISS per key. Never waits."""
        self._check_open()
        return [Result.HIT if key.key in self._stored else Result.MISS for key in keys]

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Copy what is stored. Cancelling it returns after the copies have ended."""
        self._check_open()
        results = [self._lookup(key, record) for key, record in zip(keys, records, strict=True)]
        pairs = [(records[i], self._stored[keys[i].key].data) for i, r in enumerate(results) if r is Result.HIT]
        await self._copy(_copy_out, pairs)
        return results

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Copy each new record in. Cancelling it returns after the copies have ended; the records are not kept then."""
        self._check_open()
        new = {key.key: record for key, record in zip(keys, records, strict=True) if key.key not in self._stored}
        pairs = [(record, np.empty(HEADER_BYTES + record.payload.nbytes, np.uint8)) for record in new.values()]
        await self._copy(_copy_in, pairs)
        for key, (_, data) in zip(new, pairs, strict=True):
            self._keep(key, data)
        return [Result.HIT] * len(keys)

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        """Forget each key. Never waits."""
        self._check_open()
        return [Result.HIT if self._drop(key.key) else Result.MISS for key in keys]

    async def clear(self) -> None:
        """Forget everything. Never waits."""
        self._changed(False, list(self._stored))
        self._stored.clear()
        self._bytes = 0

    def register(self, pool: str, memory: memoryview) -> None:
        """Nothing to do: any memory will do."""

    def watch(self, tell: Tell | None) -> None:
        """``tell`` hears of every key that is there, and of every change; None: of nothing any more."""
        self._tell = tell
        self._changed(True, list(self._stored))

    def stats(self) -> Mapping[str, int | float]:
        """Pages and bytes held, and how many records left for want of room."""
        return {"pages": len(self._stored), "bytes": self._bytes, "errors": 0, "evicted": self._counts["evicted"]}

    async def listing(self) -> AsyncIterator[Sequence[Stored]]:
        """What is there, least recently used first. Cancelling it changes nothing."""
        self._check_open()
        keys = list(self._stored)
        for at in range(0, len(keys), LISTED):
            found = [(key, self._stored[key]) for key in keys[at : at + LISTED] if key in self._stored]
            yield [Stored(key, kept.data.nbytes, kept.written) for key, kept in found]
            await asyncio.sleep(0)

    async def collect(self, older_than: float | None) -> Collected:
        """Forget what came more than ``older_than`` seconds ago; there is no waste. Never waits."""
        self._check_open()
        if older_than is None:
            return Collected()
        before, until = self._bytes, time.time() - older_than
        old = [key for key, kept in self._stored.items() if kept.written < until]
        for key in old:
            self._drop(key)
        return Collected(pages=len(old), size=before - self._bytes)

    async def flush(self) -> None:
        """Nothing here survives the process."""

    async def aclose(self) -> None:
        """Forget everything and end the threads. Twice is fine."""
        self._closed = True
        await self.clear()
        self._workers.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the memory store is closed")

    def _lookup(self, key: PageKey, record: Record) -> Result:
        kept = self._stored.get(key.key)
        if kept is None:
            return Result.MISS
        self._stored.move_to_end(key.key)
        return Result.HIT if kept.data.nbytes == HEADER_BYTES + record.payload.nbytes else Result.CORRUPT

    def _keep(self, key: bytes, data: _Bytes) -> None:
        if key in self._stored:
            return
        self._stored[key] = _Kept(data, time.time())
        self._bytes += data.nbytes
        self._changed(True, (key,))
        while self._capacity is not None and self._bytes > self._capacity:
            self._drop(next(iter(self._stored)))
            self._counts["evicted"] += 1

    def _drop(self, key: bytes) -> bool:
        kept = self._stored.pop(key, None)
        if kept is None:
            return False
        self._bytes -= kept.data.nbytes
        self._changed(False, (key,))
        return True

    def _changed(self, there: bool, keys: Sequence[bytes]) -> None:
        if self._tell is not None and keys:
            self._tell(there, keys)

    async def _copy(
        self, work: Callable[[Sequence[tuple[Record, _Bytes]]], None], pairs: Sequence[tuple[Record, _Bytes]]
    ) -> None:
        if sum(data.nbytes for _, data in pairs) <= INLINE_BYTES:
            work(pairs)
            return
        futures = [self._workers.call(work, batch) for batch in _batches(pairs)]
        await settled(futures)
        for future in futures:
            future.result()


def _capacity_of(url: ParsedUrl, layout: StoreLayout) -> int | None:
    """What ``url`` says of it. Raises ConfigError if it does not hold one page."""
    url.allow_only(("capacity",))
    if "capacity" not in url.options:
        return None
    capacity = url.size("capacity", 0)
    needed = HEADER_BYTES + max(layout.page_bytes.values(), default=0)
    if capacity < needed:
        raise ConfigError(f"storage option capacity={capacity} is less than one page of {needed} bytes")
    return capacity


def _copy_in(pairs: Sequence[tuple[Record, _Bytes]]) -> None:
    for record, data in pairs:
        data[:HEADER_BYTES] = np.frombuffer(record.header, np.uint8)
        data[HEADER_BYTES:] = np.frombuffer(record.payload, np.uint8)


def _copy_out(pairs: Sequence[tuple[Record, _Bytes]]) -> None:
    for record, data in pairs:
        np.frombuffer(record.header, np.uint8)[:] = data[:HEADER_BYTES]
        np.frombuffer(record.payload, np.uint8)[:] = data[HEADER_BYTES:]


def _batches(pairs: Sequence[tuple[Record, _Bytes]]) -> Iterator[Sequence[tuple[Record, _Bytes]]]:
    start = size = 0
    for i, (_, data) in enumerate(pairs):
        size += data.nbytes
        if size >= BATCH_BYTES:
            yield pairs[start : i + 1]
            start, size = i + 1, 0
    if size:
        yield pairs[start:]
