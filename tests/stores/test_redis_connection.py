"""A connection whose other end misbehaves: a scripted peer on loopback, on both loops; then the protocol and settings.

What matters is what is left when a request has ended badly: nothing that could write to its buffers or read from them,
no future nobody looks at, no socket; and that the next request works.
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import re
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from asynccache_backends.redis.resp import ProtocolError, Reader, Refusal, Request, about, joined, storing
from asynccache_backends.redis.server import Connection, RedisConnection, RedisServer
from asynccache_backends.redis.settings import RedisSettings, settings_of
from msgspec.structs import replace

from asynccache.errors import BackendError, ConfigError, Timeout, Unavailable
from asynccache.storage import HostPort, Record, Result, open_store, parse_url
from asynccache.testing.backend_suite import LAYOUT, page_key
from tests.storage.pages_kit import blank, is_free
from tests.stores.redis_server import Certificate
from tests.stores.server import HOST, free_port
from tests.waiting import until

PING: list[Request] = [(b"*1\r\n$4\r\nPING\r\n", None)]
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def peer(script: Script) -> AsyncIterator[RedisSettings]:
    """RedisSettings that lead to a server which does what ``script`` says with every connection."""
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(script(reader, writer))
        serving.add(task)
        await asyncio.wait([task])
        writer.close()
        assert task.cancelled() or isinstance(task.exception(), ConnectionError | None)

    server = await asyncio.start_server(serve, HOST, 0)
    try:
        yield RedisSettings(seeds=(HostPort(HOST, server.sockets[0].getsockname()[1]),))
    finally:
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.sleep(0.01)


@asynccontextmanager
async def connected(script: Script, stall: float = 5.0) -> AsyncIterator[Connection]:
    """A connection to such a server."""
    async with peer(script) as settings:
        link = RedisConnection(settings.seeds[0], settings)
        async with link.signed_in(5):
            connection = Connection(link, stall)
        try:
            yield connection
        finally:
            link.close()


def answers(*replies: bytes) -> Script:
    """Reads something, says the next of ``replies``; and so on; then closes."""
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for reply in replies:
            assert await reader.read(1 << 20)
            writer.write(reply)
            await writer.drain()

    return script


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reads all, says nothing."""
    while await reader.read(1 << 20):
        pass


