"""A process that fills an object store until it is killed, and says on its output what it has done. Run by tests.

Arguments: URL, number of the round. Puts for ever; every fifth batch is followed by a deletion of its first pages.
"""

from __future__ import annotations

import asyncio
import itertools
import sys

from asynccache.storage import PageKey, Result
from asynccache.testing.backend_suite import LAYOUT, content, page_key
from tests.stores.kinds import opened

BATCH = 10


def batch_keys(round_: int, batch: int) -> list[PageKey]:
    """The keys of one batch: most pages full, some odd."""
    return [page_key(f"{round_}/{batch}/{i}", "odd" if i % 5 == 4 else "full") for i in range(BATCH)]


def say(*words: object) -> None:
    """One line, at once."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def main() -> None:
    """Do as told."""
    url, round_ = sys.argv[1], int(sys.argv[2])
    async with opened(url) as store:
        say("open")
        for batch in itertools.count():
            keys = batch_keys(round_, batch)
            pages = [memoryview(content(key, LAYOUT.page_bytes[key.pool])) for key in keys]
            assert await store.put(keys, pages) == [Result.HIT] * BATCH
            say("put", batch)
            if batch % 5 == 4:
                assert await store.delete(keys[:3]) == [Result.HIT] * 3
                say("deleted", batch)


if __name__ == "__main__":
    asyncio.run(main())
