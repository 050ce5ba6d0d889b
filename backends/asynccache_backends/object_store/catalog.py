"""What is in the bucket, found out: at opening, and while others write to it. Lists are made here and nowhere else, and
no put, get or exists ever waits for one.

*Opening* reads the newest snapshot that is whole, lists what is newer than it, and reads the footers of those packs, so
it costs a few requests and one per new pack. *Refreshing* lists what is newer than the last list and reads those
footers: every ``refresh`` seconds, sooner (after a second) if a key was asked for that is not there. So another
writer's page is found ``refresh`` seconds and two requests after its pack was stored, at the latest, and a second after
it was first asked for. Packs that vanished are found out by whoever reads them (a miss), and by a *full* list, at
opening and every ten minutes.

"Newer" is by name, and names have their writers' clocks. A list therefore starts ``OVERLAP`` before the newest time
that the store itself has given to an object: a writer whose clock is behind the store's by more than that is found by
the full lists only.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from asynccache.storage import Workers, settled
from asynccache_backends.object_store.client import Client, Meta
from asynccache_backends.object_store.index import Index
from asynccache_backends.object_store.names import DEAD, INDEX, PACKS, Clock, first_name, is_name, stamp_of
from asynccache_backends.object_store.packs import MOST_PACK_BYTES, Pack, Verdict, footer_bytes, parse_footer
from asynccache_backends.object_store.snapshot import Snapshot, pack_snapshot, pack_tomb, parse_snapshot, parse_tomb

OVERLAP = 600.0
AHEAD = 24 * 3600.0                                # by how much the store's clock is believed to be ahead of ours
TAIL_BYTES = 16 << 10
MOST_BYTES = 1 << 30
"""Of a saved index or a tombstone: 9 million pages, for which the index takes 3 GiB. What is larger is not read."""
SAVE_AFTER = 64
_AT_A_TIME = 64


async def gently(packs: Sequence[Pack]) -> AsyncIterator[Pack]:
    """One after the other, with a turn of the loop for others every millisecond or so. Any of them may vanish
    meanwhile. Cancelling it is safe."""
    for n, pack in enumerate(packs, 1):
        yield pack
        if not n % _AT_A_TIME:
            await asyncio.sleep(0)


class Catalog:
    """``index`` is what is known. ``unread``: packs that are no good, by name, so that they are not read again. Whoever
    lists, saves, clears or collects holds ``lock``; puts, gets and deletions do not."""

    def __init__(self, client: Client, clock: Clock, workers: Workers, schema: bytes, parallel: int) -> None:
        self.index = Index()
        self.counts: Counter[str] = Counter()
        self.unread: dict[str, tuple[Verdict, Meta]] = {}
        self.lock = asyncio.Lock()
        self._client = client
        self._clock = clock
        self._workers = workers
        self._schema = schema
        self._parallel = parallel
        self._cursor = 0.0
        self._unsaved = 0

    async def load(self) -> bool:
        """Find what is there. Whether a snapshot was used, which may name packs that have vanished since.

        Raises:
            Unavailable: the store refuses. Cancelling it is safe.
        """
        saved = await self._load_snapshot()
        if saved is not None:
            self._cursor = saved.cursor if saved.cursor < self._clock.now() + AHEAD else 0.0
            for name, keys in saved.tombs.items():
                self._clock.seen(stamp_of(name))
                self.index.bury(name, keys)
            async for pack in gently(saved.packs):
                self._clock.seen(pack.stamp)
                self.index.add(pack)
        await self.refresh(full=saved is None)
        self._unsaved = self.counts["footers_read"]
        return saved is not None

    async def refresh(self, full: bool = False) -> None:
        """List what is newer than the last list, or everything, and take note of it; ``full`` also finds what has gone.

        Raises:
            Unavailable: the store refuses; what was found so far stays. Cancelling it is the same.
        """
        before = {pack.name for pack in self.index.packs()} if full else set()
        kept: set[str] = set()
        after = "" if full else first_name(int((self._cursor - OVERLAP) * 1000))
        newest = self._cursor
        fresh: list[Meta] = []
        tombs: list[Meta] = []
        async for metas in self._client.list(PACKS, after):
            for meta in metas:
                newest = max(newest, meta.written)
                kept.add(meta.name)
                self._sort(meta, fresh, tombs)
        self.counts["lists"] += 1
        await self._each(tombs, self._read_tomb)
        await self._each(fresh, self._read_footer)
        self._cursor = newest
        for name in before - kept:
            self.counts["vanished_packs"] += 1
            self.index.drop(name)

    def stored(self, pack: Pack) -> None:
        """A pack of our own is durable."""
        self.counts["packs_put"] += 1
        self._unsaved += 1
        self.index.add(pack)

    async def bury(self, name: str, keys: Sequence[bytes]) -> None:
        """Forget what was stored under ``keys`` until the time of ``name``, here at once, and make it last.

        Raises:
            Unavailable: the store refuses; it is forgotten here only. Cancelling it may do the same.
        """
        self.index.bury(name, keys)
        await self._client.create(f"{PACKS}/{name}{DEAD}", pack_tomb(keys))

    def lost(self, pack: Pack) -> None:
        """A pack is not there any more, or not as it was."""
        self.counts["vanished_packs"] += self.index.has(pack.name)
        self.index.drop(pack.name)

    def cleared(self) -> None:
        """Everything is being removed."""
        self.unread.clear()
        self.index.clear()

    @property
    def save_due(self) -> bool:
        """Whether so much is new that the next opening should find a snapshot of it."""
        return self._unsaved >= max(SAVE_AFTER, self.index.pack_count // 4)

    async def save(self) -> None:
        """Store a snapshot, and remove those before it.

        Raises:
            Unavailable: the store refuses. Cancelling it leaves the old one, the new one or both.
        """
        index, name, unsaved = self.index, self._clock.name(), self._unsaved
        snapshot = Snapshot(self._cursor, index.packs(), dict(index.tombs))
        packing = self._workers.call(pack_snapshot, snapshot, self._schema)
        await settled([packing])
        older = [meta.name for meta in await self._snapshots() if meta.name < name]
        await self._client.create(f"{INDEX}/{name}", packing.result())
        await self._client.delete([f"{INDEX}/{other}" for other in older])
        self._unsaved -= unsaved
        self.counts["snapshots"] += 1

    async def _snapshots(self) -> list[Meta]:
        found = [meta async for metas in self._client.list(INDEX) for meta in metas if is_name(meta.name)]
        return sorted(found, key=lambda meta: meta.name, reverse=True)

    async def _load_snapshot(self) -> Snapshot | None:
        """The newest that is whole."""
        for meta in await self._snapshots():
            if meta.size > MOST_BYTES:
                self.counts["bad_snapshots"] += 1
                continue
            try:
                data = await self._client.read_all(f"{INDEX}/{meta.name}")
            except FileNotFoundError:
                continue
            parsing = self._workers.call(parse_snapshot, memoryview(data), self._schema)
            await settled([parsing])
            if (found := parsing.result()) is not None:
                return found
            self.counts["bad_snapshots"] += 1
        return None

    def _sort(self, meta: Meta, fresh: list[Meta], tombs: list[Meta]) -> None:
        """Which of what was listed is to be read."""
        name = meta.name.removesuffix(DEAD)
        if not is_name(name):
            return
        self._clock.seen(stamp_of(name))
        if meta.name.endswith(DEAD):
            if name not in self.index.tombs:
                tombs.append(meta)
        elif not self.index.has(name) and name not in self.unread:
            fresh.append(meta)

    async def _read_tomb(self, meta: Meta) -> None:
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

    async def _read_footer(self, meta: Meta) -> None:
        path = f"{PACKS}/{meta.name}"
        if meta.size > MOST_PACK_BYTES:
            self.unread[meta.name] = Verdict.DAMAGED, meta
            return
        try:
            tail = await self._tail(path, meta.size, TAIL_BYTES)
            if (needed := footer_bytes(tail)) > len(tail):
                tail = await self._tail(path, meta.size, needed)
        except (FileNotFoundError, EOFError):
            return
        self.counts["footers_read"] += 1
        verdict, entries = parse_footer(tail, meta.size, self._schema)
        if verdict is Verdict.GOOD:
            self._unsaved += 1
            self.index.add(Pack(meta.name, meta.size, entries))
        else:
            self.unread[meta.name] = verdict, meta

    async def _tail(self, path: str, size: int, length: int) -> bytes:
        length = min(size, length)
        return bytes(await self._client.read(path, size - length, length)) if length else b""

    async def _each(self, metas: Sequence[Meta], read: Callable[[Meta], Awaitable[None]]) -> None:
        """Read all of them, a few at a time; an error is raised when none is being read any more."""
        left = list(reversed(metas))

        async def some() -> None:
            while left:
                await read(left.pop())

        tasks = [asyncio.ensure_future(some()) for _ in range(min(self._parallel, len(left)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await settled(tasks)
