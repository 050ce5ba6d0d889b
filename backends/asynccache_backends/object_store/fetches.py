"""Making the range reads of a get: several at a time, over all gets of a store, and each answer to where it belongs.

What was read lies in memory of the client's own until it is copied, so a read can be given up at any time; a copy is
waited for. A pack that is gone, or shorter than it was, is forgotten with all its keys.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from asynccache.errors import Unavailable
from asynccache.storage import Record, Result, Workers, settled
from asynccache_backends.object_store.catalog import Catalog
from asynccache_backends.object_store.client import Client
from asynccache_backends.object_store.names import PACKS
from asynccache_backends.object_store.reads import INLINE_BYTES, Stretch, hand_out


class Fetches:
    """``parallel`` reads at a time."""

    def __init__(self, client: Client, catalog: Catalog, workers: Workers, parallel: int) -> None:
        self._client = client
        self._catalog = catalog
        self._workers = workers
        self._gate = asyncio.Semaphore(parallel)

    async def fetch(self, stretches: Sequence[Stretch], records: Sequence[Record], results: list[Result]) -> None:
        """Make the reads and enter their results.

        Raises:
            Unavailable: every one of them failed. Cancelling it returns after the copies that have begun are over.
        """
        reads = [self._read(stretch, records, results) for stretch in stretches]
        errors = [await reads[0]] if len(reads) == 1 else await _together([asyncio.ensure_future(r) for r in reads])
        if errors and errors[0] is not None and None not in errors:
            raise errors[0]

    async def _read(
        self, stretch: Stretch, records: Sequence[Record], results: list[Result]
    ) -> Unavailable | None:
        """One range read: its results are entered, its error is returned."""
        pack, error = stretch.pack, None
        async with self._gate:
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

    async def _hand_out(self, stretch: Stretch, data: Any, records: Sequence[Record]) -> None:
        self._catalog.counts["range_reads"] += 1
        self._catalog.counts["get_bytes"] += stretch.size
        if stretch.size <= INLINE_BYTES:
            hand_out(stretch, data, records)
            return
        copying = self._workers.call(hand_out, stretch, data, records)
        await settled([copying])
        copying.result()


async def _together(tasks: Sequence[asyncio.Task[Unavailable | None]]) -> list[Unavailable | None]:
    """All results. Cancelling it cancels the tasks and waits for them."""
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await settled(tasks)
