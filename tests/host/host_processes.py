"""Servers and clients in processes of their own, which can be killed."""

from __future__ import annotations

import asyncio
import functools
import json
import multiprocessing
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Self

from asynccache.errors import BackendError, ConfigError
from asynccache.host.memory import UNIT, units_of
from asynccache.storage import HEADER_BYTES
from asynccache.testing.backend_suite import keys_of
from tests.host import host_child
from tests.host.host_kit import client


class HostProcess:
    """``asynccache serve`` at a path; ``start`` it again after ``kill``. ``log``: where what it says goes."""

    def __init__(self, path: str, memory: str, *more: str, log: Path | None = None) -> None:
        self.path = path
        self.url = f"host:{path}"
        self.words = ["serve", "--listen", f"unix:{path}", "--memory", memory, "--quiet", *more]
        self.command = [sys.executable, "-m", "asynccache"]
        self.process: subprocess.Popen[bytes]
        self._log = log

    def start(self, *more: str) -> None:
        """Start it. It need not listen yet."""
        words = [*self.command, *self.words, *more]
        if self._log is None:
            self.process = subprocess.Popen(words)
        else:
            with self._log.open("ab") as said:
                self.process = subprocess.Popen(words, stderr=said)

    def kill(self) -> None:
        """Kill it at once."""
        self.process.kill()
        self.process.wait()

    async def counts(self, *, seconds: float = 60.0) -> tuple[dict[str, float], dict[str, dict[str, int]]]:
        """What it counts, as soon as it answers."""
        end = time.monotonic() + seconds
        while True:
            backend = None
            try:
                backend = await client(self.path)
                await backend.exists(keys_of(1))
                counts, labels = await backend.server_counts()
                return dict(counts), {name: dict(values) for name, values in labels.items()}
            except (BackendError, ConfigError):
                assert time.monotonic() < end, "the server does not answer"
                await asyncio.sleep(0.02)
            finally:
                if backend is not None:
                    await backend.aclose()

    async def reserved(self, size: int, *, seconds: float = 60.0) -> dict[str, float]:
        """What it counts when so many bytes are reserved."""
        end = time.monotonic() + seconds
        while (counts := (await self.counts())[0])["reserved_bytes"] != size:
            assert time.monotonic() < end, f"not {size} bytes stay reserved: {counts}"
            await asyncio.sleep(0.02)
        return counts

    async def settled(self, *, seconds: float = 60.0) -> dict[str, float]:
        """What it counts when nothing is reserved any more."""
        return await self.reserved(0, seconds=seconds)

    def stop(self) -> int:
        """End it as an operator does. Returns its status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def server_process(
    path: str, memory: str = "24MiB", *more: str, log: Path | None = None
) -> Iterator[HostProcess]:
    """A server that has been started."""
    server = HostProcess(path, memory, *more, log=log)
    server.start()
    try:
        yield server
    finally:
        server.kill()


class ClientProcess:
    """A ``host_child`` that has begun. It is forked from a process that has imported what it needs, which takes a
    twentieth of the time of a new interpreter."""

    def __init__(self, path: str, seed: int, seconds: float, pause: float = 0.0) -> None:
        context = _forking()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=host_child.main, args=(path, seed, seconds, pause, theirs), daemon=True)
        self._process.start()
        theirs.close()
        assert self._pipe.poll(120), "a client does not begin"
        assert self._pipe.recv() == "ready"

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid or 0

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return bool(self._process.is_alive())

    def kill(self) -> None:
        """Kill it at once."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def end(self) -> None:
        """Tell it that it is time to end."""
        self._pipe.send("end")

    def report(self) -> dict[str, int]:
        """What it says at its end: hits, wrong, corrupt, puts. It waits for that."""
        assert self._pipe.poll(240), "a client does not come to its end"
        found: dict[str, int] = self._pipe.recv()
        self._process.join(60)
        assert self._process.exitcode == 0
        self._pipe.close()
        return found


@functools.cache
def _forking() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.host.host_child", "tests.host.host_processes"])
    return context


def pss(pid: int) -> dict[str, int]:
    """What a process has of memory, by kind, with its part of what it shares: in bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name.rstrip(":"): int(size) << 10 for name, size, *_ in map(str.split, lines)}


class MemoryUse(NamedTuple):
    """Bytes at one moment: of shared memory, by all processes together; and of the server's own."""

    shared: int
    server: int


