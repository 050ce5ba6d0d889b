"""Trust nothing that a backend says: ``CheckedStore`` is what the runtime talks to, and a backend is behind it.

It writes each page's header on the way out and verifies header and payload on the way in. What does not verify is
CORRUPT: a miss, counted, and deleted from the backend so that it is not served again. A call that fails as a whole, or
misses its deadline, makes every key FAILED; what else keeps a store that fails away from the cache is in ``guard``.

Buffers: when a call returns or raises, for whatever reason, nothing touches the buffers that were passed in. A
deadline cancels the backend's call, which by contract ends only after it has let go; so the answer FAILED may come
later than its deadline, and when it comes the buffers are free.

Checksums are computed in threads, in batches of a few MiB (0.2-1 ms); what takes a few µs is done on the spot.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from asynccache import checks
from asynccache.errors import ConfigError
from asynccache.settle import settled
from asynccache.storage.breaker import Breaker
from asynccache.storage.contract import KEY_BYTES, PageKey, Record, Result, StorageBackend, StoreLayout, check_layout
from asynccache.storage.guard import Call, Guard
from asynccache.storage.headers import HeaderPool
from asynccache.storage.options import MOST_CALLS
from asynccache.storage.probing import probe
from asynccache.storage.records import seal, verify
from asynccache.storage.scrub import Scrubbable, Scrubbed, pause
from asynccache.storage.workers import MOST_THREADS, Workers

HEADER_POOL = "#headers"
MOST_HEADERS = 1 << 24
INLINE_BYTES = 128 << 10
BATCH_BYTES = 4 << 20

_T = TypeVar("_T")


class CheckedStore:
    """A verified view of ``backend``. Belongs to one event loop.

    ``timeout``: seconds a backend call may take, and may wait for its place. ``slow``: a call of more seconds is a
    failure for the breaker; 0: none is. ``concurrency``: backend calls in flight at most. ``threads`` 0: checksums on
    the loop, for simulations. ``clock``: the breaker's, the loop's own if not given. ``headers``: pages in flight, over
    all calls; more wait.
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
        headers: int = 2048,
    ) -> None:
        self.backend = checks.provider("backend", backend, StorageBackend)  # type: ignore[type-abstract]
        self.layout = check_layout(layout)
        self.breaker = Breaker() if breaker is None else checks.instance("breaker", breaker, Breaker)
        if clock is not None:
            checks.function("clock", clock)
        timeout, slow = checks.number("timeout", timeout, above=0), checks.number("slow", slow, 0)
        concurrency = checks.integer("concurrency", concurrency, 1, MOST_CALLS)
        threads = checks.integer("threads", threads, 0, MOST_THREADS)
        headers = checks.integer("headers", headers, 1, MOST_HEADERS)
        self._guard = Guard(
            backend, lambda keys: probe(self.backend, keys), self.breaker,
            timeout=timeout, slow=slow, concurrency=concurrency, clock=clock,
        )  # fmt: skip
        self._workers = Workers(threads, "asynccache-checksum") if threads else None
        self._headers = HeaderPool(headers)
        self._counts: Counter[str] = Counter()
        backend.register(HEADER_POOL, self._headers.memory)

    def __repr__(self) -> str:
        return f"CheckedStore({self.backend!r}, {self.breaker!r})"

    @property
    def last_error(self) -> Exception | None:
        """Why the last call that failed as a whole did: an error of the same class, if that can be, and its text."""
        return self._guard.last_error

    async def put(self, keys: Sequence[PageKey], payloads: Sequence[memoryview]) -> list[Result]:
        """Store each payload; HIT where a later ``get`` may find it.

        Cancelling it returns after the backend has let go of the payloads; what was stored by then stays stored.

        Raises:
            ConfigError: a key or payload is unusable, or there is not one payload of its pool's size for each key.
        """
        self._check(keys, payloads, writable=False)
        results: list[Result] = []
        for part in self._parts(len(keys)):
            results += await self._put(keys[part], payloads[part])
        self._counts["put_pages"] += results.count(Result.HIT)
        return results

    async def get(self, keys: Sequence[PageKey], payloads: Sequence[memoryview]) -> list[Result]:
        """Fill each payload. HIT: the bytes are there and are the ones that were stored; otherwise they are undefined.

        Cancelling it returns after backend and checksums have let go of the payloads. Raises as ``put``, also for a
        payload that is read-only.
        """
        self._check(keys, payloads, writable=True)
        results: list[Result] = []
        for part in self._parts(len(keys)):
            results += await self._get(keys[part], payloads[part])
        self._counts["get_pages"] += results.count(Result.HIT)
        self._counts["corrupt_pages"] += results.count(Result.CORRUPT)
        return results

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        """HIT or MISS per key as the backend says, FAILED where it cannot be known. Cancelling it changes nothing.

        Raises:
            ConfigError: a key is unusable.
        """
        _check_keys(keys)
        return await self._guard.answers(Call.ASK, keys, self.backend.exists)

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        """Forget each key. Cancelling it may leave any of them deleted. Raises as ``exists``."""
        _check_keys(keys)
        return await self._guard.answers(Call.PUT, keys, self.backend.delete)

    async def clear(self) -> None:
        """Forget everything. Cancelling it may leave the store cleared.

        Raises:
            BackendError: the backend could not. ``Timeout``: not before the deadline.
        """
        await self._guard.whole("clear", self.backend.clear)

    async def flush(self) -> None:
        """Return once everything put so far would survive a power loss, as far as the backend promises that.
        Cancelling it leaves some of it volatile.

        Raises:
            BackendError: the backend could not. ``Timeout``: not before the deadline.
        """
        await self._guard.whole("flush", self.backend.flush)

    async def scrub(
        self, rate: float | None = None, tell: Callable[[Scrubbed], object] = lambda so_far: None
    ) -> Scrubbed:
        """Read all that is stored, and forget what does not verify; at most ``rate`` bytes a second. ``tell`` hears
        after every few MiB what has been done so far.

        Raises:
            ConfigError: this backend cannot do it.
            BackendError: it failed. Cancelling it stops after the part that is being read.
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
            found = await self._guard.whole("scrub", partial(backend.scrub, part, self._verdicts))
            self._counts["corrupt_pages"] += found.bad
            done = done.plus(found)
            tell(done)
            if rate is not None:
                await asyncio.sleep(pause(done.bytes, rate, loop.time() - began))
        return done

    def is_away(self, key: PageKey) -> bool:
        """Whether calls are refused now. A probe may be begun, for ``key``. Raises as ``exists``."""
        _check_key(key, "key")
        return self._guard.refuses((key,))

    def register(self, pool: str, memory: memoryview) -> None:
        """Tell the backend where the payloads of ``pool`` lie."""
        self.backend.register(checks.text("pool", pool), checks.instance("memory", memory, memoryview))

    def stats(self) -> Mapping[str, int | float]:
        """The backend's counters and this store's own."""
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
            if self._workers is not None:
                self._workers.close()
                self._workers = None  # who calls all the same is told by the backend that it is closed

    async def _put(self, keys: Sequence[PageKey], payloads: Sequence[memoryview]) -> list[Result]:
        if self._guard.refuses(keys):  # before any work is done for it
            return [Result.FAILED] * len(keys)
        headers = await self._headers.take(len(keys))
        try:
            records = list(map(Record, headers, payloads))
            await self._in_batches(seal, keys, records)
            return await self._guard.answers(Call.PUT, keys, lambda keys: self.backend.put(keys, records))
        finally:
            self._headers.give(headers)

    async def _get(self, keys: Sequence[PageKey], payloads: Sequence[memoryview]) -> list[Result]:
        if self._guard.refuses(keys):  # before any work is done for it
            return [Result.FAILED] * len(keys)
        headers = await self._headers.take(len(keys))
        try:
            records = list(map(Record, headers, payloads))
            _blank(headers)
            results = await self._guard.answers(Call.GET, keys, lambda keys: self.backend.get(keys, records))
            await self._verify(keys, records, results)
        finally:
            self._headers.give(headers)
        if Result.CORRUPT in results:
            bad = [key for key, result in zip(keys, results, strict=True) if result is Result.CORRUPT]
            await self._guard.answers(Call.DROP, bad, self.backend.delete)
        return results

    async def _verify(self, keys: Sequence[PageKey], records: Sequence[Record], results: list[Result]) -> None:
        """Turn every HIT that does not verify into CORRUPT."""
        hit = Result.HIT  # an Enum's member costs 0.2 µs to look up, more than all else that is done for a page here
        hits = [i for i, result in enumerate(results) if result is hit]
        good = await self._verdicts([keys[i] for i in hits], [records[i] for i in hits])
        for i, ok in zip(hits, good, strict=True):
            if not ok:
                results[i] = Result.CORRUPT

    async def _verdicts(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[bool]:
        """Whether each record verifies."""
        return [good for batch in await self._in_batches(verify, keys, records) for good in batch]

    async def _in_batches(
        self,
        work: Callable[[Sequence[PageKey], Sequence[Record]], _T],
        keys: Sequence[PageKey],
        records: Sequence[Record],
    ) -> list[_T]:
        if self._workers is None or sum(record.payload.nbytes for record in records) <= INLINE_BYTES:
            return [work(keys, records)]
        futures = [self._workers.call(work, keys[part], records[part]) for part in _batches(records)]
        await settled(futures)
        return [future.result() for future in futures]

    def _parts(self, count: int) -> Iterator[slice]:
        step = max(1, self._headers.count // 2)
        return (slice(at, at + step) for at in range(0, count, step))

    def _check(self, keys: Sequence[PageKey], payloads: Sequence[memoryview], *, writable: bool) -> None:
        """Whether there is a good payload for each key. A shortcut for good ones, and what names the others."""
        sizes = self.layout.page_bytes
        _check_list("keys", keys)
        _check_list("payloads", payloads)
        try:
            for key, payload in zip(keys, payloads, strict=True):
                name = key.key
                if type(name) is not bytes or len(name) != KEY_BYTES or sizes.get(key.pool) != payload.nbytes:
                    break
                if not payload.c_contiguous or (writable and payload.readonly):
                    break
            else:
                return
        except Exception:  # whatever they are, keys and payloads they are not
            pass
        for key in keys:
            _check_key(key)
        if len(payloads) != len(keys):
            raise ConfigError(f"payloads: there are {len(payloads)} for {len(keys)} keys")
        for key, payload in zip(keys, payloads, strict=True):
            self._check_payload(key.pool, payload, writable)

    def _check_payload(self, pool: str, payload: memoryview, writable: bool) -> None:
        size = self.layout.page_bytes.get(pool)
        if not isinstance(payload, memoryview) or not payload.c_contiguous:
            raise ConfigError(f"payloads: {checks.shown(payload)} is no memoryview of bytes in a row")
        if payload.nbytes != size:
            raise ConfigError(f"payloads: one of pool {pool!r} has {payload.nbytes} bytes, expected {size}")
        if writable and payload.readonly:
            raise ConfigError("payloads: one is read-only, and pages are read into it")


def _check_list(name: str, values: object) -> None:
    if type(values) is not list:
        checks.instance(name, values, (list, tuple))


def _check_keys(keys: Sequence[PageKey]) -> None:
    _check_list("keys", keys)
    for key in keys:
        if type(key) is not PageKey or type(key.key) is not bytes or len(key.key) != KEY_BYTES:
            _check_key(key)


def _check_key(key: PageKey, name: str = "keys") -> None:
    if not isinstance(key, PageKey) or not isinstance(key.pool, str) or not isinstance(key.key, bytes):
        raise ConfigError(f"{name}: {checks.shown(key)} is no PageKey of a text and bytes")
    if len(key.key) != KEY_BYTES:
        raise ConfigError(f"{name}: {checks.shown(key)} has {len(key.key)} bytes, expected {KEY_BYTES}")


COUNTERS = ("put_pages", "get_pages", "corrupt_pages")

_BLANK = bytes(64)


def _blank(headers: Sequence[memoryview]) -> None:
    """So that a backend which claims a hit and writes nothing finds no old header to hide behind."""
    for header in headers:
        header[:] = _BLANK


def _batches(records: Sequence[Any]) -> Iterator[slice]:
    """Runs of records of about ``BATCH_BYTES``, at least one record each."""
    start = size = 0
    for i, record in enumerate(records):
        size += record.payload.nbytes
        if size >= BATCH_BYTES:
            yield slice(start, i + 1)
            start, size = i + 1, 0
    if size:
        yield slice(start, len(records))
