"""A host process under real clients: a crowd that must find it as large at the end as when it was warm, then clients
that are killed, then servers that are killed.

    python -m tests.soak.host --seconds 600 --clients 500 --servers 100

Half of the seconds are the crowd's: eight clients with pages of several sizes, and two stresses. What server and
clients have is looked at once a second, and compared as in ``flat``: memory of their own, descriptors, threads. All
together they never have more of shared memory, with the server's own, than was asked for and 64 MiB. The other half is
for kills, as many of those asked for as there is time for. On a busy machine it takes longer: processes must begin.

Prints the seed, a line every few seconds, and what was found; what the server says only if something was wrong. The
status is 1 then: a page was wrong or corrupt, a slot was lost, something grew.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.host.host_kit import socket_path
from tests.host.host_processes import (
    ClientProcess,
    Crowd,
    HostProcess,
    insist_on_every_slot,
    killed_clients,
    killed_servers,
    memory_use,
    server_process,
)
from tests.soak.flat import Look, differences, look

AT_A_TIME = 10
SHOWN_EVERY = 5.0
MEMORY = 96 << 20
MORE = 64 << 20
WARM = 3
"""The first third of the looks is not compared."""
TOLERANCE = 0.08
"""Of some 27 MiB of the server, which went up and down by 3 %. What is kept of each of 100,000 pages is more."""
FEWEST = 8
"""Looks that are compared, at the least: a busy machine has no time for more kills."""


class Watched:
    """A server and its clients, which are looked at now and then. ``wrong``: what is not as it should be, in sentences.
    What the clients have is added up."""

    def __init__(self, server: HostProcess, pids: Sequence[int]) -> None:
        self.wrong: list[str] = []
        self._server = server
        self._pids = pids
        self._own: list[Look] = []
        self._theirs: list[Look] = []
        self._began = time.monotonic()
        self._shown = 0.0

    def look(self, others: Sequence[int] = ()) -> None:
        """Look now; ``others`` have the shared memory mapped as well."""
        at = time.monotonic() - self._began
        self._own.append(look(at, self._server.process.pid))
        each = [look(at, pid) for pid in self._pids]
        self._theirs.append(Look(at, *(sum(column) for column in zip(*(one[1:] for one in each), strict=True)))
                            if each else Look(at, 0, 0, 0, 0))  # fmt: skip
        use = memory_use(self._server, [*self._pids, *others])
        if use.shared > MEMORY or use.shared + use.server > MEMORY + MORE:
            self.wrong.append(f"after {at:.0f} s: {use}, where {MEMORY} bytes were asked for")
        if at >= self._shown:
            self._shown = at + SHOWN_EVERY
            own, theirs = self._own[-1], self._theirs[-1]
            print(f"{at:6.0f} s  shared {mib(use.shared)} of {mib(MEMORY)} MiB  the server {mib(own.rss)} MiB, "
                  f"{own.fds} fds  its clients {mib(theirs.rss)} MiB, {theirs.fds} fds", flush=True)

    def ended(self, *, one_server: bool = True) -> list[str]:
        """What was wrong, and what has grown. ``one_server``: it has lived all the time."""
        for name, looks in (("the server", self._own), ("the clients", self._theirs))[0 if one_server else 1 :]:
            compared = looks[len(looks) // WARM :]
            if len(compared) < FEWEST:
                print(f"{name}: only {len(compared)} looks, too few to compare", flush=True)
            elif any(one.rss for one in compared):
                self.wrong += [f"{name}: {sentence}" for sentence in differences(compared, TOLERANCE)]
                first, last = compared[0], compared[-1]
                print(f"{name}: {mib(first.rss)} to {mib(last.rss)} MiB, {first.fds} to {last.fds} fds", flush=True)
        return self.wrong


def mib(size: float) -> str:
    return f"{size / 2**20:.1f}"


def bad(found: dict[str, int]) -> list[str]:
    """What is wrong in a client's report."""
    return [] if found["hits"] and not found["wrong"] and not found["corrupt"] else [f"a client found {found}"]


