"""``CheckedStore``: a backend whose answers can be trusted. Everything that uses a store goes through one.

It writes a header before each page is stored, and verifies header and payload after each page was read. A page that
does not verify is CORRUPT: it counts as missing and is deleted from the backend, so that it is not served again. A call
that fails as a whole, or misses its deadline, is FAILED for every key. ``call_guard`` has the rest of what protects the
cache from a store that fails.

A record is a 64-byte header and the page's payload. The header, little-endian:

    offset  size
         0     4  magic, b"acKV"
         4     2  schema of this header (1)
         6     2  flags, 0
         8     8  payload length in bytes
        16    32  storage key
        48    16  xxh3_128 of the payload, big-endian as the library returns it

A record verifies if its header equals, byte for byte, the header that its key and payload would get now. So a change of
any bit of header or payload is found, and a record that was stored under another key does not verify.

When a call has returned or raised, for whatever reason, nothing touches its buffers any more. A deadline cancels the
backend's call, and by contract that call ends only after the backend has let go of them. So the answer FAILED may come
later than the deadline; when it comes, the buffers are free.

Checksums are computed in threads, in batches of a few MiB (0.2-1 ms each). Small ones, which take some µs, are computed
on the event loop.

Scrubbing: every stored page is read, and pages that do not verify are deleted before somebody asks for them. A backend
that keeps its pages together can be ``Scrubbable``: it divides what it has into parts of a few MiB, and reads them one
by one. Any backend whose pages can be listed is read page by page (``scrub_listed``). A backend cannot tell whether a
record is good, so it is given a ``Verify`` that can.
"""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

from xxhash import xxh3_128_digest

from asynccache import checks
from asynccache.config import PoolSpec
from asynccache.errors import ConfigError, Timeout
from asynccache.settle import MOST_THREADS, ThreadPool
from asynccache.storage.call_guard import Breaker, CallGuard
from asynccache.storage.contract import (
    BLOCK_BYTES,
    HEADER_BYTES,
    KEY_BYTES,
    Hint,
    Hintable,
    Listable,
    PageKey,
    Record,
    Result,
    StorageBackend,
    Stored,
    StoreLayout,
    check_layout,
    drop_damaged,
    longest_backoff,
    named_key,
    probe,
)
from asynccache.storage.url import MOST_CALLS

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
    """The result of a scrub."""

    pages: int = 0
    """How many pages were read."""
    bytes: int = 0
    """The bytes of the pages' payloads."""
    bad: int = 0
    """How many pages did not verify and were deleted."""
    unread: int = 0
    """How many pages could not be read; they were left as they are."""

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


MAGIC = b"acKV"
SCHEMA = 1

_HEADER = struct.Struct("<4sHHQ32s16s")
assert _HEADER.size == HEADER_BYTES

RECORD_SCHEMA = hashlib.sha256(b"asynccache record 1: magic, schema, flags, length, key, xxh3_128").digest()


def header_of(key: bytes, payload: memoryview) -> bytes:
    """Return the header of ``payload`` when it is stored under ``key``: 64 bytes."""
    return _HEADER.pack(MAGIC, SCHEMA, 0, payload.nbytes, key, xxh3_128_digest(payload))


def seal(keys: Sequence[PageKey], records: Sequence[Record]) -> None:
    """Fill in each record's header for its key and payload."""
    for key, record in zip(keys, records, strict=True):
        record.header[:] = header_of(key.key, record.payload)


def verify(keys: Sequence[PageKey], records: Sequence[Record]) -> list[bool]:
    """Return for each record whether it is undamaged and belongs to its key."""
    return [r.header.tobytes() == header_of(k.key, r.payload) for k, r in zip(keys, records, strict=True)]


def store_layout(pools: Iterable[PoolSpec]) -> StoreLayout:
    """Return what a backend is told about ``pools``. Logical pools have no bytes, so nothing of them is stored, and
    they are left out."""
    return StoreLayout({spec.name: spec.bytes_per_page for spec in pools if spec.bytes_per_page}, RECORD_SCHEMA)


def storage_key(prefix_hash: bytes, digest: bytes, *, named: bool = True) -> bytes:
    """Return the storage key, 32 bytes, of the page with this prefix hash in the pool with this ``pool_digest``.
    ``named``: the key names the block, by the end of its hash, which is its name in KV events (see ``named_key``)."""
    block = int.from_bytes(prefix_hash[-BLOCK_BYTES:], "big") if named else None
    return named_key(hashlib.sha256(prefix_hash + digest).digest(), block)


