"""The example server in a process of its own, and OpenAI's client on it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import openai

from tests import warm
from tests.processes import PATHS, ROOT, Running

PAGE = 16
SOON = 20.0
WORDS = (str(ROOT / "examples" / "openai_server.py"), "--port", "0", "--threads", "1")


class Server(Running):
    """A server that has printed its address. ``path``, ``place``: whatever a fixture has to tell of it."""

    path = "scheduler"
    place = Path()

    def __init__(self, *options: str) -> None:
        environment = {**PATHS, "PYTHONASYNCIODEBUG": ""}
        super().__init__(*WORDS, *options, env=environment, imports=warm.MODELS)
        self.told_to_stop = False

    def __enter__(self) -> Self:
        self.greeting = self.line("stdout")
        self.url = self.greeting.split()[0]
        return self

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        """An OpenAI client for an ``async with``. It never tries again, and goes through no proxy."""
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="-", max_retries=0, http_client=http, **options)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Send a signal, as an operator does. A second one ends the server at once."""
        self.told_to_stop = True
        self.process.send_signal(number)


@contextmanager
def running(*options: str) -> Iterator[Server]:
    """A server. At the end it is told to stop, if it was not, and must have written no complaint."""
    with Server(*options) as server:
        yield server
        done = server.ended(None if server.told_to_stop else signal.SIGTERM)
        assert (done.returncode, done.stderr) == (0, "")


async def settled(client: openai.AsyncOpenAI) -> dict[str, Any]:
    """The server's figures once no request is being served and nothing is held any more."""
    end = time.monotonic() + SOON
    while True:
        figures: Any = await client.get(f"{str(client.base_url).removesuffix('/v1/')}/statistics", cast_to=object)
        if whole(figures):
            return dict(figures)
        assert time.monotonic() < end, figures
        await asyncio.sleep(0.02)


def whole(figures: dict[str, Any]) -> bool:
    """No request, no lease, no transfer; every page free or evictable."""
    cache = figures["cache"]
    shelves = [*cache["device"].values(), *cache["host"].values()]
    quiet = not (figures["requests"]["live"] or cache["leases"] or cache["waiting"])
    still = not any(cache["core"]["operations"].values())
    return quiet and still and all(s["free"] + s["evictable"] == s["capacity"] for s in shelves)
