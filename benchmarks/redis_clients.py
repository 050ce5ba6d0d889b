"""redis-py and the backend side by side on one server: ``python benchmarks/redis_clients.py URL``.

``asynccache bench store URL`` measures the backend more thoroughly; this benchmark compares it with what most
people would use, redis-py with hiredis (MSET, MGET and a copy of each value into its page). Every round measures all
clients, so that other work of the machine slows all alike; the medians are printed. CPU is this process's, user and
system, per page.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import mmap
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, cast

import redis.asyncio
import uvloop
from asynccache_backends.redis import RedisBackend

from asynccache.storage import RECORD_SCHEMA, CheckedStore, PageKey, Record, Result, StoreLayout, parse_size, parse_url

CALLS = 2
BATCH_BYTES = 8 << 20

Move = Callable[[slice], Awaitable[None]]


class Client(NamedTuple):
    name: str
    put: Move
    get: Move


class MovedPages:
    """The pages that are moved: ``total`` bytes in pages of ``size``; where they come from and where they go to."""

    def __init__(self, size: int, total: int) -> None:
        count = total // size
        self.size, self.batch = size, max(1, BATCH_BYTES // size)
        self.keys = [PageKey("pages", hashlib.sha256(b"%d" % i).digest()) for i in range(count)]
        self.source, self.target = self._memory(count), self._memory(count)
        headers = memoryview(mmap.mmap(-1, 64 * count))
        self.headers = [headers[i * 64 : i * 64 + 64] for i in range(count)]

    def _memory(self, count: int) -> list[memoryview]:
        memory = memoryview(mmap.mmap(-1, count * self.size))
        memory[:] = os.urandom(1 << 20) * (len(memory) >> 20) + bytes(len(memory) % (1 << 20))
        return [memory[i * self.size : (i + 1) * self.size] for i in range(count)]

    @property
    def batches(self) -> list[slice]:
        return [slice(at, at + self.batch) for at in range(0, len(self.keys), self.batch)]


async def clients(url: str, pages: MovedPages) -> list[Client]:
    """Return all clients, connected. Nobody closes them; their connections end with the process."""
    layout = StoreLayout({"pages": pages.size}, RECORD_SCHEMA)
    library = redis.asyncio.Redis.from_url(url)
    backend = await RedisBackend.open(parse_url(url), layout)
    checked = CheckedStore(backend, layout)

    async def mset(at: slice) -> None:
        await library.mset({key.key: page for key, page in zip(pages.keys[at], pages.source[at], strict=True)})

    async def mget(at: slice) -> None:
        values = cast(list[bytes], await library.mget([key.key for key in pages.keys[at]]))
        for value, page in zip(values, pages.target[at], strict=True):
            page[:] = value

    def hits(results: Sequence[Result]) -> None:
        assert set(results) == {Result.HIT}

    async def put(at: slice) -> None:
        hits(await backend.put(pages.keys[at], list(map(Record, pages.headers[at], pages.source[at]))))

    async def get(at: slice) -> None:
        hits(await backend.get(pages.keys[at], list(map(Record, pages.headers[at], pages.target[at]))))

    async def put_checked(at: slice) -> None:
        hits(await checked.put(pages.keys[at], pages.source[at]))

    async def get_checked(at: slice) -> None:
        hits(await checked.get(pages.keys[at], pages.target[at]))

    return [
        Client("redis-py", mset, mget),
        Client("backend", put, get),
        Client("checked", put_checked, get_checked),
    ]


async def moved(move: Move, pages: MovedPages) -> tuple[float, float]:
    """GB/s, and CPU in µs a page, of moving all pages, ``CALLS`` calls at a time."""
    batches = iter(pages.batches)

    async def work() -> None:
        for at in batches:
            await move(at)

    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.gather(*(work() for _ in range(CALLS)))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return len(pages.keys) * pages.size / wall / 1e9, cpu / len(pages.keys) * 1e6


async def run(url: str, size: int, total: int, rounds: int) -> None:
    pages = MovedPages(size, total)
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    server = redis.asyncio.Redis.from_url(url)
    for client in [client for _ in range(rounds) for client in await clients(url, pages)]:
        await server.flushdb()
        for operation, move in (("put", client.put), ("get", client.get)):
            found.setdefault((client.name, operation), []).append(await moved(move, pages))
    for (name, operation), figures in found.items():
        rate, cpu = (statistics.median(column) for column in zip(*figures, strict=True))
        sys.stdout.write(f"{size >> 10:5} KiB  {operation}  {name:9} {rate:6.2f} GB/s {cpu:8.1f} µs a page\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="a server whose database may be EMPTIED, as in redis://127.0.0.1:6379/9")
    parser.add_argument("--page-sizes", default="64KiB,256KiB", metavar="SIZES",
                        help="sizes of a page, each measured by itself (default: %(default)s)")
    parser.add_argument("--bytes", default="256MiB", metavar="SIZE", help="bytes in a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds (default: %(default)s)")
    args = parser.parse_args()
    for size in args.page_sizes.split(","):
        uvloop.run(run(args.url, parse_size("--page-sizes", size), parse_size("--bytes", args.bytes), args.rounds))


if __name__ == "__main__":
    main()