async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Does not even read."""
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    await asyncio.Event().wait()


def fetching(*records: Record) -> list[Request]:
    return [(b"GET x\r\n", record) for record in records]


def stored(record: Record) -> list[Request]:
    return [(command, None) for command in storing([b"k"], [record])]


PAGE = fetching(blank(10))


def server_of(settings: RedisSettings, **changed: Any) -> RedisServer:
    """The server that these settings lead to."""
    return RedisServer(settings.seeds[0], replace(settings, **changed), Counter())


@pytest.mark.parametrize(("reply", "why"), [
    *((reply, "connection lost") for reply in (
        b"", b"$10", b"$4160\r\n", b"$4160\r\n" + bytes(70), b"$4160\r\n" + bytes(4160), b"$99\r\nabc")),
    *((reply + b"." * 20, "") for reply in (b"HTTP/1.1 400 Bad\r\n", b"+OK\r\n+OK\r\n", b"*1\r\n", b"$9\r\nxx")),
])  # fmt: skip
async def test_a_connection_lost_in_the_middle_or_that_says_nonsense_is_ended_and_holds_nothing(
    reply: bytes, why: str
) -> None:
    record = blank(4096)
    async with connected(answers(reply, *([] if why else [b""]))) as connection:
        with pytest.raises(Unavailable) as refused:
            await connection.ask(fetching(record))
        assert why in str(refused.value)
        assert connection.link.closed
        assert is_free(record)
        with pytest.raises(Unavailable):
            await connection.ask(PING)


async def test_what_was_answered_before_the_end_counts() -> None:
    record = blank(4096)
    async with connected(answers(b"$4160\r\n" + bytes(4160) + b"\r\n")) as connection:
        assert await connection.ask(fetching(record)) == [Result.HIT]
        await until(lambda: connection.link.closed)


@pytest.mark.parametrize("word", [b"+hello\r\n", b"$", b""])
async def test_a_word_between_requests_ends_it(word: bytes) -> None:
    """Or a later request would take it for its own answer. No word: the server has closed."""
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"+PONG\r\n")
        await asyncio.sleep(0.05)
        writer.write(word)
        if word:
            await reader.read(100)

    async with connected(script) as connection:
        await connection.ask(PING)
        await until(lambda: connection.link.closed)


async def test_answers_ahead_of_the_question_end_it() -> None:
    """All replies are there while half of a page is unsent: the other half would become part of the next request."""
    async def hasty(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"+OK\r\n" * 3)
        await deaf(reader, writer)

    record = blank(16 << 20)
    batch = stored(record) * 3
    async with connected(hasty) as connection:
        with pytest.raises(Unavailable):
            await connection.ask(batch)
        assert connection.link.closed


@pytest.mark.parametrize("script", [silent, deaf])
async def test_silence_is_a_time_out(script: Script) -> None:
    record = blank(16 << 20)
    batch = stored(record)
    async with connected(script, stall=0.1) as connection:
        with pytest.raises(Timeout, match=r"silent for 0\.1 s"):
            await connection.ask(batch)
        assert connection.link.closed
    del batch
    assert is_free(record)


async def test_silence_is_counted_from_the_last_byte_that_came() -> None:
    loop, last = asyncio.get_running_loop(), 0.0

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal last
        await reader.read(100)
        for byte in b"+PON":
            await asyncio.sleep(0.2)
            last = loop.time()
            writer.write(bytes([byte]))
        await silent(reader, writer)

    async with connected(half, stall=0.5) as connection:
        with pytest.raises(Timeout, match=r"silent for 0\.5 s"):
            await connection.ask(PING)
        assert loop.time() - last >= 0.43


async def test_a_page_that_is_taken_slowly_is_not_silence() -> None:
    """Nothing is answered meanwhile, and it takes far longer than ``stall``."""
    async def sips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken = 0
        while taken < 24 << 20:
            await asyncio.sleep(0.01)
            taken += len(await reader.read(1 << 17))
        writer.write(b"+OK\r\n")

    record = blank(24 << 20)
    async with connected(sips, stall=1.5) as connection:
        sock = connection.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 256 << 10)  # or the kernel takes pages in great gulps
        assert await connection.ask(stored(record)) == [b"OK"]


async def test_a_cancelled_put_sends_nothing_more() -> None:
    """What has not left by then is never sent: the peer sees the page's first bytes, as they were, and the end."""
    seen = bytearray()
    ended = asyncio.Event()
    begin = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await begin.wait()
        while data := await reader.read(1 << 20):
            seen.extend(data)
        ended.set()

    record = blank(64 << 20)
    record.payload[:] = b"\x01" * (64 << 20)
    batch = stored(record)
    async with connected(script) as connection:
        task = asyncio.create_task(connection.ask(batch))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        record.payload[:] = b"\x02" * (64 << 20)
        begin.set()
        await ended.wait()
    assert 0 < len(seen) < 64 << 20
    assert b"\x02" not in seen[200:]
    del batch, task
    assert is_free(record)


async def test_pages_are_asked_for_only_so_far_ahead() -> None:
    """A server that answers the third question only after it has seen the fifth would wait for ever; of pages of 1 MiB
    4 are asked for ahead."""
    most = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal most
        asked = answered = 0
        while data := await reader.read(1 << 20):
            asked += data.count(b"GET")
            most = max(most, asked - answered)
            await asyncio.sleep(0.01)
            writer.write(b"$-1\r\n")
            answered += 1
            while answered < asked:
                writer.write(b"$-1\r\n")
                answered += 1
                await asyncio.sleep(0)

    async with connected(script) as connection:
        records = [blank(1 << 20) for _ in range(20)]
        assert await connection.ask(fetching(*records)) == [Result.MISS] * 20
    assert 2 <= most <= 4


