"""The object store backend: pages in packs, found by an index in memory. Many processes may share one bucket.

What always holds:
* An object is written once, under a name that is never used again, and is never replaced. So what is read of it is
  right, or it is missing.
* After a HIT from a put the pack is stored, so there is nothing to flush.
* The index is this process's view of the store. It may have packs that another process has removed: reading one is a
  MISS, and removes it from the index. What another process has stored is found some seconds later.
* If two puts, in whatever process, store the same page at the same time there are two copies. One of them is read,
  everywhere the same.
* When the store is full, puts are FAILED for a moment without a request, and reads go on.
* How long packs are kept is up to a rule of the bucket. A pack that the bucket has removed is a MISS.
* Payloads are not verified here; ``CheckedStore`` does that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Self

from asynccache.errors import Unavailable
from asynccache.storage import (
    HEADER_BYTES,
    REFUSED,
    Breaker,
    OpenCalls,
    PageKey,
    ParsedUrl,
    Record,
    Result,
    Stored,
    StoreLayout,
    Tell,
    ThreadPool,
)
from asynccache_backends.object_store.catalog import CatalogKeeper, PackCatalog
from asynccache_backends.object_store.client import NoRoom, ObjectClient, ObjectSettings, connect, settings_of
from asynccache_backends.object_store.formats import INDEX, PACKS, NameClock, Pack, stamp_of
from asynccache_backends.object_store.reads import Fetches, plan_reads
from asynccache_backends.object_store.uploads import Uploads

MISS, HIT, CORRUPT, FAILED = Result  # looking up an Enum's member takes 0.2 µs, and would be done for every page

COUNTERS = (
    "errors", "refused_pages", "packs_put", "put_bytes", "range_reads", "get_bytes", "deleted", "lists", "footers_read",
    "vanished_packs", "snapshots", "bad_snapshots", "bad_tombstones",
)
_CLOSING = 5.0


class ObjectBackend:
    """An open object store. ``open`` makes it."""

    shared = True
    """All processes that use the bucket find the same pages."""

    def __init__(self, client: ObjectClient, settings: ObjectSettings, schema: bytes) -> None:
        clock = NameClock()
        self._client = client
        self._settings = settings
        self._threads = ThreadPool(2, "asynccache-object")
        self._catalog = PackCatalog(client, clock, self._threads, schema, settings.parallel)
        self._keeper = CatalogKeeper(self._catalog, settings.refresh)
        self._uploads = Uploads(
            client, clock, self._threads, schema, pack=settings.pack, parallel=settings.parallel, stored=self._stored
        )
        self._fetches = Fetches(client, self._catalog, self._threads, settings.parallel)
        self._room = Breaker.brief()  # open while the store is full
        self._open_calls = OpenCalls(f"object store {client.shown!r}")

    @classmethod
    def check(cls, url: ParsedUrl, layout: StoreLayout) -> None:
        """Raise the ConfigError that ``open`` would raise for ``url``, if any, also if the client library is missing.
        Nothing is sent."""
        connect(url, settings_of(url))

    @classmethod
    async def open(cls, url: ParsedUrl, layout: StoreLayout) -> Self:
        """Open the store below the URL's prefix.

        Raises:
            ConfigError: an option is unknown, unusable or a secret, or the client library is missing.
            Unavailable: the store cannot be reached or refuses the requests.

        Cancelling it leaves nothing open.
        """
        settings = settings_of(url)
        return await cls.open_client(connect(url, settings), settings, layout)

    @classmethod
    async def open_client(cls, client: ObjectClient, settings: ObjectSettings, layout: StoreLayout) -> Self:
        """Open the store that ``client`` makes requests to, as ``open`` does."""
        store = cls(client, settings, layout.schema)
        try:
            saved = await store._catalog.load()
        except BaseException:
            store._threads.close()
            raise
        store._keeper.start(full=saved)
        return store

    def __repr__(self) -> str:
        index = self._catalog.index
        return f"ObjectBackend({self._client.shown!r}, pages={index.pages}, packs={len(index.holders)})"

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        """Return for each key whether it is stored, as far as this process knows: HIT or MISS. The call never waits."""
        with self._open_calls:
            index = self._catalog.index
            results = [HIT if key.key in index else MISS for key in keys]
            if MISS in results:
                self._keeper.missed()
            return results

    async def probe(self) -> None:
        """Ask the store for a sign of life, and return when it has answered. (``exists`` asks only the index.)

        Raises:
            Unavailable: it does not answer.
        """
        with suppress(FileNotFoundError):
            await self._client.size("probe")

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Read ranges of packs, several at a time, and copy the pages to their records. Cancelling it returns when the
        copies that have begun have ended.

        Raises:
            Unavailable: all reads failed.
        """
        with self._open_calls:
            results = [MISS] * len(keys)
            stretches, wrong = plan_reads(self._catalog.index, keys, records, self._settings.pack)
            for i in wrong:
                results[i] = CORRUPT
            await self._fetches.fetch(stretches, records, results)
            if MISS in results:
                self._keeper.missed()
            return results

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Store new pages in packs. Pages that are known to be stored are left alone. FAILED means that there is no
        room, or that a pack could not be stored.

        Cancelling it returns when nobody reads the payloads any more. Packs that were being stored for this call alone
        are given up.

        Raises:
            Unavailable: nothing could be stored, for another reason than a lack of room.
        """
        with self._open_calls:
            index = self._catalog.index
            results = [HIT if key.key in index else FAILED for key in keys]
            fresh = [i for i, result in enumerate(results) if result is FAILED]
            if fresh:
                await self._store(fresh, keys, records, results)
            return results

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        """Delete the page of each key: HIT if this process knew of one, else MISS. This process forgets it at once, and
        others when they find the tombstone. All keys are in the tombstone, since there may be pages that this process
        does not know. A call stores one tombstone, and removes packs of which nothing is left. A pack whose writer's
        clock is more than a day ahead is later than any tombstone, so it is removed as a whole. FAILED means that the
        store refuses, so only this process has forgotten the pages.

        Cancelling it may leave any of them deleted.
        """
        if not keys:
            return []
        with self._open_calls:
            index, name = self._catalog.index, self._catalog.clock.name()
            holders = [index.pack_of(key.key) for key in keys]
            results = [MISS if pack is None else HIT for pack in holders]
            self._catalog.counts["deleted"] += results.count(HIT)
            packs = {pack.name: pack for pack in holders if pack is not None}
            try:
                await self._catalog.bury(name, list(dict.fromkeys(key.key for key in keys)))
                doomed = [p for p in packs.values() if not p.live or p.stamp > stamp_of(name)]
                for pack in doomed:
                    index.drop(pack.name)
                await self._client.delete([f"{PACKS}/{pack.name}" for pack in doomed])
            except Unavailable:
                self._catalog.counts["errors"] += 1
                return [FAILED] * len(keys)
            return results

    async def clear(self) -> None:
        """Remove every pack, tombstone and snapshot below the prefix, also those of other processes. Packs that are
        being put meanwhile are kept. Cancelling it may leave any of them removed.

        Raises:
            Unavailable: the store refuses.
        """
        with self._open_calls:
            async with self._catalog.lock:
                self._catalog.unread.clear()
                self._catalog.index.clear()
                for folder in (INDEX, PACKS):
                    async for metas in self._client.list(folder):
                        kept = self._uploads.under_way()
                        doomed = [m.name for m in metas if m.name not in kept and not self._catalog.index.has(m.name)]
                        await self._client.delete([f"{folder}/{name}" for name in doomed])

    async def listing(self) -> AsyncIterator[Sequence[Stored]]:
        """Yield all pages that this process knows, pack by pack. It never waits."""
        with self._open_calls:
            for pack in self._catalog.index.packs():
                entries = [pack.entry(at) for at in self._catalog.index.live(pack)]
                yield [Stored(entry.key, entry.length + HEADER_BYTES, pack.stamp / 1000) for entry in entries]

    def register(self, pool: str, memory: memoryview) -> None:
        """Do nothing: the client takes any memory."""

    def watch(self, tell: Tell | None) -> Iterable[Sequence[bytes]]:
        """Call ``tell`` from now on at every change; None ends that. Returns the keys that are known now, in parts."""
        return self._catalog.index.watched(tell)

    def stats(self) -> Mapping[str, int | float]:
        """Return the counters. ``stored_bytes`` is the size of all packs, with the dead records in them."""
        index, counts = self._catalog.index, self._catalog.counts
        return {
            "pages": index.pages,
            "bytes": index.bytes,
            "packs": len(index.holders),
            "stored_bytes": index.stored,
            "unreadable_packs": len(self._catalog.unread),
            "tombstones": len(index.tombs),
            **{name: counts[name] for name in COUNTERS},
        }

    async def flush(self) -> None:
        """Do nothing: after a HIT from a put the page is stored."""
        with self._open_calls:
            return

    async def aclose(self) -> None:
        """Wait for the calls under way, store a snapshot of the index if much is new, and end the threads. Calling it
        twice is fine. If it is cancelled, the snapshot may not be stored."""
        if self._open_calls.closed:
            return
        try:
            try:
                await self._open_calls.close()
            finally:
                await self._keeper.stop()
                await self._uploads.drain()
            if self._catalog.save_due:
                async with asyncio.timeout(_CLOSING):
                    await self._catalog.save()
        except (Unavailable, TimeoutError):
            self._catalog.counts["errors"] += 1
        finally:
            self._threads.close()

    def _stored(self, pack: Pack) -> None:
        self._catalog.stored(pack)
        self._keeper.stored()

    async def _store(
        self, fresh: Sequence[int], keys: Sequence[PageKey], records: Sequence[Record], results: list[Result]
    ) -> None:
        """Store the pages at the positions ``fresh``. Whether it returns or raises, index and results are right when it
        ends. It raises the first error if nothing was stored, unless the reason is a lack of room."""
        counts, clock = self._catalog.counts, asyncio.get_running_loop().time
        permit = self._room.allow(clock())
        if permit == REFUSED:
            counts["refused_pages"] += len(fresh)
            return
        payloads = [records[i].payload for i in fresh]
        try:
            errors = await self._uploads.put(
                [keys[i].key for i in fresh], [bytes(records[i].header) for i in fresh], payloads
            )
            full = sum(isinstance(error, NoRoom) for error in errors)
            counts["refused_pages"] += full
            counts["errors"] += len({*errors} - {None})
            if full == len(errors):
                self._room.failure(permit, clock())
            elif errors[0] is not None and None not in errors:
                raise errors[0]
            else:
                self._room.success(permit)
        except BaseException:
            self._room.abandon(permit)
            raise
        for i, error, payload in zip(fresh, errors, payloads, strict=True):
            if error is None:
                counts["put_bytes"] += payload.nbytes
                results[i] = HIT
