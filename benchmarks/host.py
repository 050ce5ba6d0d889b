"""A host process beside Redis over a Unix socket, and both beside an aligned copy: ``python -m benchmarks.host``.

Both servers and all clients are processes of their own, and CPU is that of client and server together, in µs a page,
user and system. Each round measures all of them, so that other work of the machine slows all alike; medians are shown.
In the first pass every client touches the shared memory for the first time; it is shown as ``first``, and not counted
with the others. ``raw`` is the backend alone, ``checked`` with its ``CheckedStore``. ``--clients N`` has N clients move
pages at the same time, each its own. ``--huge`` measures a second host process as well, in huge pages, which must be
reserved (the command says how many if they are not).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from redis.asyncio.connection import Connection

from asynccache.storage import (
    RECORD_SCHEMA,
    CheckedStore,
    PageKey,
    Record,
    Result,
    StorageBackend,
    StoreLayout,
    backend_class,
    parse_size,
    parse_url,
)

BATCH_BYTES = 8 << 20
CALLS = 2
NOWHERE = "redis.invalid"
TICK = os.sysconf("SC_CLK_TCK")


class UnixLoop(uvloop.Loop):
    """A loop on which connections to ``NOWHERE`` go to Redis's Unix socket, which no URL of ours can name."""

    async def create_connection(self, factory: Any, host: Any = None, port: Any = None, **more: Any) -> Any:
        """The same as asyncio's."""
        if host == NOWHERE:
            return await self.create_unix_connection(factory, os.environ["REDIS_SOCKET"])
        return await super().create_connection(factory, host, port, **more)


connection_init = Connection.__init__


def without_options(self: Any, *args: Any, **kwargs: Any) -> None:
    """Make a connection of redis-py's which sets no options of TCP, that a Unix socket does not have."""
    connection_init(self, *args, **kwargs)
    self.socket_keepalive_options = {}