@pytest.mark.parametrize("address", [  # the last as a cluster's map may name them
    HostPort(HOST, free_port()), HostPort("no-such-host.invalid", 1), HostPort("a..b", 1), HostPort("a\0b", 1),
], ids=["nobody", "no name", "empty label", "zero"])  # fmt: skip
async def test_nobody_there_is_unavailable_and_named(address: HostPort) -> None:
    with pytest.raises(BackendError, match=re.escape(str(address))):
        await server_of(RedisSettings(seeds=(address,))).ask(PING)


async def test_a_server_that_never_greets_is_a_time_out() -> None:
    async with peer(silent) as settings:
        with pytest.raises(Timeout):
            await server_of(settings, password="secret", stall=0.1).ask(PING)


@pytest.mark.parametrize("said", [
    b"-ERR unknown command 'AUTH', with args beginning with: 'hunter2'\r\n", b"-hunter2\r\n", b"+hunter2\r\n",
    b":hunter2\r\n", b"$hunter2\r\n", b"*hunter2\r\n", b"hunter2\r\n", b"-MOVED hunter2\r\n", b"-LOADING hunter2\r\n",
    b"-MOVED 1 hunter2:1\r\n", b"*1\r\n$7\r\nhunter2\r\n", b"hunter2",
])  # fmt: skip
async def test_what_the_server_says_to_a_password_is_not_repeated(said: bytes) -> None:
    async with peer(answers(said)) as settings:
        with pytest.raises(Unavailable) as caught:
            await server_of(settings, password="hunter2").ask(PING)
        assert "hunter2" not in str(caught.value)
        assert "ASYNCCACHE_REDIS_PASSWORD" in str(caught.value)


