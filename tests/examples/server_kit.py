"""The example server in a process of its own, and OpenAI's client on it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

from tests import warm

ROOT = Path(__file__).parents[2]
PAGE = 16
STARTS_WITHIN = 120.0
SOON = 20.0


class Server:
    """A server that has printed its address."""

    def __init__(self, process: subprocess.Popen[str], greeting: str, log: Path) -> None:
        self._process = process
        self._log = log
        self.told_to_stop = False
        self.place = log.parent
        self.path = "scheduler"
        self.greeting = greeting
        self.url = greeting.split()[0]

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        """An OpenAI client for an ``async with``. It never tries again, and goes through no proxy."""
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="-", max_retries=0, http_client=http, **options)

    def terminate(self) -> None:
        """Send SIGTERM, as an operator does. A second one ends the server at once."""
        self.told_to_stop = True
        self._process.send_signal(signal.SIGTERM)

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C at a terminal does."""
        self.told_to_stop = True
        self._process.send_signal(signal.SIGINT)

    def ended(self) -> str:
        """Wait for the server's end, whose status must be 0. Returns what it wrote to stderr."""
        status = self.status()
        said = self._log.read_text()
        assert status == 0, said
        return said

    def status(self) -> int:
        """Wait for the server's end; returns the exit status."""
        return self._process.wait(timeout=60)


def command(*options: str) -> list[str]:
    return [sys.executable, str(ROOT / "examples" / "openai_server.py"), "--port", "0", "--threads", "1", *options]


@contextmanager
def running(folder: Path, *options: str) -> Iterator[Server]:
    """A server. At the end it is told to stop, if it runs still, and must have written no complaint."""
    with started(folder, *options) as server:
        yield server
        if not server.told_to_stop:
            server.terminate()
        assert server.ended() == ""


@contextmanager
def started(folder: Path, *options: str) -> Iterator[Server]:
    """A server, which is killed at the end if it is still there."""
    paths = [str(ROOT / part) for part in ("", "backends", "scheduler_shim")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONASYNCIODEBUG": ""}
    log = folder / "stderr"
    with log.open("w") as stderr:
        process = warm.Popen(
            command(*options), stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment, imports=warm.MODELS
        )
    try:
        assert process.stdout is not None
        greeting = process.stdout.readline()
        assert greeting, log.read_text()
        yield Server(process, greeting, log)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


async def statistics(client: openai.AsyncOpenAI) -> dict[str, Any]:
    """The server's figures."""
    found: Any = await client.get(f"{str(client.base_url).removesuffix('/v1/')}/statistics", cast_to=object)
    return dict(found)


async def settled(client: openai.AsyncOpenAI) -> dict[str, Any]:
    """The figures once no request is being served and nothing is held any more."""
    end = time.monotonic() + SOON
    while True:
        figures = await statistics(client)
        if whole(figures):
            return figures
        assert time.monotonic() < end, figures
        await asyncio.sleep(0.02)


def whole(figures: dict[str, Any]) -> bool:
    """No request, no lease, no transfer; every page free or evictable."""
    cache = figures["cache"]
    shelves = [*cache["device"].values(), *cache["host"].values()]
    quiet = not (figures["requests"]["live"] or cache["leases"] or cache["waiting"])
    still = not any(cache["core"]["operations"].values())
    return quiet and still and all(s["free"] + s["evictable"] == s["capacity"] for s in shelves)
