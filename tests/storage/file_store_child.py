"""A process that fills a file store until it is killed, and says on its output what it has done. Run by tests.

Arguments: URL, number of the round, what to do: ``fill`` (put, flush, delete, for ever), ``limited`` (fill
under RLIMIT_FSIZE and report).
"""

from __future__ import annotations

import asyncio
import itertools
import resource
import sys

from asynccache_backends.file import FileBackend

from asynccache.storage import CheckedStore, PageKey, Result, parse_url
from asynccache.testing.backend_suite import LAYOUT, content, page_key

BATCH = 30


def batch_keys(round_: int, batch: int) -> list[PageKey]:
    """The keys of one batch: most pages full, some odd."""
    return [page_key(f"{round_}/{batch}/{i}", "odd" if i % 5 == 4 else "full") for i in range(BATCH)]


def batch_pages(keys: list[PageKey]) -> list[memoryview]:
    """Their payloads."""
    return [memoryview(content(key, LAYOUT.page_bytes[key.pool])) for key in keys]


def say(*words: object) -> None:
    """One line, at once."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def fill(store: CheckedStore, round_: int) -> None:
    """Put batches for ever; every third is followed by a flush, every fifth by a delete of its first pages."""
    for batch in itertools.count():
        keys = batch_keys(round_, batch)
        assert await store.put(keys, batch_pages(keys)) == [Result.HIT] * BATCH
        say("put", batch)
        if batch % 5 == 4:
            assert await store.delete(keys[:3]) == [Result.HIT] * 3
            say("deleted", batch)
        if batch % 3 == 2:
            await store.flush()
            say("flushed", batch)


async def limited(store: CheckedStore) -> None:
    """With files limited to less than a segment: writes fail and say so, nothing hangs, what is there is still read."""
    keys = batch_keys(0, 0)
    assert await store.put(keys, batch_pages(keys)) == [Result.HIT] * BATCH
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    failed = 0
    for batch in range(1, 40):
        results = await store.put(batch_keys(0, batch), batch_pages(batch_keys(0, batch)))
        failed += results.count(Result.FAILED)
    pages = [memoryview(bytearray(LAYOUT.page_bytes[key.pool])) for key in keys]
    read = (await store.get(keys, pages)).count(Result.HIT)
    stats = store.stats()
    say("failed", failed, "read", read, "errors", stats["errors"], "refused", stats["refused_writes"])


async def main() -> None:
    """Do as told."""
    url, round_, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    store = CheckedStore(await FileBackend.open(parse_url(url), LAYOUT), LAYOUT)
    say("open")
    if what == "fill":
        await fill(store, round_)
    else:
        await limited(store)


if __name__ == "__main__":
    asyncio.run(main())
