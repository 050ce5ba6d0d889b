"""Clients that lie: wrong frames, endless ones, huge lengths, foreign slots, and one that writes over all of the
memory."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from asynccache.errors import ConfigError, Unavailable
from asynccache.host import server as server_module
from asynccache.host import wire
from asynccache.host.takeover import take_over
from asynccache.storage import Result
from asynccache.testing.backend_suite import get_all, keys_of, put_all, record_of, same
from tests.host.host_kit import client, opened, served, serving, socket_path
from tests.waiting import until

HELLO = wire.frame(wire.Greeting(wire.VERSION, wire.OLDEST))
KEYS = [bytes([n]) * 32 for n in range(3)]
encode = msgspec.msgpack.encode


def framed(body: bytes, length: int | None = None) -> bytes:
    return struct.pack("<I", len(body) if length is None else length) + body


WRONG = {
    "nothing but zeros": bytes(4096),
    "a huge length": framed(b"", 0xFFFFFFFF),
    "one more than there may be": HELLO + framed(b"x" * 100, wire.MOST_FRAME + 1),
    "a long greeting": framed(b"x" * 8000),
    "no MessagePack": framed(b"\xc1\xc1\xc1"),
    "HTTP": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "no greeting first": wire.frame(wire.Exist(1, KEYS, ["full"] * 3)),
    "a greeting twice": HELLO + HELLO,
    "an unknown request": HELLO + framed(encode(["Explode", 1])),
    "a short key": HELLO + framed(encode(["Exist", 1, [b"x"], ["full"]])),
    "too many keys": HELLO + framed(encode(["Exist", 1, [KEYS[0]] * 5000, []])),
    "a negative size": HELLO + framed(encode(["Find", 1, KEYS[:1], ["full"], [-1]])),
    "an endless nest": HELLO + framed(b"\x91" * 5000),
    "a text that is none": HELLO + framed(encode(["Exist", 1, [KEYS[0]]])[:-33] + b"\xa2\xff\xfe"),
    "a number for a list": HELLO + framed(encode(["Publish", 1, 7])),
}
ODD = {
    "fewer sizes than keys": wire.Find(1, KEYS, ["full"] * 3, [1]),
    "fewer pools than keys": wire.Reserve(1, KEYS, [], [1, 1, 1]),
    "generations that are missing": wire.Damaged(1, KEYS, []),
    "fewer generations than slots": wire.Publish(1, [0, 1], [0]),
}
HARMLESS: list[Any] = [
    wire.Publish(1, [0, 1, 2, 1 << 61], [0, 0, 0, 7]), wire.GiveBack([0, 1, 2, 5, 1 << 61], [0, 0, 0, 0]),
    wire.Reserve(2, KEYS, ["full"] * 3, [0, 1 << 61, 1 << 40]), wire.Damaged(3, KEYS, [0, 1, 2]),
    wire.Enumerate(4, 1 << 61), wire.Find(5, KEYS, ["x"] * 3, [0, 1, 1 << 61]), wire.Exist(6, [], []),
]  # fmt: skip


def connected(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    sock.setblocking(False)
    return sock


async def is_closed(sock: socket.socket) -> bool:
    loop = asyncio.get_running_loop()
    with suppress(ConnectionError):
        async with asyncio.timeout(10):
            while await loop.sock_recv(sock, 1 << 16):
                pass
    return True


@pytest.mark.parametrize("what", WRONG)
async def test_wrong_frames_end_their_connection_and_no_other(what: str) -> None:
    keys = keys_of(4)
    async with served() as (server, backend):
        stored = await put_all(backend, keys)
        with connected(server.path) as sock:
            await asyncio.get_running_loop().sock_sendall(sock, WRONG[what])
            assert await is_closed(sock)
        assert server.table.counts["malformed"] == 1
        assert same(stored, (await get_all(backend, keys))[1])
        assert backend.stats()["connects"] == 1


@pytest.mark.parametrize("what", ODD)
async def test_requests_that_make_no_sense_are_refused(what: str) -> None:
    async with served() as (_, backend):
        channel = await backend._connection.ready()
        with pytest.raises(Exception, match="differ in number"):
            await channel.ask(lambda number: type(ODD[what])(number, *msgspec.structs.astuple(ODD[what])[1:]))


async def test_foreign_slots_and_absurd_sizes_change_nothing() -> None:
    keys = keys_of(6)
    async with served() as (server, backend):
        stored = await put_all(backend, keys)
        with connected(server.path) as sock:
            await asyncio.get_running_loop().sock_sendall(sock, HELLO + b"".join(map(wire.frame, HARMLESS)))
            await until(lambda: server.table.counts["no_room"] == 3)
            assert same(stored, (await get_all(backend, keys))[1])
            server.table.audit()


async def test_noise_ends_in_no_error_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    path, random = socket_path(), Random(35)
    good = [HELLO, *map(wire.frame, [*HARMLESS, *ODD.values(), wire.RemoveAll(7), wire.Tell(8), wire.Secure(9)])]
    async with serving(path) as server:
        for _ in range(150):
            data = bytearray(HELLO + b"".join(random.choices(good, k=4)))
            for _ in range(random.randrange(4)):
                data[random.randrange(len(data))] = random.randrange(256)
            with connected(path) as sock:
                await asyncio.get_running_loop().sock_sendall(sock, data[: random.randrange(1, len(data) + 1)])
                await asyncio.sleep(0)
        await until(lambda: not server._clients)
        server.table.audit()
        backend = await client(path)
        await put_all(backend, keys_of(3))
        await backend.aclose()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_client_that_never_greets_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "GREETING_TIME", 0.1)
    path = socket_path()
    async with serving(path) as server:
        with connected(path) as sock:
            assert await is_closed(sock)
        await until(lambda: not server._clients)


async def test_a_client_that_reads_no_answers_is_not_read_from_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MOST_UNREAD", 1 << 16)
    path = socket_path()
    ask = wire.frame(wire.Exist(1, KEYS * 300, []))
    async with serving(path) as server:
        with connected(path) as sock:
            await asyncio.get_running_loop().sock_sendall(sock, HELLO)
            await until(lambda: any(one.session for one in server._clients))
            [glutton] = server._clients
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(sock, ask * 400), 1.5)
            assert glutton._transport.get_write_buffer_size() < 1 << 21
            backend = await client(path)
            await put_all(backend, keys_of(3))
            await backend.aclose()


ASKS = """
import asyncio, sys
from asynccache.testing.backend_suite import keys_of
from tests.host.host_kit import client

