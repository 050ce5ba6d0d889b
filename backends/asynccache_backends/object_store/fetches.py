"""Makes the range reads of gets, several at a time for all gets of a store together, and copies the pages to their
records.

The bytes that were read lie in memory of the client until they are copied. So a read can be cancelled at any time,
while a copy that has begun is waited for. A pack that is missing, or shorter than it was, is removed from the index.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from asynccache.errors import Unavailable
from asynccache.storage import Record, Result, Workers, settled
from asynccache_backends.object_store.catalog import PackCatalog
from asynccache_backends.object_store.client import ObjectClient
from asynccache_backends.object_store.formats import PACKS
from asynccache_backends.object_store.reads import INLINE_BYTES, PackStretch, hand_out


class Fetches:
    """The reads of a store: ``parallel`` of them at a time, at most."""

    def __init__(self, client: ObjectClient, catalog: PackCatalog, workers: Workers, parallel: int) -> None:
        self._client = client
        self._catalog = catalog
        self._workers = workers
        self._limit = asyncio.Semaphore(parallel)

    async def fetch(self, stretches: Sequence[PackStretch], records: Sequence[Record], results: list[Result]) -> None:
        """Make the reads, fill the records, and set the results. Cancelling it returns when the copies that have begun
        have ended.

        Raises:
            Unavailable: all reads failed.
        """
        reads = [self._read(stretch, records, results) for stretch in stretches]
        errors = [await reads[0]] if len(reads) == 1 else await _together([asyncio.ensure_future(r) for r in reads])
        if errors and errors[0] is not None and None not in errors:
            raise errors[0]

    async def _read(
        self, stretch: PackStretch, records: Sequence[Record], results: list[Result]
    ) -> Unavailable | None:
        """Make one range read and set the results of its keys. Returns its error, or None."""
        pack, error = stretch.pack, None
        async with self._limit:
            try:
                data = await self._client.read(f"{PACKS}/{pack.name}", stretch.start, stretch.size)
                outcome = Result.HIT if len(data) == stretch.size else Result.CORRUPT
                if outcome is Result.HIT:
                    await self._hand_out(stretch, data, records)
            except FileNotFoundError:
                outcome = Result.MISS
            except EOFError:
                outcome = Result.CORRUPT
            except Unavailable as failure:
                outcome, error = Result.FAILED, failure
                self._catalog.counts["errors"] += 1
        if outcome in (Result.MISS, Result.CORRUPT):
            self._catalog.lost(pack)
        for wanted in stretch.wanted:
            results[wanted.which] = outcome
        return error

    async def _hand_out(self, stretch: PackStretch, data: Any, records: Sequence[Record]) -> None:
        self._catalog.counts["range_reads"] += 1
        self._catalog.counts["get_bytes"] += stretch.size
        if stretch.size <= INLINE_BYTES:
            hand_out(stretch, data, records)
        else:
            await self._workers.run(hand_out, stretch, data, records)


async def _together(tasks: Sequence[asyncio.Task[Unavailable | None]]) -> list[Unavailable | None]:
    """Wait for all tasks and return their results. Cancelling it cancels the tasks and waits until they have ended."""
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await settled(tasks)
