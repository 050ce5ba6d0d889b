"""The catalog: which packs are in the bucket, found out when the store is opened and while others write to it.

Lists are requested only by this module and by ``clear``. No put, get or exists waits for one.

*Opening* reads the newest snapshot that is undamaged, lists what is newer, and reads the footers of those packs. It
takes a few requests, and one for each new pack. *Refreshing* lists what is newer than the last list and reads those
footers. It is done every ``refresh`` seconds, and already after a second if a key was asked for that is not known. So a
page of another writer is found ``refresh`` seconds and two requests after its pack was stored, at the latest, and about
a second after somebody asked for it. Packs that have vanished are noticed by a get that reads them, which is a miss,
and by a *full* list, which is made at opening and every ten minutes.

What is newer is told by the names of packs, and the time in a name is from its writer's clock. Therefore a list begins
``OVERLAP`` seconds before the newest time that the store itself has given to an object. Packs of a writer whose clock
is behind the store's by more than that are found by full lists only.

``CatalogKeeper`` is the work in the background of an open store: it finds packs of other processes and stores snapshots
of the index. All of it is done by one task. The task wakes every ``refresh`` seconds, and when something is due, but
then at least a second (or ``refresh`` seconds, if that is less) after the last time. After an error it waits twice as
long as before, up to a minute. Only ``stop`` waits for the task.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from asynccache.errors import Unavailable
from asynccache.settle import each, settled
from asynccache.storage import ThreadPool
from asynccache_backends.object_store.client import ListedObject, ObjectClient
from asynccache_backends.object_store.formats import (
    DEAD,
    INDEX,
    MOST_PACK_BYTES,
    PACKS,
    NameClock,
    Pack,
    PackIndex,
    PackIndexSnapshot,
    first_name,
    footer_bytes,
    is_name,
    pack_snapshot,
    pack_tomb,
    parse_footer,
    parse_snapshot,
    parse_tomb,
    stamp_of,
)

OVERLAP = 600.0
AHEAD = 24 * 3600.0  # seconds; a snapshot's cursor that is further ahead of this clock is taken for an error
TAIL_BYTES = 16 << 10
MOST_BYTES = 1 << 30
"""A larger snapshot or tombstone is not read. A snapshot of so many bytes names 9 million pages, for which the index
takes 3 GiB."""
SAVE_AFTER = 64
_AT_A_TIME = 64


class PackCatalog:
    """The content of the bucket as far as it is known. ``index`` has the packs. ``unread`` has the names of packs whose
    footers are of no use, so that they are not read again. ``lock`` is held while somebody lists, stores a snapshot or
    clears; puts, gets and deletions do not need it."""

    def __init__(
        self, client: ObjectClient, clock: NameClock, threads: ThreadPool, schema: bytes, parallel: int
    ) -> None:
        self.index = PackIndex()
        self.counts: Counter[str] = Counter()
        self.unread: set[str] = set()
        self.lock = asyncio.Lock()
        self._client = client
        self.clock = clock
        self._threads = threads
        self._schema = schema
        self._parallel = parallel
        self._cursor = 0.0
        self._unsaved = 0

    async def load(self) -> bool:
        """Find what is stored, at opening. Returns whether a snapshot was used, which may have packs that have vanished
        since.

        Raises:
            Unavailable: the store refuses.
        """
        saved = await self._load_snapshot()
        if saved is not None:
            self._cursor = saved.cursor if saved.cursor < self.clock.now() + AHEAD else 0.0
            for name, keys in saved.tombs.items():
                self.clock.seen(stamp_of(name))
                self.index.bury(name, keys)
            for n, found in enumerate(saved.packs, 1):
                pack = Pack(*found)
                self.clock.seen(pack.stamp)
                self.index.add(pack)
                if not n % _AT_A_TIME:
                    await asyncio.sleep(0)  # others have the event loop about every millisecond
        await self.refresh(full=saved is None)
        self._unsaved = self.counts["footers_read"]
        return saved is not None

    async def refresh(self, full: bool = False) -> None:
        """List what is newer than the last list and add it to the index. ``full``: list everything, and also remove
        packs and tombstones from the index that have vanished. After it was cancelled or has failed, what was found so
        far is in the index.

        Raises:
            Unavailable: the store refuses.
        """
        before = {pack.name for pack in self.index.packs()} if full else set()
        buried = set(self.index.tombs) if full else set()
        kept: set[str] = set()
        after = "" if full else first_name(int((self._cursor - OVERLAP) * 1000))
        newest = self._cursor
        fresh: list[ListedObject] = []
        tombs: list[ListedObject] = []
        async for metas in self._client.list(PACKS, after):
            for meta in metas:
                newest = max(newest, meta.written)
                name = meta.name.removesuffix(DEAD)
                kept.add(name)
                if not is_name(name):
                    continue
                self.clock.seen(stamp_of(name))
                if meta.name.endswith(DEAD):
                    if name not in self.index.tombs:
                        tombs.append(meta)
                elif not self.index.has(name) and name not in self.unread:
                    fresh.append(meta)
        self.counts["lists"] += 1
        await each(tombs, self._read_tomb, self._parallel)
        await each(fresh, self._read_footer, self._parallel)
        self._cursor = newest
        for name in before - kept:
            self.counts["vanished_packs"] += 1
            self.index.drop(name)
        for name in buried - kept:
            if stamp_of(name) < (newest - OVERLAP) * 1000:  # a later one may still be on its way
                self.index.unbury(name)
        if full:
            self.unread &= kept

    def stored(self, pack: Pack) -> None:
        """Add a pack that this process has stored."""
        self.counts["packs_put"] += 1
        self._unsaved += 1
        self.index.add(pack)

    async def bury(self, name: str, keys: Sequence[bytes]) -> None:
        """Delete what was stored under ``keys`` up to the time in ``name``: in the index at once, and for others by a
        tombstone of that name. If it is cancelled there may be no tombstone.

        Raises:
            Unavailable: the store refuses, and there is no tombstone.
        """
        self.index.bury(name, keys)
        await self._client.create(f"{PACKS}/{name}{DEAD}", pack_tomb(keys))

    def lost(self, pack: Pack) -> None:
        """Remove a pack from the index that was found to be missing or changed."""
        self.counts["vanished_packs"] += self.index.has(pack.name)
        self.index.drop(pack.name)

    @property
    def save_due(self) -> bool:
        """True if so much is new since the last snapshot that another is worth it."""
        return self._unsaved >= max(SAVE_AFTER, len(self.index.holders) // 4)

    async def save(self) -> None:
        """Store a snapshot and remove the earlier ones. Cancelling it leaves the old one, the new one or both.

        Raises:
            Unavailable: the store refuses.
        """
        index, name, unsaved = self.index, self.clock.name(), self._unsaved
        packs = [(pack.name, pack.size, pack.entries) for pack in index.packs()]
        snapshot = PackIndexSnapshot(self._cursor, packs, dict(index.tombs))
        packed = await self._threads.run(pack_snapshot, snapshot, self._schema)
        older = [meta.name for meta in await self._snapshots() if meta.name < name]
        await self._client.create(f"{INDEX}/{name}", packed)
        await self._client.delete([f"{INDEX}/{other}" for other in older])
        self._unsaved -= unsaved
        self.counts["snapshots"] += 1

    async def _snapshots(self) -> list[ListedObject]:
        found = [meta async for metas in self._client.list(INDEX) for meta in metas if is_name(meta.name)]
        return sorted(found, key=lambda meta: meta.name, reverse=True)

    async def _load_snapshot(self) -> PackIndexSnapshot | None:
        """Return the newest undamaged snapshot, or None."""
        for meta in await self._snapshots():
            if meta.size > MOST_BYTES:
                self.counts["bad_snapshots"] += 1
                continue
            try:
                data = await self._client.read_all(f"{INDEX}/{meta.name}")
            except FileNotFoundError:
                continue
            found = await self._threads.run(parse_snapshot, memoryview(data), self._schema)
            if found is not None:
                return found
            self.counts["bad_snapshots"] += 1
        return None

    async def _read_tomb(self, meta: ListedObject) -> None:
        name = meta.name.removesuffix(DEAD)
        if meta.size > MOST_BYTES:
            self.counts["bad_tombstones"] += 1
            return
        try:
            data = await self._client.read_all(f"{PACKS}/{meta.name}")
        except FileNotFoundError:
            return
        keys = parse_tomb(name, bytes(data))
        if keys is None:
            self.counts["bad_tombstones"] += 1
        else:
            self.index.bury(name, keys)

    async def _read_footer(self, meta: ListedObject) -> None:
        path = f"{PACKS}/{meta.name}"
        if meta.size > MOST_PACK_BYTES:
            self.unread.add(meta.name)
            return
        try:
            tail = await self._tail(path, meta.size, TAIL_BYTES)
            if (needed := footer_bytes(tail)) > len(tail):
                tail = await self._tail(path, meta.size, needed)
        except (FileNotFoundError, EOFError):
            return
        self.counts["footers_read"] += 1
        entries = parse_footer(tail, meta.size, self._schema)
        if entries is None:
            self.unread.add(meta.name)
        else:
            self._unsaved += 1
            self.index.add(Pack(meta.name, meta.size, entries))

    async def _tail(self, path: str, size: int, length: int) -> bytes:
        length = min(size, length)
        return bytes(await self._client.read(path, size - length, length)) if length else b""


FULL_EVERY = 600.0
SHORTEST = 1.0
LONGEST = 60.0
_NEVER = 1e9


class CatalogKeeper:
    """The owner of the background task. ``refresh``: seconds between two looks for packs of other processes; 0: they
    are not looked for."""

    def __init__(self, catalog: PackCatalog, refresh: float) -> None:
        self._catalog = catalog
        self._refresh = refresh
        self._due = asyncio.Event()
        self._delay = min(SHORTEST, refresh or SHORTEST)
        self._full_at = asyncio.get_running_loop().time() + FULL_EVERY
        self._task: asyncio.Task[None] | None = None

    def start(self, full: bool) -> None:
        """Start the task. ``full``: whether it begins with a list of everything, unless ``refresh`` is 0."""
        if full:
            self._full_at = 0.0
            self._due.set()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def missed(self) -> None:
        """Look for packs of other processes soon, because a key was asked for that is not known here."""
        if self._refresh:
            self._due.set()

    def stored(self) -> None:
        """Note that a pack was stored, so that a snapshot may be due."""
        if self._catalog.save_due:
            self._due.set()

    async def stop(self) -> None:
        """Cancel the task and wait until it has ended. Cancelling it does not shorten the waiting."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await settled([task])

    async def _run(self) -> None:
        loop, wait = asyncio.get_running_loop(), self._delay
        while True:
            await asyncio.sleep(wait)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, (self._refresh or _NEVER) - wait)):
                    await self._due.wait()
            self._due.clear()
            try:
                async with self._catalog.lock:
                    if self._refresh:
                        now = loop.time()
                        full = now >= self._full_at
                        await self._catalog.refresh(full)
                        if full:
                            self._full_at = now + FULL_EVERY
                    if self._catalog.save_due:
                        await self._catalog.save()
                wait = self._delay
            except (Unavailable, FileNotFoundError):
                self._catalog.counts["errors"] += 1
                wait = min(2 * wait, LONGEST)