async def test_a_redis_py_that_connects_in_another_way_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no password was sent."""
    heard = b""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heard
        heard += await reader.read(100)

    async def connect(link: RedisConnection) -> None:
        pass

    monkeypatch.setattr(RedisConnection, "connect", connect)
    async with peer(script) as settings:
        with pytest.raises(ConfigError, match=r"redis-py \d+\.\d+.*_connect"):
            await server_of(settings, password="hunter2").ask(PING)
    assert b"hunter2" not in heard


async def test_a_connection_that_was_closed_while_it_was_made_is_none() -> None:
    """Just when there is a transport, and nothing else to wait for."""
    hung_up = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.read(100)
        hung_up.set()

    async with peer(script) as settings:
        link = RedisConnection(settings.seeds[0], settings)
        link.closed = True
        with pytest.raises(Unavailable):
            async with link.signed_in(5):
                pass
        await asyncio.wait_for(hung_up.wait(), 5)


async def test_connections_are_kept_and_shared() -> None:
    served = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        served += 1
        while await reader.read(100):
            await asyncio.sleep(0)
            writer.write(b"+PONG\r\n")

    async with peer(script) as settings:
        server = server_of(settings)
        for _ in range(5):
            assert await server.ask(PING) == [b"PONG"]
        assert served == 1
        await asyncio.gather(*(server.ask(PAGE) for _ in range(20)))
        assert 2 < served <= 1 + settings.connections
        server.close()
        with pytest.raises(Unavailable, match="closed"):
            await server.ask(PAGE)


async def test_who_waits_for_a_connection_gets_it_before_who_had_it() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(100):
            writer.write(b"+PONG\r\n")

    async with peer(script) as settings:
        server = server_of(settings)
        calls = Counter[int]()

        async def ask_again_and_again(worker: int) -> None:
            while sum(calls.values()) < 300:
                await server.ask(PING)
                calls[worker] += 1

        await asyncio.gather(*map(ask_again_and_again, range(3)))
        assert min(calls.values()) >= max(calls.values()) - 2, calls
        server.close()


async def test_what_is_remembered_of_a_failure_holds_no_pages() -> None:
    """Not even until the garbage collector comes by."""
    async with peer(silent) as settings:
        server = server_of(settings, stall=0.1)
        header, payload = mmap.mmap(-1, 64), mmap.mmap(-1, 4096)
        gc.disable()
        try:
            record = Record(memoryview(header), memoryview(payload))
            failed = asyncio.create_task(server.ask(fetching(record)))
            await asyncio.wait([failed])
            assert isinstance(failed.exception(), Timeout)
            del failed, record
            payload.close()                            # BufferError as long as anybody has a view of it
            header.close()
        finally:
            gc.enable()
        server.close()


async def test_answers_before_their_questions_end_the_connection_at_once() -> None:
    async with connected(answers(b":7\r\n" * 20, b"")) as connection:
        with pytest.raises(ProtocolError, match="not asked yet"):
            await asyncio.wait_for(connection.ask(fetching(*[blank(1 << 20)] * 20)), 2)


async def test_a_reply_that_drips_has_the_deadline_of_the_call() -> None:
    """It is never silent, so ``stall`` never ends it."""
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"PING" in await reader.read(1 << 20):
            writer.write(b"+PONG\r\n")
            return
        with suppress(ConnectionError):
            while True:
                writer.write(b"0")
                await asyncio.sleep(0.01)

    async with peer(script) as settings:
        url = f"redis://{settings.seeds[0]}?cluster=off&stall=10s"
        store = await open_store(url, LAYOUT, timeout=0.3)
        assert store is not None
        async with asyncio.timeout(5):
            assert await store.exists([page_key("x")]) == [Result.FAILED]
        assert store.stats()["timeouts"] == 1
        await store.aclose()


async def test_small_questions_do_not_wait_behind_pages() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 20):
            if data != PING[0][0]:
                await asyncio.Event().wait()
            writer.write(b"+PONG\r\n")

    async with peer(script) as settings:
        server = server_of(settings)
        pages = [asyncio.create_task(server.ask(fetching(blank(10)))) for _ in range(10)]
        await asyncio.sleep(0.01)
        assert await server.ask(PING) == [b"PONG"]
        for task in pages:
            task.cancel()
        await asyncio.wait(pages)
        server.close()


@pytest.mark.parametrize("password", ["p", ""], ids=["greeted", "not greeted"])
async def test_a_server_that_accepts_and_hangs_up_is_left_alone(password: str) -> None:
    """Without a password nothing is said over a new connection, so that it is lost only when it has been asked."""
    attempts = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1

    async with peer(script) as settings:
        server = server_of(settings, password=password)
        outcomes = await asyncio.gather(*(server.ask(PAGE) for _ in range(100)), return_exceptions=True)
        assert all(isinstance(outcome, Unavailable) for outcome in outcomes)
        assert attempts <= settings.connections
        assert "left alone" in str(outcomes[-1])
        server.close()


async def test_a_server_that_has_come_back_is_asked_though_the_call_that_tried_it_was_cancelled() -> None:
    """The first call after a failure is the probe of the server's breaker: others are refused meanwhile."""
    tries = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal tries
        tries += 1
        number = tries
        while number > 1 and await reader.read(1 << 20):
            if number == 2:
                await asyncio.Event().wait()
            writer.write(b"+PONG\r\n")

    async with peer(script) as settings:
        server = server_of(settings)
        with pytest.raises(Unavailable):
            await server.ask(PING)
        await asyncio.sleep(0.15)
        probe = asyncio.create_task(server.ask(PING))
        await until(lambda: tries == 2)
        probe.cancel()
        await asyncio.wait([probe])
        async with asyncio.timeout(20):
            assert await server.ask(PING) == [b"PONG"]
        server.close()


@pytest.mark.parametrize("waits_for", ["a greeting", "TLS", "an answer"])
async def test_closing_ends_a_connection_that_is_being_made_and_fails_what_is_under_way(waits_for: str) -> None:
    """At once, and not when ``stall`` is over."""
    async with peer(silent) as settings:
        tls = ssl.create_default_context() if waits_for == "TLS" else None
        server = server_of(settings, password="secret" * (waits_for == "a greeting"), tls=tls, stall=60.0)
        task = asyncio.create_task(server.ask(PING))
        await asyncio.sleep(0.05)
        server.close()
        async with asyncio.timeout(2):
            with pytest.raises(BackendError, match="closed" if waits_for == "an answer" else None):
                await task


