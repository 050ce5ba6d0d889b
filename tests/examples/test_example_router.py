"""The router in front of three example servers, two of which share a host process: prompts go to where they are cached;
one server is killed and comes back."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any, NamedTuple

import openai
import pytest

from asynccache.events import EventStream
from tests.examples.server_kit import Server
from tests.host.host_kit import socket_path
from tests.host.host_processes import HostProcess
from tests.processes import ROOT, Running
from tests.stores.server import free_port, listens
from tests.waiting import until

pytest.importorskip("aiohttp")
import aiohttp

SOON = 60.0
PROMPT = "Everybody begins with the same long words, of which there are many pages. " * 8
GREEDY: dict[str, Any] = {"model": "random-qwen3", "temperature": 0, "max_tokens": 6}


def addresses() -> EventStream:
    return EventStream(*(f"tcp://127.0.0.1:{free_port()}" for _ in range(2)))


class Replica:
    """An example server at a port, with its events, which can be killed and started again."""

    def __init__(self, more: list[str]) -> None:
        self.stream, self.port, self.more = addresses(), free_port(), more
        self.url = f"http://127.0.0.1:{self.port}"
        self.server: Server

    def start(self, stack: ExitStack) -> None:
        events = ["--kv-events", self.stream.endpoint, "--kv-events-replay", str(self.stream.replay)]
        self.server = stack.enter_context(Server("--port", str(self.port), *events, *self.more))


class Routed(NamedTuple):
    """The three, their host process, and the router's address."""

    url: str
    replicas: list[Replica]
    stack: ExitStack


@pytest.fixture(scope="module")
def routed() -> Iterator[Routed]:
    host, machine = socket_path(), addresses()
    with ExitStack() as stack:
        process = HostProcess(host, "64MiB", "--events", machine.endpoint, "--events-replay", str(machine.replay))
        process.start()
        stack.callback(process.kill)
        together = ["--storage", f"host:{host}"]
        replicas = [Replica(together), Replica(together), Replica([])]
        for replica in replicas:
            replica.start(stack)
        words: list[str] = []
        for replica in replicas:
            streams = [replica.stream, machine] if replica.more else [replica.stream]
            named = [replica.url, *(address for one in streams for address in one[:2] if address is not None)]
            words += ["--server", ",".join(named)]
        port = free_port()
        stack.enter_context(router("--port", str(port), *words))
        yield Routed(f"http://127.0.0.1:{port}", replicas, stack)


@contextmanager
def router(*words: str) -> Iterator[None]:
    """The router in a process of its own, which ends with 0 when it is told to."""
    with Running(ROOT / "examples" / "router.py", *words) as process:
        yield
        assert process.ended(signal.SIGTERM).returncode == 0


@asynccontextmanager
async def clients(routed: Routed) -> AsyncIterator[tuple[openai.AsyncOpenAI, aiohttp.ClientSession]]:
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with (
        openai.AsyncOpenAI(base_url=f"{routed.url}/v1", api_key="-", max_retries=0, http_client=http) as client,
        aiohttp.ClientSession() as session,
    ):
        await status_when(session, routed, lambda seen: all(well(one) for one in seen.values()))
        yield client, session


def well(server: dict[str, Any]) -> bool:
    return bool(server["healthy"]) and all(stream["connected"] for stream in server["streams"])


