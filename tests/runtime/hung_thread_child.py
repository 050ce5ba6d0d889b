"""A cache whose store hangs in a thread is closed, and the process ends. The first argument names the store: ``file``
with a folder, or ``own``. Prints how long closing took, and what it raised."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from asynccache_backends.file import files
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache, CacheConfig, Full
from asynccache.errors import BackendError
from asynccache.settle import ThreadPool
from asynccache.storage import PageKey, Record, Result

hung = threading.Event()


def hang(*_: object) -> int:
    hung.set()
    threading.Event().wait()
    raise AssertionError


class Own(MemoryBackend):
    """Writes in a thread of its own, and lets nothing go before the thread does."""

    def __init__(self) -> None:
        super().__init__()
        self._writers = ThreadPool(1, "own")

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        await self._writers.run(hang)
        return await super().put(keys, records)

    async def aclose(self) -> None:
        self._writers.close()
        await super().aclose()


async def main(store: str) -> None:
    if store != "own":
        files.os.pwritev = hang  # type: ignore[attr-defined]
    config = CacheConfig(
        model="m", components=(Full(bytes_per_token=1024, device_tokens=64, host_tokens=64),), page_size=4,
    )  # fmt: skip
    cache = AsyncCache(config, storage=Own() if store == "own" else f"file:{store}?capacity=64MiB")
    async with cache:
        async with cache.lease(range(16)) as lease:
            await lease.commit(range(16))
        await asyncio.to_thread(hung.wait, 30)
        begun = time.monotonic()
        try:
            await cache.aclose(0.2)
        except BackendError as error:
            sys.stdout.write(f"{time.monotonic() - begun:.1f} {error}\n")


with suppress(BackendError):  # leaving the cache closes it again, which raises the same error
    asyncio.run(main(sys.argv[1]))
