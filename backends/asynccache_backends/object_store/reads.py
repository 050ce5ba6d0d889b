"""The range reads of gets: pages that lie close to each other in a pack are one read of up to a few MiB. Several reads
are made at a time, for all gets of a store together, and their pages are copied to the records.

The bytes that were read lie in memory of the client until they are copied. So a read can be cancelled at any time,
while a copy that has begun is waited for. A pack that is missing, or shorter than it was, is removed from the index.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from asynccache.errors import Unavailable
from asynccache.storage import PageKey, Record, Result, ThreadPool
from asynccache_backends.object_store.catalog import PackCatalog
from asynccache_backends.object_store.client import ObjectClient
from asynccache_backends.object_store.formats import PACKS, FooterEntry, Pack, PackIndex

GAP = 512 << 10  # so many bytes between two wanted pages are read with them, since another request would cost more


class PackStretch(NamedTuple):
    """One range read, from the offset ``start`` of the pack on. ``wanted`` has the records in it, each with the
    position of its key in the call."""

    pack: Pack
    start: int
    wanted: list[tuple[int, FooterEntry]]

    @property
    def end(self) -> int:
        """The offset in the pack at which it ends."""
        _, last = self.wanted[-1]
        return last.offset + last.length


def plan_reads(
    index: PackIndex, keys: Sequence[PageKey], records: Sequence[Record], most: int
) -> tuple[list[PackStretch], list[int]]:
    """Return the reads for all keys that are stored, of ``most`` bytes each at most; and the positions of keys whose
    page has another length than their record."""
    stretches: list[PackStretch] = []
    wrong: list[int] = []
    for location, which in sorted(index.locate(keys)):
        pack, at = index.at(location)
        entry = pack.entry(at)
        _, _, offset, length = entry
        if records[which].payload.nbytes != length:
            wrong.append(which)
            continue
        last = stretches[-1] if stretches else None
        if last is None or last.pack is not pack or offset - last.end > GAP or offset + length - last.start > most:
            last = PackStretch(pack, offset, [])
            stretches.append(last)
        last.wanted.append((which, entry))
    return stretches, wrong


class Fetches:
    """The reads of a store: ``parallel`` of them at a time, at most."""

    def __init__(self, client: ObjectClient, catalog: PackCatalog, threads: ThreadPool, parallel: int) -> None:
        self._client = client
        self._catalog = catalog
        self._threads = threads
        self._limit = asyncio.Semaphore(parallel)

    async def fetch(self, stretches: Sequence[PackStretch], records: Sequence[Record], results: list[Result]) -> None:
        """Make the reads, fill the records, and set the results. Cancelling it returns when the copies that have begun
        have ended.

        Raises:
            Unavailable: all reads failed.
        """
        reads = [self._read(stretch, records, results) for stretch in stretches]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(read) for read in reads]
        except ExceptionGroup as failed:               # a bug, as no read should raise; the first error says more
            raise failed.exceptions[0] from None
        errors = [task.result() for task in tasks]
        if errors and errors[0] is not None and None not in errors:
            raise errors[0]

    async def _read(
        self, stretch: PackStretch, records: Sequence[Record], results: list[Result]
    ) -> Unavailable | None:
        """Make one range read and set the results of its keys. Returns its error, or None."""
        pack, size, error = stretch.pack, stretch.end - stretch.start, None
        async with self._limit:
            try:
                data = await self._client.read(f"{PACKS}/{pack.name}", stretch.start, size)
                outcome = Result.HIT if len(data) == size else Result.CORRUPT
                if outcome is Result.HIT:
                    self._catalog.counts["range_reads"] += 1
                    self._catalog.counts["get_bytes"] += size
                    await self._threads.run_for(size, _copy_out, stretch, data, records)
            except FileNotFoundError:
                outcome = Result.MISS
            except EOFError:
                outcome = Result.CORRUPT
            except Unavailable as failure:
                outcome, error = Result.FAILED, failure
                self._catalog.counts["errors"] += 1
        if outcome in (Result.MISS, Result.CORRUPT):
            self._catalog.lost(pack)
        for which, _ in stretch.wanted:
            results[which] = outcome
        return error


def _copy_out(stretch: PackStretch, data: Any, records: Sequence[Record]) -> None:
    """Copy the headers and payloads in ``data``, which was read for ``stretch``, to their records. Large copies run in
    a thread."""
    source = np.frombuffer(data, np.uint8)
    for which, (_, header, offset, length) in stretch.wanted:
        record, at = records[which], offset - stretch.start
        record.header[:] = header
        np.frombuffer(record.payload, np.uint8)[:] = source[at : at + length]