def memory_of(count: int, size: int) -> list[memoryview]:
    """Pages of memory that was touched, each aligned."""
    memory = memoryview(mmap.mmap(-1, count * size))
    memory[:] = os.urandom(1 << 16) * (count * size // (1 << 16)) + bytes(count * size % (1 << 16))
    return [memory[i * size : (i + 1) * size] for i in range(count)]


def cpu_of(pid: int) -> float:
    """Seconds of CPU that a process has used, by its threads' run time where the kernel tells it."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


class Load:
    """The pages of one client."""

    def __init__(self, size: int, total: int, name: int) -> None:
        count = total // size
        self.size, self.batch = size, min(128, max(1, BATCH_BYTES // size))
        self.keys = [PageKey("pages", sha256(b"%d/%d/%d" % (name, size, i)).digest()) for i in range(count)]
        self.source, self.target = memory_of(count, size), memory_of(count, size)
        headers = memoryview(mmap.mmap(-1, 64 * count))
        self.headers = [headers[i * 64 : i * 64 + 64] for i in range(count)]

    @property
    def batches(self) -> list[slice]:
        """The pages of each call."""
        return [slice(at, at + self.batch) for at in range(0, len(self.keys), self.batch)]


async def passes(
    store: CheckedStore, backend: StorageBackend, load: Load, pid: int, *, checked: bool
) -> dict[str, tuple[float, float, float]]:
    """Put all pages and get them. Returns GB/s, and CPU of client and server in µs a page."""

    async def move(verb: str, at: slice) -> None:
        memory = (load.source if verb == "put" else load.target)[at]
        if checked:
            results = await getattr(store, verb)(load.keys[at], memory)
        else:
            records = list(map(Record, load.headers[at], memory))
            results = await getattr(backend, verb)(load.keys[at], records)
        assert set(results) == {Result.HIT}, results

    found: dict[str, tuple[float, float, float]] = {}
    for verb in ("put", "get"):
        batches = iter(load.batches)

        async def work(verb: str = verb, batches: Any = batches) -> None:
            for at in batches:
                await move(verb, at)

        own, other, wall = time.process_time(), cpu_of(pid), time.perf_counter()
        await asyncio.gather(*(work() for _ in range(CALLS)))
        own, other, wall = time.process_time() - own, cpu_of(pid) - other, time.perf_counter() - wall
        count = len(load.keys)
        found[verb] = (count * load.size / wall / 1e9, own / count * 1e6, other / count * 1e6)
        if verb == "get" and checked:
            assert load.source == load.target
    took = []
    for _ in range(30):
        began = time.perf_counter()
        await backend.exists((load.keys * 256)[:256])
        took.append((time.perf_counter() - began) * 1e6)
    found["exists of 256 (wall, µs)"] = (statistics.median(took), 0.0, 0.0)
    await backend.delete(load.keys)
    return found


def copies(load: Load) -> dict[str, tuple[float, float, float]]:
    """The same bytes copied by one thread between aligned places that were touched before."""
    found = {}
    slots = [np.frombuffer(page, np.uint8) for page in memory_of(len(load.keys), load.size)]
    for verb, pages in (("put", load.source), ("get", load.target)):
        cpu, wall = time.process_time(), time.perf_counter()
        for page, slot in zip(pages, slots, strict=True):
            there = np.frombuffer(page, np.uint8)
            np.copyto(*((slot, there) if verb == "put" else (there, slot)))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        found[verb] = (len(pages) * load.size / wall / 1e9, cpu / len(pages) * 1e6, 0.0)
    return found


async def client(urls: Sequence[tuple[str, str, int]], size: int, total: int, name: int, rounds: int) -> dict[str, Any]:
    """All figures of one client: by store, with or without checksums, and verb, one triple a round."""
    load, found = Load(size, total, name), dict[str, list[tuple[float, float, float]]]()
    layout, stores = StoreLayout({"pages": size}, RECORD_SCHEMA), []
    for what, url, pid in urls:
        parsed = parse_url(url)
        backend = await backend_class(parsed.scheme).open(parsed, layout)
        stores.append((what, CheckedStore(backend, layout), backend, pid))
    for number in range(rounds + 1):
        for what, store, backend, pid in stores:
            for checked in (False, True):
                for verb, figures in (await passes(store, backend, load, pid, checked=checked)).items():
                    if number:
                        found.setdefault(f"{what} {'checked' if checked else 'raw'} {verb}", []).append(figures)
                    elif what.startswith("host") and not checked and verb in ("put", "get"):
                        found[f"{what} raw {verb}, first"] = [figures]
        for verb, figures in copies(load).items():
            if number:
                found.setdefault(f"memcpy raw {verb}", []).append(figures)
    for _, store, _, _ in stores:
        await store.aclose()
    return found


def main() -> None:
    """Start the servers and the clients, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page-size", default="256KiB")
    parser.add_argument("--bytes", default="128MiB", help="of each client, in a pass")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--huge", action="store_true", help="measure a host process in huge pages, too")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--as-client", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    size, total = (parse_size("size", text) for text in (given.page_size, given.bytes))
    if given.as_client:
        Connection.__init__ = without_options  # type: ignore[method-assign]
        with asyncio.Runner(loop_factory=UnixLoop) as runner:
            urls = json.loads(given.as_client[0])
            found = runner.run(client(urls, size, total, int(given.as_client[1]), given.rounds))
        sys.stdout.write(json.dumps(found))
        return
    folder = tempfile.mkdtemp(prefix="kv")
    memory = max(256 << 20, 3 * given.clients * total)
    servers, processes = [], []
    for name, more in (("host", []), ("host huge", ["--huge"]))[: 2 if given.huge else 1]:
        path = f"{folder}/{len(processes)}"
        process = subprocess.Popen([sys.executable, "-m", "asynccache", "serve", "--quiet", "--listen", f"unix:{path}",
                                    "--memory", str(memory), *more])  # fmt: skip
        processes.append(process)
        servers.append((name, f"host:{path}", process.pid))
    if shutil.which("redis-server"):
        redis = subprocess.Popen(["redis-server", "--port", "0", "--unixsocket", f"{folder}/r", "--save", "",
                                  "--appendonly", "no", "--io-threads", "1"], stdout=subprocess.DEVNULL)  # fmt: skip
        processes.append(redis)
        os.environ["REDIS_SOCKET"] = f"{folder}/r"
        servers.append(("redis", f"redis://{NOWHERE}:6379", redis.pid))
    try:
        for number in range(2 if given.huge else 1):
            while not os.path.exists(f"{folder}/{number}"):
                if processes[number].poll() is not None:
                    raise SystemExit(f"{memory >> 21} huge pages are wanted: sysctl vm.nr_hugepages={memory >> 21}")
                time.sleep(0.05)
        time.sleep(memory / (1 << 30))  # they allocate
        words = [sys.executable, "-m", "benchmarks.host", "--page-size", given.page_size, "--bytes", given.bytes,
                 "--rounds", str(given.rounds)]  # fmt: skip
        running = [subprocess.Popen([*words, "--as-client", json.dumps(servers), str(n)], stdout=subprocess.PIPE)
                   for n in range(given.clients)]  # fmt: skip
        answers = [json.loads(process.communicate()[0]) for process in running]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        shutil.rmtree(folder)
    report = {}
    for name in answers[0]:
        each = [[statistics.median(column) for column in zip(*answer[name], strict=True)] for answer in answers]
        rate, own, other = sum(one[0] for one in each), *(statistics.mean(one[at] for one in each) for at in (1, 2))
        report[name] = {"gb_s": round(rate, 3), "client_us": round(own, 1), "server_us": round(other, 1)}
        sys.stdout.write(f"{name:<34}{rate:10.2f} {own:10.1f} + {other:6.1f} µs a page\n")
    if given.json:
        Path(given.json).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
