"""Collection: waste is removed from a store. No object is changed: live records are copied to a new pack first.

Waste is:
* packs without a live record, because all of theirs were deleted, or are in a later pack, too;
* packs that are mostly dead, and several small ones: their live records move into a new pack together;
* objects with names of packs whose footers are damaged, once they are too old to be on their way;
* tombstones that concern no pack any more;
* old snapshots.

Objects with other names, and packs with another record schema, are left alone.

If two processes collect at the same time, some work is done twice and nothing is lost: both may copy the same record,
and the later copy is read. A process that reads a pack which was just removed finds its pages in the new pack, as
soon as it has found that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from asynccache.storage import Collected
from asynccache_backends.object_store.catalog import OVERLAP, PackCatalog, gently
from asynccache_backends.object_store.formats import (
    DEAD,
    LAST_STAMP,
    MAX_RECORDS,
    PACKS,
    FooterCheck,
    FooterEntry,
    Pack,
    name_at,
    pack_entries,
    stamp_of,
    trailer_of,
)


class Collector:
    """One collection. The caller holds the catalog's lock. ``target``: the bytes of a full pack."""

    def __init__(self, catalog: PackCatalog, target: int) -> None:
        self._catalog = catalog
        self._client, self._clock, self._schema = catalog.client, catalog.clock, catalog.schema
        self._target = target
        self._done = Collected()

    async def run(self, older_than: float | None) -> Collected:
        """Collect, and store a snapshot of the index. Returns what was removed. ``older_than``: see ``Collectable``.
        Cancelling it leaves the rest for the next call.

        Raises:
            Unavailable: the store refuses.
        """
        await self._catalog.refresh(full=True)
        if older_than is not None:
            await self._delete_old(int((self._clock.now() - older_than) * 1000))
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

    async def _delete_old(self, until: int) -> None:
        """Delete the pages that were stored up to the time ``until``, in milliseconds since 1970. The tombstone has
        that time in its name, so it does not concern pages that are stored again meanwhile."""
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
        """Copy the live records of these packs to a new pack, and remove those that have no live record then.

        The new pack's name is later than the names of these packs, even if their writer's clock is far ahead of this
        one. For of two records with the same birth, the one in the later pack is read."""
        stamp = max(stamp_of(self._clock.name()), max(pack.stamp for pack in group) + 1)
        name, entries, payloads = name_at(min(stamp, LAST_STAMP)), [], []
        for pack in group:
            try:
                data = np.frombuffer(await self._client.read(f"{PACKS}/{pack.name}", 0, pack.size), np.uint8)
            except (FileNotFoundError, EOFError):
                data = np.empty(0, np.uint8)
            if len(data) != pack.size:
                self._catalog.lost(pack)
                continue
            found = [pack.entry(at) for at in self._catalog.index.live(pack)]
            entries += found
            payloads += [data[entry.offset : entry.offset + entry.length] for entry in found]
        if entries:
            await self._store(name, entries, payloads)
        there = [pack for pack in group if self._catalog.index.has(pack.name) and not pack.live]
        self._add(waste=len(there))
        await self._remove(there)

    async def _store(self, name: str, entries: Sequence[FooterEntry], payloads: Sequence[object]) -> None:
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
            if verdict is FooterCheck.DAMAGED and self._clock.now() - meta.written > OVERLAP:
                await self._client.delete([f"{PACKS}/{name}"])
                del self._catalog.unread[name]
                self._add(waste=1, size=meta.size)

    async def _remove_tombs(self) -> None:
        """Remove tombstones that concern no pack any more. No known pack has a record of their keys that was born up to
        their time, and they are so old that no such pack can be on its way."""
        index = self._catalog.index
        oldest: dict[bytes, int] = {}
        async for pack in gently(index.packs()):
            for key, _, born in pack.births():
                oldest[key] = min(born, oldest.get(key, born))
        for name, keys in list(index.tombs.items()):
            stamp = stamp_of(name)
            old = self._clock.now() * 1000 - stamp > OVERLAP * 1000
            if old and all(oldest.get(key, stamp + 1) > stamp for key in keys):
                await self._client.delete([f"{PACKS}/{name}{DEAD}"])
                index.unbury(name)
                self._add(waste=1)


def groups(packs: Sequence[Pack], target: int) -> Iterator[list[Pack]]:
    """Yield the groups of packs that are rewritten, each into one new pack of ``target`` bytes at most.

    These are packs of which less than half is live, and packs whose live records have less than half of ``target``
    bytes. A single small pack without dead records is left as it is.
    """
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