def pool_digest(
    spec: PoolSpec,
    page_size: int,
    *,
    layout: str = "page_first",
    shard: str | None = None,
) -> bytes:
    """Return a digest of all that must be equal for two caches to exchange the bytes of this pool: its name, dtype,
    layout, page size in tokens and bytes, the model's layers in it, and the part of every page that this rank has.

    ``shard`` names that part; by default it is the spec's. The number of pages and the pool whose slots index this one
    do not change the bytes, so they are not in the digest.
    """
    covers = ",".join(map(str, spec.model_layers))
    part = spec.shard if shard is None else shard
    fields = (spec.name, spec.dtype, layout, part, str(page_size), str(spec.bytes_per_page), covers)
    digest = hashlib.sha256(RECORD_SCHEMA)
    for field in fields:
        data = field.encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    return digest.digest()


def breaker_of(backend: object, jitter: Callable[[], float] = lambda: 1.0) -> Breaker:
    """Return a new breaker for ``backend`` with back-offs at most as long as the backend wants."""
    longest = longest_backoff(backend, LONGEST_BACKOFF)
    return Breaker(backoff=min(FIRST_BACKOFF, longest), max_backoff=longest, jitter=jitter)


FIRST_BACKOFF, LONGEST_BACKOFF = 1.0, 15.0
PART_PAGES = 1024
"""Pages in one call of the backend, at most. A longer call is made in parts, so that it does not hold up the loop."""
COUNTERS = ("put_pages", "get_pages", "corrupt_pages", "hinted_pages", "unheard_hints")


