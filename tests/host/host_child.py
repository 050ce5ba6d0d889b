"""A client of a host process in a process of its own: it stores and reads pages of several sizes until it is killed or
its seconds are over or it is told to end, and compares every hit; or a stress. ``host_processes`` starts them."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from hashlib import sha256
from multiprocessing.connection import Connection
from random import Random
from tempfile import NamedTemporaryFile

from asynccache.storage import RECORD_SCHEMA, PageKey, Result, StoreLayout, open_store

SIZES = {"a": 4096, "b": 73728, "c": 262144, "d": 1 << 20}
LARGEST = max(SIZES.values())
MOST = 8
"""Pages in a call."""
KEYS = 60
"""Pages of each size. All clients use the same, so that they find each other's."""


def page_of(pool: str, number: int) -> tuple[PageKey, bytes]:
    """A page that its key determines, and quickly made."""
    name = sha256(f"{pool}{number}".encode()).digest()
    return PageKey(pool, name), (name * (SIZES[pool] // 32 + 1))[: SIZES[pool]]


async def run(path: str, seed: int, seconds: float, pause: float, pipe: Connection) -> dict[str, int]:
    """Use the store for so long, once it is open and ``pipe`` was told so, or until something comes from there.
    ``pause``: seconds between calls, of which two are made at a time. Returns hits, wrong, corrupt, puts."""
    random, end = Random(seed), time.monotonic() + seconds
    store = await open_store(f"host:{path}", StoreLayout(SIZES, RECORD_SCHEMA))
    assert store is not None
    counts = {"hits": 0, "wrong": 0, "corrupt": 0, "puts": 0}
    pipe.send("ready")

    async def use() -> None:
        ours, theirs = (memoryview(bytearray(MOST * LARGEST)) for _ in range(2))  # so that its size does not change
        while time.monotonic() < end and not pipe.poll():
            pool = random.choice(list(SIZES))
            pages = [page_of(pool, random.randrange(KEYS)) for _ in range(random.randrange(1, MOST + 1))]
            keys, size = [key for key, _ in pages], SIZES[pool]
            mine, found = ([memory[i * size : (i + 1) * size] for i in range(len(pages))] for memory in (ours, theirs))
            for buffer, (_, data) in zip(mine, pages, strict=True):
                buffer[:] = data
            if random.random() < 0.5:
                answers = await store.put(keys, mine)
                counts["puts"] += answers.count(Result.HIT)
            else:
                answers = await store.get(keys, found)
                for answer, buffer, right in zip(answers, found, mine, strict=True):
                    counts["hits"] += answer is Result.HIT
                    counts["wrong"] += answer is Result.HIT and buffer != right
                    counts["corrupt"] += answer is Result.CORRUPT
            await asyncio.sleep(pause if answers.count(Result.FAILED) < len(answers) else 0.02)

    await asyncio.gather(use(), use())
    await store.aclose()
    return counts


def main(pipe: Connection, path: str, seed: int, seconds: float, pause: float) -> None:
    """The process. What it sends at last is what ``run`` returns. Servers that are killed are no news."""
    logging.getLogger("asynccache").addHandler(logging.NullHandler())
    pipe.send(asyncio.run(run(path, seed, seconds, pause, pipe)))


def stress(pipe: Connection, url: str, seed: int, *much: str) -> None:
    """``asynccache stress``, which computes and loads on the server's store, and verifies every hit. ``much``: how
    much, as its options say it. What it sends at last is its report."""
    from asynccache.cli.main import main

    pipe.send("ready")
    with NamedTemporaryFile() as report:
        status = main(["stress", "--json", report.name, "--quiet", "--rate", "0", *much, "--seed", str(seed),
                       "--device-tokens", "12288", "--host-tokens", "12288", "--storage", url])  # fmt: skip
        assert status == 0
        pipe.send(json.load(report))
