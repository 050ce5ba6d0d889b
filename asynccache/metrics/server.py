"""A small HTTP server about a cache, on the cache's own event loop, for a scraper and for people.

    GET  /metrics      metrics for Prometheus, if prometheus-client is installed
    GET  /healthz      200 while the cache takes requests; else 503 with the reason
    GET  /statistics   all counters, as JSON
    POST /explain      {"tokens": [...], "extra_key": null}; for short prompts also GET /explain?tokens=1,2,3

HEAD is answered as GET is, without the body.

The server answers one request on each connection and then closes the connection. It is not made for the public: do not
give it a public address. Still, no client can delay the cache or other clients for long:

* A request that has not arrived completely within ``PATIENCE`` seconds is answered with 408. A client that does not
  read its answer within as many seconds is disconnected.
* At most ``MOST_CONNECTIONS`` connections are open at a time. A further one is answered with 503 at once.
* A body of more than ``MOST_BYTES`` is answered with 413. Bytes that are no HTTP request, and tokens or keys that make
  no sense, are answered with 400. If the client is still sending then, the rest is read and thrown away for up to
  ``PATIENCE`` seconds: closing the connection earlier would reset it, and the client might never see the answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import parse_qs, urlsplit

from asynccache import checks
from asynccache.errors import AsyncCacheError, ConfigError
from asynccache.extras import install
from asynccache.metrics.lag import LoopLag

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from asynccache.runtime.cache import AsyncCache

MOST_PORT = 65535
MOST_BYTES = 8 << 20
MOST_CONNECTIONS = 64
PATIENCE = 10.0
_CHUNK = 1 << 16
_UNREAD = ("400", "405", "411", "413")
_JSON = "application/json"


def a_cache(cache: AsyncCache) -> AsyncCache:
    """Return ``cache``. Raises ConfigError if it is not an ``AsyncCache``."""
    from asynccache.runtime.cache import AsyncCache  # imported here, so that this module does not need the runtime

    return checks.instance("cache", cache, AsyncCache)


def _a_registry(registry: CollectorRegistry) -> CollectorRegistry:
    if not callable(getattr(registry, "collect", None)):
        raise ConfigError(f"registry={checks.shown(registry)} must be a registry of prometheus_client")
    return registry


class HttpRequest(NamedTuple):
    """An HTTP request."""

    method: str
    path: str
    query: Mapping[str, list[str]]
    body: bytes


class HttpResponse(NamedTuple):
    """An HTTP response. ``kind`` is its content type. ``bodiless``: only the head is sent, with the length of ``body``;
    for HEAD."""

    status: str
    kind: str
    body: bytes
    bodiless: bool = False


class Refused(Exception):
    """The request cannot be answered. ``status`` is the HTTP status of the response, ``why`` its message."""

    def __init__(self, status: str, why: str) -> None:
        super().__init__(why)
        self.status = status


class Exposed:
    """Serves ``/metrics``, ``/healthz``, ``/statistics`` and ``/explain`` over HTTP, until its block ends:
    ``async with Exposed(cache, port=9090) as exposed``.

    Args:
        cache: the cache.
        host: the address to listen at.
        port: the port; with 0 the system chooses one, and ``exposed.port`` has it.
        registry: the registry whose metrics ``/metrics`` shows; by default one with the metrics of this cache.
        lag: the ``LoopLag`` to start, and to show in that default registry; by default a new one.

    Raises:
        ConfigError: an argument is unusable.
    """

    def __init__(
        self, cache: AsyncCache, *, host: str = "127.0.0.1", port: int = 0,
        registry: CollectorRegistry | None = None, lag: LoopLag | None = None,
    ) -> None:  # fmt: skip
        self._cache = a_cache(cache)
        self._host = checks.text("host", host)
        self.port = checks.integer("port", port, 0, MOST_PORT)
        self._lag = LoopLag() if lag is None else checks.instance("lag", lag, LoopLag)
        self._registry = None if registry is None else _a_registry(registry)
        self._server: asyncio.Server | None = None
        self._talking: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"Exposed(http://{self._host}:{self.port})"

    async def __aenter__(self) -> Self:
        """Begin to listen. Cancelling it leaves nothing open.

        Raises:
            ConfigError: the server cannot listen at this address.
        """
        try:
            self._server = await asyncio.start_server(self._talk, self._host, self.port, limit=_CHUNK)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"serve: cannot listen at {self._host}:{self.port}: {error}") from error
        self.port = self._server.sockets[0].getsockname()[1]
        self._lag.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections. Cancelling it leaves no socket open."""
        self._lag.stop()
        if self._server is not None:
            self._server.close()
        for task in self._talking:
            task.cancel()
        while self._talking:
            await asyncio.wait(self._talking)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        crowded = len(self._talking) >= MOST_CONNECTIONS
        self._talking.add(task)
        try:
            await _deliver(_CROWDED if crowded else await self._answered(reader), reader, writer)
            writer.close()
        except (TimeoutError, OSError, asyncio.CancelledError):
            writer.transport.abort()  # the client is gone or does not read, or the server is being closed
        finally:
            self._talking.discard(task)

    async def _answered(self, reader: asyncio.StreamReader) -> HttpResponse:
        try:
            async with asyncio.timeout(PATIENCE):
                request = await _read(reader)
        except TimeoutError:
            return _failed("408 Request Timeout", f"the request did not arrive within {PATIENCE:g} s")
        except Refused as refused:
            return _failed(refused.status, refused)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            return _failed("400 Bad Request", error)
        answer = await self._answered_request(request)
        return answer._replace(bodiless=request.method == "HEAD")

    async def _answered_request(self, request: HttpRequest) -> HttpResponse:
        try:
            return await self._answer(request)
        except Refused as refused:
            return _failed(refused.status, refused)
        except ConfigError as error:
            return _failed("400 Bad Request", error)
        except (AsyncCacheError, RuntimeError) as error:  # the cache is closed, or not open yet
            return _failed("503 Service Unavailable", error)
        except Exception as error:  # other collectors in the user's registry may raise anything
            return _failed("500 Internal Server Error", f"{type(error).__name__}: {error}")

    async def _answer(self, request: HttpRequest) -> HttpResponse:
        match request.path:
            case "/metrics":
                return self._metrics()
            case "/healthz":
                return self._healthz()
            case "/statistics":
                return _json(plain(self._cache.statistics()))
            case "/explain":
                tokens, extra_key = _asked(request)
                return _json((await self._cache.explain(tokens, extra_key)).plain())
            case _:
                raise Refused("404 Not Found", "there are /metrics, /healthz, /statistics and /explain")

    def _metrics(self) -> HttpResponse:
        try:
            from prometheus_client import CollectorRegistry, generate_latest
            from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

            from asynccache.metrics.collector import CacheCollector
        except ModuleNotFoundError:
            raise Refused("501 Not Implemented", f"{install('metrics')} brings /metrics") from None
        if self._registry is None:
            self._registry = CollectorRegistry()
            self._registry.register(CacheCollector(self._cache, lag=self._lag))
        return HttpResponse("200 OK", CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self._registry))

    def _healthz(self) -> HttpResponse:
        why = self._cache.closed
        if why is not None:
            raise Refused("503 Service Unavailable", why)
        return HttpResponse("200 OK", "text/plain", b"ok\n")


