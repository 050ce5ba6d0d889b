"""The example server drops requests that do not arrive in time, bounds its connections and answers garbage with 400."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import cache

import openai_server
import pytest
import uvicorn
from openai_serving import arrival
from openai_serving.app import build
from openai_serving.arrival import Punctual
from openai_serving.service import Service, ServiceParts

SHORT = 0.3
SOON = 60.0
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
FINE = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
TRICKLES = {
    "silence": (b"", b"", b""), "the head": (POST, b"X: y\r\n", b""),
    "the body": (POST + b"Content-Length: 100000\r\n\r\n", b" ", b"408"),
    "the second head": (FINE + POST, b"X: y\r\n", b"200"),
}  # fmt: skip


@cache
def served() -> ServiceParts:
    return openai_server.served(openai_server.arguments(["--device-tokens", "256", "--host-tokens", "512"]))


@asynccontextmanager
async def serving(connections: int = 8) -> AsyncIterator[int]:
    """The port of a server, which still answers when the test is over."""
    async with asyncio.timeout(SOON), Service(served()) as service:
        config = uvicorn.Config(build(service), port=0, log_level="critical", lifespan="off", http=Punctual,
                                limit_concurrency=connections)  # fmt: skip
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110  uvicorn sets no asyncio.Event
            await asyncio.sleep(0.01)
        port: int = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield port
            assert b" 200 " in await answer(port, FINE.replace(b"Host", b"Connection: close\r\nHost"))
        finally:
            server.should_exit = True
            await task


async def answer(port: int, sent: bytes) -> bytes:
    """All that is answered until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        return await heard(reader)
    finally:
        writer.close()


async def heard(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the connection is closed or reset."""
    said = b""
    with suppress(ConnectionResetError):
        while piece := await reader.read(1 << 16):
            said += piece
    return said


@pytest.mark.parametrize("what", TRICKLES)
async def test_a_request_that_does_not_arrive_in_time_is_dropped_however_it_trickles(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, drop, status = TRICKLES[what]
    async with serving() as port:
        monkeypatch.setattr(arrival, "PATIENCE", SHORT)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(start)
        answered = asyncio.create_task(heard(reader))
        while not answered.done():
            writer.write(drop)
            await asyncio.wait([answered], timeout=SHORT / 20)
        assert answered.result().split()[1:2] == ([status] if status else [])
        writer.close()


async def test_no_more_connections_than_allowed_are_open() -> None:
    async with serving(connections=3) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _ in range(5):
            assert await answer(port, b"") == b""
        for _, writer in silent:
            writer.close()
        for reader, _ in silent:
            await reader.read()


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"model":' * 100_000, b"\xff", b"{", b'{"prompt": [1e400]}'])
async def test_a_body_that_cannot_be_used_is_a_400(body: bytes) -> None:
    async with serving() as port:
        head = POST + f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        assert (await answer(port, head + body)).startswith(b"HTTP/1.1 400 ")
