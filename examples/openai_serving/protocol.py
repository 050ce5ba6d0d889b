"""OpenAI's API as JSON: turns request bodies into ``ParsedRequest``, and errors into JSON. Values only.

Law: a parameter that would change the answer is either supported or refused. An unknown parameter is an error that
names it. The few parameters that only describe the caller are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asynccache_shim import Sampling

from openai_serving.words import Message, Unspeakable, Words

COMPLETION_TOKENS = 16
"""The default of ``max_tokens`` for completions. The default for chats is the server's option ``--chat-tokens``."""

MAX_STOPS = 4
MAX_CHOICES = 128
MAX_TOP = {True: 20, False: 5}
"""How many of the likeliest tokens a chat and a completion may ask for, as in OpenAI's API."""

_IGNORED = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier"})
_DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,), "echo": (False,), "frequency_penalty": (0,),
    "presence_penalty": (0,), "logit_bias": ({},), "suffix": ("",), "tools": ([],), "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "parallel_tool_calls": (True, False),
}  # fmt: skip
"""Parameters that are not supported, with the values that ask for nothing and are therefore accepted."""

Json = dict[str, Any]
Prompt = str | list[int] | list[Message]


class ApiError(Exception):
    """An error that the client is told, with its HTTP status and its body in OpenAI's form."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """One request, checked. ``prompt``: a text, tokens, or the messages of a chat. ``max_tokens``: None: the endpoint's
    default, or less if there is no room for it. ``choices``: how many answers are wanted. ``top``: how many of the
    likeliest tokens are wanted beside each token's log-probability; None: no log-probabilities."""

    chat: bool
    model: str
    prompt: Prompt = field(repr=False)
    choices: int
    max_tokens: int | None
    stops: tuple[str, ...]
    sampling: Sampling
    stream: bool
    include_usage: bool
    priority: int
    cache_salt: str | None
    top: int | None


def parse(raw: bytes, *, chat: bool) -> ParsedRequest:
    """Read the body of a request to ``/v1/chat/completions`` (``chat``) or ``/v1/completions``.

    Raises:
        ApiError: the body cannot be used; the message says why, and ``param`` names the parameter.
    """
    body = Body(raw)
    stream = body.flag("stream")
    ask = ParsedRequest(
        chat=chat,
        model=body.text("model", needed=True) or "",
        prompt=_messages(body.take("messages")) if chat else _prompt(body.take("prompt")),
        choices=1 if (choices := body.integer("n", 1, MAX_CHOICES)) is None else choices,
        max_tokens=_max_tokens(body),
        stops=_stops(body.take("stop")),
        sampling=Sampling(
            temperature=body.number("temperature", 0.0, 2.0, 1.0),
            top_p=body.number("top_p", 0.0, 1.0, 1.0),
            seed=body.integer("seed", -(2**63), 2**63 - 1),
        ),
        stream=stream,
        include_usage=_include_usage(body.take("stream_options"), stream),
        priority=body.integer("priority", -(2**31), 2**31 - 1) or 0,
        cache_salt=body.text("cache_salt"),
        top=_top(body, chat, stream),
    )
    body.finish()
    return ask


def parse_prompt(raw: bytes) -> tuple[Prompt, str | None]:
    """Read the body of a request that is only about a prompt: ``tokens``, ``prompt`` or ``messages``. Returns the
    prompt and its namespace (``namespace``). The body may also have ``model``.

    Raises:
        ApiError: the body has none or several of these, or has something else.
    """
    body = Body(raw)
    body.text("model")
    namespace = body.text("namespace")
    given = {name: value for name in ("tokens", "prompt", "messages") if (value := body.take(name)) is not None}
    body.finish()
    match given:
        case {"messages": messages} if len(given) == 1:
            return _messages(messages), namespace
        case {"tokens": value} | {"prompt": value} if len(given) == 1:
            return _prompt(value), namespace
    raise ApiError(400, f"give one of tokens, prompt and messages, not {' and '.join(given) or 'none of them'}")


def tokens_of(prompt: Prompt, words: Words) -> list[int]:
    """The tokens of a prompt. This may take long.

    Raises:
        ApiError: the model has no tokens for the prompt, or the prompt is empty.
    """
    if isinstance(prompt, str):
        tokens = words.encode(prompt)
    elif all(isinstance(each, int) for each in prompt):
        tokens = [each for each in prompt if isinstance(each, int)]
        if (most := max(tokens)) >= words.vocabulary:
            raise _wrong("prompt", most, f"is no token: the model has tokens from 0 to {words.vocabulary - 1}")
    else:
        try:
            tokens = words.conversation([each for each in prompt if not isinstance(each, int)])
        except Unspeakable as error:
            raise ApiError(400, f"messages: {error}", param="messages", code="invalid_value") from None
    if not tokens:
        raise ApiError(400, "the prompt has no tokens", param="prompt", code="invalid_value")
    return tokens


