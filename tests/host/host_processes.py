"""Servers and clients in processes of their own, which can be killed."""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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


class Forked:
    """``target`` of ``host_child`` in a process that has begun. It is forked from one that has imported what it needs,
    which takes a twentieth of the time of a new interpreter."""

    def __init__(self, target: Callable[..., None], *given: Any) -> None:
        context = _forking()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *given), daemon=True)
        self._process.start()
        theirs.close()
        assert self._pipe.poll(120), "it does not begin"
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

    def report(self) -> dict[str, Any]:
        """What it says at its end. It waits for that."""
        assert self._pipe.poll(240), "it does not come to its end"
        found: dict[str, Any] = self._pipe.recv()
        self._process.join(60)
        assert self._process.exitcode == 0
        self._pipe.close()
        return found


class ClientProcess(Forked):
    """It reports hits, wrong, corrupt, puts."""

    def __init__(self, path: str, seed: int, seconds: float, pause: float = 0.0) -> None:
        super().__init__(host_child.main, path, seed, seconds, pause)

    def end(self) -> None:
        """Tell it that it is time to end."""
        self._pipe.send("end")


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


PAUSE = 0.02
"""Between a client's calls in a crowd, so that two cores are enough for ten processes."""


class Crowd:
    """``with Crowd(server, seed, "--requests", "99") as crowd``: so many clients and stresses at once, until one stress
    has served ``much``. All stresses have one seed, so that they ask for the same conversations. What is left at the
    end of the block is killed."""

    def __init__(self, server: HostProcess, seed: int, *much: str, clients: int = 8, stresses: int = 2) -> None:
        self.clients: list[ClientProcess] = []
        self.stresses: list[Forked] = []
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
                self.stresses.append(Forked(host_child.stress, self._server.url, self._seed, *self._much))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._running:
            one.kill()

    @property
    def together(self) -> bool:
        """Whether all of them are alive."""
        return len(self._running) == len(self.clients) + len(self.stresses)

    @property
    def pids(self) -> list[int]:
        """Of those that are alive."""
        return [one.pid for one in self._running]

    @property
    def _running(self) -> list[Forked]:
        everybody: list[Forked] = [*self.clients, *self.stresses]
        return [one for one in everybody if one.alive]

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