async def status_when(
    session: aiohttp.ClientSession, routed: Routed, true: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """What the router knows, once ``true`` of it."""
    end, seen = time.monotonic() + SOON, None
    while True:
        try:
            async with session.get(f"{routed.url}/router") as answer:
                seen = await answer.json()
                if true(seen):
                    return dict(seen)
        except aiohttp.ClientError:
            pass
        assert time.monotonic() < end, seen
        await asyncio.sleep(0.05)


async def ask(client: openai.AsyncOpenAI, prompt: str, **more: Any) -> tuple[str, str, int]:
    """Where a prompt was served, what was said, and how many of its tokens were cached."""
    answer = await client.completions.with_raw_response.create(**GREEDY | more, prompt=prompt)
    said: Any = answer.parse()
    details = said.usage.prompt_tokens_details
    return answer.headers["x-served-by"], said.choices[0].text, details.cached_tokens if details else 0


async def ask_until(
    client: openai.AsyncOpenAI, prompts: Iterable[str], wanted: set[str]
) -> AsyncIterator[tuple[str, tuple[str, str, int]]]:
    """The prompts, and their answers, that are served by one of those wanted."""
    for prompt in prompts:
        answer = await ask(client, prompt)
        if answer[0] in wanted:
            yield prompt, answer


@pytest.mark.asyncio
@pytest.mark.slow(40)
async def test_prompts_go_where_they_are_cached_and_around_a_server_that_dies(routed: Routed) -> None:
    async with clients(routed) as (client, session):
        cold = [await ask(client, f"{number} is a prompt that nobody has seen. " * 8) for number in range(6)]
        assert {where for where, _, _ in cold} == {replica.url for replica in routed.replicas}, "cold ones are spread"

        # device: every turn of a conversation goes to the server that has the turns before it
        where, said, _ = await ask(client, PROMPT)
        conversation, turns = PROMPT, list[str]()
        for turn in range(4):
            await asyncio.sleep(0.3)  # its events arrive
            conversation += f"{said} And then, {turn}? "
            at, said, cached = await ask(client, conversation)
            assert at == where
            assert cached >= len(PROMPT) // 16 * 16 - 16
            turns.append(said)

        # streams pass through
        stream = await client.completions.create(**GREEDY, prompt=PROMPT, stream=True)
        pieces = [chunk.choices[0].text async for chunk in stream if chunk.choices]
        assert len(pieces) > 2
        assert "".join(pieces) == (await ask(client, PROMPT))[1]
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(**GREEDY | {"temperature": -1}, prompt=PROMPT)
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(**GREEDY, prompt="")

        # the first of the two that share a host process is killed while it computes: nobody sees it, and the other one
        # of the two loads what it had
        first, second, third = routed.replicas
        prompts = (f"{number} is what their machine has. " * 30 for number in range(100))
        prompt, before = await anext(ask_until(client, prompts, {first.url, second.url}))
        victim, heir = (first, second) if before[0] == first.url else (second, first)
        work = [asyncio.create_task(ask(client, f"{number}, " * 40, max_tokens=300)) for number in range(12)]
        await status_when(session, routed, lambda seen: seen[victim.url]["load"])
        victim.server.ended(signal.SIGKILL)
        assert {at for at, _, _ in await asyncio.gather(*work)} <= {heir.url, third.url, victim.url}
        await status_when(session, routed, lambda seen: not seen[victim.url]["healthy"])
        await status_when(session, routed, lambda seen: not any(one["load"] for one in seen.values()))
        again = await ask(client, prompt)
        assert again[:2] == (heir.url, before[1])
        assert again[2] >= len(prompt) // 16 * 16 - 16, "it was loaded from the machine's memory"

        # and it comes back
        await asyncio.to_thread(victim.start, routed.stack)
        await status_when(session, routed, lambda seen: well(seen[victim.url]))
        fresh = {(await ask(client, f"{number} after its return. " * 8))[0] for number in range(6)}
        assert victim.url in fresh


@pytest.mark.asyncio
@pytest.mark.slow(10)
async def test_the_list_of_models_and_a_missing_page_are_the_servers_own(routed: Routed) -> None:
    async with clients(routed) as (client, session):
        assert [model.id async for model in client.models.list()] == ["random-qwen3"]
        async with session.get(f"{routed.url}/nothing") as answer:
            assert answer.status == 404
            assert answer.headers["x-served-by"] in {replica.url for replica in routed.replicas}


@pytest.mark.asyncio
async def test_without_servers_it_says_so() -> None:
    port = free_port()
    with router("--port", str(port), "--server", f"http://127.0.0.1:{free_port()}"):
        await until(lambda: listens(port))
        async with aiohttp.ClientSession() as session:
            async with session.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "a"}) as answer:
                assert (answer.status, await answer.text()) == (503, "no server answers")