class Body:
    """A JSON object whose members are taken one by one. A member that is ``null`` counts as absent."""

    def __init__(self, raw: bytes) -> None:
        try:
            values = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is no JSON: {error}") from None
        if not isinstance(values, dict):
            raise ApiError(400, "the body must be a JSON object")
        self._values: Json = values

    def take(self, name: str) -> Any:
        return self._values.pop(name, None)

    def text(self, name: str, *, needed: bool = False) -> str | None:
        value = self.take(name)
        if value is None and not needed:
            return None
        if not isinstance(value, str) or not _is_whole(value):
            raise _wrong(name, value, "must be a string")
        return value

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise _wrong(name, value, "must be true or false")
        return bool(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise _wrong(name, value, f"must be an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float) -> float:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            raise _wrong(name, value, f"must be a number from {low:g} to {high:g}")
        return float(value)

    def finish(self) -> None:
        """Check the members that were not taken.

        Raises:
            ApiError: one of them is unknown, or asks for something that is not supported.
        """
        for name, value in self._values.items():
            if value is None or name in _IGNORED:
                continue
            if name not in _DEFAULTS:
                raise ApiError(400, f"unknown parameter: {name!a}", param=ascii(name)[1:-1], code="unknown_parameter")
            if value not in _DEFAULTS[name]:
                raise _wrong(name, value, "is not supported by this server", code="unsupported_parameter")


def _is_whole(text: str) -> bool:
    """Return True if ``text`` can be written as UTF-8. JSON may contain half of a surrogate pair, which cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _wrong(name: str, value: Any, what: str, code: str = "invalid_value") -> ApiError:
    shown = json.dumps(value)
    return ApiError(400, f"{name}={shown if len(shown) < 80 else shown[:77] + '...'} {what}", param=name, code=code)


def _max_tokens(body: Body) -> int | None:
    old, new = (body.integer(name, 1, 2**31 - 1) for name in ("max_tokens", "max_completion_tokens"))
    return old if new is None else new


def _top(body: Body, chat: bool, stream: bool) -> int | None:
    """How many of the likeliest tokens are asked for. For completions that is ``logprobs`` itself; a chat says whether
    it wants any by ``logprobs``, and how many by ``top_logprobs``."""
    if chat:
        wanted, count = body.flag("logprobs"), body.integer("top_logprobs", 0, MAX_TOP[True])
        if count is not None and not wanted:
            raise _wrong("top_logprobs", count, "needs logprobs=true")
        top = (count or 0) if wanted else None
    else:
        top = body.take("logprobs")
        top = None if top is False else top  # some clients send what a chat would
        if top is not None and (type(top) is not int or not 0 <= top <= MAX_TOP[False]):
            raise _wrong("logprobs", top, f"must be an integer from 0 to {MAX_TOP[False]}")
    if top is not None and stream:
        raise _wrong("logprobs", top, "is not supported with stream=true", code="unsupported_parameter")
    return top


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise _wrong("stop", value, f"must be a string, or a list of at most {MAX_STOPS} strings, none of them empty")
    return tuple(stops)


def _include_usage(value: Any, stream: bool) -> bool:
    if value is None:
        return False
    if not stream or not isinstance(value, dict) or value.keys() - {"include_usage", "include_obfuscation"}:
        raise _wrong("stream_options", value, "must be {\"include_usage\": true}, and needs stream=true")
    return value.get("include_usage") is True


def _prompt(value: Any) -> str | list[int]:
    """A text or a list of tokens, or a list that has one of these."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str) and value:
        return _checked("prompt", value)
    if isinstance(value, list) and value and all(type(token) is int and token >= 0 for token in value):
        return value
    raise _wrong("prompt", value, "must be one text or one list of tokens, and not empty")


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise _wrong("messages", value, "must be a list of messages, and not empty")
    return [_message(i, message) for i, message in enumerate(value)]


def _message(index: int, message: Any) -> Message:
    name = f"messages[{index}]"
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("system", "developer", "user", "assistant"):
        raise _wrong(name, message, "must have a role: system, developer, user or assistant")
    if message.get("tool_calls"):
        raise _wrong(f"{name}.tool_calls", message["tool_calls"], "is not supported by this server",
                     code="unsupported_parameter")  # fmt: skip
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part["text"] for part in parts if _is_text(part)]
    if len(texts) < len(parts):
        raise _wrong(f"{name}.content", content, "must be text")
    return {"role": role, "content": _checked(f"{name}.content", "".join(texts))}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _checked(name: str, text: str) -> str:
    if not _is_whole(text):
        raise ApiError(400, f"{name}: half of a surrogate pair is no text", param=name, code="invalid_value")
    return text
