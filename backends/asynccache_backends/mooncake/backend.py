"""The Mooncake backend.

What always holds:
* A page is one object, and is written once. A put of a key that exists changes nothing and is a HIT.
* The client's calls block, so they are made in threads, each for a batch of pages. Cancelling a call waits for them;
  the client's own time-outs (``client.ENVIRONMENT``) limit how long that can take.
* A call raises if for every key the master or the owner of the page did not answer. Otherwise each key has a result of
  its own.
* After a call in which the master did not answer, the next call first asks the master for a sign of life. It does so on
  the event loop, where waiting keeps no buffers in use.
* A full store evicts pages in the background. So a put tries again for a short while, and then the pages are FAILED.

No page survives a restart: pages are in the memory of the processes that contribute segments, and are lost with them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Self

from asynccache.errors import BackendError, ConfigError
from asynccache.storage import (
    HEADER_BYTES,
    OpenCalls,
    PageKey,
    ParsedUrl,
    Record,
    Result,
    Stored,
    StoreLayout,
    ThreadPool,
    completed_in_thread,
    settled,
)
from asynccache_backends.mooncake import codes as meaning
from asynccache_backends.mooncake.client import (
    MooncakeClient,
    MooncakeSettings,
    acquire,
    copy,
    greet,
    library,
    object_names,
    settings_of,
)
from asynccache_backends.mooncake.transfers import ClientCalls

MISS, HIT, CORRUPT, FAILED = Result

PART_PAGES = 64  # in one call of the client; fewer pages mean less time in a call if an owner of pages hangs
LIST_PAGES = 256
COUNTERS = ("errors", "lost_calls", "full_waits", "full_pages", "deleted")
FULL_WAITS = (0.02, 0.04, 0.08, 0.16, 0.32)  # seconds between attempts of a put to a full store; 0.62 in all


class MooncakeBackend:
    """A Mooncake store that is in use. ``open`` makes it."""

    shared = True
    """All processes with the same master find the same pages."""

    def __init__(self, settings: MooncakeSettings, client: MooncakeClient) -> None:
        self._settings = settings
        self._client = client
        self._transfers = ClientCalls(client, settings.replicas)
        self._reading = ThreadPool(settings.threads, "asynccache-mooncake-read")
        self._writing = ThreadPool(settings.threads, "asynccache-mooncake-write")  # so no read waits for a write
        self._open_calls = OpenCalls("the Mooncake store")
        self._counts: Counter[str] = Counter()
        self._lost_master = False  # whether it did not answer in the last call that has ended

    @classmethod
    def check(cls, url: ParsedUrl, layout: StoreLayout) -> None:
        """Raise the ConfigError that ``open`` would raise for ``url``, if any, also if the client is not installed. The
        master is not asked."""
        settings_of(url)
        library()

    @classmethod
    async def open(cls, url: ParsedUrl, layout: StoreLayout) -> Self:
        """Open the store of ``mooncake://master:port?...`` (see ``MooncakeSettings``). The first cache of a process
        sets the client up; no other thread of the process runs for 0.05 to 0.1 s then.

        Cancelling it waits for a set-up that has begun, and leaves nothing in use.

        Raises:
            ConfigError: an option is unusable, the client is not installed, or it is in use with other options.
            Unavailable: the master cannot be reached. ``Timeout``: it does not answer.
        """
        settings = settings_of(url)
        await completed_in_thread(library)  # in a thread, since importing it takes long
        return cls(settings, await acquire(settings))

    def __repr__(self) -> str:
        return f"MooncakeBackend({self._settings.master}, {self._settings.namespace!r}, {self._client!r})"

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        """Return for each key whether it is stored: HIT or MISS. The store does not evict a page for some seconds after
        a HIT. Cancelling it waits for the answer."""
        with self._open_calls:
            codes = await self._ask(self._reading, self._transfers.exists, self._names(keys))
            self._check_reached(codes)
            return [meaning.exists_result(code) for code in codes]

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Read each object directly into the buffers of its record. Cancelling it returns when the client has let go of
        the records."""
        with self._open_calls:
            first = {key: i for i, (_, key) in reversed(list(enumerate(keys)))}
            wanted = sorted(first.values())
            names, into = self._names([keys[i] for i in wanted]), [records[i] for i in wanted]
            codes = await self._ask(self._reading, self._transfers.get, names, into)
            results = await self._get_results(names, into, codes)
            return _copy_to_repeated(keys, records, first, dict(zip(wanted, results, strict=True)))

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Store the records directly from their buffers. If the store is full, wait a little for it to evict pages.

        Cancelling it returns when the client has let go of the records. Pages that were stored by then stay stored.
        """
        with self._open_calls:
            names, put = self._names(keys), self._transfers.put
            codes = await self._ask(self._writing, put, names, records)
            for wait in FULL_WAITS:
                full = [i for i, code in enumerate(codes) if code in meaning.FULL_CODES]
                if not full:
                    break
                self._counts["full_waits"] += 1
                await asyncio.sleep(wait)
                again = await self._ask(self._writing, put, [names[i] for i in full], [records[i] for i in full])
                for i, code in zip(full, again, strict=True):
                    codes[i] = code
            self._counts["full_pages"] += sum(code in meaning.FULL_CODES for code in codes)
            self._check_reached(codes)
            results = [meaning.put_result(code) for code in codes]
            stored = [record for record, result in zip(records, results, strict=True) if result is HIT]
            self._counts["stored"] += len(stored)
            self._counts["stored_bytes"] += sum(HEADER_BYTES + record.payload.nbytes for record in stored)
            return results

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        """Remove objects, also those that the store protects because they were read just now. Cancelling it waits for
        the answer."""
        with self._open_calls:
            codes = await self._ask(self._reading, self._transfers.delete, self._names(keys))
            self._check_reached(codes)
            results = [meaning.delete_result(code) for code in codes]
            self._counts["deleted"] += results.count(HIT)
            return results

    async def clear(self) -> None:
        """Remove all objects of this namespace, also those of other processes. Other namespaces are left alone.
        Cancelling it waits for the answer.

        Raises:
            Unavailable: the master cannot be reached.
            BackendError: it refuses.
        """
        with self._open_calls:
            await self._greet()
            removed = await self._reading.run(self._transfers.clear, self._settings.pattern)
            self._check_reached([min(removed, 0)])
            if removed < 0:
                raise BackendError(f"mooncake: the store was not cleared ({removed})")
            for name in ("stored", "stored_bytes", "deleted"):
                self._counts[name] = 0

    async def listing(self) -> AsyncIterator[Sequence[Stored]]:
        """Yield all objects of this namespace, as the master's admin server lists them.

        Raises:
            ConfigError: the URL does not name the admin server.
            Unavailable: the admin server cannot be asked.
        """
        if self._settings.admin is None:
            raise ConfigError("mooncake: pages are listed by the master's metrics server: say where it is, by admin=")
        with self._open_calls:
            found = await self._reading.run(object_names, self._settings.admin)
        keys = {name: key for name in found if (key := self._settings.key_of(name)) is not None}
        names = list(keys)
        for at in range(0, len(names), LIST_PAGES):
            part = names[at : at + LIST_PAGES]
            with self._open_calls:
                sizes = await self._reading.run(self._transfers.sizes, part)
            yield [Stored(keys[n], size, 0.0) for n, size in zip(part, sizes, strict=True) if size is not None]

    def register(self, pool: str, memory: memoryview) -> None:
        """Have ``memory`` registered with the client, in a thread, before the next call. It stays so until
        ``aclose``."""
        if memory.nbytes:
            self._transfers.expect(memory)

    def stats(self) -> Mapping[str, int | float]:
        """Return the counters of this instance. It does not learn what the store evicts and what others put, so
        ``pages`` is how many pages its puts have stored or found there, less those that it has deleted."""
        counts, transfers = self._counts, self._transfers
        pages = max(0, counts["stored"] - counts["deleted"])
        return {
            "pages": pages,
            "bytes": pages * counts["stored_bytes"] // max(1, counts["stored"]),
            "registered_bytes": transfers.registered,
            "refused_regions": transfers.refused,
            "staged_pages": transfers.staged,
            **{name: counts[name] for name in COUNTERS},
        }

    async def flush(self) -> None:
        """Do nothing: no page survives a power loss."""

    async def aclose(self) -> None:
        """Wait for the calls under way and unregister the pools' memory. The process's client stays, for the next
        cache. Later calls raise Unavailable. Cancelling it waits all the same."""
        if self._open_calls.closed:
            return
        try:
            await self._open_calls.close()
        finally:
            try:
                await settled([self._reading.call(self._transfers.close)])
            finally:
                self._reading.close()
                self._writing.close()
                self._client.release()

    def _names(self, keys: Sequence[PageKey]) -> list[str]:
        return [self._settings.name(key) for _, key in keys]

    async def _ask(self, threads: ThreadPool, call: Callable[..., list[int]], *columns: Sequence[Any]) -> list[int]:
        """Make ``call`` in threads, for parts of the ``columns``, which have an item for each page. Returns a code for
        each page. When one part has reached nobody, or this is cancelled, parts that have not begun are not made; those
        that have begun are waited for."""
        await self._greet()
        given_up, count = False, len(columns[0])

        def tried(part: slice) -> list[int]:
            nonlocal given_up
            if given_up:
                return [meaning.NOT_TRIED] * len(range(count)[part])
            codes = call(*(column[part] for column in columns))
            given_up |= meaning.is_nobody(codes)
            self._lost_master = meaning.lost_master(codes)
            return codes

        parts = [threads.call(tried, slice(at, at + PART_PAGES)) for at in range(0, count, PART_PAGES)]
        try:
            if parts:
                await asyncio.wait(parts)
        except asyncio.CancelledError:
            given_up = True
            raise
        finally:
            await settled(parts)
            errors = [part.exception() for part in parts]  # all are read, or asyncio would log the others
        for error in filter(None, errors):
            raise error
        codes = [code for part in parts for code in part.result()]
        if len(codes) != count:
            raise BackendError(f"mooncake: the client answered {len(codes)} codes for {count} pages")
        self._counts["errors"] += sum(code in meaning.NOBODY_CODES for code in codes)
        return codes

    async def _greet(self) -> None:
        """Ask the master for a sign of life, if it did not answer in an earlier call. Raises Unavailable if it gives
        none."""
        if self._lost_master:
            await greet(self._settings.master)
            self._lost_master = False

    async def _get_results(self, names: Sequence[str], records: Sequence[Record], codes: Sequence[int]) -> list[Result]:
        """Return the results of a get. Where a page has another length than its buffers, the client's code does not say
        so: then the length is asked for, and such a page is CORRUPT."""
        results = [
            meaning.get_result(code, HEADER_BYTES + record.payload.nbytes)
            for code, record in zip(codes, records, strict=True)
        ]
        doubtful = [i for i, code in enumerate(codes) if code in meaning.LENGTH_CODES]
        if doubtful:
            sizes = await self._reading.run(self._transfers.sizes, [names[i] for i in doubtful])
            for i, size in zip(doubtful, sizes, strict=True):
                if size is not None and size != HEADER_BYTES + records[i].payload.nbytes:
                    results[i] = CORRUPT
        if CORRUPT not in results:
            self._check_reached(codes)
        return results

    def _check_reached(self, codes: Sequence[int]) -> None:
        """Raise BackendError if a call with these codes reached nobody (see ``codes.is_nobody``)."""
        if meaning.is_nobody(codes):
            self._counts["lost_calls"] += 1
            raise meaning.nobody_error(codes, str(self._settings.master))


def _copy_to_repeated(
    keys: Sequence[PageKey], records: Sequence[Record], first: Mapping[bytes, int], results: Mapping[int, Result]
) -> list[Result]:
    """Return the results of all keys from those of the different ones, and copy pages to the records of repeated keys.
    (The client must not be asked for an object twice in one call: it fills one of the buffers and reports both.)"""
    if len(first) < len(keys):
        for i, (_, key) in enumerate(keys):
            if first[key] != i and results[first[key]] is HIT:
                copy(records[i].header, records[first[key]].header)
                copy(records[i].payload, records[first[key]].payload)
    return [results[first[key]] for _, key in keys]