class CheckedStore:
    """A backend behind checksums, deadlines and a breaker. Belongs to one event loop.

    Args:
        backend: where the records are stored; ``aclose`` closes it.
        layout: the pools and the bytes of their pages.
        timeout: seconds that a call may wait for its place. Once it has the place, it may take as many seconds again.
        slow: seconds after which a call that is still running counts as a failure for the breaker; 0 means never.
        concurrency: how many reads the backend has at a time, at most, and how many writes.
        breaker: decides when the backend is left alone; a new ``Breaker`` by default.
        clock: returns the breaker's time in seconds; the event loop's clock by default.
        threads: how many threads compute checksums. With 0 they are computed on the loop, for simulations.

    Raises:
        ConfigError: an argument is unusable.
    """

    def __init__(
        self,
        backend: StorageBackend,
        layout: StoreLayout,
        *,
        timeout: float = 30.0,
        slow: float = 0.0,
        concurrency: int = 16,
        breaker: Breaker | None = None,
        clock: Callable[[], float] | None = None,
        threads: int = 2,
    ) -> None:
        self.backend = checks.provider("backend", backend, StorageBackend)  # type: ignore[type-abstract]
        self.layout = check_layout(layout)
        self.breaker = breaker_of(backend) if breaker is None else checks.instance("breaker", breaker, Breaker)
        if clock is not None:
            checks.function("clock", clock)
        timeout, slow = checks.number("timeout", timeout, above=0), checks.number("slow", slow, 0)
        concurrency = checks.integer("concurrency", concurrency, 1, MOST_CALLS)
        threads = checks.integer("threads", threads, 0, MOST_THREADS)
        self._guard = CallGuard(
            backend, lambda keys: probe(self.backend, keys), self.breaker,
            timeout=timeout, slow=slow, concurrency=concurrency, clock=clock,
        )  # fmt: skip
        self._threads = ThreadPool(threads, "asynccache-checksum")
        self._counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"CheckedStore({self.backend!r}, {self.breaker!r})"

    @property
    def last_error(self) -> Exception | None:
        """The error of the last call that failed as a whole; None if none has failed. It is a copy with the text of
        that error, and of the same class where that is possible."""
        return self._guard.last_error

    async def put(self, keys: Sequence[PageKey], payloads: Sequence[memoryview]) -> list[Result]:
        """Store each payload under its key. Returns a result for each key: HIT where a later ``get`` may find the page.

        Cancelling it returns after the backend has let go of the payloads. Pages stored by then stay stored.

        Raises:
            ConfigError: a key or payload is unusable, or there is not one payload of its pool's size for each key. No
                page was stored then.
        """
        self._check(keys, payloads, writable=False)
        results: list[Result] = []
        for part in _parts(len(keys)):
            results += await self._put(keys[part], payloads[part])
        self._counts["put_pages"] += results.count(Result.HIT)
        return results

    async def get(self, keys: Sequence[PageKey], payloads: Sequence[memoryview]) -> list[Result]:
        """Read the page of each key into its payload. Returns a result for each key: HIT where the payload holds the
        bytes that were stored. After any other result the payload's content is undefined.

        Cancelling it returns after the backend and the checksum threads have let go of the payloads. Raises as ``put``
        does, and also if a payload is read-only.
        """
        self._check(keys, payloads, writable=True)
        results: list[Result] = []
        for part in _parts(len(keys)):
            results += await self._get(keys[part], payloads[part])
        self._counts["get_pages"] += results.count(Result.HIT)
        self._counts["corrupt_pages"] += results.count(Result.CORRUPT)
        return results

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        """Return for each key whether it is stored: HIT or MISS as the backend says, FAILED where it cannot tell or is
        not asked. Cancelling it changes nothing.

        Raises:
            ConfigError: a key is unusable.
        """
        _check_keys(keys)
        return await self._guard.answers("ask", keys, self.backend.exists)

    async def hint(self, verb: Hint, keys: Sequence[PageKey], seconds: float = 0.0) -> list[Result]:
        """Pass on a hint about the pages of ``keys``: HIT for each that is now as the hint wants it, else MISS; FAILED
        where the backend is not asked or does not answer. A backend that takes no hints (see ``Hintable``) is not
        asked, which is counted as ``unheard_hints``, and the answer is MISS. Cancelling it may leave any of it done.

        Raises:
            ConfigError: an argument is unusable.
        """
        verb, seconds = checks.instance("verb", verb, Hint), checks.number("seconds", seconds, 0)
        _check_keys(keys)
        backend = self.backend
        if not isinstance(backend, Hintable):
            self._counts["unheard_hints"] += 1
            return [Result.MISS] * len(keys)
        results: list[Result] = []
        for part in _parts(len(keys)):
            results += await self._guard.answers("ask", keys[part], lambda keys: backend.hint(verb, keys, seconds))
        self._counts["hinted_pages"] += results.count(Result.HIT)
        return results

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        """Delete the page of each key: HIT if there was one, MISS if not, FAILED if it may still be there. Cancelling
        it may leave any of them deleted. Raises as ``exists`` does."""
        _check_keys(keys)
        try:
            call = self._guard.answers("put", keys, self.backend.delete)
            return await self._guard.without_buffers("delete", call)
        except Timeout:
            return [Result.FAILED] * len(keys)

    async def clear(self) -> None:
        """Delete every page. Cancelling it may leave the store cleared.

        Raises:
            BackendError: the backend failed. ``Timeout``: it did not answer within the deadline.
        """
        await self._guard.on_request("clear", self.backend.clear)

    async def flush(self) -> None:
        """Return once all pages stored so far would survive a power loss, as far as the backend promises that. If it is
        cancelled, some of them may not survive one.

        Raises:
            BackendError: the backend failed. ``Timeout``: it did not answer within the deadline.
        """
        await self._guard.on_request("flush", self.backend.flush)

    async def scrub(
        self, rate: float | None = None, tell: Callable[[Scrubbed], object] = lambda so_far: None
    ) -> Scrubbed:
        """Read every stored page and delete those that do not verify. Returns the sums of what was read and found.

        ``rate``: bytes that are read in a second, at most; None: as many as possible. ``tell`` is called after every
        few MiB with the sums so far. Cancelling it stops after the part that is being read.

        Raises:
            ConfigError: an argument is unusable, or the backend is not ``Scrubbable``.
            BackendError: the backend failed.
        """
        if rate is not None:
            rate = checks.number("rate", rate, above=0)
        checks.function("tell", tell)
        backend = self.backend
        if not isinstance(backend, Scrubbable):
            raise ConfigError(f"{backend!r} cannot be read through: its pages cannot be listed")
        loop = asyncio.get_running_loop()
        began, done = loop.time(), Scrubbed()
        for part in backend.parts():
            found = await self._guard.on_request("scrub", partial(backend.scrub, part, self._verdicts))
            self._counts["corrupt_pages"] += found.bad
            done = done.plus(found)
            tell(done)
            if rate is not None:
                await asyncio.sleep(pause(done.bytes, rate, loop.time() - began))
        return done

    def is_away(self, key: PageKey) -> bool:
        """Return True if the breaker refuses calls now. This counts as a refused call, and begins a probe with ``key``
        where one is due. Raises as ``exists`` does."""
        _check_key(key, "key")
        return self._guard.refuses((key,))

    def register(self, pool: str, memory: memoryview) -> None:
        """Tell the backend that payloads of ``pool`` will be slices of ``memory``.

        Raises:
            ConfigError: ``pool`` is not text, or ``memory`` is not a memoryview.
        """
        self.backend.register(checks.text("pool", pool), checks.instance("memory", memory, memoryview))

    def stats(self) -> Mapping[str, int | float]:
        """Return the backend's counters and this store's own, by name."""
        return {
            **self.backend.stats(),
            **{name: self._counts[name] for name in COUNTERS},
            **self._guard.stats(),
        }

    async def aclose(self) -> None:
        """Close the backend and the threads. Calling it twice is fine; cancelling it is up to the backend."""
        try:
            await self._guard.aclose()
            await self.backend.aclose()
        finally:
            self._threads.close()

    async def _put(self, keys: Sequence[PageKey], payloads: Sequence[memoryview]) -> list[Result]:
        if self._guard.refuses(keys):  # asked first, to spare the checksums of pages that would not be stored
            return [Result.FAILED] * len(keys)
        records = _records(payloads)
        await self._threads.spread(seal, [payload.nbytes for payload in payloads], keys, records)
        return await self._guard.answers("put", keys, lambda keys: self.backend.put(keys, records))

    async def _get(self, keys: Sequence[PageKey], payloads: Sequence[memoryview]) -> list[Result]:
        records = _records(payloads)
        results = await self._guard.answers("get", keys, lambda keys: self.backend.get(keys, records))
        hit = Result.HIT  # looking up an Enum's member takes 0.2 µs, more than all else that is done for a page here
        hits = [i for i, result in enumerate(results) if result is hit]
        good = await self._verdicts([keys[i] for i in hits], [records[i] for i in hits])
        for i, verified in zip(hits, good, strict=True):
            if not verified:
                results[i] = Result.CORRUPT
        if Result.CORRUPT in results:
            bad = [key for key, result in zip(keys, results, strict=True) if result is Result.CORRUPT]
            await self._guard.answers("drop", bad, lambda keys: drop_damaged(self.backend, keys))
        return results

    async def _verdicts(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[bool]:
        """Return for each record whether it verifies."""
        batches = await self._threads.spread(verify, [record.payload.nbytes for record in records], keys, records)
        return [good for batch in batches for good in batch]

    def _check(self, keys: Sequence[PageKey], payloads: Sequence[memoryview], *, writable: bool) -> None:
        """Raise ConfigError if keys or payloads cannot be used. ``writable``: whether pages will be read into the
        payloads."""
        _check_keys(keys)
        _check_list("payloads", payloads)
        if len(payloads) != len(keys):
            raise ConfigError(f"payloads: there are {len(payloads)} for {len(keys)} keys")
        sizes = self.layout.page_bytes
        for key, payload in zip(keys, payloads, strict=True):
            if not isinstance(payload, memoryview) or not _is_contiguous(payload):
                raise ConfigError(f"payloads: {checks.shown(payload)} is no memoryview of bytes in a row")
            if payload.nbytes != sizes.get(key.pool):
                raise ConfigError(f"payloads: one of pool {key.pool!r} has {payload.nbytes} bytes, "
                                  f"expected {sizes.get(key.pool)}")
            if writable and payload.readonly:
                raise ConfigError("payloads: one is read-only, and pages are read into it")


def _parts(count: int) -> Iterator[slice]:
    """Cut a call of ``count`` pages into the parts of which each is one call of the backend."""
    return (slice(at, at + PART_PAGES) for at in range(0, count, PART_PAGES))


def _records(payloads: Sequence[memoryview]) -> list[Record]:
    """Return a record for each payload. Its header is new memory, all zeros: with the header of an earlier call a
    backend that answers HIT and writes nothing could pass."""
    headers = memoryview(bytearray(len(payloads) * HEADER_BYTES))
    starts = range(0, len(headers), HEADER_BYTES)
    return [Record(headers[at : at + HEADER_BYTES], payload) for at, payload in zip(starts, payloads, strict=True)]


def _check_list(name: str, values: object) -> None:
    if type(values) is not list:
        checks.instance(name, values, (list, tuple))


def _is_contiguous(payload: memoryview) -> bool:
    try:
        return payload.c_contiguous
    except ValueError:  # the view was released
        return False


def _check_keys(keys: Sequence[PageKey]) -> None:
    _check_list("keys", keys)
    for key in keys:  # the types are compared here, too, to spare a call for each good key
        good = type(key) is PageKey and type(key.pool) is str and type(key.key) is bytes and len(key.key) == KEY_BYTES
        if not good:
            _check_key(key)


def _check_key(key: PageKey, name: str = "keys") -> None:
    if not isinstance(key, PageKey) or not isinstance(key.pool, str) or not isinstance(key.key, bytes):
        raise ConfigError(f"{name}: {checks.shown(key)} is no PageKey of a text and bytes")
    if len(key.key) != KEY_BYTES:
        raise ConfigError(f"{name}: {checks.shown(key)} has {len(key.key)} bytes, expected {KEY_BYTES}")