async def test_a_hung_server_holds_up_those_who_asked_and_not_the_line() -> None:
    async with peer(silent) as settings:
        server = server_of(settings, stall=0.2, connections=2)
        began = asyncio.get_running_loop().time()
        outcomes = await asyncio.gather(*(server.ask(PAGE) for _ in range(20)), return_exceptions=True)
        assert sum(isinstance(outcome, Timeout) for outcome in outcomes) == 2
        assert asyncio.get_running_loop().time() - began < 2
        server.close()


# The protocol without I/O: replies cut at every place, and what is sent, byte for byte.


HIT, MISS, CORRUPT = Result.HIT, Result.MISS, Result.CORRUPT
GUARD = 16


class Page:
    """A record with guards around its payload."""

    def __init__(self, size: int) -> None:
        self.memory = bytearray(b"\xaa" * (size + 2 * GUARD))
        self.header = bytearray(64)
        self.record = Record(memoryview(self.header), memoryview(self.memory)[GUARD : GUARD + size])

    @property
    def value(self) -> bytes:
        return bytes(self.header) + bytes(self.record.payload)

    @property
    def guarded(self) -> bool:
        return self.memory[:GUARD] == self.memory[-GUARD:] == b"\xaa" * GUARD


def _bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def land(reader: Reader, data: bytes) -> None:
    """What a socket does with ``data``, one buffer after the other."""
    while data:
        buffer = reader.buffer
        count = min(len(buffer), len(data))
        buffer[:count] = data[:count]
        data = data[count:]
        reader.received(count)


def _read(parts: Sequence[bytes], sinks: Sequence[Record | None], spare: int = 64) -> list[Any]:
    reader = Reader(sinks, spare)
    for part in parts:
        land(reader, part)
    assert reader.missing == 0
    return [str(reply) if isinstance(reply, Refusal) else reply for reply in reader.replies]


PLAIN = [(b"+OK\r\n", b"OK"), (b":-7\r\n", -7), (b"$-1\r\n", None), (b"-OOM no room\r\n", "OOM no room"),
         (b":1234567\r\n", 1234567),         (b"-ERR\r\n", "ERR"), (b"+\r\n", b""), (b":0\r\n", 0)]  # fmt: skip


@pytest.mark.parametrize("seed", range(24))
def test_replies_of_every_kind_come_out_as_they_are_however_they_are_cut(seed: int) -> None:
    """Pages that are there, missing, refused or of another length (however long), among replies that are no pages: cut
    at every place, and in small pieces. No byte beside a payload is touched, and what is there is whole."""
    rng, parts, sinks, expected = Random(seed), list[bytes](), list[Page | None](), list[Any]()
    size = rng.choice([0, 1, 30, 300, 40_000])
    pages = list[tuple[int, bytes]]()
    for at in range(rng.randint(1, 9)):
        if rng.random() < 0.3:
            sinks.append(None)
            part, reply = rng.choice(PLAIN)
        else:
            sinks.append(Page(size))
            value = rng.randbytes(64 + size)
            part, reply = rng.choice([(_bulk(value), HIT)] * 3 + [
                (b"$-1\r\n", MISS), (b"-LOADING x\r\n", "LOADING x"), (_bulk(value + b"x"), CORRUPT),
                (_bulk(b""), CORRUPT), (_bulk(bytes(200_000 if size == 300 else 95 + size)), CORRUPT),
            ])  # fmt: skip
            pages += [(at, value)] if reply is HIT else []
        parts.append(part)
        expected.append(reply)
    data = b"".join(parts)
    short = len(data) < 2500
    cuts = [[at, len(data)] for at in (range(len(data)) if short else rng.sample(range(len(data)), 8))]
    steps = [range(step, len(data) + step, step) for step in ((1, 2, 3, 7, 63, 64, 65, 255) if short else (9999,))]
    for ends in (*cuts, *steps):
        for sink in filter(None, sinks):
            sink.memory[GUARD:-GUARD] = bytes(size)
        pieces = [data[begin:end] for begin, end in pairwise([0, *ends])]
        records = [None if sink is None else sink.record for sink in sinks]
        assert _read(pieces, records, rng.choice([16, 64, 4096])) == expected
        for at, value in pages:
            assert getattr(sinks[at], "value", None) == value
        assert all(sink is None or sink.guarded for sink in sinks)


