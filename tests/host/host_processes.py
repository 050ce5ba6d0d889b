"""Servers and clients in processes of their own, which can be killed."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

from asynccache.errors import BackendError, ConfigError
from asynccache.testing.backend_suite import keys_of
from tests.host.host_kit import client


class HostProcess:
    """``asynccache serve`` at a path; ``start`` it again after ``kill``."""

    def __init__(self, path: str, memory: str, *more: str) -> None:
        self.path = path
        self.url = f"host:{path}"
        self.words = ["serve", "--listen", f"unix:{path}", "--memory", memory, "--quiet", *more]
        self.command = [sys.executable, "-m", "asynccache"]
        self.process: subprocess.Popen[bytes]

    def start(self, *more: str) -> None:
        """Start it. It need not listen yet."""
        self.process = subprocess.Popen([*self.command, *self.words, *more])

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
def server_process(path: str, memory: str = "24MiB", *more: str) -> Iterator[HostProcess]:
    """A server that has been started."""
    server = HostProcess(path, memory, *more)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def child(path: str, seed: int, seconds: float) -> subprocess.Popen[str]:
    """A client process, which has begun."""
    words = [sys.executable, "-m", "tests.host.host_child", path, str(seed), str(seconds)]
    made = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert made.stdout is not None
    assert made.stdout.readline() == "ready\n"
    return made


def report(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What a client that has come to its end says."""
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(out)
    return found


async def killed_clients(server: HostProcess, seed: int, kills: int, *, at_once: int = 3) -> dict[str, float]:
    """Kill ``kills`` clients at random moments, while others go on. Returns the server's counts when all is over."""
    random = Random(seed)
    running: list[subprocess.Popen[str]] = []
    loop = asyncio.get_running_loop()
    for number in range(kills):
        while len(running) < at_once:
            running.append(await loop.run_in_executor(None, child, server.path, seed * 1000 + number, 3600.0))
        await asyncio.sleep(random.random() * 0.3)
        victim = running.pop(random.randrange(len(running)))
        victim.kill()
        victim.communicate()
    for process in running:
        process.kill()
        process.communicate()
    return await server.settled()


async def killed_servers(server: HostProcess, seed: int, kills: int, clients: Sequence[subprocess.Popen[str]]) -> None:
    """Kill the server ``kills`` times at random moments while ``clients`` go on, and start it again."""
    random = Random(seed)
    for _ in range(kills):
        await server.counts()
        await asyncio.sleep(random.random() * 0.3)
        server.kill()
        await asyncio.sleep(random.random() * 0.1)
        server.start()
    assert all(process.poll() is None for process in clients)
    await server.counts()
