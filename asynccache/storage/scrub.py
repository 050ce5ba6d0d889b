"""Scrubbing: every stored page is read, and pages that do not verify are deleted before somebody asks for them.

A backend that keeps its pages together can be ``Scrubbable``: it divides what it has into parts of a few MiB, and reads
them one by one. Any backend whose pages can be listed is read page by page (``scrub_listed``). A backend cannot tell
whether a record is good, so it is given a ``Verify`` that can.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

from asynccache.errors import Timeout
from asynccache.storage.contract import HEADER_BYTES, Listable, PageKey, Record, Result, Stored, drop_damaged

Verify = Callable[[Sequence[PageKey], Sequence[Record]], Awaitable[list[bool]]]
"""Returns for each record whether it is undamaged and belongs to its key. The pool's name in a key may be empty, since
a backend need not know it."""

SCRUB_POOL = "#scrub"
BATCH_BYTES = 8 << 20
BATCH_PAGES = 64


class Part(NamedTuple):
    """A part of a store: ``pages`` pages of ``page_bytes`` bytes each. ``place`` says where, in the backend's own
    terms."""

    page_bytes: int
    pages: int
    place: Any


class Scrubbed(NamedTuple):
    """The result of a scrub. ``pages``: how many were read. ``bytes``: the bytes of their payloads. ``bad``: how many
    of them did not verify and were deleted. ``unread``: how many could not be read; they were left as they are."""

    pages: int = 0
    bytes: int = 0
    bad: int = 0
    unread: int = 0

    def plus(self, other: Scrubbed) -> Scrubbed:
        """Return the sums of both."""
        return Scrubbed(*map(sum, zip(self, other, strict=True)))


@runtime_checkable
class Scrubbable(Protocol):
    """A backend whose pages can be scrubbed. Optional."""

    def parts(self) -> list[Part]:
        """Return all that is stored now, in parts that are small enough to be read into memory one by one."""
        ...

    async def scrub(self, part: Part, verify: Verify) -> Scrubbed:
        """Read the pages of ``part`` that are still stored, and delete those that do not verify. After it is cancelled
        no more pages are deleted."""
        ...


class _Readable(Listable, Protocol):
    def register(self, pool: str, memory: memoryview) -> None: ...

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]: ...

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]: ...


def pause(done: int, rate: float, elapsed: float) -> float:
    """Return how many seconds to wait after ``done`` bytes in ``elapsed`` seconds to stay below ``rate`` bytes a
    second."""
    return max(0.0, done / rate - elapsed)


async def scrub_listed(backend: _Readable, verify: Verify, timeout: float) -> AsyncIterator[Scrubbed]:
    """Read every page that ``backend`` lists, and delete those that do not verify. Yields what was done, batch by
    batch; pages that are gone when they are read are not counted. After it is cancelled no more pages are deleted.

    Raises:
        BackendError: the backend could not list or read. ``Timeout``: it did not answer within ``timeout`` seconds.
    """
    buffers = _Buffers(backend)
    async for listed in in_time(backend.listing(), timeout):
        for batch in _batches(listed):
            yield await _scrub_batch(backend, verify, batch, buffers.records(batch), timeout)


async def in_time(batches: AsyncIterator[Sequence[Stored]], timeout: float) -> AsyncIterator[Sequence[Stored]]:
    """Yield what ``batches`` yields. Raises ``Timeout`` if one takes more than ``timeout`` seconds to come."""
    while True:
        async with within(timeout, "the store did not go on with its list"):
            batch = await anext(batches, None)
        if batch is None:
            return
        yield batch


@asynccontextmanager
async def within(timeout: float, what: str) -> AsyncIterator[None]:
    """A context that may take ``timeout`` seconds. Then it is cancelled and raises ``Timeout``, whose message begins
    with ``what``."""
    try:
        async with asyncio.timeout(timeout):
            yield
    except TimeoutError:
        raise Timeout(f"{what} within {timeout:g} s") from None


async def _scrub_batch(
    backend: _Readable, verify: Verify, batch: Sequence[Stored], records: Sequence[Record], timeout: float
) -> Scrubbed:
    keys = [PageKey(SCRUB_POOL, page.key) for page in batch]
    async with within(timeout, f"the store did not give {len(keys)} pages"):
        results = await backend.get(keys, records)
    hits = [i for i, result in enumerate(results) if result is Result.HIT]
    good = await verify([keys[i] for i in hits], [records[i] for i in hits])
    bad = [i for i, is_good in zip(hits, good, strict=True) if not is_good]
    bad += [i for i, result in enumerate(results) if result is Result.CORRUPT]
    if bad:
        async with within(timeout, f"the store did not delete {len(bad)} damaged pages"):
            await drop_damaged(backend, [keys[i] for i in bad])
    read = [i for i, result in enumerate(results) if result in (Result.HIT, Result.CORRUPT)]
    size = sum(records[i].payload.nbytes for i in read)
    return Scrubbed(len(read), size, len(bad), results.count(Result.FAILED))


class _Buffers:
    """Memory for one batch of records at a time. It is registered with the backend before it is used."""

    def __init__(self, backend: _Readable) -> None:
        self._backend = backend
        self._memory = memoryview(b"")
        self._count = 0

    def records(self, batch: Sequence[Stored]) -> list[Record]:
        """Return a record for each page of the batch. They lie where those of the batch before lay."""
        starts, at = [], BATCH_PAGES * HEADER_BYTES
        for page in batch:
            starts.append(at)
            at += -(-_payload(page) // mmap.PAGESIZE) * mmap.PAGESIZE  # so each begins at a page of the system's memory
        if at > self._memory.nbytes:
            self._memory = memoryview(mmap.mmap(-1, max(at, BATCH_BYTES + mmap.PAGESIZE * BATCH_PAGES)))
            self._backend.register(SCRUB_POOL if not self._count else f"{SCRUB_POOL}{self._count}", self._memory)
            self._count += 1
        memory = self._memory
        memory[: len(batch) * HEADER_BYTES] = bytes(len(batch) * HEADER_BYTES)
        headers = (memory[i * HEADER_BYTES : (i + 1) * HEADER_BYTES] for i in range(len(batch)))
        payloads = (memory[at : at + _payload(page)] for at, page in zip(starts, batch, strict=True))
        return list(map(Record, headers, payloads))


def _payload(page: Stored) -> int:
    return max(0, page.size - HEADER_BYTES)


def _batches(listed: Sequence[Stored]) -> Iterator[Sequence[Stored]]:
    """Cut ``listed`` into runs of at most ``BATCH_PAGES`` pages and about ``BATCH_BYTES``, with at least one page
    each."""
    start = size = 0
    for i, page in enumerate(listed):
        if i > start and (size + page.size > BATCH_BYTES or i - start == BATCH_PAGES):
            yield listed[start:i]
            start, size = i, 0
        size += page.size
    if start < len(listed):
        yield listed[start:]
