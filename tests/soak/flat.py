"""A long run of the stress tool with faults ends as large as it was when it was warm: ``python -m tests.soak.flat``.

Once a second the process itself is measured: resident memory, file descriptors, threads, tasks. A scraper asks
the cache's server for every page as often. The first third of the run is its warm-up, in which every tier fills. What
follows is compared in quarters: the last must be like the first. The seed is random unless it is given, and is printed.
The exit status is 0 if the run was right and flat, else 1.
"""


from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

from asynccache import AsyncCache
from asynccache.cli.options import RunSettings, loop_factory
from asynccache.cli.report import Report
from asynccache.cli.session import Session
from asynccache.metrics import MetricsServer, start_metrics_server

EVERY = 1.0
SHOWN_EVERY = 5
TOLERANCE = 0.02
MOST_MORE = {"fds": 2, "threads": 2, "tasks": 6}
"""Requests come and go, and with them tasks: half a dozen is chance, and a leak would be hundreds."""

PAGES = ("/metrics", "/statistics", "/healthz", "/explain?tokens=1,2,3")


class Look(NamedTuple):
    """The process at one moment: ``rss`` in bytes, without what files back, as the kernel takes that away and brings it
    back as it likes; the others as counts."""

    at: float
    rss: int
    fds: int
    threads: int
    tasks: int


def look(at: float, pid: int | None = None) -> Look:
    """Now: this process, to be called on its loop; or another one, of which no tasks can be seen."""
    folder = f"/proc/{pid or 'self'}"
    resident, of_files = map(int, Path(folder, "statm").read_text().split()[1:3])
    fds, threads = (len(os.listdir(f"{folder}/{each}")) for each in ("fd", "task"))
    tasks = 0 if pid else len(asyncio.all_tasks())
    return Look(at, (resident - of_files) * os.sysconf("SC_PAGESIZE"), fds, threads, tasks)


def differences(looks: Sequence[Look], tolerance: float = TOLERANCE) -> Iterator[str]:
    """What is not as it was, in sentences. ``looks`` are those after the warm-up. ``tolerance``: the share by which
    memory may differ."""
    quarter = len(looks) // 4
    if not quarter:
        yield f"there are {len(looks)} samples, too few to compare: give it more --seconds"
        return
    first, last = looks[:quarter], looks[-quarter:]
    before, after = (median(one.rss for one in part) for part in (first, last))
    if abs(after / before - 1) > tolerance:
        yield (f"resident memory went from {before / 2**20:.1f} MiB to {after / 2**20:.1f} MiB, by "
               f"{after / before - 1:+.1%}; at most {tolerance:.0%} is flat")
    for name, most in MOST_MORE.items():
        before, after = (median(getattr(one, name) for one in part) for part in (first, last))
        if abs(after - before) > most:
            yield f"{name} went from {before:g} to {after:g}; at most {most} more or fewer is constant"


class Soak(Session):
    """One run that is looked at while it lasts. ``looks`` are those after the warm-up."""

    def __init__(self, settings: RunSettings, warm_up: float) -> None:
        super().__init__(settings)
        self.looks: list[Look] = []
        self._warm_up = warm_up
        self._server: MetricsServer | None = None
        self._asking = asyncio.Lock()

    async def run(self) -> Report:
        """The report of the run."""
        looking = asyncio.create_task(self._look())
        try:
            return await super().run()
        finally:
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking

    @asynccontextmanager
    async def _exposed(self, cache: AsyncCache) -> AsyncIterator[None]:
        async with await start_metrics_server(cache) as server:
            self._server = server
            try:
                yield
            finally:
                async with self._asking:        # the server stays until it has been asked
                    self._server = None

    async def _look(self) -> None:
        began, number = time.monotonic(), 0
        while True:
            async with self._asking:
                if self._server is not None:        # before and after that, the cache is opened, flushed and closed
                    self._note(look(time.monotonic() - began), number)
                    await asked(self._server)
                    number += 1
            await asyncio.sleep(EVERY)

    def _note(self, found: Look, number: int) -> None:
        if found.at >= self._warm_up:
            self.looks.append(found)
        if number % SHOWN_EVERY == 0:
            print(f"{found.at:6.0f} s  {found.rss / 2**20:7.1f} MiB  {found.fds} fds  {found.threads} threads  "
                  f"{found.tasks} tasks{'' if self.looks else '  (warming up)'}", flush=True)


async def asked(server: MetricsServer) -> None:
    """Ask for every page once, as a scraper would."""
    for page in PAGES:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(f"GET {page} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 "), answer[:200]
        writer.close()
        await writer.wait_closed()


def stress(seconds: float, seed: int, folder: str) -> RunSettings:
    """Two stores that are full soon, faults and cancellations, as many requests as the machine can serve."""
    return RunSettings.read("stress", {
        "duration": str(seconds), "seed": str(seed), "rate": "0", "faults": "0.1", "cancel_rate": "0.1", "quiet": True,
        "device_tokens": "16384", "host_tokens": "32768", "components": "full,swa,mamba", "end_hints": "0.5",
        "storage": ["memory:?capacity=32MiB", f"file:{folder}/kv?capacity=128MiB&segment=8MiB"],
    })  # fmt: skip


def soak(seconds: float, seed: int) -> int:
    """Run, print what was seen; the exit status."""
    with tempfile.TemporaryDirectory(prefix="asynccache-soak-") as folder:
        settings = stress(seconds, seed, folder)
        session = Soak(settings, seconds / 3)
        with asyncio.Runner(loop_factory=loop_factory(settings.loop)) as runner:
            report = runner.run(session.reported())
    wrong = [*report["problems"], *differences(session.looks)]
    told = ("served", "cancelled", "failed", "verify", "leaks", "elapsed_s")
    print(json.dumps({name: report[name] for name in told}))
    print("\n".join(wrong) or "flat")
    return 1 if wrong else 0


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="A long run of the stress tool must end as large as it was when warm.")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long requests are served (default: 600)")
    parser.add_argument("--seed", type=int, help="of everything drawn at random (default: a random one, printed)")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    print(f"python -m tests.soak.flat --seconds {options.seconds:g} --seed {seed}", flush=True)
    logging.getLogger("asynccache").addHandler(logging.NullHandler())  # faults are what this is about
    return soak(options.seconds, seed)


if __name__ == "__main__":
    sys.exit(main())
