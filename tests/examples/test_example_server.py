"""The example server as its users see it, from its start to its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import cache
from typing import Any, NoReturn
from urllib.parse import urlsplit

import openai
import openai_server
import pytest
import torch
import uvicorn
from openai_serving import arrival
from openai_serving.app import build
from openai_serving.arrival import Punctual
from openai_serving.models import make
from openai_serving.paths import SchedulerPath
from openai_serving.protocol import ApiError, ParsedRequest, parse
from openai_serving.service import Choices, Service, ServiceParts
from openai_serving.text import ByteWords, encode
from openai_serving.words import spoken

from asynccache import AsyncCache
from tests.examples.server_kit import PAGE, Server, running, settled
from tests.stores.server import listens
from tests.waiting import until

# The example server as its users see it: a process of its own, and OpenAI's client on it.


MODEL = "random-qwen3"
CONTEXT = 4096
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = ("--device-tokens", str(CONTEXT), "--host-tokens", str(4 * CONTEXT), "--max-live", "40")
    with running(*options) as server:
        yield server


def scores(prompt: str, said: int) -> list[dict[int, float]]:
    """The log-probabilities of the five likeliest tokens at each place of what the model says."""
    model, tokens, found = make("qwen3"), encode(prompt), list[dict[int, float]]()
    with torch.inference_mode():
        for _ in range(said):
            values, best = model(input_ids=torch.tensor([tokens])).logits[0, -1].log_softmax(-1).topk(5)
            found.append(dict(zip(best.tolist(), values.tolist(), strict=True)))
            tokens.append(int(best[0]))
    return found


async def text_of(stream: openai.AsyncStream[Any]) -> tuple[str, str | None, Any]:
    """What a stream said, why it ended, and its usage."""
    said, reason, usage = "", None, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            said += (choice.delta.content or "") if hasattr(choice, "delta") else choice.text
            reason = choice.finish_reason or reason
    return said, reason, usage


def cached(usage: Any) -> int:
    found: int = usage.prompt_tokens_details.cached_tokens
    return found


async def test_it_says_where_it_is_and_what_it_has(client: openai.AsyncOpenAI, server: Server) -> None:
    assert f"curl {server.url}/v1/chat/completions" in server.greeting
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-4")


@pytest.mark.parametrize("path", ["scheduler", "prefix"])
async def test_log_probabilities_are_the_models_own_with_and_without_a_hit(path: str) -> None:
    prompt = "How likely? All of them begin with these words, which are long enough for several pages. "
    expected = scores(prompt, 12)
    with running("--device-tokens", str(CONTEXT), "--path", path) as server:
        async with server.client() as client:
            for hits in (0, (len(prompt) - 1) // PAGE * PAGE):
                answer = await client.completions.create(**GREEDY, prompt=prompt, max_tokens=12, logprobs=5)
                told = answer.choices[0].logprobs
                assert cached(answer.usage) == hits
                assert told is not None
                assert told.text_offset == list(range(12))
                assert [next(iter(one)) for one in told.top_logprobs or ()] == told.tokens  # the likeliest is first
                each = zip(told.top_logprobs or (), told.token_logprobs or (), expected, strict=True)
                for found, own, wanted in each:
                    texts = {spoken(ByteWords(), token): value for token, value in wanted.items()}
                    assert found == pytest.approx(texts, abs=1e-3)
                    assert own == pytest.approx(max(wanted.values()), abs=1e-3)
            messages: Any = [{"role": "user", "content": "Hello!"}]
            chat = await client.chat.completions.create(
                **GREEDY, messages=messages, max_tokens=6, logprobs=True, top_logprobs=2)
            assert chat.choices[0].logprobs is not None
            content = chat.choices[0].logprobs.content or []
            assert len(content) == 6
            assert all(one.top_logprobs[0].logprob == one.logprob for one in content)
            bare = await client.chat.completions.create(**GREEDY, messages=messages, max_tokens=6)
            assert bare.choices[0].logprobs is None


async def test_a_conversation_finds_its_own_answers_in_the_cache(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Tell me something long."}]
    first = await client.chat.completions.create(**GREEDY, messages=messages, max_tokens=100)
    said = first.choices[0].message.content
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    second = await client.chat.completions.create(**GREEDY, messages=messages, max_tokens=8)
    assert first.usage is not None
    assert cached(second.usage) >= (first.usage.total_tokens - 1) // PAGE * PAGE


async def test_a_client_that_does_not_wait_for_its_answer_ends_it(client: openai.AsyncOpenAI) -> None:
    before = await settled(client)
    with pytest.raises(openai.APITimeoutError):
        await client.completions.create(**GREEDY, prompt="Too slow", max_tokens=4000, timeout=0.5)
    after = await settled(client)
    assert after["requests"]["ended"]["aborted"] == before["requests"]["ended"].get("aborted", 0) + 1


async def test_errors_have_the_form_of_the_api(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.completions.create(model="gpt-4", prompt="Hello")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(**GREEDY, prompt="Hello", max_tokens=0)
    assert bad.value.param == "max_tokens"
    for prompt, most in (("x" * CONTEXT, None), ("x", CONTEXT), ("x" * 3 * CONTEXT, 1)):
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(**GREEDY, prompt=prompt, max_tokens=most)
        assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIStatusError) as large:
        await client.completions.create(**GREEDY, prompt="x" * (17 << 20))
    assert large.value.status_code == 413
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model=MODEL, input="Hello")


async def test_a_request_that_just_fits_is_served(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(**GREEDY, prompt="x" * (CONTEXT - 2), max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


async def test_more_requests_than_it_takes_are_told_to_come_later(client: openai.AsyncOpenAI) -> None:
    asked = [client.completions.create(**GREEDY, prompt=f"Crowd {i}", max_tokens=8) for i in range(60)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, BaseException)]
    assert 0 < len(refused) < 60
    assert all(isinstance(answer, openai.RateLimitError) for answer in refused)


async def test_more_streams_than_the_device_holds_are_all_right(client: openai.AsyncOpenAI) -> None:
    """Ten times 500 tokens in 4,096: somebody waits, or is retracted and goes on."""

    async def ask(i: int) -> str:
        stream = await client.completions.create(**GREEDY, prompt=f"{i} " * 220, max_tokens=60, stream=True)
        return (await text_of(stream))[0]

    said = await asyncio.gather(*(ask(i) for i in range(10)))
    assert said == [await ask(i) for i in range(10)], "and now each alone"


# The example server from its start to its end: draining, signals, what it refuses to start with. Every family is served
# from the cache in ``tests/cli/test_cli_verify_engine.py``.


FEW = ["--device-tokens", "256", "--host-tokens", "512"]
PROMPT = "What was said before the restart is known after it. " * 8 + "Yes?"


async def streamed(client: openai.AsyncOpenAI, count: int) -> Any:
    """A stream that has begun."""
    stream = await client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=count, stream=True)
    await anext(aiter(stream))
    return stream


@pytest.mark.slow
async def test_a_stream_is_finished_before_it_stops() -> None:
    with running() as server:
        async with server.client() as client:
            stream = await streamed(client, 200)
            server.stop()
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.slow
async def test_a_stream_that_does_not_end_in_time_is_cut() -> None:
    """Its reader is told, and the cache is closed in good order."""
    with running("--drain", "0.5") as server:
        async with server.client() as client:
            stream = await streamed(client, 20_000)
            server.stop()
            with pytest.raises(openai.APIError, match="the server is closing"):
                async for _ in stream:
                    pass


@pytest.mark.slow
async def test_a_second_sigterm_ends_it_at_once() -> None:
    """A stream that would be waited for is not."""
    with Server("--drain", "600") as server:
        async with server.client() as client:
            stream = await streamed(client, 20_000)
            server.stop()
            await until(lambda: not listens(urlsplit(server.url).port or 0), "it has not heard the first signal")
            assert server.ended(signal.SIGTERM).returncode == -signal.SIGTERM
            await stream.close()


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize("opening", [False, True])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_it_serves_has_its_own_status(
    number: signal.Signals, status: int, opening: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it makes the model, or opens the cache, which is cancelled then."""
    def makes(*_: object) -> NoReturn:
        os.kill(os.getpid(), number)
        raise AssertionError("the signal did not end it")

    async def opens(*_: object) -> None:
        os.kill(os.getpid(), number)
        await asyncio.Event().wait()

    if opening:
        monkeypatch.setattr(Service, "__aenter__", opens)
    else:
        monkeypatch.setattr(openai_server, "served", makes)
    assert openai_server.main(FEW) == status