async def crowded(server: HostProcess, seed: int, seconds: float) -> list[str]:
    """Eight clients and two stresses for so long. Returns what was wrong."""
    with Crowd(server, seed, "--duration", str(seconds)) as crowd:
        watched = Watched(server, [one.pid for one in crowd.clients])
        while crowd.together:
            await asyncio.to_thread(watched.look, [one.pid for one in crowd.stresses])
            await asyncio.sleep(1.0)
        moved, asking = await asyncio.to_thread(crowd.reports)
    wrong = watched.ended() + [sentence for found in moved for sentence in bad(found)]
    print(f"the clients: {({name: sum(found[name] for found in moved) for name in moved[0]})}", flush=True)
    for report in asking:
        told = {name: report[name] for name in ("served", "verify", "leaks")}
        told["from the server"] = report["stages"]["prefetch"]["pages"]
        print(f"a stress: {told}", flush=True)
        if report["verify"]["mismatches"] or report["storage"]["corrupt_pages"] or not told["from the server"]:
            wrong.append(f"a stress found {told}, {report['storage']}")
    return wrong


async def clients_killed(server: HostProcess, seed: int, kills: int, end: float) -> list[str]:
    """Kill up to so many clients, as long as there is time. Returns what was wrong."""
    watched, killed = Watched(server, []), 0
    while killed < kills and time.monotonic() < end:
        await killed_clients(server, seed + killed, AT_A_TIME)
        killed += AT_A_TIME
        await insist_on_every_slot(server)
        watched.look()
    witness = await asyncio.to_thread(ClientProcess, server.path, seed, 5.0)
    found = await asyncio.to_thread(witness.report)
    counts = await insist_on_every_slot(server)
    print(f"{killed} of {kills} clients killed: {found}, {counts}", flush=True)
    return watched.ended() + bad(found)


async def servers_killed(server: HostProcess, seed: int, kills: int, end: float) -> list[str]:
    """Kill the server up to so many times, as long as there is time, under two clients. Returns what was wrong."""
    restarts = 0
    await server.counts()
    clients = [await asyncio.to_thread(ClientProcess, server.path, seed + n, 3600.0) for n in range(2)]
    watched = Watched(server, [one.pid for one in clients])
    while restarts < kills and time.monotonic() < end:
        await killed_servers(server, seed + restarts, 1, clients)
        restarts += 1
        await asyncio.sleep(1.0)  # until they are with the new one, they have the memory of the one before mapped
        watched.look()  # a client that kept the memory of a server that is dead would have more than was asked for
    for one in clients:
        one.end()
    reports = [await asyncio.to_thread(one.report) for one in clients]
    print(f"{restarts} of {kills} servers killed: {reports}", flush=True)
    await insist_on_every_slot(server)
    return watched.ended(one_server=False) + [sentence for found in reports for sentence in bad(found)]


async def soak(seconds: float, clients: int, servers: int, seed: int) -> list[str]:
    """Return what was wrong."""
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with server_process(socket_path(), str(MEMORY), log=log) as server:
            await server.counts()
            wrong += await crowded(server, seed, seconds / 2)
            wrong += await clients_killed(server, seed, clients, time.monotonic() + seconds / 4)
        store = f"file:{folder}/kv?capacity=64MiB"
        with server_process(socket_path(), str(MEMORY), "--storage", store, log=log) as server:
            wrong += await servers_killed(server, seed, servers, time.monotonic() + seconds / 4)
        if wrong:
            print(log.read_text()[-10_000:])
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--servers", type=int, default=100)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000)
    given = parser.parse_args()
    print(f"python -m tests.soak.host --seconds {given.seconds:g} --seed {given.seed}", flush=True)
    found_wrong = asyncio.run(soak(given.seconds, given.clients, given.servers, given.seed))
    print("\n".join(found_wrong) or "well")
    raise SystemExit(1 if found_wrong else 0)
