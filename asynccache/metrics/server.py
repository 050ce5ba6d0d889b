"""Serves the pages of ``asynccache.metrics.app`` by uvicorn, on the cache's own event loop.

uvicorn sets a client no deadline for its request. So a connection here answers one request and ends after ``LIFE``
seconds, whatever it has sent or read by then, and at most ``MOST_CONNECTIONS`` are open at a time.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Any, Self

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from asynccache import checks
from asynccache.errors import ConfigError
from asynccache.metrics.asgi import MetricsApp
from asynccache.metrics.loop_lag import LoopLag
from asynccache.settle import completed

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from asynccache.runtime.cache import AsyncCache

MOST_CONNECTIONS = 64
LIFE = 20.0
_MOST_PORT = 65535
_MOST_HEAD = 1 << 16
_REFUSED = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"

_log = logging.getLogger(__name__)
_log.addHandler(logging.NullHandler())  # what clients do wrong is not printed, unless the program logs it


class _BriefConnection(H11Protocol):
    """A connection of uvicorn's that is refused if there are too many, and that ends after ``LIFE`` seconds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _log
        self._end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._end = self.loop.call_later(LIFE, self._late)
        if len(self.connections) > MOST_CONNECTIONS:
            why = b"there are %d connections already; try again soon" % MOST_CONNECTIONS
            self._refuse(b"503 Service Unavailable", why)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._end is not None:
            self._end.cancel()
        super().connection_lost(exc)

    def _late(self) -> None:
        if (self.cycle is None or self.cycle.more_body) and not self.transport.is_closing():
            self._refuse(b"408 Request Timeout", b"the request did not arrive within %g s" % LIFE)
        else:
            self.transport.abort()

    def _refuse(self, status: bytes, why: bytes) -> None:
        body = b'{"error": "%s"}\n' % why
        self.transport.write(_REFUSED % (status, len(body), body))
        self.transport.close()


class MetricsServer:
    """A server that ``start_metrics_server`` has started. ``host`` and ``port`` are where it listens. It ends with its
    ``async with`` block, or by ``aclose()``."""

    def __init__(self, server: uvicorn.Server, listener: socket.socket, lag: LoopLag) -> None:
        self._server = server
        self._listener = listener
        self._lag = lag
        self.host, self.port = listener.getsockname()[:2]

    def __repr__(self) -> str:
        return f"MetricsServer(http://{self.host}:{self.port})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections. A second call does nothing. Cancelling it leaves no socket open."""
        self._lag.stop()
        if self._listener.fileno() < 0:
            return
        try:
            await self._server.shutdown(sockets=[self._listener])
        finally:
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()


async def start_metrics_server(
    cache: AsyncCache, *, host: str = "127.0.0.1", port: int = 0,
    registry: CollectorRegistry | None = None, lag: LoopLag | None = None,
) -> MetricsServer:  # fmt: skip
    """Serve ``asynccache.metrics.app(cache)`` over HTTP:
    ``async with await start_metrics_server(cache, port=9090) as server``.

    Args:
        cache: the cache.
        host: the address to listen at; 0.0.0.0: all of this machine's.
        port: the port; with 0 the system chooses one, and ``server.port`` has it.
        registry: the registry whose metrics ``/metrics`` shows; by default one with the metrics of this cache.
        lag: the ``LoopLag`` to start, and to show in that default registry; by default a new one.

    Raises:
        ConfigError: an argument is unusable, or the server cannot listen at this address.

    Cancelling it leaves no socket open.
    """
    host, port = checks.text("host", host, empty=False), checks.integer("port", port, 0, _MOST_PORT)
    lag = LoopLag() if lag is None else lag
    config = uvicorn.Config(
        MetricsApp(cache, registry, lag), http=_BriefConnection, ws="none", lifespan="off", log_config=None,
        access_log=False, date_header=False, headers=[("connection", "close")], proxy_headers=False,
        h11_max_incomplete_event_size=_MOST_HEAD, timeout_graceful_shutdown=1, backlog=MOST_CONNECTIONS,
    )  # fmt: skip  backlog: asyncio accepts so many in one step, before the first of them can be refused
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    server.server_state.default_headers = config.encoded_headers
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(f"host={host!r}, port={port}: cannot listen there: {error}") from error
    try:
        await completed(server.startup(sockets=[listener]))  # half started, there would be nothing to close it by
    except BaseException:
        for listening in getattr(server, "servers", ()):
            listening.close()
        listener.close()
        raise
    lag.start()
    return MetricsServer(server, listener, lag)