def memory_use(server: HostProcess, pids: Iterable[int]) -> MemoryUse:
    """What a server and the clients ``pids`` have. Of shared memory these have no other than the server's. A client may
    have ended."""
    each = [pss(server.process.pid)]
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            each.append(pss(pid))
    return MemoryUse(sum(one.get("Pss_Shmem", 0) for one in each), each[0]["Pss_Anon"] + each[0]["Pss_File"])


class Stress:
    """``asynccache stress`` in a process of its own, which computes and loads on the server's store, and verifies every
    hit. ``much``: how much, as its options say it."""

    def __init__(self, url: str, seed: int, *much: str) -> None:
        words = ["stress", "--json", "-", "--quiet", "--rate", "0", *much, "--seed", str(seed),
                 "--device-tokens", "12288", "--host-tokens", "12288", "--storage", url]  # fmt: skip
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  a pipe would be full, and nobody reads it yet
        self._process = subprocess.Popen(
            [sys.executable, "-m", "asynccache", *words], stdout=self._said, stderr=self._said)
        self.pid = self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill it at once."""
        self._process.kill()
        self._process.wait()
        self._said.close()

    def report(self) -> dict[str, Any]:
        """Its report. It waits for the end."""
        status = self._process.wait(240)
        with self._said:
            self._said.seek(0)
            said = self._said.read().decode()
        assert status == 0, said[-5000:]
        found: dict[str, Any] = json.loads(said[said.index("{") :])
        return found


PAUSE = 0.02
"""Between a client's calls in a crowd, so that two cores are enough for ten processes."""


class Crowd:
    """``with Crowd(server, seed, "--requests", "99") as crowd``: so many clients and stresses at once, until one stress
    has served ``much``. All stresses have one seed, so that they ask for the same conversations. What is left at the
    end of the block is killed."""

    def __init__(self, server: HostProcess, seed: int, *much: str, clients: int = 8, stresses: int = 2) -> None:
        self.clients: list[ClientProcess] = []
        self.stresses: list[Stress] = []
        self._server = server
        self._seed = seed
        self._much = much
        self._wanted = clients, stresses

    def __enter__(self) -> Self:
        clients, stresses = self._wanted
        try:
            for number in range(clients):
                self.clients.append(ClientProcess(self._server.path, self._seed + number, 3600.0, PAUSE))
            for _ in range(stresses):
                self.stresses.append(Stress(self._server.url, self._seed, *self._much))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for one in (one for one in self.clients if one.alive):
            one.kill()
        for other in (other for other in self.stresses if other.alive):
            other.kill()

    @property
    def together(self) -> bool:
        """Whether all of them are alive."""
        return all(one.alive for one in self.clients) and all(one.alive for one in self.stresses)

    @property
    def pids(self) -> list[int]:
        """Of those that are alive."""
        running: list[ClientProcess | Stress] = [*self.clients, *self.stresses]
        return [one.pid for one in running if one.alive]

    def reports(self) -> tuple[list[dict[str, int]], list[dict[str, Any]]]:
        """What clients and stresses say at their end, to which they are brought now. It waits for that."""
        for one in self.clients:
            one.end()
        return [one.report() for one in self.clients], [one.report() for one in self.stresses]


async def insist_on_every_slot(server: HostProcess) -> dict[str, float]:
    """Assert that what is not free is pages that can be found, once nothing is being written; returns the counts."""
    counts, backend = await server.settled(), await client(server.path)
    units = sum([units_of(page.size - HEADER_BYTES) async for batch in backend.listing() for page in batch])
    await backend.aclose()
    assert counts["allocated_bytes"] - counts["free_bytes"] == units * UNIT, f"a slot is lost: {counts}"
    return counts


async def killed_clients(server: HostProcess, seed: int, kills: int, *, at_once: int = 3) -> dict[str, float]:
    """Kill ``kills`` clients at random moments, while others go on. Returns the server's counts when all is over."""
    random = Random(seed)
    running: list[ClientProcess] = []
    for number in range(kills):
        while len(running) < at_once:
            running.append(await asyncio.to_thread(ClientProcess, server.path, seed * 1000 + number, 3600.0))
        await asyncio.sleep(random.random() * 0.3)
        running.pop(random.randrange(len(running))).kill()
    for process in running:
        process.kill()
    return await server.settled()


async def killed_servers(server: HostProcess, seed: int, kills: int, clients: Sequence[ClientProcess]) -> None:
    """Kill the server ``kills`` times at random moments while ``clients`` go on, and start it again."""
    random = Random(seed)
    for _ in range(kills):
        await server.counts()
        await asyncio.sleep(random.random() * 0.3)
        server.kill()
        await asyncio.sleep(random.random() * 0.1)
        server.start()
    assert all(process.alive for process in clients)
    await server.counts()
