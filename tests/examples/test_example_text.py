"""Text and request bodies in the examples."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from asynccache_shim import Sampling
from hypothesis import given
from hypothesis import strategies as st
from openai_serving import words
from openai_serving.protocol import ApiError, ParsedRequest, parse, parse_prompt, tokens_of
from openai_serving.text import BEGIN, END, ByteReader, ByteWords, StopStrings, conversation, encode
from openai_serving.words import CheckpointWords, Unspeakable

from tests.examples.checkpoints import byte_fallback, byte_level

# Text in the examples.


# The tokenizer of the example server: nothing is lost, nothing shown too early.


def decode(tokens: list[int]) -> str:
    reader = ByteReader()
    return "".join(map(reader.put, tokens)) + reader.rest()


@given(st.binary())
def test_any_bytes_survive_as_text(data: bytes) -> None:
    assert encode(decode(list(data))) == list(data)


@given(st.text(st.characters(exclude_categories=["Cs", "Co"])))
def test_any_text_survives_as_tokens(text: str) -> None:
    assert decode(encode(text)) == text
    assert encode(text) == list(text.encode())


def test_an_answer_that_comes_back_is_the_tokens_that_it_was() -> None:
    first = conversation([("user", "hi")])
    answer = [0x41, 0xFF, 0xC3, 0xA9]
    again = conversation([("user", "hi"), ("assistant", decode(answer)), ("user", "more")])
    assert again[: len(first) + len(answer)] == first + answer
    assert again[len(first) + len(answer)] == END
    assert first[0] == BEGIN


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_a_stop_string_ends_the_text_however_it_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    stopped = StopStrings(stops)
    shown, rest = "", text
    while rest:
        cut = data.draw(st.integers(1, len(rest)))
        shown += stopped.put(rest[:cut])
        assert not any(stop in shown for stop in stops)
        assert text.startswith(shown)
        rest = rest[cut:]
        if stopped.hit:
            break
    shown += stopped.rest()
    seen = text[: len(text) - len(rest)]
    ends = [at for at in map(seen.find, stops) if at >= 0]
    assert stopped.hit == bool(ends)
    assert shown == (seen[: min(ends)] if ends else text)


def test_what_cannot_be_the_start_of_a_stop_string_is_shown_at_once() -> None:
    stopped = StopStrings(["STOP"])
    assert [stopped.put(text) for text in ("aS", "T", "x", "STO", "P!")] == ["a", "", "STx", "", ""]
    assert stopped.hit
    assert stopped.rest() == ""
    assert stopped.put("more") == ""


# Tokens of a checkpoint's tokenizer into text, piece by piece: what ``tokenizer.decode`` makes of all of them, and
# never a part of a character.


LETTERS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@cache
def kinds() -> dict[str, Any]:
    return {"byte_level": byte_level(), "byte_fallback": byte_fallback()}


def checkpoint(kind: str) -> CheckpointWords:
    tokenizer = kinds()[kind]
    return CheckpointWords(tokenizer, len(tokenizer), frozenset((1,)))


def pieces(known: CheckpointWords, tokens: list[int], before: list[int] | None = None) -> list[str]:
    reader = known.reader(before or [])
    return [*map(reader.put, tokens), reader.rest()]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(text=LETTERS)
def test_a_text_comes_out_as_it_is_decoded(kind: str, text: str) -> None:
    known = checkpoint(kind)
    tokens = known.encode(text)
    shown = pieces(known, tokens)
    assert "".join(shown) == kinds()[kind].decode(tokens, skip_special_tokens=True)
    if words.DAMAGED not in text:
        assert not any(words.DAMAGED in piece for piece in shown), "a part of a character was shown"


@given(st.lists(st.one_of(st.integers(0, 419), st.integers(3, 258)), max_size=120))
def test_any_tokens_come_out_as_they_are_decoded(tokens: list[int]) -> None:
    """Bytes that are no characters, too."""
    assert "".join(pieces(checkpoint("byte_level"), tokens)) == kinds()["byte_level"].decode(
        tokens, skip_special_tokens=True
    )


@given(LETTERS.filter(bool), LETTERS)
def test_a_completion_goes_on_where_its_prompt_ends(prompt: str, text: str) -> None:
    """A tokenizer that drops the blank before a text's first word does not drop it in the middle."""
    known = checkpoint("byte_fallback")
    before, tokens = known.encode(prompt), known.encode(text)[1:]
    whole = kinds()["byte_fallback"].decode(before + tokens, skip_special_tokens=True)
    shown = "".join(pieces(known, tokens, before))
    if words.DAMAGED not in prompt + text:
        assert kinds()["byte_fallback"].decode(before, skip_special_tokens=True) + shown == whole


