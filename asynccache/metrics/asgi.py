"""An ASGI app about a cache, for a scraper and for people. It mounts into FastAPI or Starlette, or runs by itself.

    GET  /metrics      metrics for Prometheus, if prometheus-client is installed
    GET  /healthz      200 while the cache takes requests; else 503 with the reason
    GET  /statistics   all counters, as JSON
    POST /explain      {"tokens": [...], "namespace": null}; for short prompts also GET /explain?tokens=1,2,3

HEAD is answered as GET is. Errors are JSON: ``{"error": "..."}``. Nothing here asks who calls: serve it where only
your own machines can reach it.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from enum import Enum
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import msgspec

from asynccache import checks
from asynccache.errors import AsyncCacheError, ConfigError
from asynccache.extras import install
from asynccache.metrics.loop_lag import LoopLag

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from asynccache.runtime.cache import AsyncCache


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MOST_BYTES = 8 << 20
"""A longer body is answered with 413: a prompt of a million tokens is shorter."""
_JSON = "application/json"


class ExplainRequest(msgspec.Struct):
    """The question that is sent to ``/explain``."""

    tokens: list[int]
    namespace: str | None = None


class HttpError(Exception):
    """The request is answered with this status and message."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class MetricsApp:
    """The app that ``app`` returns."""

    def __init__(self, cache: AsyncCache, registry: CollectorRegistry | None, lag: LoopLag | None) -> None:
        from asynccache.runtime.cache import AsyncCache  # here, so that this module does not need the runtime

        self._cache = checks.instance("cache", cache, AsyncCache)
        self._lag = None if lag is None else checks.instance("lag", lag, LoopLag)
        if registry is not None and not callable(getattr(registry, "collect", None)):
            raise ConfigError(f"registry={checks.shown(registry)} must be a registry of prometheus_client")
        self._registry = registry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"asynccache.metrics.app answers HTTP, not {scope['type']}")
        try:
            status, kind, body = HTTPStatus.OK, *await self._answer(scope, receive)
        except Exception as error:  # a collector in the user's registry may raise anything
            status, kind, body = _status_of(error), _JSON, _json({"error": str(error) or type(error).__name__})
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status.value, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[str, bytes]:
        page = scope["path"].removeprefix(scope.get("root_path", ""))
        posted = page == "/explain" and scope["method"] == "POST"
        if not posted and scope["method"] not in ("GET", "HEAD"):
            raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, f"{scope['method']} is not served here")
        match page:
            case "/metrics":
                return self._metrics()
            case "/healthz":
                if (why := self._cache.closed) is not None:
                    raise HttpError(HTTPStatus.SERVICE_UNAVAILABLE, why)
                return "text/plain", b"ok\n"
            case "/statistics":
                return _JSON, _json(plain(self._cache.statistics()))
            case "/explain":
                asked = await _in_body(receive) if posted else _in_query(scope["query_string"])
                return _JSON, _json((await self._cache.explain(asked.tokens, asked.namespace)).plain())
        raise HttpError(HTTPStatus.NOT_FOUND, "there are /metrics, /healthz, /statistics and /explain")

    def _metrics(self) -> tuple[str, bytes]:
        try:
            from prometheus_client import CollectorRegistry, generate_latest
            from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

            from asynccache.metrics.collector import CacheCollector
        except ModuleNotFoundError:
            raise HttpError(HTTPStatus.NOT_IMPLEMENTED, f"{install('metrics')} brings /metrics") from None
        if self._registry is None:
            self._registry = CollectorRegistry()
            self._registry.register(CacheCollector(self._cache, lag=self._lag))
        return CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self._registry)


def app(cache: AsyncCache, *, registry: CollectorRegistry | None = None, lag: LoopLag | None = None) -> MetricsApp:
    """Return an ASGI app with ``/metrics``, ``/healthz``, ``/statistics`` and ``/explain`` of ``cache``:
    ``FastAPI().mount("/cache", app(cache))``. It must run on the cache's event loop.

    Args:
        cache: the cache; it may be opened later.
        registry: the registry whose metrics ``/metrics`` shows; by default one with the metrics of this cache.
        lag: a ``LoopLag`` that was started, to be shown in that default registry.

    Raises:
        ConfigError: an argument is unusable.
    """
    return MetricsApp(cache, registry, lag)


async def _in_body(receive: Receive) -> ExplainRequest:
    """Read the question from the body. A body that is too long is read to its end and thrown away: a client that is
    still sending does not see an answer."""
    body, length, more = bytearray(), 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HttpError(HTTPStatus.BAD_REQUEST, "the body is not complete")
        length += len(message.get("body", b""))
        if length <= MOST_BYTES:
            body += message.get("body", b"")
        more = message.get("more_body", False)
    if length > MOST_BYTES:
        raise HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has at most {MOST_BYTES} bytes")
    try:
        return msgspec.json.decode(body, type=ExplainRequest)
    except (ValueError, RecursionError) as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, f'{error}; send {{"tokens": [...], "namespace": null}}') from None


def _in_query(query: bytes) -> ExplainRequest:
    fields = parse_qs(query.decode("latin-1"))
    try:
        tokens = [int(token) for token in ",".join(fields.get("tokens", [])).split(",") if token]
    except ValueError as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"tokens: {error}") from None
    return ExplainRequest(tokens, fields.get("namespace", [None])[0])


def _status_of(error: Exception) -> HTTPStatus:
    if isinstance(error, HttpError):
        return error.status
    if isinstance(error, ConfigError):
        return HTTPStatus.BAD_REQUEST
    if isinstance(error, (AsyncCacheError, RuntimeError)):  # the cache is closed, or not open yet
        return HTTPStatus.SERVICE_UNAVAILABLE
    return HTTPStatus.INTERNAL_SERVER_ERROR


def plain(value: Any) -> Any:
    """Return ``value`` in the types of JSON: named tuples become objects, and enum members their values."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(field) for name, field in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(key): plain(field) for key, field in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(field) for field in value]
    return value.value if isinstance(value, Enum) else value


def _json(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"
