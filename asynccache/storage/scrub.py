"""Reading all that is stored, to find what has rotted before somebody asks for it.

A backend that keeps its pages together deals out what it has in parts of a few MiB and reads them one at a time
(``Scrubbable``); one whose pages can be listed is read page by page (``scrub_listed``). Whether a record is good is not
for a backend to say, so it is handed a ``Verify``. What is not good is forgotten.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

from asynccache.errors import Timeout
from asynccache.storage.contract import HEADER_BYTES, PageKey, Record, Result
from asynccache.storage.listing import Listable, Stored

Verify = Callable[[Sequence[PageKey], Sequence[Record]], Awaitable[list[bool]]]
"""Whether each record is whole and is its key's. The pool's name in a key may be empty: a backend need not know it."""

SCRUB_POOL = "#scrub"
BATCH_BYTES = 8 << 20
BATCH_PAGES = 64


class Part(NamedTuple):
    """``pages`` stored pages of ``page_bytes`` each; ``place`` is the backend's own."""

    page_bytes: int
    pages: int
    place: Any


class Scrubbed(NamedTuple):
    """What a scrub has read. ``bad``: did not verify, and are forgotten. ``unread``: the disk gave an error, and they
    are left alone."""

    pages: int = 0
    bytes: int = 0
    bad: int = 0
    unread: int = 0

    def plus(self, other: Scrubbed) -> Scrubbed:
        """Both together."""
        return Scrubbed(*map(sum, zip(self, other, strict=True)))


@runtime_checkable
class Scrubbable(Protocol):
    """What a backend has beside the contract if its pages can be read through."""

    def parts(self) -> list[Part]:
        """All that is stored now, in parts small enough to be read into memory one by one."""
        ...

    async def scrub(self, part: Part, verify: Verify) -> Scrubbed:
        """Read what is still there of ``part`` and forget what does not verify. Cancelling it forgets nothing more."""
        ...


class _Readable(Listable, Protocol):
    def register(self, pool: str, memory: memoryview) -> None: ...

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]: ...

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]: ...


def pause(done: int, rate: float, elapsed: float) -> float:
    """How long to wait after ``done`` bytes in ``elapsed`` seconds, so as not to exceed ``rate`` bytes a second."""
    return max(0.0, done / rate - elapsed)


async def scrub_listed(backend: _Readable, verify: Verify, timeout: float) -> AsyncIterator[Scrubbed]:
    """Read every page that ``backend`` lists, and forget what does not verify; what was found, batch by batch. Pages
    that leave meanwhile are none of ours.

    Raises:
        BackendError: it cannot be listed or read. ``Timeout``: it was silent for ``timeout`` seconds.

    Cancelling it forgets nothing more.
    """
    buffers = _Buffers(backend)
    async for listed in in_time(backend.listing(), timeout):
        for batch in _batches(listed):
            yield await _scrub_batch(backend, verify, batch, buffers.records(batch), timeout)


async def in_time(batches: AsyncIterator[Sequence[Stored]], timeout: float) -> AsyncIterator[Sequence[Stored]]:
    """``batches``, each within ``timeout`` seconds; raises ``Timeout`` for one that is not."""
    while True:
        async with within(timeout, "the store did not go on with its list"):
            batch = await anext(batches, None)
        if batch is None:
            return
        yield batch


@asynccontextmanager
async def within(timeout: float, what: str) -> AsyncIterator[None]:
    """What is inside has ``timeout`` seconds; then it is ``Timeout``, which says what."""
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
            await backend.delete([keys[i] for i in bad])
    read = [i for i, result in enumerate(results) if result in (Result.HIT, Result.CORRUPT)]
    size = sum(records[i].payload.nbytes for i in read)
    return Scrubbed(len(read), size, len(bad), results.count(Result.FAILED))


class _Buffers:
    """Memory for a batch of records, told to the backend before it is used."""

    def __init__(self, backend: _Readable) -> None:
        self._backend = backend
        self._memory = memoryview(b"")
        self._count = 0

    def records(self, batch: Sequence[Stored]) -> list[Record]:
        """A record for each page. Earlier ones are not to be used any more."""
        starts, at = [], BATCH_PAGES * HEADER_BYTES
        for page in batch:
            starts.append(at)
            at += _room(page)
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


def _room(page: Stored) -> int:
    """What a payload takes, so that the next one starts at a multiple of the system's page."""
    return -(-_payload(page) // mmap.PAGESIZE) * mmap.PAGESIZE


def _batches(listed: Sequence[Stored]) -> Iterator[Sequence[Stored]]:
    """Runs of pages of at most about ``BATCH_BYTES``, at least one page each."""
    start = size = 0
    for i, page in enumerate(listed):
        if i > start and (size + page.size > BATCH_BYTES or i - start == BATCH_PAGES):
            yield listed[start:i]
            start, size = i, 0
        size += page.size
    if start < len(listed):
        yield listed[start:]
