"""The example server from its start to its end: restarts, draining, families, what it refuses to start with."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import openai
import openai_server
import pytest
from openai_serving.models import FAMILIES
from openai_serving.service import Service

from tests.examples.server_kit import PAGE, command, running, settled, started

PROMPT = "What was said before the restart is known after it. " * 8 + "Yes?"
CACHED = len(PROMPT) // PAGE * PAGE
GREEDY: dict[str, Any] = {"temperature": 0, "prompt": PROMPT, "max_tokens": 16}


async def complete(client: openai.AsyncOpenAI, **more: Any) -> Any:
    model = [model.id async for model in client.models.list()][0]  # noqa: RUF015
    return await client.completions.create(model=model, **GREEDY | more)


HYBRIDS = ("falcon_h1", "deepseek_v4")
"""Families whose pools the engine's own tests read and write in the gate; over HTTP they are in ``make soak``."""


def tiers(answer: Any) -> dict[str, int]:
    found: dict[str, int] = answer.usage.prompt_tokens_details.cached_tokens_by_tier
    return found


@pytest.mark.slow
async def test_a_restart_finds_in_storage_what_was_there(tmp_path: Path) -> None:
    options = ("--storage", f"file:{tmp_path / 'kv'}?capacity=64MiB&segment=8MiB")
    said = []
    for expected in ({"device": 0, "host": 0, "storage": 0}, {"device": 0, "host": 0, "storage": CACHED}):
        with running(tmp_path, *options) as server:
            async with server.client() as client:
                answer = await complete(client)
                assert tiers(answer) == expected
                said.append(answer.choices[0].text)
    assert said[0] == said[1]


@pytest.mark.slow
async def test_a_stream_is_finished_before_it_stops(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        async with server.client() as client:
            stream = await complete(client, max_tokens=200, stream=True)
            await anext(aiter(stream))
            server.terminate()
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].choices[0].finish_reason == "length"
            assert server.ended() == ""


@pytest.mark.slow
async def test_a_stream_that_does_not_end_in_time_is_cut(tmp_path: Path) -> None:
    """Its reader is told, and the cache is closed in good order."""
    with running(tmp_path, "--drain", "0.5") as server:
        async with server.client() as client:
            stream = await complete(client, max_tokens=20_000, stream=True)
            await anext(aiter(stream))
            server.terminate()
            with pytest.raises(openai.APIError, match="the server is closing"):
                async for _ in stream:
                    pass


@pytest.mark.slow
async def test_a_second_sigterm_ends_it_at_once(tmp_path: Path) -> None:
    """A stream that would be waited for is not."""
    with started(tmp_path, "--drain", "600") as server:
        async with server.client() as client:
            stream = await complete(client, max_tokens=20_000, stream=True)
            await anext(aiter(stream))
            server.terminate()
            while listens(server.url):  # noqa: ASYNC110  another process says nothing of it
                await asyncio.sleep(0.01)
            server.terminate()
            assert server.status() == -signal.SIGTERM
            await stream.close()


def listens(url: str) -> bool:
    """Whether the server still takes connections: it does not once it has heard the first signal."""
    try:
        socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


@contextmanager
def own_signals() -> Iterator[None]:
    """The server owns the signals of its process; here that is the process of all tests."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)    # a shell's background job has it ignored
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_it_serves_has_its_own_status(
    number: signal.Signals, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it makes the model, or opens the cache, which is cancelled then."""
    def makes(*_: object) -> NoReturn:
        os.kill(os.getpid(), number)
        raise AssertionError("the signal did not end it")

    async def opens(*_: object) -> None:
        os.kill(os.getpid(), number)
        await asyncio.Event().wait()

    with own_signals(), monkeypatch.context() as patch:
        patch.setattr(openai_server, "served", makes)
        assert openai_server.main([]) == status
    with own_signals(), monkeypatch.context() as patch:
        patch.setattr(Service, "__aenter__", opens)
        assert openai_server.main(["--device-tokens", "256", "--host-tokens", "512"]) == status


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=pytest.mark.soak if one in HYBRIDS else ()) for one in FAMILIES[1:]]
)
async def test_every_family_is_served_from_the_cache(family: str, tmp_path: Path) -> None:
    with running(tmp_path, "--model-family", family) as server:
        async with server.client() as client:
            first = await complete(client)
            again = await asyncio.gather(*(complete(client) for _ in range(3)))
            assert {answer.choices[0].text for answer in again} == {first.choices[0].text}
            assert all(answer.usage.prompt_tokens_details.cached_tokens == CACHED for answer in again)
            await settled(client)


REFUSED = [
    (("--device-tokens", "100"), "device_tokens=100 is not a multiple of page_size=16"),
    (("--storage", "tape:0"), "tape"),
    (("--step-tokens", "16"), "step_tokens=16 must hold a token for each of max_running=32"),
]


def is_one_sentence(status: int, out: str, err: str, told: str) -> None:
    assert (status, out) == (2, ""), err
    assert err.startswith("openai_server: ")
    assert told in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("options", "told"), REFUSED)
def test_settings_that_cannot_be_are_refused_in_a_sentence(
    options: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    is_one_sentence(openai_server.main(["--port", "0", *options]), *capsys.readouterr(), told)


@pytest.mark.slow
def test_a_process_that_refuses_its_settings_ends_with_that_status() -> None:
    options, told = REFUSED[0]
    ran = subprocess.run(command(*options), capture_output=True, text=True, timeout=120, check=False)
    is_one_sentence(ran.returncode, ran.stdout, ran.stderr, told)
