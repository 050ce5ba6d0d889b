"""A few pages over HTTP, asked for as a scraper, a browser and a vandal would; nobody can hold it up."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from asynccache import AsyncCache, CacheClosed, ConfigError
from asynccache.memory.cpu import CpuDevice
from asynccache.metrics import MetricsServer, asgi, server, start_metrics_server
from tests.runtime.runtime_kit import opened, serve, settings, text, until

# A few pages over HTTP, asked for as a scraper, a browser and a vandal would.


def get(page: str, version: str = "HTTP/1.1", method: str = "GET") -> bytes:
    return f"{method} {page} {version}\r\nHost: x\r\n\r\n".encode()


def post(body: bytes, head: str = "") -> bytes:
    return f"POST /explain HTTP/1.1\r\nHost: x\r\n{head or f'Content-Length: {len(body)}'}\r\n\r\n".encode() + body


async def raw(to: MetricsServer, sent: bytes) -> tuple[bytes, bytes]:
    """The head and the body of the answer to a client that sends all it has before it listens, as most do."""
    reader, writer = await asyncio.open_connection("127.0.0.1", to.port)
    try:
        writer.write(sent)
        await writer.drain()
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        return head, body
    finally:
        writer.close()


async def answer(to: MetricsServer, sent: bytes) -> tuple[int, str]:
    """Its status, and what it says of the error."""
    return said(*await raw(to, sent))


def said(head: bytes, body: bytes) -> tuple[int, str]:
    status = int(head.split()[1])
    return status, json.loads(body)["error"] if b"application/json" in head and status != 200 else body.decode()


async def explained(server: MetricsServer, **asked: Any) -> dict[str, Any]:
    _, body = await answer(server, post(json.dumps(asked).encode()))
    found: dict[str, Any] = json.loads(body)
    return found


async def test_the_pages() -> None:
    async with opened(settings(host=16)) as cache, await start_metrics_server(cache) as server:
        await serve(cache, text(4))
        assert await answer(server, get("/healthz")) == (200, "ok\n")
        head, body = await raw(server, get("/metrics"))
        assert head.split()[1] == b"200"
        assert b"content-type: text/plain" in head.lower()
        assert b'asynccache_requests_total{cache="test"} 1.0' in body
        assert b"asynccache_loop_lag_seconds_bucket" in body
        head, body = await raw(server, get("/statistics"))
        assert b"content-type: application/json" in head.lower()
        assert json.loads(body)["device"]["full"]["capacity"] == 16
        assert json.loads(body)["lookups"]["requests"] == 1


async def test_explain_by_post_and_by_get() -> None:
    async with opened(settings(host=16, eviction="lru")) as cache, await start_metrics_server(cache) as server:
        await serve(cache, text(4))
        await cache.flush()
        posted = await explained(server, tokens=text(4))
        got = json.loads((await answer(server, get("/explain?tokens=" + ",".join(map(str, text(4))))))[1])
        assert posted == got
        assert got["device"] == 16
        assert (await explained(server, tokens=text(4), namespace="tenant"))["device"] == 0


async def test_a_closed_cache_is_not_healthy() -> None:
    cache = AsyncCache(settings())
    async with await start_metrics_server(cache) as server:
        for page in ("/healthz", "/statistics", "/explain?tokens=1", "/metrics"):
            assert (await answer(server, get(page)))[0] == 503
        async with cache:
            assert (await answer(server, get("/healthz")))[0] == 200
        status, why = await answer(server, get("/healthz"))
        assert status == 503
        assert "closed" in why
        assert (await answer(server, get("/explain?tokens=1")))[0] == 503
        assert (await answer(server, get("/metrics")))[0] == 200


async def test_books_that_may_be_wrong_are_told_on_every_page_and_to_everybody_who_waits() -> None:
    device = CpuDevice()
    cache = await AsyncCache(settings(device=8), device=device).__aenter__()
    async with await start_metrics_server(cache) as server:
        held = await cache.lease(text(6)).__aenter__()
        waiting = asyncio.ensure_future(cache.lease(text(6, 1)).__aenter__())
        await until(lambda: cache.statistics().waiting == 1)
        assert 'asynccache_closed{cache="test",reason=""} 0.0' in (await answer(server, get("/metrics")))[1]

        def broken(*arguments: object) -> object:
            raise KeyError("a slot")

        cache.core.extend = broken  # type: ignore[method-assign,assignment]
        with pytest.raises(KeyError):
            await held.extend(1)
        with pytest.raises(CacheClosed, match=r"books may be wrong.*a slot"):
            await waiting
        status, why = await answer(server, get("/healthz"))
        assert status == 503
        assert "books may be wrong" in why
        _, metrics = await answer(server, get("/metrics"))
        assert re.search(r'asynccache_closed{cache="test",reason="[^"]*books may be wrong[^"]*"} 1.0', metrics)
        free = cache.statistics().device["full"].free
        held.release()
        assert cache.statistics().device["full"].free == free, "nothing is given back to books that may be wrong"
    report = await cache.aclose()
    assert isinstance(report.error, KeyError)
    await device.aclose()


async def test_an_address_that_is_taken_is_refused() -> None:
    async with opened(settings()) as cache, await start_metrics_server(cache) as server:
        with pytest.raises(ConfigError, match="cannot listen"):
            async with await start_metrics_server(cache, port=server.port):
                pass


async def test_closing_twice_or_cancelled_leaves_no_socket_open() -> None:
    async with opened(settings()) as cache:
        server = await start_metrics_server(cache)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        closing = asyncio.create_task(server.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert await reader.read() == b""
        writer.close()
        await server.aclose()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", server.port)


@pytest.mark.parametrize("hops", range(5))
async def test_a_start_that_is_cancelled_anywhere_leaves_no_socket_open(hops: int) -> None:
    async with opened(settings()) as cache:
        async with await start_metrics_server(cache) as server:
            port = server.port
        starting = asyncio.create_task(start_metrics_server(cache, port=port))
        for _ in range(hops):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        if not starting.cancelled():
            await starting.result().aclose()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        async with await start_metrics_server(cache, port=port) as server:
            assert (await answer(server, get("/healthz")))[0] == 200


def test_without_uvicorn_one_sentence_says_what_to_install() -> None:
    program = "import sys; sys.modules['uvicorn'] = None; from asynccache.metrics import start_metrics_server"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert "pip install 'prometheus-client>=0.20' 'uvicorn>=0.34' brings it" in done.stderr


# Clients of a cache's server cannot break it or hold it up: everything is answered, in time, by few connections.


SHORT = 0.2
SOON = 30.0


@asynccontextmanager
async def exposed() -> AsyncIterator[MetricsServer]:
    """A served cache, which still answers when the test is over."""
    async with asyncio.timeout(SOON), opened(settings(host=16)) as cache, await start_metrics_server(cache) as found:
        yield found
        assert (await answer(found, get("/healthz")))[0] == 200


BODIES = [
    b"[" * 100_000, b'{"tokens": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"a":' * 100_000, b"{", b"\xff\xfe",
    b'{"tokens": [' + b"9" * 5000 + b"]}", b'{"tokens": [99999999999999999999]}', b'{"tokens": [NaN]}', b"null",
    b'{"tokens": [1e400]}', b'{"tokens": [true]}', b'{"tokens": [1.0]}', b'{"tokens": "abc"}', b'{"tokens": null}',
    b"[1]",
    b'{"tokens": {"1": 2}}', b'{"tokens": [-1]}', b'{"tokens": [[1]]}', b'{"tokens": [1], "namespace": 3}',
    b'{"tokens": [1], "namespace": "\\ud800"}', b'{"tokens": [1], "namespace": ["a"]}',
]  # fmt: skip
REFUSED = [
    *((post(body), 400) for body in BODIES), (get("/"), 404), (get("http://["), 404), (get("/%00%ff"), 404),
    (get("/explain?tokens=a"), 400), (get("/explain?tokens=" + "9" * 5000), 400),
    (get("/explain?tokens=99999999999999999999"), 400), (get("/metrics", "HTTP/2"), 400),
    *((post(b"", f"Content-Length: {length}"), 400) for length in ("-1", "1_0", "\xb2", "9" * 5000, "x")),
    (post(b"0\r\n\r\n", "Transfer-Encoding: chunked"), 400), (b"what is this\r\n\r\n", 400),
    (b"BREW /healthz HTTP/1.1\r\nHost: x\r\n\r\n", 405), (b"POST /healthz HTTP/1.1\r\nHost: x\r\n\r\n", 405),
    (b"GET /healthz HTTP/1.1\r\n\r\n", 400), (b"GET " + b"x" * 100_000, 400), (b"\xff\xfe\r\n\r\n", 400),
    (b"\x16\x03\x01\r\n\r\n", 400),
]  # fmt: skip


async def test_what_cannot_be_answered_is_refused_with_its_status_and_the_next_is_served() -> None:
    async with exposed() as found:
        for sent, status in REFUSED:
            told = await answer(found, sent)
            assert (told[0], bool(told[1])) == (status, True), sent[:200]
        assert (await answer(found, post(json.dumps({"tokens": text(4)}).encode())))[0] == 200
        for page, wanted in (("/healthz", b"200"), ("/statistics", b"200"), ("/nothing", b"404")):
            heads, bodies = zip(*[await raw(found, get(page, method=how)) for how in ("GET", "HEAD")], strict=True)
            assert heads[0].split()[1] == wanted
            assert (heads[0], [bool(body) for body in bodies]) == (heads[1], [True, False])


async def test_a_body_that_is_too_large_is_a_413_also_for_who_sends_it_first() -> None:
    async with exposed() as found:
        status, why = await answer(found, post(b"x" * (asgi.MOST_BYTES + 1)))
        assert (status, str(asgi.MOST_BYTES) in why) == (413, True)
        status, _ = await answer(found, post(b'{"tokens": []}'.ljust(asgi.MOST_BYTES)))
        assert status == 200


TRICKLES = {
    "silence": (b"", b""), "the head": (b"GET /healthz HTTP/1.1\r\nHost: x\r\n", b"X: y\r\n"),
    "the body": (b"POST /explain HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n", b" "),
}


@pytest.mark.parametrize("what", TRICKLES)
async def test_a_request_that_does_not_arrive_in_time_is_dropped_however_it_trickles(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told so, and its connection is closed; there is always one more byte in time, but never the last."""
    async with exposed() as found:
        monkeypatch.setattr(server, "LIFE", SHORT)
        reader, writer = await asyncio.open_connection("127.0.0.1", found.port)
        began, (start, drop) = time.monotonic(), TRICKLES[what]
        writer.write(start)
        answered = asyncio.create_task(reader.read())
        while not answered.done():
            writer.write(drop)
            await asyncio.wait([answered], timeout=SHORT / 20)
        try:
            head, _, body = (await answered).partition(b"\r\n\r\n")
        except ConnectionError:
            pass  # dropped, and what was sent after the end had the answer thrown away before it was read
        else:
            assert said(head, body) == (408, f"the request did not arrive within {SHORT:g} s")
        assert time.monotonic() - began >= SHORT
        writer.close()


