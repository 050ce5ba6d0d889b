"""A few pages over HTTP, asked for as a scraper, a browser and a vandal would."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

import pytest

from asynccache import AsyncCache, CacheClosed, ConfigError
from asynccache.memory.cpu import CpuDevice
from asynccache.metrics import MetricsServer, start_metrics_server
from tests.runtime.runtime_kit import opened, serve, settings, text, until


def _fetch(url: str, body: bytes | None) -> tuple[int, str, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read()


async def fetch(server: MetricsServer, path: str, body: Any = None) -> tuple[int, str, bytes]:
    data = None if body is None else json.dumps(body).encode()
    return await asyncio.to_thread(_fetch, f"http://127.0.0.1:{server.port}{path}", data)


async def test_the_pages() -> None:
    async with opened(settings(host=16)) as cache, await start_metrics_server(cache) as server:
        await serve(cache, text(4))
        assert (await fetch(server, "/healthz"))[::2] == (200, b"ok\n")
        status, kind, body = await fetch(server, "/metrics")
        assert status == 200
        assert kind.startswith("text/plain")
        assert b'asynccache_requests_total{cache="test"} 1.0' in body
        assert b"asynccache_loop_lag_seconds_bucket" in body
        _, kind, body = await fetch(server, "/statistics")
        assert kind == "application/json"
        assert json.loads(body)["device"]["full"]["capacity"] == 16
        assert json.loads(body)["lookups"]["requests"] == 1


@pytest.mark.parametrize(("path", "status"), [("/healthz", b"200"), ("/statistics", b"200"), ("/nothing", b"404")])
async def test_head_is_answered_as_get_is_without_a_body(path: str, status: bytes) -> None:
    async with opened(settings(host=16)) as cache, await start_metrics_server(cache) as server:
        heads, bodies = [], []
        for method in ("GET", "HEAD"):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            heads.append(head)
            bodies.append(body)
            writer.close()
        assert heads[0].split()[1] == status
        assert heads[0] == heads[1]
        assert bodies[0]
        assert not bodies[1]


async def test_explain_by_post_and_by_get() -> None:
    async with opened(settings(host=16)) as cache, await start_metrics_server(cache) as server:
        await serve(cache, text(4))
        await cache.flush()
        _, _, posted = await fetch(server, "/explain", {"tokens": text(4)})
        _, _, got = await fetch(server, "/explain?tokens=" + ",".join(map(str, text(4))))
        assert json.loads(posted) == json.loads(got)
        assert json.loads(got)["device"] == 16
        _, _, other = await fetch(server, "/explain", {"tokens": text(4), "namespace": "tenant"})
        assert json.loads(other)["device"] == 0


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [("/", None, 404), ("/explain?tokens=a", None, 400), ("/explain", {"tokens": "abc"}, 400),
     ("/explain", {"tokens": [1, -5]}, 400), ("/explain", {"tokens": [1], "namespace": 3}, 400),
     ("/explain", [1], 400)],
)  # fmt: skip
async def test_what_cannot_be_answered_is_said(path: str, body: Any, status: int) -> None:
    async with opened(settings()) as cache, await start_metrics_server(cache) as server:
        code, _, answer = await fetch(server, path, body)
        assert code == status
        assert json.loads(answer)["error"]
        assert (await fetch(server, "/healthz"))[0] == 200


@pytest.mark.parametrize(
    ("sent", "answered"),
    [(b"what is this\r\n\r\n", b"400"), (b"BREW /healthz HTTP/1.1\r\nHost: x\r\n\r\n", b"405"),
     (b"POST /healthz HTTP/1.1\r\nHost: x\r\n\r\n", b"405"), (b"GET /healthz HTTP/1.1\r\n\r\n", b"400"),
     (b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n", b"400"),
     (b"GET " + b"x" * 100_000, b"400"), (b"\xff\xfe\r\n\r\n", b"400"), (b"GET", b"")],
)  # fmt: skip
async def test_noise_is_refused_and_the_next_is_served(sent: bytes, answered: bytes) -> None:
    async with opened(settings()) as cache, await start_metrics_server(cache) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        writer.write_eof()
        assert answered in await reader.read()
        writer.close()
        assert (await fetch(server, "/healthz"))[0] == 200


async def test_whoever_is_silent_is_hung_up_on_when_it_closes() -> None:
    async with opened(settings()) as cache:
        async with await start_metrics_server(cache):
            pass
        async with await start_metrics_server(cache) as server:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            await asyncio.sleep(0)
        writer.close()


async def test_a_closed_cache_is_not_healthy() -> None:
    cache = AsyncCache(settings())
    async with await start_metrics_server(cache) as server:
        for page in ("/healthz", "/statistics", "/explain?tokens=1", "/metrics"):
            assert (await fetch(server, page))[0] == 503
        async with cache:
            assert (await fetch(server, "/healthz"))[0] == 200
        status, _, body = await fetch(server, "/healthz")
        assert status == 503
        assert "closed" in json.loads(body)["error"]
        assert (await fetch(server, "/explain?tokens=1"))[0] == 503
        assert (await fetch(server, "/metrics"))[0] == 200


async def test_books_that_may_be_wrong_are_told_on_every_page_and_to_everybody_who_waits() -> None:
    device = CpuDevice()
    cache = await AsyncCache(settings(device=8), device=device).__aenter__()
    async with await start_metrics_server(cache) as server:
        held = await cache.lease(text(6)).__aenter__()
        waiting = asyncio.ensure_future(cache.lease(text(6, 1)).__aenter__())
        await until(lambda: cache.statistics().waiting == 1)
        assert b'asynccache_closed{cache="test",reason=""} 0.0' in (await fetch(server, "/metrics"))[2]

        def broken(*arguments: object) -> object:
            raise KeyError("a slot")

        cache.core.extend = broken  # type: ignore[method-assign,assignment]
        with pytest.raises(KeyError):
            await held.extend(1)
        with pytest.raises(CacheClosed, match=r"books may be wrong.*a slot"):
            await waiting
        status, _, body = await fetch(server, "/healthz")
        assert status == 503
        assert "books may be wrong" in json.loads(body)["error"]
        metrics = (await fetch(server, "/metrics"))[2].decode()
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
            assert (await fetch(server, "/healthz"))[0] == 200


def test_without_uvicorn_one_sentence_says_what_to_install() -> None:
    program = "import sys; sys.modules['uvicorn'] = None; from asynccache.metrics import start_metrics_server"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert "pip install 'prometheus-client>=0.20' 'uvicorn>=0.34' brings it" in done.stderr