def test_pages_are_received_where_they_belong() -> None:
    """Nothing but what is between two of them is received anywhere else."""
    pages = [Page(100_000 + i) for i in range(5)]
    reader = Reader([page.record for page in pages])
    for page in pages:
        assert len(reader.buffer) == len("$100064\r\n") + 64 + 2 * (page is not pages[0])
        land(reader, b"\r\n"[: 2 * (page is not pages[0])] + b"$%d\r\n" % (64 + len(page.record.payload)) + bytes(64))
        assert (reader.buffer.obj, len(reader.buffer)) == (page.memory, len(page.record.payload))
        land(reader, bytes(len(page.record.payload)))
    assert len(reader.buffer) == 2
    land(reader, b"\r\n")
    assert reader.replies == [HIT] * 5


def test_after_the_last_page_the_next_byte_has_a_place_and_is_an_error() -> None:
    page = Page(10)
    reader = Reader([page.record])
    land(reader, _bulk(bytes(74)))
    assert reader.missing == 0
    with pytest.raises(ProtocolError, match="nobody asked"):
        land(reader, b"x")


def test_a_reader_that_forgets_holds_no_buffer() -> None:
    page = Page(100)
    reader = Reader([page.record])
    land(reader, b"$164\r\n" + bytes(64) + b"abc")
    reader.forget()
    page.record.header.release()
    page.record.payload.release()
    page.memory.extend(b"x")


NO_PAGE = [b"HTTP/1.1 400\r\n", b"$x\r\n", b"$1a\r\n", b"$68\r\n" + bytes(68) + b"\r\r"]
NO_ANSWER = [
    b"HTTP/1.1 400\r\n", b"$x\r\n", b"\r\n", b"$3\r\nabcd\r\n", b":1\r\n:2\r\n", b"*x\r\n", b"x" * 70, b"$\r\n",
    b":1\r\n:", b"$99999999999999\r\n", b"$1\r\n1\r\n", b"$0\r\n\r\n", b"$-2\r\n",
]  # fmt: skip
LISTS = [b"*1\r\n:1\r\n", b"*0\r\n", b"*-1\r\n", b"%1\r\n+a\r\n:1\r\n"]


@pytest.mark.parametrize(("page", "data"), [
    *((True, data) for data in [*NO_PAGE, *LISTS]), *((False, data) for data in [*NO_ANSWER, *LISTS]),
])  # fmt: skip
def test_what_is_no_answer_is_an_error(page: bool, data: bytes) -> None:
    """Lists are asked for by redis-py, so that here one is no answer."""
    with pytest.raises(ProtocolError):
        land(Reader([Page(4).record if page else None], 64), data)


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(map(_bulk, words))


def test_commands_are_framed_by_length() -> None:
    names = [b"a\r\nFLUSHALL\r\n", b"b" * 13]
    assert about(b"GET", names) == [_command(b"GET", name) for name in names]
    assert about(b"GET", []) == []


@pytest.mark.parametrize("ttl_ms", [0, 90_000])
def test_a_page_is_sent_from_where_it_lies(ttl_ms: int) -> None:
    page = Page(100)
    key = b"p:" + b"\r\n$0*" * 6 + b"xx"
    buffers = list(joined([*storing([key], [page.record], ttl_ms), b"GET\r\n", b"X"]))
    assert buffers[1].obj is page.memory  # type: ignore[union-attr]
    assert len(buffers) == 3
    options = (b"NX", b"PX", b"90000") if ttl_ms else (b"NX",)
    assert b"".join(buffers) == _command(b"SET", key, page.value, *options) + b"GET\r\nX"


def test_neighbours_share_a_buffer() -> None:
    requests = storing([b"k%d" % i for i in range(5)], [Page(100).record for _ in range(5)])
    assert len(list(joined(requests))) == 11
    assert len(list(joined([b"a", b"b", b"c"]))) == 1
    assert list(joined([])) == []