async def test_who_does_not_read_the_answer_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with exposed() as found:
        monkeypatch.setattr(server, "LIFE", SHORT)
        monkeypatch.setattr(asgi, "plain", lambda statistics: "x" * (64 << 20))
        reader, writer = await asyncio.open_connection("127.0.0.1", found.port)
        writer.write(get("/statistics"))
        await until(lambda: bool(connections(found)))
        await until(lambda: not connections(found))
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(64 << 20)
        writer.close()
        monkeypatch.undo()


def connections(found: MetricsServer) -> set[object]:
    return set(found._server.server_state.connections)


async def test_a_number_of_connections_is_open_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once those that dawdle have had their time, others are served."""
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 3)
    async with exposed() as found:
        silent = [await asyncio.open_connection("127.0.0.1", found.port) for _ in range(3)]
        await until(lambda: len(connections(found)) == 3)
        for _ in range(10):
            status, why = await answer(found, b"")
            assert (status, "connections already" in why) == (503, True)
        assert len(connections(found)) <= 4
        for _, writer in silent:
            writer.close()
        await until(lambda: not connections(found))
        assert (await answer(found, get("/healthz")))[0] == 200


async def test_thousands_of_connections_leave_the_cache_its_sockets_and_its_time() -> None:
    """They come faster than they can end. Meanwhile requests are served, and files can be opened."""
    async with opened(settings(host=16)) as cache, await start_metrics_server(cache) as found:
        async def vandal() -> None:
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", found.port)
                writer.write(b"GET /")
                await asyncio.sleep(SHORT)
                writer.close()
                await writer.wait_closed()

        most, vandals = 0, [asyncio.create_task(vandal()) for _ in range(400)]
        for round_ in range(5):
            await serve(cache, text(4, round_))
            vandals += [asyncio.create_task(vandal()) for _ in range(400)]
            await asyncio.sleep(SHORT / 2)
            most = max(most, len(connections(found)))
        await asyncio.gather(*vandals)
        assert server.MOST_CONNECTIONS // 2 < most <= 4 * server.MOST_CONNECTIONS  # some are being refused
        async with asyncio.timeout(30):  # the system may hold some that have ended, which the server has yet to accept
            while (await answer(found, get("/healthz")))[0] != 200:
                await until(lambda: not connections(found))
        await until(lambda: not connections(found))


@pytest.mark.parametrize("kind", [ValueError, KeyError, OSError, TimeoutError])
async def test_a_collector_that_raises_is_a_500_that_says_so(kind: type[Exception]) -> None:
    class Broken(Collector):
        def collect(self) -> Iterator[Metric]:
            raise kind("a figure")

        def describe(self) -> list[Metric]:
            return []

    registry = CollectorRegistry()
    registry.register(Broken())
    async with opened(settings(host=16)) as cache, await start_metrics_server(cache, registry=registry) as found:
        status, why = await answer(found, get("/metrics"))
    assert (status, "a figure" in why) == (500, True)
