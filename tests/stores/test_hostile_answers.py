"""A server's answer is data from outside. If it is nested beyond all reason, without an end, or of no shape that was
asked for, there is a named error or a page that failed; it takes no memory on a stranger's word, and nothing hangs."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from asynccache_backends.mooncake import client as mooncake
from asynccache_backends.redis import RedisBackend
from asynccache_backends.redis.resp import ProtocolError, Reader
from asynccache_backends.redis.server import Answers

from asynccache.errors import BackendError, Timeout, Unavailable
from asynccache.storage import HostPort, Result, parse_url
from asynccache.testing.backend_suite import LAYOUT, blank, keys_of, page_key
from tests.stores.server import HOST
from tests.stores.test_redis_connection import peer
from tests.waiting import until

FAILED = Result.FAILED
PATIENCE = 20.0


def hear(data: bytes) -> list[Any]:
    """What a reader makes of ``data`` where one reply that is no page is expected."""
    reader = Reader([None])
    while data and reader.missing:
        count = min(len(reader.buffer), len(data))
        reader.buffer[:count] = data[:count]
        reader.received(count)
        data = data[count:]
    return reader.replies


@pytest.mark.parametrize("data", [
    b"*1\r\n" * 200_000, b"*2\r\n:1\r\n" * 200_000, b"$400000000\r\n",
    b"*2\r\n$1\r\na\r\n$400000000\r\n", b":" + b"9" * 5000 + b"\r\n", b"*" + b"9" * 25 + b"\r\n",
])  # fmt: skip
def test_a_bomb_is_no_answer_and_takes_no_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            hear(data)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@asynccontextmanager
async def saying(answer: Callable[[bytes, int], bytes], options: str = "cluster=off") -> AsyncIterator[RedisBackend]:
    """A backend whose server answers every word by ``answer``, which is told its own port."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = writer.get_extra_info("sockname")[1]
        while words := await reader.read(1 << 16):
            writer.write(answer(words, port))
            await writer.drain()

    async with peer(script) as settings, asyncio.timeout(PATIENCE):
        backend = await RedisBackend.open(parse_url(f"redis://{settings.seeds[0]}?{options}"), LAYOUT)
        try:
            yield backend
        finally:
            await backend.aclose()


async def said_at_opening(reply: bytes) -> None:
    async with saying(lambda words, port: reply, "cluster=auto"):
        pass


@pytest.mark.parametrize("reply", [
    b"*1\r\n" * 100_000, b"*1\r\n:1\r\n", b"*1\r\n*0\r\n", b"*1\r\n*3\r\n:0\r\n:5\r\n:7\r\n", b"*1\r\n$1\r\nx\r\n",
    b"*1\r\n*3\r\n:0\r\n:99999999\r\n*2\r\n$1\r\nh\r\n:1\r\n", b"*1\r\n*3\r\n:-5\r\n:5\r\n*2\r\n$1\r\nh\r\n:1\r\n",
    b"*1\r\n*3\r\n:0\r\n:5\r\n*2\r\n$1\r\n\xff\r\n:1\r\n", b"*1\r\n*3\r\n:0\r\n:5\r\n*2\r\n$1\r\nh\r\n$1\r\n1\r\n",
    b"*1\r\n*3\r\n:0\r\n:5\r\n*2\r\n$1\r\nh\r\n:70000\r\n", b"*1\r\n*3\r\n:0\r\n:5\r\n*0\r\n",
    b"*1\r\n*3\r\n$-1\r\n:5\r\n*2\r\n$1\r\nh\r\n:1\r\n", b":" + b"9" * 5000 + b"\r\n",
    b"HTTP/1.1 400 Bad Request\r\n\r\n", b"x" * 100_000 + b"\r\n", b"$-7\r\n",
])  # fmt: skip
async def test_a_map_of_a_cluster_that_is_none_is_unavailable(reply: bytes) -> None:
    with pytest.raises(Unavailable) as refused:
        await said_at_opening(reply)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("piece", [b":1\r\n", b"$-1\r\n", b"+a\r\n", b"*0\r\n", b"$300\r\n" + bytes(300) + b"\r\n"])
async def test_a_list_without_an_end_is_no_answer(piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answers, "room", 1 << 20)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"*1000000000\r\n")
        while True:
            writer.write(piece * 1000)
            await writer.drain()

    async with peer(script) as settings, asyncio.timeout(PATIENCE):
        with pytest.raises(Unavailable, match="answers of more than"):
            await RedisBackend.open(parse_url(f"redis://{settings.seeds[0]}?stall=60"), LAYOUT)


