"""Request bodies of OpenAI's API: what is understood, what is refused, and how."""

from __future__ import annotations

import json
from typing import Any

import pytest
from asynccache_shim import Sampling
from openai_serving.protocol import ApiError, ParsedRequest, parse, parse_prompt, tokens_of
from openai_serving.text import ByteWords, conversation, encode

HELLO = [{"role": "user", "content": "Hello"}]


def completion(**more: Any) -> ParsedRequest:
    return parse(json.dumps({"model": "m", "prompt": "Hello", **more}).encode(), chat=False)


def chat(**more: Any) -> ParsedRequest:
    return parse(json.dumps({"model": "m", "messages": HELLO, **more}).encode(), chat=True)


def tokens(ask: ParsedRequest) -> list[int]:
    return tokens_of(ask.prompt, ByteWords())


def refused(raw: bytes, *, is_chat: bool = False) -> dict[str, Any]:
    with pytest.raises(ApiError) as told:
        parse(raw, chat=is_chat)
    assert told.value.status == 400
    error = told.value.body["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    return error


def test_the_defaults_are_those_of_the_api() -> None:
    ask = completion()
    assert (tokens(ask), ask.max_tokens, ask.choices) == (encode("Hello"), None, 1)
    assert (ask.stops, ask.stream, ask.include_usage) == ((), False, False)
    assert ask.sampling == Sampling(1.0, 1.0)
    assert (ask.priority, ask.cache_salt) == (0, None)


def test_null_is_as_good_as_absent() -> None:
    names = ("max_tokens", "stop", "temperature", "seed", "stream", "stream_options", "n", "frobnicate")
    assert completion(**dict.fromkeys(names)) == completion()


@pytest.mark.parametrize("prompt", ["Hello", ["Hello"], encode("Hello"), [encode("Hello")]])
def test_a_prompt_is_text_or_tokens(prompt: Any) -> None:
    assert tokens(completion(prompt=prompt)) == encode("Hello")


def test_messages_become_one_prompt() -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "a"},
            {"type": "text", "text": "b"}]}]  # fmt: skip
    assert tokens(chat(messages=said)) == conversation([("system", "Be brief."), ("user", "ab")])


def test_limits_sampling_and_extensions_are_read() -> None:
    ask = chat(max_tokens=5, max_completion_tokens=7, stop=["a", "b"], temperature=0, top_p=0.5, seed=3, stream=True,
               stream_options={"include_usage": True}, priority=-2, cache_salt="tenant", user="me")  # fmt: skip
    assert (ask.max_tokens, ask.stops, ask.sampling) == (7, ("a", "b"), Sampling(0.0, 0.5, 3))
    assert (ask.stream, ask.include_usage, ask.priority, ask.cache_salt) == (True, True, -2, "tenant")
    assert completion(stop="x").stops == ("x",)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"1", b"[" * 100_000, b"\xff"])
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    refused(raw)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", None), ("model", 3), ("prompt", None), ("prompt", ""), ("prompt", []),
        ("prompt", [-1]), ("prompt", [True]), ("prompt", ["a", "b"]), ("prompt", {"a": 1}), ("prompt", "\ud800"),
        ("max_tokens", 0), ("max_tokens", "5"), ("max_tokens", 1.5), ("max_tokens", True), ("max_tokens", 2**40),
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", "hot"), ("temperature", True), ("top_p", 1.1),
        ("seed", 0.5), ("seed", 2**64), ("stop", ""), ("stop", [""]), ("stop", ["a"] * 5), ("stop", 1),
        ("stream", 1), ("stream", "yes"), ("stream_options", {"include_usage": True}), ("n", 0), ("n", 129), ("n", 1.5),
        ("echo", True),
        ("logprobs", 6), ("logprobs", True), ("best_of", 2), ("suffix", "x"), ("frequency_penalty", 0.5),
        ("priority", "high"), ("cache_salt", 1), ("cache_salt", "\ud800"), ("temprature", 0.5),
    ],
)  # fmt: skip
def test_a_parameter_that_cannot_be_used_is_named(name: str, value: Any) -> None:
    body = {"model": "m", "prompt": "Hello", name: value}
    assert refused(json.dumps(body).encode())["param"] == name


@pytest.mark.parametrize(
    "messages",
    [
        None, [], "Hello", [1], [{}], [{"role": "user"}], [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": 1}], [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}],
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": "\ud800"}],
    ],
)  # fmt: skip
def test_messages_that_cannot_be_used_are_named(messages: Any) -> None:
    body = {"model": "m", "messages": messages}
    assert refused(json.dumps(body).encode(), is_chat=True)["param"].startswith("messages")


@pytest.mark.parametrize("more", [{"tools": [{"type": "function"}]}, {"response_format": {"type": "json_object"}}])
def test_what_would_change_the_answer_is_refused(more: dict[str, Any]) -> None:
    body = {"model": "m", "messages": HELLO, **more}
    assert refused(json.dumps(body).encode(), is_chat=True)["code"] == "unsupported_parameter"


def test_log_probabilities_are_asked_for_in_two_ways() -> None:
    assert [completion(logprobs=value).top for value in (None, False, 0, 5)] == [None, None, 0, 5]
    assert [chat(logprobs=True).top, chat(logprobs=True, top_logprobs=20).top] == [0, 20]
    for more in ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": 1}):
        refused(json.dumps({"model": "m", "messages": HELLO, **more}).encode(), is_chat=True)
    streamed = {"model": "m", "prompt": "a", "logprobs": 1, "stream": True}
    assert refused(json.dumps(streamed).encode())["param"] == "logprobs"


def test_what_asks_for_nothing_is_accepted() -> None:
    assert chat(n=1, tools=[], logprobs=False, response_format={"type": "text"}, frequency_penalty=0) == chat()


def test_a_token_that_the_model_has_not_is_named() -> None:
    with pytest.raises(ApiError, match="prompt=258 is no token: the model has tokens from 0 to 257") as told:
        tokens(completion(prompt=[1, 258]))
    assert told.value.status == 400


def test_a_prompt_alone_is_text_or_tokens_or_messages() -> None:
    for body in ({"tokens": [1, 2]}, {"prompt": [1, 2]}, {"model": "m", "prompt": [[1, 2]]}):
        assert parse_prompt(json.dumps(body).encode()) == ([1, 2], None)
    assert parse_prompt(json.dumps({"messages": HELLO, "namespace": "a"}).encode()) == (HELLO, "a")
    for wrong in (b"{}", b'{"prompt": "a", "tokens": [1]}', b'{"prompt": "a", "stream": true}'):
        with pytest.raises(ApiError):
            parse_prompt(wrong)