def test_a_character_is_shown_with_its_last_token() -> None:
    known = checkpoint("byte_level")
    tokens = kinds()["byte_level"].convert_tokens_to_ids(list("ðŁ¦"))    # three bytes of four
    reader = known.reader()
    assert [reader.put(token) for token in tokens] == [""] * len(tokens)
    last = known.encode("🦊")
    assert "".join(pieces(known, last)) == "🦊"


def test_noise_without_an_end_is_shown_and_costs_no_more_and_more() -> None:
    known = checkpoint("byte_level")
    (broken,) = kinds()["byte_level"].convert_tokens_to_ids(["ÿ"])
    reader = known.reader()
    shown = "".join(reader.put(broken) for _ in range(1000))
    assert len(shown) > 990
    assert len(reader._window) <= words.WINDOW + 1
    assert shown + reader.rest() == words.DAMAGED * 1000


def test_a_conversation_is_what_the_chat_template_makes_of_it() -> None:
    known = checkpoint("byte_level")
    made = known.conversation([{"role": "user", "content": "Hi"}])
    assert kinds()["byte_level"].decode(made) == "<|begin|>user\nHi<|end|>\n<|begin|>assistant\n"
    with pytest.raises(Unspeakable, match="there are no developers here"):
        known.conversation([{"role": "developer", "content": "Hi"}])


def test_a_checkpoint_without_a_chat_template_says_so() -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = None
    with pytest.raises(Unspeakable, match="no chat template; /v1/completions takes a prompt"):
        CheckpointWords(tokenizer, 420, frozenset()).conversation([{"role": "user", "content": "Hi"}])


# Request bodies of OpenAI's API: what is understood, what is refused, and how.


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


WRONG: list[tuple[str, Any]] = [
    ("model", None), ("model", 3), ("prompt", None), ("prompt", ""), ("prompt", []),
    ("prompt", [-1]), ("prompt", [True]), ("prompt", ["a", "b"]), ("prompt", {"a": 1}), ("prompt", "\ud800"),
    ("max_tokens", 0), ("max_tokens", "5"), ("max_tokens", 1.5), ("max_tokens", True), ("max_tokens", 2**40),
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", "hot"), ("temperature", True), ("top_p", 1.1),
    ("seed", 0.5), ("seed", 2**64), ("stop", ""), ("stop", [""]), ("stop", ["a"] * 5), ("stop", 1),
    ("stream", 1), ("stream", "yes"), ("stream_options", {"include_usage": True}), ("n", 0), ("n", 129), ("n", 1.5),
    ("echo", True), ("logprobs", 6), ("logprobs", True), ("best_of", 2), ("suffix", "x"), ("frequency_penalty", 0.5),
    ("priority", "high"), ("cache_salt", 1), ("cache_salt", "\ud800"), ("temprature", 0.5),
]  # fmt: skip
MESSAGES: list[Any] = [
    None, [], "Hello", [1], [{}], [{"role": "user"}], [{"role": "tool", "content": "x"}],
    [{"role": "user", "content": 1}], [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
    [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": "\ud800"}],
]
WRONG_IN_CHAT: list[tuple[str, Any]] = [
    *(("messages", one) for one in MESSAGES),
    ("tools", [{"type": "function"}]), ("response_format", {"type": "json_object"}),
]  # fmt: skip


def test_what_cannot_be_used_is_named() -> None:
    for raw in (b"", b"{", b"[]", b"1", b"[" * 100_000, b"\xff"):
        refused(raw)
    for name, value in WRONG:
        assert refused(json.dumps({"model": "m", "prompt": "Hello", name: value}).encode())["param"] == name, value
    for name, value in WRONG_IN_CHAT:
        error = refused(json.dumps({"model": "m", "messages": HELLO, name: value}).encode(), is_chat=True)
        assert error["param"].startswith(name), value
        assert name == "messages" or error["code"] == "unsupported_parameter"


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
