"""A process that fills a store until it is killed, and says on its output what it has done; and what has to be there.

Arguments: URL, number of the round, and ``limited`` for a folder's store whose files may not grow.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import subprocess
import sys
from collections.abc import Sequence

from asynccache.storage import CheckedStore, PageKey, Result
from asynccache.testing.backend_suite import page_key
from tests.storage.pages_kit import fill, get, put
from tests.stores.kinds import opened
from tests.stores.server import ours

BATCH = 20

Said = dict[str, set[int]]
"""The batches of which each word was said."""


def batch_keys(round_: int, batch: int) -> list[PageKey]:
    """The keys of one batch: most pages full, some odd."""
    return [page_key(f"{round_}/{batch}/{i}", "odd" if i % 5 == 4 else "full") for i in range(BATCH)]


def child(url: str, round_: int, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, url, str(round_), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ours())


def killed_after(lines: int, url: str, round_: int) -> Said:
    """What a child had said when it was killed, some time after that many lines."""
    with child(url, round_) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(lines)]
        process.kill()
        said += process.stdout.readlines()
    done: Said = {"put": set(), "deleted": set(), "flushed": set(), "open": set()}
    for word, number in (line.split() for line in said if line.endswith("\n")):
        done[word].add(int(number))
    return done


async def check(store: CheckedStore, history: Sequence[Said]) -> None:
    """What was put is there, what was deleted is not, and of all else no byte is wrong."""
    for round_, done in enumerate(history):
        for batch in range(max(done["put"], default=0) + 3):
            results = await get(store, batch_keys(round_, batch))
            if batch in done["put"]:
                assert results[3:] == [Result.HIT] * (BATCH - 3)
            if batch in done["deleted"] or (batch in done["put"] and batch % 5 != 4):
                assert results[:3] == [Result.MISS if batch in done["deleted"] else Result.HIT] * 3
    assert store.stats()["errors"] == 0


def say(word: str, number: int) -> None:
    """One line, at once."""
    sys.stdout.write(f"{word} {number}\n")
    sys.stdout.flush()


async def endlessly(store: CheckedStore, round_: int) -> None:
    """Put batches for ever; every third is followed by a flush, every fifth by a delete of its first pages."""
    for batch in itertools.count():
        keys = batch_keys(round_, batch)
        await fill(store, keys)
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
    await fill(store, keys)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    more = [key for batch in range(1, 60) for key in batch_keys(0, batch)]
    told = [result for at in range(0, len(more), BATCH) for result in await put(store, more[at : at + BATCH])]
    say("failed", told.count(Result.FAILED))
    say("read", (await get(store, keys)).count(Result.HIT))
    there = [Result.HIT if found is Result.HIT else Result.FAILED for found in await get(store, more)]
    say("right", int(there == told))
    say("errors", int(store.stats()["errors"]))
    say("refused", int(store.stats()["refused_writes"]))
    os._exit(0)                                        # what cannot be written cannot be closed


async def main(url: str, round_: str, *what: str) -> None:
    """Do as told."""
    async with opened(url) as store:
        say("open", 0)
        await (limited(store) if what else endlessly(store, int(round_)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