async def main():
    print(await (await client(sys.argv[1])).exists(keys_of(1)))

asyncio.run(main())
"""


@pytest.mark.parametrize(("limit", "why"), [
    ("MOST_CLIENTS", "there are 3 connections already"), ("MOST_OF_ONE", "3 connections are of process {} already"),
])  # fmt: skip
async def test_too_many_connections_are_refused_and_served_when_others_have_gone(
    limit: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all processes, or of one; another has a share of its own then."""
    monkeypatch.setattr(server_module, limit, 3)
    path = socket_path()
    async with serving(path) as server:
        some = [await client(path) for _ in range(3)]
        late = await client(path)  # an engine starts all the same
        await asyncio.sleep(0.06)
        with pytest.raises(Unavailable, match=why.format(os.getpid())):
            await late.exists(keys_of(1))
        if limit == "MOST_OF_ONE":
            other = await asyncio.create_subprocess_exec(sys.executable, "-c", ASKS, path, stdout=subprocess.PIPE)
            assert (await other.communicate())[0] == b"[<Result.MISS: 0>]\n"
        await some.pop().aclose()
        await until(lambda: len(server._clients) == 2)
        await asyncio.sleep(0.06)
        await put_all(late, keys_of(3))
        for one in (*some, late):
            await one.aclose()


async def reserve(sock: socket.socket, key: bytes) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, HELLO + wire.frame(wire.Reserve(1, [key], ["full"], [4096])))


@pytest.mark.parametrize("seen", [True, False])
async def test_where_nothing_tells_processes_apart_no_connection_frees_what_another_has_reserved(
    monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    """Before Linux 6.9 all pidfds have one inode, and a process of another container no number, as here."""
    monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result([0] * 10))
    if not seen:
        monkeypatch.setattr(Path, "read_text", lambda self: "Pid:\t0\n")
    monkeypatch.setattr(server_module, "MOST_OF_ONE", 3)
    path = socket_path()
    async with serving(path) as server:
        with connected(path) as one, connected(path) as two:
            await reserve(one, KEYS[0])
            await reserve(two, KEYS[1])
            await until(lambda: server.table.reserved_bytes == 2 * 4096)
            assert len(server._peers) == (1 if seen else 2)
            await asyncio.get_running_loop().sock_sendall(two, wire.frame(wire.Bye()))
            await until(lambda: server.table.reserved_bytes == 4096)
            with connected(path), connected(path), connected(path) as late:
                assert await is_closed(late)
        names = [peer.writer.name for peer in server._peers]
        assert len([name for name in names if str(os.getpid()) in name]) == len(names)


