"""The example server as its users see it: a process of its own, and OpenAI's client on it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import openai
import pytest
import torch
from openai_serving.models import make
from openai_serving.text import BEGIN, END, ByteReader, ByteWords, encode
from openai_serving.words import spoken
from prometheus_client.parser import text_string_to_metric_families

from tests.examples.server_kit import PAGE, Server, running, settled, statistics

MODEL = "random-qwen3"
CONTEXT = 4096
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
PREFIX = "All of them begin with these words, which are long enough for several pages. " * 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--device-tokens", str(CONTEXT), "--host-tokens", str(4 * CONTEXT), "--max-live", "40")
    with running(tmp_path_factory.mktemp("server"), *options) as server:
        yield server


@cache
def the_model() -> Any:
    return make("qwen3")


def straight(prompt: str, count: int) -> str:
    """What the model says without a server and without a cache."""
    model, tokens, reader = the_model(), encode(prompt), ByteReader()
    said = ""
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([tokens]), use_cache=True)
        for _ in range(count):
            token = int(out.logits[0, -1].argmax())
            if token in (BEGIN, END):
                break
            said += reader.put(token)
            out = model(input_ids=torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
    return said + reader.rest()


def scores(prompt: str, said: int) -> list[dict[int, float]]:
    """The log-probabilities of the five likeliest tokens at each place of what the model says."""
    model, tokens, found = the_model(), encode(prompt), list[dict[int, float]]()
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


def test_it_says_where_it_is_and_what_to_try(server: Server) -> None:
    assert f"curl {server.url}/v1/chat/completions" in server.greeting


async def test_the_model_is_listed(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-4")


async def test_the_text_is_the_models_own_with_and_without_a_hit(client: openai.AsyncOpenAI) -> None:
    prompt = "What the model says. " + PREFIX
    first = await client.completions.create(**GREEDY, prompt=prompt, max_tokens=24)
    again = await client.completions.create(**GREEDY, prompt=prompt, max_tokens=24)
    elsewhere = await client.completions.create(**GREEDY, prompt=prompt, max_tokens=24, extra_body={"cache_salt": "b"})
    assert [cached(a.usage) for a in (first, again, elsewhere)] == [0, (len(prompt) - 1) // PAGE * PAGE, 0]
    assert first.usage is not None
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (len(prompt), 24)
    assert first.choices[0].text == again.choices[0].text == elsewhere.choices[0].text == straight(prompt, 24)


@pytest.mark.parametrize("path", ["scheduler", "prefix"])
async def test_log_probabilities_are_the_models_own_with_and_without_a_hit(path: str, tmp_path: Path) -> None:
    prompt = "How likely? " + PREFIX
    expected = scores(prompt, 12)
    with running(tmp_path, "--device-tokens", str(CONTEXT), "--path", path) as server:
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


async def test_a_stream_says_what_a_whole_answer_says(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "system", "content": "Be noisy."}, {"role": "user", "content": "Hello!"}]
    whole = await client.chat.completions.create(**GREEDY, messages=messages, max_tokens=20)
    stream = await client.chat.completions.create(
        **GREEDY, messages=messages, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    said, reason, usage = await text_of(stream)
    assert said == whole.choices[0].message.content
    assert reason == whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 20
    assert cached(usage) > cached(whole.usage) == 0


async def test_a_conversation_finds_its_own_answers_in_the_cache(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Tell me something long."}]
    first = await client.chat.completions.create(**GREEDY, messages=messages, max_tokens=100)
    said = first.choices[0].message.content
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    second = await client.chat.completions.create(**GREEDY, messages=messages, max_tokens=8)
    assert first.usage is not None
    assert cached(second.usage) >= (first.usage.total_tokens - 1) // PAGE * PAGE


async def test_concurrent_streams_share_their_prefix(client: openai.AsyncOpenAI) -> None:
    async def ask(i: int) -> tuple[str, str | None, Any]:
        prompt = f"Shared. {PREFIX}{chr(ord('a') + i)}?"
        return await text_of(await client.completions.create(
            **GREEDY, prompt=prompt, max_tokens=12, stream=True, stream_options={"include_usage": True}))  # fmt: skip

    first, *others = [await ask(0), *await asyncio.gather(*(ask(i) for i in range(1, 13)))]
    assert cached(first[2]) == 0
    for i, (said, reason, usage) in enumerate(others, 1):
        assert cached(usage) == len(f"Shared. {PREFIX}") // PAGE * PAGE
        assert reason == "length"
        assert said == straight(f"Shared. {PREFIX}{chr(ord('a') + i)}?", 12)


async def test_metrics_count_what_the_cache_served(client: openai.AsyncOpenAI) -> None:
    for _ in range(2):
        await client.completions.create(**GREEDY, prompt=PREFIX + "Figures", max_tokens=1)
    text = await asyncio.to_thread(_read, f"{str(client.base_url).removesuffix('/v1/')}/metrics")
    samples = {(s.name, s.labels.get("tier")): s.value
               for family in text_string_to_metric_families(text) for s in family.samples}
    served = await settled(client)
    assert samples["asynccache_hit_tokens_total", "device"] == served["cache"]["lookups"]["hits"]["device"] > 0


def _read(url: str) -> str:
    with urlopen(url, timeout=20) as response:
        return str(response.read().decode())


async def test_a_client_that_leaves_a_stream_ends_it(client: openai.AsyncOpenAI) -> None:
    before = await settled(client)
    streams = [
        await client.completions.create(**GREEDY, prompt=f"Left alone {i}", max_tokens=4000, stream=True)
        for i in range(3)
    ]
    for stream in streams:
        await anext(aiter(stream))
    assert (await statistics(client))["requests"]["live"] == 3
    for stream in streams:
        await stream.close()
    after = await settled(client)
    assert after["requests"]["ended"]["aborted"] == before["requests"]["ended"].get("aborted", 0) + 3


async def test_a_client_that_does_not_wait_for_its_answer_ends_it(client: openai.AsyncOpenAI) -> None:
    before = await settled(client)
    with pytest.raises(openai.APITimeoutError):
        await client.completions.create(**GREEDY, prompt="Too slow", max_tokens=4000, timeout=0.5)
    after = await settled(client)
    assert after["requests"]["ended"]["aborted"] == before["requests"]["ended"].get("aborted", 0) + 1


async def test_a_stop_string_ends_the_answer_before_it(client: openai.AsyncOpenAI) -> None:
    prompt = "Until here. " + PREFIX
    whole = straight(prompt, 30)
    stop = whole[10:12]
    answer = await client.completions.create(**GREEDY, prompt=prompt, max_tokens=30, stop=stop)
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    terms: dict[str, Any] = {"max_tokens": 30, "stop": [stop, "nowhere"], "stream": True}
    stream = await client.completions.create(**GREEDY, **terms, prompt=prompt)
    assert (await text_of(stream))[:2] == (whole[: whole.index(stop)], "stop")


async def test_a_seed_says_the_same_again(client: openai.AsyncOpenAI) -> None:
    async def ask(seed: int) -> str:
        answer = await client.completions.create(model=MODEL, prompt="Dice.", max_tokens=24, temperature=1.5, seed=seed)
        return answer.choices[0].text

    first, second, again = await ask(1), await ask(2), await ask(1)
    assert first == again != second


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
    assert said[3] == straight("3 " * 220, 60)


async def test_it_says_that_it_is_well(client: openai.AsyncOpenAI, server: Server) -> None:
    found: Any = await client.get(f"{server.url}/healthz", cast_to=object)
    assert found == {"status": "ok"}