async def test_a_server_that_says_a_byte_now_and_then_is_a_time_out() -> None:
    """It is never silent, and never done."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"*100000\r\n")
        while True:
            writer.write(b":1\r\n")
            await writer.drain()
            await asyncio.sleep(0.01)

    async with peer(script) as settings, asyncio.timeout(PATIENCE):
        with pytest.raises(Timeout, match=r"no answer in 0\.2 s"):
            await RedisBackend.open(parse_url(f"redis://{settings.seeds[0]}?stall=0.1"), LAYOUT)


def one_for_all(port: int) -> bytes:
    """The map of a cluster of one."""
    return b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % port


@pytest.mark.parametrize("where", [
    b"", b" ", b" x", b" 1", b" 1 h", b" 1 h:", b" 1 h:x", b" 1 h:99999999", b" 99999 h:1", b" -1 h:1", b" 1 h:0",
])  # fmt: skip
@pytest.mark.parametrize("word", [b"MOVED", b"ASK"])
async def test_a_redirection_to_nowhere_is_none(word: bytes, where: bytes) -> None:
    def answer(words: bytes, port: int) -> bytes:
        return one_for_all(port) if b"SLOTS" in words else b"-%b%b\r\n" % (word, where)

    async with saying(answer, "cluster=on") as backend:
        with pytest.raises(Unavailable, match=word.decode()):
            await backend.exists([page_key("a")])
        assert backend.stats()["nodes"] == 1


@pytest.mark.parametrize("word", [b"MOVED", b"ASK"])
async def test_servers_that_redirect_for_ever_are_asked_a_few_times(word: bytes) -> None:
    asked = 0

    def answer(words: bytes, port: int) -> bytes:
        nonlocal asked
        if b"SLOTS" in words:
            return one_for_all(port)
        asked += words.count(b"EXISTS")
        return b"+OK\r\n" * words.count(b"ASKING") + b"-%b 1 127.0.0.1:%d\r\n" % (word, port)

    async with saying(answer, "cluster=on") as backend:
        for calls in (1, 2, 3):
            with pytest.raises(Unavailable, match=word.decode()):
                await backend.exists([page_key("a")])
            assert asked <= 4 * calls
        assert backend.stats()["nodes"] == 1


async def test_a_new_map_that_is_none_leaves_the_old_one() -> None:
    asked: list[bytes] = []

    def answer(words: bytes, port: int) -> bytes:
        if b"SLOTS" not in words:
            return b":1\r\n"
        asked.append(words)
        return one_for_all(port) if len(asked) == 1 else b"*1\r\n:1\r\n"

    async with saying(answer, "cluster=on") as backend:
        backend._router._stale = True
        assert await backend.exists([page_key("a")]) == [Result.HIT]
        await until(lambda: len(asked) == 2)
        assert await backend.exists([page_key("a")]) == [Result.HIT]


@pytest.mark.parametrize("reply", [b":1\r\n", b"+OK\r\n", b":2\r\n", b"-WHAT\r\n"])
async def test_what_is_no_page_is_never_a_hit(reply: bytes) -> None:
    """A hit is 1, and so is what a server may say."""
    async with saying(lambda words, port: b"+PONG\r\n" if b"PING" in words else reply) as backend:
        keys = keys_of(1)
        (result,) = await backend.get(keys, [blank(key) for key in keys])
        assert result is FAILED


@pytest.mark.parametrize("reply", [
    b":1\r\n", b"$-1\r\n", b"*0\r\n", b"*1\r\n$1\r\n0\r\n", b"*2\r\n:0\r\n*0\r\n", b"*2\r\n$1\r\n0\r\n:5\r\n",
    b"*2\r\n$1\r\n0\r\n*2\r\n$1\r\na\r\n:5\r\n", b"*2\r\n$1\r\n0\r\n*1\r\n*1\r\n:1\r\n", b"*2\r\n" * 50_000,
])  # fmt: skip
async def test_a_list_of_keys_that_is_none_is_unavailable(reply: bytes) -> None:
    async with saying(lambda words, port: b"+PONG\r\n" if b"PING" in words else reply) as backend:
        with pytest.raises(Unavailable):
            async for _ in backend.listing():
                pass
        with pytest.raises(BackendError):
            await backend.clear()


# the admin server of a Mooncake master


@contextmanager
def admin(respond: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[HostPort]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            respond(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer((HOST, 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield HostPort(HOST, server.server_port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def endless(handler: BaseHTTPRequestHandler) -> None:
    """Names without an end, until nobody listens any more."""
    handler.send_response(200)
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(b"asynccache.0000\n" * 4096)
    except OSError:
        return


def test_names_come_whole() -> None:
    def some(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        for number in range(3000):
            handler.wfile.write(b"name-%d\n" % number)

    with admin(some) as place:
        assert mooncake.object_names(place) == [f"name-{number}" for number in range(3000)]


@pytest.mark.parametrize(("limit", "value"), [("MOST_BYTES", 1 << 20), ("LIST_WITHIN", 0.2)])
def test_a_list_of_names_without_an_end_is_unavailable(
    limit: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, limit, value)
    with admin(endless) as place, pytest.raises(Unavailable, match=f"{HOST}.* has no end of its answer"):
        mooncake.object_names(place)