async def _read(reader: asyncio.StreamReader) -> HttpRequest:
    """Read one request from a connection.

    Raises:
        Refused: the request is too long, is no HTTP, or uses a part of HTTP that is not served.
        ValueError: the request's URL cannot be parsed.
        asyncio.IncompleteReadError: the request ends too soon.
        asyncio.LimitOverrunError: the head of the request is too long.
    """
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    words = head[0].split()
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise Refused("400 Bad Request", "this is no HTTP")
    if words[0] not in ("GET", "POST", "HEAD"):
        raise Refused("405 Method Not Allowed", f"{words[0]} is not served")
    fields = {name.strip().lower(): text.strip() for name, _, text in (line.partition(":") for line in head[1:])}
    parts = urlsplit(words[1])
    body = await reader.readexactly(_length(fields))
    return HttpRequest(words[0], parts.path, parse_qs(parts.query), body)


def _length(fields: Mapping[str, str]) -> int:
    """Return the length of the body in bytes, from the header fields."""
    if "transfer-encoding" in fields:
        raise Refused("411 Length Required", "send the body whole, with its Content-Length")
    told = fields.get("content-length", "0")
    if not (told.isascii() and told.isdecimal()):
        raise Refused("400 Bad Request", f"Content-Length: {told[:40]!r} must be a number of bytes")
    if len(told) > len(str(MOST_BYTES)) or int(told) > MOST_BYTES:
        raise Refused("413 Content Too Large", f"Content-Length: {told[:40]}: a body has at most {MOST_BYTES} bytes")
    return int(told)


async def _deliver(answer: HttpResponse, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send the response. Returns when the system has sent all of it.

    Raises:
        TimeoutError: the client did not take the response within ``PATIENCE`` seconds.
        OSError: the client has disconnected.
    """
    async with asyncio.timeout(PATIENCE):
        writer.transport.set_write_buffer_limits(0)  # so that drain() returns only when all is sent
        writer.write(_written(answer))
        await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
        if answer.status.startswith(_UNREAD):  # closing now would reset the connection before the answer is read
            while await reader.read(_CHUNK):
                pass


def _asked(request: HttpRequest) -> tuple[list[int], str | None]:
    """Return the tokens and the ``extra_key`` in a request for /explain.

    Raises:
        Refused: they are missing, or are something else.
    """
    try:
        tokens, extra_key = _in_body(request.body) if request.method == "POST" else _in_query(request.query)
    except (ValueError, RecursionError) as error:
        raise Refused("400 Bad Request", f"{type(error).__name__}: {error}") from None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise Refused("400 Bad Request", "tokens must be a list of integers")
    if extra_key is not None and not isinstance(extra_key, str):
        raise Refused("400 Bad Request", "extra_key must be a string")
    return tokens, extra_key


def _in_body(body: bytes) -> tuple[Any, Any]:
    fields = json.loads(body or b"{}")
    if not isinstance(fields, dict):
        raise Refused("400 Bad Request", 'send {"tokens": [...]}')
    return fields.get("tokens"), fields.get("extra_key")


def _in_query(query: Mapping[str, list[str]]) -> tuple[Any, Any]:
    tokens = [int(token) for token in ",".join(query.get("tokens", [])).split(",") if token]
    return tokens, query.get("extra_key", [None])[0]


def plain(value: Any) -> Any:
    """Return ``value`` in the types of JSON: named tuples become objects, and enum members their values."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(field) for name, field in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(key): plain(field) for key, field in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(field) for field in value]
    return value.value if isinstance(value, Enum) else value


def _json(value: object) -> HttpResponse:
    return HttpResponse("200 OK", _JSON, json.dumps(value).encode() + b"\n")


def _failed(status: str, error: Exception | str) -> HttpResponse:
    return HttpResponse(status, _JSON, json.dumps({"error": str(error)}).encode() + b"\n")


def _written(answer: HttpResponse) -> bytes:
    head = f"HTTP/1.1 {answer.status}\r\nContent-Type: {answer.kind}\r\nContent-Length: {len(answer.body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + (b"" if answer.bodiless else answer.body)


_CROWDED = _failed("503 Service Unavailable", f"there are {MOST_CONNECTIONS} connections already; try again soon")