async def test_a_connection_that_ends_well_frees_nothing_that_a_lost_one_has_reserved() -> None:
    """A thread of the process may still copy there."""
    path = socket_path()
    async with serving(path) as server:
        with connected(path) as lost:
            await reserve(lost, KEYS[0])
            await until(lambda: server.table.reserved_bytes == 4096)
        await until(lambda: not server._clients)
        with connected(path) as well:
            await reserve(well, KEYS[1])
            await until(lambda: server.table.reserved_bytes == 2 * 4096)
            await asyncio.get_running_loop().sock_sendall(well, wire.frame(wire.Bye()))
        await until(lambda: not server._clients)
        assert server.table.reserved_bytes >= 4096


async def test_a_scribbler_over_all_of_the_memory_costs_hits_and_never_gives_a_wrong_byte() -> None:
    path, keys = socket_path(), keys_of(40)
    async with serving(path) as server, opened(path) as store:
        pages = [record_of(key).payload for key in keys]
        size, random = server.memory.layout.size, Random(1)
        for what in range(6):
            assert set(await store.put(keys, pages)) <= {Result.HIT, Result.CORRUPT}
            fd = os.dup(server.memory.fd)
            with mmap.mmap(fd, size) as own:  # generations, headers and payloads, as a client sees them
                for _ in range(30) if what else ():
                    at = random.randrange(size - 4096)
                    own[at : at + 4096] = random.randbytes(4096)
                if what == 5:
                    own[:] = bytes(size)
            os.close(fd)
            fetched = [memoryview(bytearray(16384)) for _ in keys]
            results = await store.get(keys, fetched)
            for result, page, got in zip(results, pages, fetched, strict=True):
                assert result is not Result.HIT or page == got
            assert what or results == [Result.HIT] * 40
        await store.delete(keys)
        assert server.table.reserved_bytes == 0


async def test_small_requests_with_long_answers_are_answered_as_fast_as_the_answers_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "MOST_UNREAD", 1 << 16)
    count = 1000
    async with served(memory=32 << 20) as (server, backend):
        await put_all(backend, keys_of(500))
        loop, frames, answers = asyncio.get_running_loop(), wire.Frames(1 << 20), 0
        with connected(server.path) as sock:
            await loop.sock_sendall(sock, HELLO + wire.frame(wire.Enumerate(1, 0)) * count)
            await until(lambda: len(server._clients) == 2 and all(one.session for one in server._clients))
            await asyncio.sleep(0.2)
            waiting = max(one._transport.get_write_buffer_size() for one in server._clients)
            assert waiting < 1 << 20, f"{waiting} bytes wait for a client that reads nothing"
            async with asyncio.timeout(60):
                while answers < 1 + count:
                    answers += len(list(frames.feed(await loop.sock_recv(sock, 1 << 20))))


async def test_a_client_that_dies_before_its_connection_begins_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    path = socket_path()
    async with serving(path) as server:
        with connected(path):
            server._accept()
            [peer] = server._peers
            server._died(peer)
            await until(lambda: not server._clients)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_without_file_descriptors_the_server_waits_and_takes_connections_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = socket_path()
    async with serving(path) as server:
        listener, tries = server._listener, list[int]()

        class Full:
            def accept(self) -> Any:
                tries.append(1)
                raise OSError(24, "Too many open files")

            def __getattr__(self, name: str) -> Any:
                return getattr(listener, name)

        monkeypatch.setattr(server, "_listener", Full())
        with connected(path) as sock:
            await asyncio.sleep(0.2)
            assert len(tries) == 1
            monkeypatch.setattr(server, "_listener", listener)
            await asyncio.get_running_loop().sock_sendall(sock, HELLO)
            await until(lambda: any(one.session for one in server._clients))


async def test_only_the_servers_own_user_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_of(3)
    async with served(group=str(os.getgid())) as (server, backend):
        stored = await put_all(backend, keys)
        monkeypatch.setattr(server_module, "peer_of", lambda sock: (os.getpid(), 4242, os.getgid()))
        with pytest.raises(ConfigError, match="own user may take over"):
            await asyncio.to_thread(take_over, server.path)
        assert not server.draining
        assert same(stored, (await get_all(backend, keys))[1])