REFUSED = [
    (("--device-tokens", "100"), "device_tokens=100 is not a multiple of page_size=16"),
    (("--storage", "tape:0"), "tape"),
    (("--step-tokens", "16"), "step_tokens=16 must hold a token for each of max_running=32"),
]


@pytest.mark.parametrize(("options", "told"), REFUSED)
def test_settings_that_cannot_be_are_refused_in_a_sentence(
    options: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert openai_server.main(["--port", "0", *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err.startswith("openai_server: "), told in err, err.count("\n")) == ("", True, True, 1), err


# The example server drops requests that do not arrive in time, bounds its connections and answers garbage with 400.


SHORT = 0.3
AT_MOST = 60.0
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
FINE = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
TRICKLES = {
    "silence": (b"", b"", b""), "the head": (POST, b"X: y\r\n", b""),
    "the body": (POST + b"Content-Length: 100000\r\n\r\n", b" ", b"408"),
    "the second head": (FINE + POST, b"X: y\r\n", b"200"),
}  # fmt: skip


@cache
def small_parts() -> ServiceParts:
    return openai_server.served(openai_server.arguments(FEW))


@asynccontextmanager
async def punctual(connections: int = 8) -> AsyncIterator[int]:
    """The port of a server, which still answers when the test is over."""
    async with asyncio.timeout(AT_MOST), Service(small_parts()) as service:
        config = uvicorn.Config(build(service), port=0, log_level="critical", lifespan="off", http=Punctual,
                                limit_concurrency=connections)  # fmt: skip
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110  uvicorn sets no asyncio.Event
            await asyncio.sleep(0.01)
        port: int = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield port
            assert b" 200 " in await answer(port, FINE.replace(b"Host", b"Connection: close\r\nHost"))
        finally:
            server.should_exit = True
            await task


async def answer(port: int, sent: bytes) -> bytes:
    """All that is answered until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        return await heard(reader)
    finally:
        writer.close()


async def heard(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the connection is closed or reset."""
    said = b""
    with suppress(ConnectionResetError):
        while piece := await reader.read(1 << 16):
            said += piece
    return said


@pytest.mark.parametrize("what", TRICKLES)
async def test_a_request_that_does_not_arrive_in_time_is_dropped_however_it_trickles(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, drop, status = TRICKLES[what]
    async with punctual() as port:
        monkeypatch.setattr(arrival, "PATIENCE", SHORT)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(start)
        answered = asyncio.create_task(heard(reader))
        while not answered.done():
            writer.write(drop)
            await asyncio.wait([answered], timeout=SHORT / 20)
        assert answered.result().split()[1:2] == ([status] if status else [])
        writer.close()


async def test_no_more_connections_than_allowed_are_open() -> None:
    async with punctual(connections=3) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _ in range(5):
            assert await answer(port, b"") == b""
        for _, writer in silent:
            writer.close()
        for reader, _ in silent:
            await reader.read()


# The service of the example server, without HTTP: the errors that its users are told when something below it fails.


POISON = 255


@cache
def poisonable() -> ServiceParts:
    """A model that fails of one token."""
    planned = openai_server.served(openai_server.arguments(FEW))
    path = planned.path
    assert isinstance(path, SchedulerPath)
    forward = path.model.forward

    def fragile(input_ids: Any, **options: Any) -> Any:
        if (input_ids == POISON).any():
            raise ArithmeticError("poisoned")
        return forward(input_ids=input_ids, **options)

    path.model.forward = fragile
    return planned


@asynccontextmanager
async def served() -> AsyncIterator[Service]:
    async with Service(poisonable()) as service:
        yield service


def ask(prompt: Any = "Hello", **more: Any) -> ParsedRequest:
    return parse(json.dumps({"model": "random-qwen3", "temperature": 0, "prompt": prompt, **more}).encode(), chat=False)


async def start(service: Service, wanted: ParsedRequest) -> Choices:
    return service.generate(wanted, await service.tokens(wanted.prompt))


async def text(service: Service, wanted: ParsedRequest) -> str:
    choices = await start(service, wanted)
    try:
        return "".join([piece or "" async for _, piece in choices.pieces()])
    finally:
        choices.abort()


async def test_a_model_that_fails_is_told_to_whom_it_failed_and_to_nobody_else() -> None:
    async with served() as service:
        expected = await text(service, ask())
        with pytest.raises(ApiError, match="poisoned") as told:
            await text(service, ask([1, 2, POISON]))
        assert told.value.status == 500
        assert await text(service, ask()) == expected
        assert service.failure is None
        assert (await service.statistics())["requests"]["ended"] == {"length": 2, "failed": 1}


async def test_a_cache_that_is_gone_is_told_and_seen() -> None:
    async with served() as service:
        assert service.failure is None
        await service.served.path.ask(AsyncCache.aclose)
        assert service.failure == "the cache is closed"
        with pytest.raises(ApiError) as told:
            await text(service, ask())
        assert told.value.status == 503


async def test_usage_counts_no_token_after_a_stop_string() -> None:
    async with served() as service:
        whole = await text(service, ask(max_tokens=40))
        choices = await start(service, ask(max_tokens=200, stop=whole[5]))
        (generation,) = choices.all
        said = "".join([piece async for piece in generation])
        assert generation.reason == "stop"
        assert said == whole[: whole.index(whole[5])]
        made = choices.usage["completion_tokens"]
        assert made < 40
        await text(service, ask("Steps go on"))
        choices.abort()
        assert choices.usage["completion_tokens"] == made


async def test_who_is_cut_short_is_told_and_nobody_else_comes_in() -> None:
    async with served() as service:
        choices = await start(service, ask(max_tokens=200))
        pieces = choices.pieces()
        await anext(pieces)
        service.cut()
        with pytest.raises(ApiError, match="closing"):
            [piece async for piece in pieces]
        with pytest.raises(ApiError, match="closing") as told:
            await start(service, ask())
        assert told.value.status == 503
        choices.abort()
        assert (await service.statistics())["requests"] == {"live": 0, "ended": {"aborted": 1}}
