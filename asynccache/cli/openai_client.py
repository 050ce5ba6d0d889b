"""A client of servers that have OpenAI's API, for ``verify-engine``, and how far two answers are apart.

HTTP/1.1 over a connection for each request, without streaming and without a proxy. The standard library's clients block
a thread, which Ctrl-C could not end; this one is cancelled like everything else.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import math
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from asynccache.errors import AsyncCacheError, ConfigError

TOP = 5
"""How many of the likeliest tokens are asked for: as many as the API has."""
MOST_BYTES = 64 << 20
BUSY = (429, 503)
AGAIN = 0.5


class EngineError(AsyncCacheError):
    """The server does not answer, or not as OpenAI's API says."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        """The status of the server's answer; 0: there was none."""


class Completion(NamedTuple):
    """A server's answer to a prompt: its tokens as texts, for each of them its log-probability and those of the
    likeliest tokens, the whole text, and how many tokens the prompt had, how many of them were cached, and, where the
    server says so, in which tiers."""

    tokens: Sequence[str]
    logprobs: Sequence[float]
    top: Sequence[Mapping[str, float]]
    text: str
    prompt: int
    cached: int
    tiers: Mapping[str, int]


class Client:
    """A client of the server at ``url``, with or without ``/v1``. ``key``: sent as a bearer token."""

    def __init__(self, url: str, timeout: float, key: str | None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ConfigError(f"{url!r} is no address of a server: give one such as http://127.0.0.1:8000")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/').removesuffix('/v1')}"
        self.timeout = timeout
        """Seconds that a request may take, with repetitions if the server is busy."""
        self._host, self._port = parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self._base = parts.path.rstrip("/").removesuffix("/v1") + (f"?{parts.query}" if parts.query else "")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._key = key

    async def complete(self, model: str, prompt: str | list[int], new: int, salt: str | None) -> Completion:
        """Let the server go on with ``prompt`` by at most ``new`` tokens, the likeliest ones. ``salt``: the namespace
        in the server's cache.

        Raises:
            EngineError: the server does not answer, or without log-probabilities.
        """
        body = {"model": model, "prompt": prompt, "max_tokens": new, "temperature": 0, "logprobs": TOP}
        found = await self.ask("/v1/completions", body if salt is None else body | {"cache_salt": salt})
        try:
            (choice,), usage = found["choices"], found["usage"]
            told = choice["logprobs"]
            details = usage.get("prompt_tokens_details") or {}
            top = [{str(token): float(value) for token, value in one.items()} for one in told["top_logprobs"]]
            return Completion(
                [str(token) for token in told["tokens"]], [float(value) for value in told["token_logprobs"]], top,
                str(choice["text"]), int(usage["prompt_tokens"]), int(details.get("cached_tokens") or 0),
                {str(tier): int(n) for tier, n in (details.get("cached_tokens_by_tier") or {}).items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            shown = json.dumps(found)
            raise EngineError(f"{self.url}/v1/completions answers without log-probabilities or usage, as OpenAI's API "
                              f"has them: {shown if len(shown) < 200 else shown[:197] + '...'}") from None  # fmt: skip

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON that the server answers with: to a GET, or to a POST of ``body``. A server that is busy is asked
        again.

        Raises:
            EngineError: it does not answer in time, refuses, or answers with something else.
        """
        try:
            async with asyncio.timeout(self.timeout):
                while True:
                    status, answer = await self.send(path, body)
                    if status not in BUSY:
                        break
                    await asyncio.sleep(AGAIN)
        except TimeoutError:
            raise EngineError(f"{self.url}{path} does not answer within {self.timeout:g} s") from None
        except (OSError, ValueError, EOFError, asyncio.LimitOverrunError, http.client.HTTPException) as error:
            cause = getattr(error, "strerror", None) or error
            raise EngineError(f"{self.url} does not answer: {cause or type(error).__name__}") from None
        try:
            found = json.loads(answer)
        except (ValueError, RecursionError):
            found = answer[:200].decode(errors="replace")
        if not 200 <= status < 300 or isinstance(found, str):
            why = found.get("error", found.get("message", found)) if isinstance(found, dict) else found
            why = why.get("message", why) if isinstance(why, dict) else why
            raise EngineError(f"{self.url}{path} answers {status}: {str(why)[:300]}", status)
        return found

    async def send(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        """Send one request; returns the status and the body of the answer. There is no deadline.

        Raises:
            OSError, EOFError, ValueError, asyncio.LimitOverrunError, http.client.HTTPException: there is no answer, or
                it is no HTTP.
        """
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        try:
            content = b"" if body is None else json.dumps(body).encode()
            lines = [f"{'GET' if body is None else 'POST'} {f'{self._base}{path}' or '/'} HTTP/1.1",
                     f"Host: {f'[{self._host}]' if ':' in self._host else self._host}:{self._port}",
                     "Connection: close", "Accept: application/json", "Content-Type: application/json",
                     f"Content-Length: {len(content)}", *([f"Authorization: Bearer {self._key}"] if self._key else ())]
            writer.write("\r\n".join([*lines, "", ""]).encode() + content)
            await writer.drain()
            return await _answer(reader)
        finally:
            writer.transport.abort()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = io.BytesIO(await reader.readuntil(b"\r\n\r\n"))
    first = head.readline().split()
    if len(first) < 2 or not first[0].startswith(b"HTTP/1.") or not first[1].isdigit():
        raise ValueError("it speaks no HTTP/1.1")
    headers, body = http.client.parse_headers(head), bytearray()
    if "chunked" in headers.get("Transfer-Encoding", "").lower():
        while size := int((await reader.readuntil(b"\n")).split(b";")[0], 16):
            _check_size(len(body) + size)
            body += await reader.readexactly(size)
            await reader.readuntil(b"\n")
    elif (length := headers.get("Content-Length")) is not None:
        _check_size(int(length))
        body += await reader.readexactly(int(length))
    else:
        while piece := await reader.read(1 << 16):
            body += piece
            _check_size(len(body))
    return int(first[1]), bytes(body)


def _check_size(size: int) -> None:
    if not 0 <= size <= MOST_BYTES:
        raise ValueError(f"its answer has {size} bytes")


class Difference(NamedTuple):
    """How far two answers are apart, in nats; and the first token, counted from 0, at which that is more than allowed;
    None: it is nowhere."""

    nats: float
    token: int | None


def apart(one: Completion, other: Completion, allowed: float = math.inf) -> Difference:
    """Compare two answers to the same prompt, up to the first token that differs: after it they go on from different
    texts. How far they are apart at a token is the largest difference of a likely token's log-probability, and where
    the tokens differ, too, by how much ``one`` preferred its own: two tokens that are equally likely may change places.
    """
    worst = 0.0
    for i in range(max(len(one.tokens), len(other.tokens))):
        if i >= min(len(one.tokens), len(one.top), len(other.tokens), len(other.top)):
            return Difference(math.inf, i)  # one of them ended here
        own, its = one.top[i], other.top[i]
        found = max((_gap(own[token], its[token]) for token in own.keys() & its.keys()), default=math.inf)
        if one.tokens[i] != other.tokens[i]:
            found = max(found, _gap(one.logprobs[i], own.get(other.tokens[i], min(own.values(), default=-math.inf))))
        worst = max(worst, found)
        if worst > allowed:
            return Difference(worst, i)
        if one.tokens[i] != other.tokens[i]:
            break
    return Difference(worst, None)


def _gap(one: float, other: float) -> float:
    gap = 0.0 if one == other else abs(one - other)
    return gap if math.isfinite(gap) else math.inf
