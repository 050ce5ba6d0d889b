"""Ridding a store of waste. Nothing that somebody reads is ever changed: what is still good moves to a new pack first.

Waste is: packs of which no record answers (deleted, or stored earlier by somebody else); packs that are mostly dead,
and small ones of which one pack can hold several, whose good records move together; objects with our names that no
footer makes sense of, once they are old enough not to be on their way; tombstones that no pack needs any more; old
snapshots. What has another kind of name or another record schema is left alone.

Two that collect at a time waste work and lose nothing: both may write a copy of what moves, and the earlier copy
answers for both. Who reads a pack that has just been removed is answered by the new one, if it has heard of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from asynccache.storage import Collected
from asynccache_backends.object_store.catalog import OVERLAP, Catalog, gently
from asynccache_backends.object_store.client import Client
from asynccache_backends.object_store.names import DEAD, PACKS, Clock, name_at, stamp_of
from asynccache_backends.object_store.packs import MAX_RECORDS, Entry, Pack, Verdict, pack_entries, trailer_of


class Collector:
    """One collection; the caller holds the catalog's lock. ``target``: what a full pack has."""

    def __init__(self, catalog: Catalog, client: Client, clock: Clock, schema: bytes, target: int) -> None:
        self._catalog = catalog
        self._client = client
        self._clock = clock
        self._schema = schema
        self._target = target
        self._done = Collected()

    async def run(self, older_than: float | None) -> Collected:
        """Collect, and save the index.

        Raises:
            Unavailable: the store refuses. Cancelling it leaves the rest for the next time.
        """
        await self._catalog.refresh(full=True)
        if older_than is not None:
            await self._retire(int((self._clock.now() - older_than) * 1000))
        packs = self._catalog.index.packs()
        empty = [pack for pack in packs if not pack.live]
        self._add(waste=len(empty))
        await self._remove(empty)
        for group in groups([pack for pack in packs if pack.live], self._target):
            await self._rewrite(group)
        await self._remove_damaged()
        await self._remove_tombs()
        await self._catalog.save()
        return self._done

    async def _retire(self, until: int) -> None:
        """Forget what was stored until then. A tombstone of that time spares what is stored again meanwhile."""
        whole, keys = list[Pack](), list[bytes]()
        async for pack in gently(self._catalog.index.packs()):
            entries = [pack.entry(at) for at in self._catalog.index.live(pack)]
            old = [entry.key for entry in entries if entry.born <= until]
            self._add(pages=len(old))
            if old and len(old) == len(entries):
                whole.append(pack)
            else:
                keys += old
        await self._remove(whole)
        if keys:
            await self._catalog.bury(name_at(until), keys)

    def _add(self, pages: int = 0, waste: int = 0, size: int = 0) -> None:
        self._done = Collected(*(a + b for a, b in zip(self._done, (pages, waste, size), strict=True)))

    async def _remove(self, packs: Sequence[Pack]) -> None:
        await self._client.delete([f"{PACKS}/{pack.name}" for pack in packs])
        for pack in packs:
            self._catalog.index.drop(pack.name)
            self._add(size=pack.size)

    async def _rewrite(self, group: Sequence[Pack]) -> None:
        """Move what is live of these packs to a new one."""
        name, entries, payloads = self._clock.name(), [], []
        for pack in group:
            try:
                data = np.frombuffer(await self._client.read(f"{PACKS}/{pack.name}", 0, pack.size), np.uint8)
            except (FileNotFoundError, EOFError):
                self._catalog.lost(pack)
                continue
            found = [pack.entry(at) for at in self._catalog.index.live(pack)] if len(data) == pack.size else []
            entries += found
            payloads += [data[entry.offset : entry.offset + entry.length] for entry in found]
        if entries:
            await self._store(name, entries, payloads)
        there = [pack for pack in group if self._catalog.index.has(pack.name)]
        self._add(waste=len(there))
        await self._remove(there)

    async def _store(self, name: str, entries: Sequence[Entry], payloads: Sequence[object]) -> None:
        keys, headers = [entry.key for entry in entries], [entry.header for entry in entries]
        lengths = [entry.length for entry in entries]
        table = pack_entries(keys, headers, lengths, [entry.born for entry in entries])
        footer = table + trailer_of(table, self._schema)
        await self._client.create(f"{PACKS}/{name}", b"".join([*payloads, footer]))  # type: ignore[list-item]
        size = sum(lengths) + len(footer)
        self._catalog.stored(Pack(name, size, table))
        self._add(size=-size)

    async def _remove_damaged(self) -> None:
        for name, (verdict, meta) in list(self._catalog.unread.items()):
            if verdict is Verdict.DAMAGED and self._clock.now() - meta.written > OVERLAP:
                await self._client.delete([f"{PACKS}/{name}"])
                del self._catalog.unread[name]
                self._add(waste=1, size=meta.size)

    async def _remove_tombs(self) -> None:
        """A tombstone that is older than any pack on its way, and whose keys no earlier pack has, is done."""
        index = self._catalog.index
        oldest: dict[bytes, int] = {}
        async for pack in gently(index.packs()):
            for key, _, born in pack.births():
                oldest[key] = min(born, oldest.get(key, born))
        for name, keys in list(index.tombs.items()):
            stamp = stamp_of(name)
            settled = self._clock.now() * 1000 - stamp > OVERLAP * 1000
            if settled and all(oldest.get(key, stamp + 1) > stamp for key in keys):
                await self._client.delete([f"{PACKS}/{name}{DEAD}"])
                index.unbury(name)
                self._add(waste=1)


def groups(packs: Sequence[Pack], target: int) -> Iterator[list[Pack]]:
    """Which packs are rewritten together: those less than half live, and those less than half of what a pack may be,
    up to what a pack may hold. One that is small but has nothing dead, and no company, stays as it is."""
    group: list[Pack] = []
    size = records = 0
    for pack in packs:
        if not (2 * pack.live_bytes < pack.size or 2 * pack.live_bytes < target):
            continue
        if group and (size + pack.live_bytes > target or records + pack.live > MAX_RECORDS):
            yield group
            group, size, records = [], 0, 0
        group.append(pack)
        size, records = size + pack.live_bytes, records + pack.live
    if len(group) > 1 or any(pack.live < pack.count for pack in group):
        yield group
