"""The counters of a host process for Prometheus: ``/metrics``, and ``/healthz``, by HTTP.

The text format is a line a number, so it is written here, and the process needs no package for it. A connection has one
request of a few lines and some seconds; there are few at a time. Nobody is asked who he is: listen where only your own
machines can reach it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

from asynccache.errors import ConfigError
from asynccache.host.server import COUNTERS, HostServer
from asynccache.storage import parse_host_port

PREFIX = "asynccache_host_"
MOST_CONNECTIONS = 32
MOST_HEAD = 1 << 14
PATIENCE = 10.0
STORE_GAUGES = ("waiting", "writing", "breaker")


def metrics_text(server: HostServer) -> str:
    """Return all counters of ``server`` in the text format of Prometheus."""
    return "\n".join([*_lines(server), ""])


def _lines(server: HostServer) -> Iterator[str]:
    counts, seen = server.counts(), set[str]()

    def of(name: str, labels: str, value: float, counter: bool) -> Iterator[str]:
        name = f"{PREFIX}{name}{'_total' if counter else ''}"
        if name not in seen:
            seen.add(name)
            yield f"# TYPE {name} {'counter' if counter else 'gauge'}"
        yield f"{name}{labels} {value:g}" if isinstance(value, float) else f"{name}{labels} {value}"

    by_store: dict[str, list[tuple[str, float]]] = {}
    for name, value in counts.items():
        store, dot, what = name.rpartition(".")
        if dot:
            by_store.setdefault(what, []).append((store, value))
        else:
            yield from of(name, "", value, name in COUNTERS)
    for what, values in by_store.items():
        for store, value in values:
            yield from of(f"store_{what}", f'{{store="{store}"}}', value, what not in STORE_GAUGES)
    by_label: dict[str, list[tuple[str, int]]] = {}
    for label in server.table.known_labels.values():
        for what, amount in (("pages", label.pages), ("bytes", label.bytes), *label.counts.items()):
            by_label.setdefault(what, []).append((label.name, amount))
    for what, amounts in by_label.items():
        for name, amount in amounts:
            shown = name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
            yield from of(f"label_{what}", f'{{label="{shown}"}}', amount, what not in ("pages", "bytes"))


@asynccontextmanager
async def serve_metrics(server: HostServer, address: str, *, patience: float = 0.0) -> AsyncIterator[str]:
    """Serve the counters at ``address`` (``HOST:PORT``) as long as this lasts. Gives the address that it listens at.
    ``patience``: for how many seconds it tries again while somebody else listens there.

    Raises:
        ConfigError: it cannot listen there.
    """
    where, open_now = parse_host_port(address), set[asyncio.StreamWriter]()
    if where is None:
        raise ConfigError(f"metrics={address!r} must be HOST:PORT")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_now.add(writer)
        try:
            async with asyncio.timeout(PATIENCE):
                if len(open_now) > MOST_CONNECTIONS:
                    writer.write(_response("503 Service Unavailable", "too many connections\n"))
                else:
                    writer.write(_page(server, await reader.readuntil(b"\r\n\r\n")))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            open_now.discard(writer)
            writer.transport.abort()

    until = time.monotonic() + patience
    while True:
        try:
            listener = await asyncio.start_server(answer, where.host, where.port, limit=MOST_HEAD)
            break
        except OSError as error:
            if time.monotonic() >= until:
                raise ConfigError(f"metrics={address}: cannot listen there: {error.strerror or error}") from None
        await asyncio.sleep(0.05)
    try:
        host, port = listener.sockets[0].getsockname()[:2]
        yield f"{host}:{port}"
    finally:
        listener.close()
        for writer in list(open_now):
            writer.transport.abort()
        with suppress(TimeoutError):
            await asyncio.wait_for(listener.wait_closed(), 1.0)


def _page(server: HostServer, head: bytes) -> bytes:
    words = head.split(b"\r\n", 1)[0].split()
    if len(words) != 3 or words[0] not in (b"GET", b"HEAD"):
        return _response("405 Method Not Allowed", "GET /metrics or /healthz\n")
    match words[1].partition(b"?")[0]:
        case b"/metrics":
            found = _response("200 OK", metrics_text(server), "text/plain; version=0.0.4; charset=utf-8")
        case b"/healthz":
            found = _response("503 Service Unavailable", "ends\n") if server.draining else _response("200 OK", "ok\n")
        case _:
            found = _response("404 Not Found", "there are /metrics and /healthz\n")
    return found if words[0] == b"GET" else found.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


def _response(status: str, text: str, kind: str = "text/plain") -> bytes:
    body = text.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
