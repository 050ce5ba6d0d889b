"""Commands of ``asynccache`` on one store, in a process of their own: a Mooncake client belongs to a process for good.

On standard input a JSON list of steps, each a list of words: ``fill N BAD`` puts N pages in each of two pools, and BAD
more whose headers are not theirs; anything else goes to the command line. On standard output a JSON list of what each
step gave: exit status, standard output, standard error.
"""

from __future__ import annotations

import asyncio
import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout

from asynccache.cli.main import main
from asynccache.storage import PageKey, Record, Result, open_store
from asynccache.testing.backend_suite import LAYOUT, content, page_key

POOLS = ("full", "odd")


async def fill(url: str, count: int, bad: int) -> None:
    store = await open_store(url, LAYOUT)
    assert store is not None
    try:
        for pool in POOLS:
            keys = [page_key(f"good {n}", pool) for n in range(count)]
            assert await store.put(keys, [page(key) for key in keys]) == [Result.HIT] * count
        keys = [page_key(f"bad {n}", "full") for n in range(bad)]
        records = [Record(memoryview(bytearray(64)), page(key)) for key in keys]
        assert await store.backend.put(keys, records) == [Result.HIT] * bad
        await store.flush()
    finally:
        await store.aclose()


def page(key: PageKey) -> memoryview:
    return memoryview(content(key, LAYOUT.page_bytes[key.pool]))


def step(words: list[str], url: str) -> tuple[int, str, str]:
    if words[0] == "fill":
        asyncio.run(fill(url, int(words[1]), int(words[2])))
        return 0, "", ""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main([url if word == "URL" else word for word in words])
    return status, out.getvalue(), err.getvalue()


if __name__ == "__main__":
    given = json.load(sys.stdin)
    json.dump([step(words, sys.argv[1]) for words in given], sys.stdout)
