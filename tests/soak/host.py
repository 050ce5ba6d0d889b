"""Kills clients and servers of a host process, with real processes, until the seconds are over or all kills are done.

    python -m tests.soak.host --seconds 600 --clients 500 --servers 100

Prints the seed, and what was found. The status is 1 if a slot was lost, or a page was wrong or corrupt.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time

from tests.host.host_kit import socket_path
from tests.host.host_processes import child, killed_clients, killed_servers, report, server_process

AT_A_TIME = 10


async def soak(seconds: float, clients: int, servers: int, seed: int) -> bool:
    """Return whether all was well."""
    end, killed, path, well = time.monotonic() + seconds, 0, socket_path(), True
    with server_process(path) as server:
        await server.counts()
        while killed < clients and time.monotonic() < end:
            counts = await killed_clients(server, seed + killed, AT_A_TIME)
            killed += AT_A_TIME
        witness = await asyncio.to_thread(child, path, seed, 5.0)
        found = await asyncio.to_thread(report, witness)
        counts = await server.settled()
        well = well and not found["wrong"] and not found["corrupt"]
        print(f"{killed} clients killed: {found}, {counts}", flush=True)
    path, restarts = socket_path(), 0
    with tempfile.TemporaryDirectory() as folder, server_process(
        path, "24MiB", "--storage", f"file:{folder}/kv?capacity=64MiB"
    ) as server:
        await server.counts()
        while restarts < servers and time.monotonic() < end:
            processes = [await asyncio.to_thread(child, path, seed + restarts + n, 60.0) for n in range(2)]
            began = time.monotonic()
            while restarts < servers and time.monotonic() - began < 40:
                await killed_servers(server, seed + restarts, 1, processes)
                restarts += 1
            for process in processes:
                found = await asyncio.to_thread(report, process)
                well = well and not found["wrong"] and not found["corrupt"] and found["hits"] > 0
                print(f"{restarts} servers killed: {found}", flush=True)
        await server.settled()
    return well


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--servers", type=int, default=100)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000)
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    raise SystemExit(0 if asyncio.run(soak(given.seconds, given.clients, given.servers, given.seed)) else 1)