# Settings from a URL and from the environment. Secrets appear nowhere.


def _of(url: str, **environment: str) -> RedisSettings:
    return settings_of(parse_url(url), {f"ASYNCCACHE_REDIS_{name}": value for name, value in environment.items()})


def test_a_host_is_enough() -> None:
    settings = _of("redis://kv.internal")
    assert settings == RedisSettings(seeds=(HostPort("kv.internal", 6379),))
    assert str(settings) == "redis://kv.internal:6379/0?prefix=asynccache:"


def test_everything_said() -> None:
    settings = _of(
        "redis://al%3Aice:s%40cret@[::1]:7000/3?prefix=team-a/llama:&ttl=12h&connections=2&stall=1.5&cluster=off"
    )
    assert settings.seeds == (HostPort("::1", 7000),)
    assert (settings.database, settings.username, settings.password) == (3, "al:ice", "s@cret")
    assert (settings.prefix, settings.ttl, settings.connections, settings.stall) == ("team-a/llama:", 43200, 2, 1.5)
    assert str(settings.seeds[0]) == "[::1]:7000"


@pytest.mark.parametrize(("text", "seconds"), [("0", 0), ("90", 90), ("1.5m", 90), ("7d", 604800), ("0.0015", 0.002)])
def test_times(text: str, seconds: float) -> None:
    assert _of(f"redis://h?ttl={text}").ttl == seconds


def test_the_environment_says_what_the_url_leaves_out() -> None:
    environment = {"USERNAME": "u", "PASSWORD": "p"}
    for url, user, password in (
        ("redis://h", "u", "p"),
        ("redis://a:b@h", "a", "b"),
        ("redis://:b@h", "", "b"),
        ("redis://a@h", "a", "p"),
    ):
        settings = _of(url, **environment)
        assert (settings.username, settings.password) == (user, password)


def test_a_password_that_is_no_text_is_not_quoted() -> None:
    assert "hunter2" not in repr(_of("redis://h", PASSWORD="hunter2\udcff"))


def test_names_are_of_one_store() -> None:
    settings, longer = _of("redis://h?prefix=a:"), _of("redis://h?prefix=a:b")
    key = bytes(range(32))
    assert settings.key_of(b"a:" + key) == key
    assert [settings.key_of(name) for name in (b"a:b" + key, b"a:", b"b:" + key, b"")] == [None] * 4
    assert longer.key_of(b"a:" + key) is None
    assert _of("redis://h?prefix=a*[x]?^-\\").pattern == rb"a\*\[x\]\?\^\-\\*"


def test_certificates_by_url_and_environment(tmp_path: Path) -> None:
    made = Certificate(tmp_path)
    assert _of("redis://h").tls is None
    for settings in (
        _of(f"rediss://h?ca={made.certificate}&cert={made.certificate}&key={made.key}&tls_name=kv"),
        _of("rediss://h?tls_name=kv", CA=str(made.certificate), CERT=str(made.certificate), KEY=str(made.key)),
    ):
        assert settings.tls is not None
        assert settings.tls.verify_mode is ssl.CERT_REQUIRED
        assert settings.tls.check_hostname
        assert "localhost" in str(settings.tls.get_ca_certs())
        assert settings.tls_name == "kv"


@pytest.mark.parametrize(("url", "says"), [
    ("redis:", "host:port"), ("redis://h:0", "host:port"), ("redis://h,", "host:port"), ("redis://h/x", "database"),
    ("redis://h/1000000", "database"), ("redis://h?prefix=a%0A", "prefix"), ("redis://h?cluster=maybe", "cluster"),
])  # fmt: skip
def test_what_is_wrong_is_named(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        _of(url)


def test_no_form_of_the_settings_shows_a_secret() -> None:
    settings = _of("redis://alice:hunter2@h")
    assert "hunter2" not in f"{settings} {settings!r} {[settings]}"
    assert "alice" not in f"{settings} {settings!r}"


