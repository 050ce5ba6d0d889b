"""Replicas on a trace with private memory, and with the same sum of memory in a host process: ``python -m
benchmarks.fleet_replay trace.jsonl``.

No simulation: each replica is an ``AsyncCache`` with its bytes, ``asynccache serve`` is a process, and every page that
hits is compared. The load is the one of ``benchmarks.fleet``, or the first ``--requests`` of it, with random routing
and LRU; a block of the trace is a page. Requests come one after the other, each when the last one's pages are stored,
so that a run depends on no clock. The simulation's figures for the same requests stand beside.

Private: each replica has ``--local`` blocks in its host tier. Shared: each has ``WAY`` blocks there, and the host
process has the rest of the same sum. The device tier is as small as the longest prompt allows, and its pages are in the
host tier, too. The first tenth of the requests warms up and is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple

import numpy as np
import torch
import uvloop

from asynccache import AsyncCache, CacheConfig, Full
from asynccache.cli.traces import BLOCK_TOKENS, arrivals, read_trace
from asynccache.host.memory import UNIT, layout_of
from benchmarks.fleet import Memory, Model, Prompt, Replica, Router, fleet_load, simulate
from benchmarks.parsing import integer, listed
from tests.host.host_kit import socket_path
from tests.host.host_processes import server_process

PAGE_BYTES = 2 * UNIT
WAY = 256
LAST = 2**31 - 1
"""Behind each prompt, for what is always computed: the end of a prompt is no whole block."""
MODEL = Model(8000.0, 131072 * BLOCK_TOKENS, 3e9)


class Replayed(NamedTuple):
    """Shares of all prompt tokens: ``hits``, and of these what came from the host process. ``simulated``: the hits of
    the simulation. ``pages``: how many were compared."""

    memory: str
    local: int
    requests: int
    hits: float
    from_server: float
    simulated: float
    pages: int
    seconds: float


def server_bytes(pages: int) -> int:
    """The memory in which a host process has room for so many pages, with their headers."""
    size = pages * PAGE_BYTES
    while layout_of(size).units * UNIT < pages * PAGE_BYTES:
        size += UNIT
    return size


def config(host: int, device: int, storage: str | None) -> CacheConfig:
    """A replica's cache. A token stands for a block of the trace."""
    full = Full(bytes_per_token=PAGE_BYTES, layers=1, device_tokens=device, host_tokens=host)
    return CacheConfig(model="fleet", components=(full,), page_size=1, storage=storage, eviction="lru",
                       prefetch_policy="wait_complete", prefetch_threshold=1, prefetch_quota=1.0)  # fmt: skip


async def serve(cache: AsyncCache, path: Sequence[int]) -> tuple[int, int]:
    """Serve one prompt: compare what is cached, compute the rest, and wait until it is stored. Returns how many blocks
    were cached, and how many of these came from the host process."""
    tokens = [*path, LAST]
    values = torch.from_numpy(np.repeat(np.asarray(path, np.int64)[:, None], PAGE_BYTES // 8, axis=1)).view(torch.uint8)
    prefetch = cache.prefetch(tokens)
    await prefetch
    async with cache.lease(tokens, prefetch=prefetch) as lease:
        await lease.loaded()
        pages, known = cache.pools["full"].layer(0), lease.cached
        slots = lease.pages[: len(path)].tolist()
        rows = pages.view(torch.uint8).reshape(pages.shape[0], -1)
        if known and not torch.equal(rows[slots[:known]], values[:known]):
            raise SystemExit("a hit has other bytes")
        rows[slots[known:]] = values[known:]
        await lease.commit(path)
        far = lease.hits.storage
    await cache.flush()
    return known, far


async def replay(load: Sequence[Prompt], seed: int, caches: Sequence[AsyncCache]) -> tuple[int, int, int, int]:
    """Serve ``load``; returns tokens of prompts, of hits, and of hits from the host process, after the warm-up, and how
    many pages were compared in all."""
    router = Router("random", [Replica(Memory(1, "lru")) for _ in caches], MODEL, seed)
    tokens = hits = far = pages = 0
    for number, prompt in enumerate(load):
        found, fetched = await serve(caches[router.choose(prompt)], prompt.path)
        pages += found
        if number >= len(load) // 10:
            tokens += prompt.tokens
            hits += found * BLOCK_TOKENS
            far += fetched * BLOCK_TOKENS
        if number % 500 == 0:
            sys.stderr.write(f"{number} of {len(load)}\n")
    return tokens, hits, far, pages


async def compared(
    memory: str, load: Sequence[Prompt], seed: int, replicas: int, local: int, device: int
) -> Replayed:
    """Replay ``load`` on caches with ``private`` or ``shared`` memory."""
    began = time.monotonic()
    together = 1 if memory == "private" else replicas
    async with AsyncExitStack() as stack:
        url, host = None, local
        if memory == "shared":
            size = server_bytes(replicas * (local - WAY))
            server = stack.enter_context(server_process(socket_path(), str(size)))
            await server.counts()
            url, host = server.url, WAY
        caches = [await stack.enter_async_context(AsyncCache(config(host, device, url))) for _ in range(replicas)]
        tokens, hits, far, pages = await replay(load, seed, caches)
        if url is not None:
            counts = await server.settled()
            sys.stderr.write(f"{counts}\n")
    machines = [Memory(local * together, "lru") for _ in range(replicas // together)]
    made = [Replica(machines[number // together]) for number in range(replicas)]
    row = simulate(load, Router("random", made, MODEL, seed), False, together)
    return Replayed(memory, local, len(load), hits / tokens, far / tokens, row.local_hits, pages,
                    time.monotonic() - began)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet_replay", description=__doc__.splitlines()[0])
    parser.add_argument("trace", help="a trace in the Mooncake format")
    parser.add_argument("--replicas", type=integer(1), default=8, help="of one machine (default: 8)")
    parser.add_argument("--local", type=listed(integer(WAY + 1)), default=(1000, 4000), help="blocks a replica")
    parser.add_argument("--load", type=float, default=0.7, help="share of the time that is computed without a cache")
    parser.add_argument("--requests", type=integer(1), default=2500, help="of the load, the first so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    asked = parser.parse_args(argv)
    trace = read_trace(asked.trace)
    seconds = arrivals(trace, 1.0)[-1]
    load = fleet_load(trace, asked.load * MODEL.prefill * seconds * asked.replicas, asked.seed)[: asked.requests]
    device = max(len(prompt.path) for prompt in load) + 1
    for local in asked.local:
        for memory in ("private", "shared"):
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                row = runner.run(compared(memory, load, asked.seed, asked.replicas, local, device))
            sys.stdout.write(json.dumps(row._asdict()) + "\n" if asked.json else (
                f"{row.memory:>8} {row.local:>6} {row.requests:>6} hits {row.hits:.1%} ({row.from_server:.1%} from the "
                f"server), simulated {row.simulated:.1%}; {row.pages} pages compared, {row.seconds:.0f} s\n"
            ))  # fmt: skip
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
