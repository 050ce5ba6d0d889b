"""Servers that are away, come back or differ; clients that are cancelled, forked or lied to."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest

from asynccache.errors import BackendError, ConfigError, Unavailable
from asynccache.host import wire
from asynccache.storage import RECORD_SCHEMA, PageKey, Result, StoreLayout
from asynccache.testing.backend_suite import blank, get_all, keys_of, put_all, record_of, same
from tests.host.host_kit import client, opened, served, serving, socket_path
from tests.waiting import until

HIT, MISS, FAILED = Result.HIT, Result.MISS, Result.FAILED


async def reserved(channel: Any, keys: Sequence[PageKey]) -> Any:
    """The places that a client is granted for these pages."""
    names = [key.key for key in keys]
    return await channel.ask(
        lambda number: wire.Reserve(number, names, ["full"] * len(keys), [16384] * len(keys)))


async def test_without_a_server_a_store_opens_and_its_calls_fail_at_once() -> None:
    async with opened(socket_path()) as store:
        took = []
        for _ in range(200):
            began = time.perf_counter()
            assert await store.exists(keys_of(256)) == [FAILED] * 256
            took.append(time.perf_counter() - began)
        assert sorted(took)[150] < 0.001
        assert "no host process answers" in str(store.last_error)


async def test_a_flush_without_a_server_says_only_what_it_cannot_promise() -> None:
    path, keys = socket_path(), keys_of(3)
    backend = await client(path)
    began = time.perf_counter()
    await backend.flush()  # nothing was stored: an engine that has never met a server ends like any other
    assert time.perf_counter() - began < 0.05
    async with serving(path):
        await asyncio.sleep(0.06)
        await put_all(backend, keys)
        await backend.flush()
    await backend.flush()
    async with serving(path):
        await asyncio.sleep(0.06)
        await put_all(backend, keys)
    for _ in range(2):
        with pytest.raises(Unavailable):
            await backend.flush()
    async with serving(path):
        await asyncio.sleep(0.06)
        await backend.flush()
    await backend.aclose()
    with pytest.raises(BackendError, match="closed"):
        await backend.flush()


async def test_a_server_that_comes_back_is_used_again_within_a_second() -> None:
    path, keys = socket_path(), keys_of(3)
    pages = [record_of(key).payload for key in keys]
    async with opened(path) as store:

        async def is_back() -> bool:
            return FAILED not in await store.exists(keys)

        async def stores() -> bool:
            return await store.put(keys, pages) == [HIT] * 3

        for _ in range(3):
            until_away = time.monotonic() + 0.6
            while time.monotonic() < until_away:  # long enough for the longest back-off of a usual store's to grow
                assert HIT not in await store.exists(keys)
                await asyncio.sleep(0.02)
            async with serving(path):
                began = time.monotonic()
                await until(is_back)
                assert await store.exists(keys) == [MISS] * 3, "pages of an earlier server"
                await until(stores)
                assert time.monotonic() - began < 1.0
                fetched = [blank(key).payload for key in keys]
                assert await store.get(keys, fetched) == [HIT] * 3
                assert fetched == pages


async def test_a_page_that_is_evicted_while_it_is_copied_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_of(4)
    async with served() as (server, backend):
        await put_all(backend, keys)
        places = type(backend._connection.channel.mapping).places  # type: ignore[union-attr]

        def slow(self: Any, offsets: Any, sizes: Any) -> Any:
            server.table.drop(keys[2].key)
            return places(self, offsets, sizes)

        monkeypatch.setattr(type(backend._connection.channel.mapping), "places", slow)  # type: ignore[union-attr]
        results, _ = await get_all(backend, keys)
        assert results == [HIT, HIT, MISS, HIT]
        assert backend.stats()["overtaken"] == 1


async def test_slots_of_a_lost_connection_wait_for_the_process_or_its_next_connection() -> None:
    keys = keys_of(3)
    async with served() as (server, backend):
        channel = await backend._connection.ready()
        answer = await reserved(channel, keys)
        channel._transport.abort()
        await until(lambda: not server._clients)
        assert len(answer.slots) == 3
        assert server.table.reserved_bytes == 3 * 16384, "a thread of that process may still be copying"
        backend._connection.owe(channel, wire.GiveBack(answer.slots, answer.generations))
        await backend.exists(keys)
        await until(lambda: server.table.reserved_bytes == 0)


async def test_a_put_whose_connection_is_lost_is_published_over_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_of(3)
    async with served() as (server, backend):
        channel = await backend._connection.ready()
        ask, lost = type(channel).ask, list[int]()

        async def losing(self: Any, make: Any) -> Any:
            if isinstance(make(0), wire.Publish) and not lost:
                lost.append(1)
                self._transport.abort()
                await until(lambda: self.lost is not None)
            return await ask(self, make)

        monkeypatch.setattr(type(channel), "ask", losing)
        stored = await put_all(backend, keys)
        assert lost
        assert same(stored, (await get_all(backend, keys))[1])
        assert server.table.reserved_bytes == 0


@pytest.mark.parametrize(("ours", "theirs", "fits"), [
    ((1, 1), (1, 1), True), ((2, 1), (1, 1), True), ((1, 1), (2, 1), True), ((3, 2), (2, 1), True),
    ((3, 2), (1, 1), False), ((1, 1), (3, 2), False),
])  # fmt: skip
async def test_versions_that_are_one_apart_understand_each_other(
    ours: tuple[int, int], theirs: tuple[int, int], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = socket_path()

    def become(version: tuple[int, int]) -> None:
        monkeypatch.setattr(wire, "VERSION", version[0])
        monkeypatch.setattr(wire, "OLDEST", version[1])

    async with serving(path):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(path)
        sock.sendall(wire.frame(wire.Greeting(*theirs)))
        become(ours)
        await asyncio.sleep(0)
        sock.setblocking(False)
        data = await asyncio.get_running_loop().sock_recv(sock, 4096)
        answer = wire.read_welcome(data[4:])
        if fits:
            assert isinstance(answer, wire.Welcomed)
            assert answer.version == min(ours[0], theirs[0])
        else:
            assert isinstance(answer, wire.Refused)
            assert f"{ours[1]} to {ours[0]}, the client {theirs[1]} to {theirs[0]}" in answer.why
        sock.close()


async def test_a_client_that_is_refused_is_told_why_when_it_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    path = socket_path()
    async with serving(path):
        monkeypatch.setattr("asynccache_backends.host.connection.peer_of", lambda sock: (1, 0, 0))
        with pytest.raises(ConfigError, match="it is of user 0; if that is right, say so: owner=0"):
            await client(path, "?owner=12345")
        monkeypatch.undo()
        monkeypatch.setattr("asynccache.host.server.peer_of", lambda sock: (os.getpid(), 4242, 4242))
        monkeypatch.setattr("asynccache.host.server.groups_of", lambda sock: [])
        with pytest.raises(ConfigError, match="and the client of user 4242"):
            await client(path)


async def test_only_this_user_may_connect_from_the_first_moment_on() -> None:
    path = socket_path()
    async with serving(path):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    async with serving(path, group=str(os.getgid())):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o660


async def test_a_socket_is_not_taken_away_from_a_server_and_one_of_a_dead_server_is() -> None:
    path = socket_path()
    async with serving(path):
        with pytest.raises(ConfigError, match="a host process listens there; --replace takes over"):
            async with serving(path):
                pass
    async with serving(path):  # somebody removes its socket, and another server comes: that one's stays
        os.unlink(path)
        later = serving(path)
        await later.__aenter__()
    assert os.stat(path)
    await later.__aexit__(None, None, None)
    with pytest.raises(FileNotFoundError):
        os.stat(path)
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(path)
    dead.close()
    async with serving(path):
        pass
    os.close(os.open(path, os.O_CREAT))
    with pytest.raises(ConfigError, match="there is something that is no socket"):
        async with serving(path):
            pass


async def test_a_forked_child_has_no_store() -> None:
    async with served() as (_, backend):
        keys = keys_of(3)
        backend._connection._pid += 1
        with pytest.raises(BackendError, match="forked"):
            await backend.exists(keys)
        await backend.aclose()  # says no Bye: that would free slots which the parent writes
        backend._connection._pid -= 1
        backend._calls.closed = False
        stored = await put_all(backend, keys)
        assert same(stored, (await get_all(backend, keys))[1])
        assert backend.stats()["connects"] == 1
        await backend.aclose()


async def test_a_slot_is_given_back_by_whom_it_was_granted_to_and_by_no_earlier_call() -> None:
    """A call that is cancelled while its pages are published gives them back; meanwhile another call of its process may
    have been granted the same slot."""
    keys = keys_of(2)
    async with served() as (server, backend):
        channel = await backend._connection.ready()
        one, two = await reserved(channel, keys[:1]), await reserved(channel, keys[:1])
        for granted in (one, two):  # the second one's slot comes free, since the first was faster
            await channel.ask(lambda number: wire.Publish(number, granted.slots, granted.generations))  # noqa: B023
        three = await reserved(channel, keys[1:])
        assert three.slots == two.slots
        channel.tell(wire.GiveBack(two.slots, two.generations))
        assert (await channel.ask(lambda number: wire.Publish(number, two.slots, two.generations))).codes == bytes([3])
        assert server.table.reserved_bytes == 16384, "it is still being written"
        assert (await channel.ask(lambda number: wire.Publish(number, three.slots, three.generations))).codes == b"\1"
        server.table.audit()


async def test_a_search_that_was_cancelled_gives_nothing_back() -> None:
    keys = keys_of(3)
    async with served() as (server, backend):
        await put_all(backend, keys)
        channel = await backend._connection.ready()
        names = [key.key for key in keys]
        search = asyncio.create_task(channel.ask(lambda number: wire.Find(number, names, ["full"] * 3, [16384] * 3)))
        await asyncio.sleep(0)
        server.table.clear()
        search.cancel()
        granted = await reserved(channel, keys)
        await backend.exists(keys)
        assert len(granted.slots) == 3
        assert server.table.reserved_bytes == 3 * 16384


async def test_a_store_that_is_closed_gives_back_its_slots_though_the_process_has_others() -> None:
    path, keys = socket_path(), keys_of(3)
    async with serving(path) as server:
        first, second = await client(path), await client(path)
        await second.exists(keys)
        channel = await first._connection.ready()
        await reserved(channel, keys)
        assert server.table.reserved_bytes == 3 * 16384
        await first.aclose()
        await until(lambda: server.table.reserved_bytes == 0)
        await second.aclose()


async def test_closing_fails_the_calls_under_way_and_frees_what_they_had(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_of(30)
    async with served() as (server, backend):
        puts = [asyncio.create_task(backend.put(keys, [record_of(key) for key in keys])) for _ in range(3)]
        await asyncio.sleep(0)
        await backend.aclose()
        for put in puts:
            with suppress(BackendError):
                await put
        await until(lambda: not server._peers)
        assert server.table.reserved_bytes == 0


async def test_a_page_that_is_too_large_for_the_memory_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    path = socket_path()
    layout = StoreLayout({"full": 1 << 18, "other": 4096}, RECORD_SCHEMA)
    async with serving(path, memory=1 << 20), opened(path, layout) as store:
        large, small = PageKey("full", bytes(32)), PageKey("other", bytes([1] * 32))
        for _ in range(2):
            answers = await store.put([large, small], [memoryview(bytearray(1 << 18)), memoryview(bytearray(4096))])
            assert answers == [FAILED, HIT], "the other one is not held back"
        [told] = caplog.messages
        assert f"host:{path} stores no page of 262144 bytes: it takes 126976 at most, an eighth of its" in told
        assert store.backend.stats()["no_room"] == 2


async def test_listing_tells_every_page_and_counts_are_by_label() -> None:
    path = socket_path()
    async with serving(path):
        one, two = await client(path, "?label=a"), await client(path, "?label=b")
        keys = keys_of(2500, "swa")
        await put_all(one, keys[:1000])
        await put_all(two, keys[1000:])
        listed = [page async for batch in one.listing() for page in batch]
        assert {page.key for page in listed} == {key.key for key in keys} or len(listed) == one.stats()["pages"]
        counts, labels = await two.server_counts()
        assert counts["stored"] == 2500
        assert (labels["a"]["stored"], labels["b"]["stored"]) == (1000, 1500)
        await one.aclose()
        await two.aclose()
