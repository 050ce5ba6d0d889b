"""What only a Redis server does: it is full, refuses, wants to know who asks, forgets, lists; and maps of a cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import pytest
from asynccache_backends.redis import RedisBackend

from asynccache.errors import BackendError, Unavailable
from asynccache.storage import Result, Stored, StoreLayout, parse_url
from asynccache.testing.backend_suite import LAYOUT, blank, get_all, keys_of, page_key, put_all, record_of
from tests.storage.pages_kit import get, put
from tests.stores.kinds import backend_at, opened, until_answered
from tests.stores.redis_server import RedisServer
from tests.stores.server import HOST
from tests.waiting import until

# A real server that is killed, hung, emptied, full, or wants to know who asks.


HIT, MISS, CORRUPT, FAILED = Result.HIT, Result.MISS, Result.CORRUPT, Result.FAILED

BIG = StoreLayout({"full": 256 << 10}, LAYOUT.schema)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as started:
        yield started


async def put_big(backend: RedisBackend, count: int, first: int = 0) -> list[Result]:
    keys = [page_key(str(i)) for i in range(first, first + count)]
    return await backend.put(keys, [record_of(key, BIG) for key in keys])


class Full(NamedTuple):
    """A server without room, a backend that knows it, and the backend's clock."""

    server: RedisServer
    backend: RedisBackend
    clock: list[float]
    put: list[Result]                                  # what was said of the first 64 pages


@pytest.fixture
async def full(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Full]:
    clock = [0.0]
    monkeypatch.setattr("asynccache_backends.redis.backend._now", lambda: clock[0])
    with RedisServer(maxmemory=4 << 20) as server:
        async with backend_at(server.url, BIG) as backend:
            results = await put_big(backend, 64)
            assert set(await put_big(backend, 8, 100)) == {FAILED}
            yield Full(server, backend, clock, results)


async def test_full_refuses_pages_and_serves_what_it_has(full: Full) -> None:
    keys = [page_key(str(i)) for i in range(64)]
    results = await full.backend.get(keys, [blank(key, BIG) for key in keys])
    assert results == [HIT if put is HIT else MISS for put in full.put]
    assert 4 <= (stored := results.count(HIT)) < 16
    stats = full.backend.stats()
    assert (stats["pages"], stats["refused_pages"]) == (stored, 64 + 8 - stored)


async def test_full_is_not_asked_again_at_once_and_takes_pages_when_there_is_room(full: Full) -> None:
    before = _sets(full.server)
    assert set(await put_big(full.backend, 8, 200)) == {FAILED}
    assert _sets(full.server) == before
    full.clock[0] = 0.1
    assert set(await put_big(full.backend, 8, 250)) == {FAILED}
    assert _sets(full.server) != before
    await full.backend.clear()
    assert set(await put_big(full.backend, 4, 300)) == {FAILED}
    full.clock[0] += 1.0
    assert await put_big(full.backend, 4, 300) == [HIT] * 4
    assert await put_big(full.backend, 4, 400) == [HIT] * 4


def _sets(server: RedisServer) -> str:
    """What the server counts of SET: called, rejected, failed."""
    return next(line for line in server.say("INFO", "commandstats").splitlines() if line.startswith("cmdstat_set:"))


@pytest.mark.parametrize(("password", "opens"), [("hunter2", True), ("wrong", False), ("", False)])
async def test_a_password(password: str, opens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASYNCCACHE_REDIS_PASSWORD", raising=False)
    with RedisServer(password="hunter2") as server:
        url = f"redis://:{password}@{HOST}:{server.port}"
        if opens:
            async with backend_at(url) as backend:
                await put_all(backend, keys_of(3))
                assert "hunter2" not in f"{backend!r} {backend.stats()}"
            monkeypatch.setenv("ASYNCCACHE_REDIS_PASSWORD", password)
            async with backend_at(server.url) as backend:
                assert await backend.exists(keys_of(3)) == [HIT] * 3
        else:
            with pytest.raises(Unavailable, match=r"WRONGPASS|NOAUTH") as caught:
                await RedisBackend.open(parse_url(url), LAYOUT)
            assert "wrong" not in str(caught.value)


async def test_a_user_who_may_do_only_what_is_needed(server: RedisServer) -> None:
    """The rules in docs/stores/redis.md."""
    server.say(
        "ACL", "SETUSER", "kv", "on", ">hunter2", "~asynccache:*",
        "+get", "+set", "+exists", "+unlink", "+scan", "+strlen", "+pttl", "+ping", "+cluster|slots",
    )  # fmt: skip
    async with opened(f"redis://kv:hunter2@{HOST}:{server.port}") as store:
        keys = keys_of(10)
        assert await put(store, keys) == [HIT] * 10
        assert await get(store, keys) == [HIT] * 10
        assert await store.delete(keys[:1]) == [HIT]
        backend = store.backend
        assert isinstance(backend, RedisBackend)
        assert sum([len(part) async for part in backend.listing()]) == 9
        await store.clear()
        assert await store.exists(keys) == [MISS] * 10
    with pytest.raises(Unavailable, match="NOPERM"):
        async with backend_at(f"redis://kv:hunter2@{HOST}:{server.port}?prefix=other:") as backend:
            await backend.exists(keys)


async def test_tls() -> None:
    with RedisServer(tls=True) as server:
        async with opened(server.url) as store:
            keys = [page_key(str(i), ("full", "swa", "odd")[i % 3]) for i in range(90)]
            assert await put(store, keys) == [HIT] * 90
            assert await get(store, keys) == [HIT] * 90
        async with opened(f"{server.url}&prefix=big:", layout=BIG) as store:
            keys = keys_of(32)
            assert await asyncio.gather(*(put(store, keys[i : i + 8]) for i in range(0, 32, 8))) == [[HIT] * 8] * 4
            assert await asyncio.gather(*(get(store, keys[i : i + 8]) for i in range(0, 32, 8))) == [[HIT] * 8] * 4
            server.hang()
            calls = [asyncio.create_task(call(store, keys)) for call in (get, put)]
            await asyncio.sleep(0.05)
            for task in calls:
                task.cancel()
            async with asyncio.timeout(2):
                await asyncio.wait(calls)
            server.resume()
            assert await get(store, keys) == [HIT] * 32


async def test_tls_without_trust_and_nonsense() -> None:
    with RedisServer(tls=True) as server:
        for url in (f"rediss://{HOST}:{server.port}", f"redis://{HOST}:{server.port}", f"{server.url}&tls_name=other"):
            with pytest.raises(Unavailable):
                await RedisBackend.open(parse_url(url), LAYOUT)


async def test_a_server_that_became_a_replica(server: RedisServer) -> None:
    """It takes no page any more; the next call finds out who is there now, by a new connection."""
    keys = keys_of(5)
    async with backend_at(server.url) as backend:
        await put_all(backend, keys)
        server.say("REPLICAOF", HOST, "1")
        assert (await get_all(backend, keys))[0] == [HIT] * 5
        other = page_key("new")
        with pytest.raises(Unavailable, match="READONLY"):
            await backend.put([other], [record_of(other)])
        before = backend.stats()["connects"]
        server.say("REPLICAOF", "NO", "ONE")
        assert await backend.put([other], [record_of(other)]) == [HIT]
        assert backend.stats()["connects"] > before


async def test_something_else_under_a_page_s_name(server: RedisServer) -> None:
    """It is CORRUPT; a checked store forgets it, and the page can be stored."""
    key = page_key("x")
    async with opened(server.url) as store:
        backend = store.backend
        assert isinstance(backend, RedisBackend)
        assert server.say("LPUSH", b"asynccache:" + key.key, "x") == ":1\r\n"
        assert await get(store, [key]) == [CORRUPT]
        assert await get(store, [key]) == [MISS]
        assert await put(store, [key]) == [HIT]
        assert await get(store, [key]) == [HIT]


async def test_a_database_of_its_own(server: RedisServer) -> None:
    async with backend_at(f"{server.url}/3") as third, backend_at(server.url) as first:
        await put_all(third, keys_of(4))
        assert await first.exists(keys_of(4)) == [MISS] * 4
        await first.clear()
        assert await third.exists(keys_of(4)) == [HIT] * 4
    with pytest.raises(Unavailable, match="DB index"):
        await RedisBackend.open(parse_url(f"{server.url}/999"), LAYOUT)


async def test_connections_that_the_server_closes_are_made_anew(server: RedisServer) -> None:
    async with backend_at(server.url) as backend:
        await put_all(backend, keys_of(4))
        for _ in range(3):
            server.say("CLIENT", "KILL", "TYPE", "normal")
            await asyncio.sleep(0.05)
            assert await backend.exists(keys_of(4)) == [HIT] * 4
            assert (await get_all(backend, keys_of(4)))[0] == [HIT] * 4


async def test_cancelled_while_opening(server: RedisServer) -> None:
    """Nothing stays open: what does would be a warning, which is an error here."""
    for turns in range(6):
        task: asyncio.Task[Any] = asyncio.create_task(RedisBackend.open(parse_url(server.url), LAYOUT))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            await task.result().aclose()


async def test_after_a_put_that_asked_for_room_and_was_cancelled_the_next_one_asks(full: Full) -> None:
    await full.backend.clear()
    full.clock[0] = 1.0
    full.server.say("CLIENT", "PAUSE", 60_000, "WRITE")
    asking = asyncio.create_task(put_big(full.backend, 4, 200))
    await until(lambda: "blocked_clients:1" in full.server.say("INFO", "clients"))
    asking.cancel()
    await asyncio.wait([asking])
    full.server.say("CLIENT", "UNPAUSE")
    assert asking.cancelled()
    assert await put_big(full.backend, 4, 300) == [HIT] * 4


# A refusal of a Redis server is heard at once, and a command that it has not done is not taken for done.


@pytest.mark.parametrize("forbidden", ["strlen", "unlink"])
async def test_what_cannot_be_looked_at_is_not_listed_and_what_stays_was_not_cleared(
    forbidden: str, server: RedisServer
) -> None:
    async with backend_at(server.url) as backend:
        await put_all(backend, keys_of(3))
        server.say("ACL", "SETUSER", "default", f"-{forbidden}")
        with pytest.raises(Unavailable, match="NOPERM"):
            await (anext(backend.listing()) if forbidden == "strlen" else backend.clear())
        assert await backend.exists(keys_of(3)) == [HIT] * 3


# What it keeps for whom, what it lists, and what it forgets by itself.


async def _listed(backend: RedisBackend) -> list[Stored]:
    return [stored async for part in backend.listing() for stored in part]


async def test_a_page_that_is_there_is_not_sent_again(server: RedisServer) -> None:
    keys = keys_of(20)
    async with backend_at(server.url) as backend:
        records = await put_all(backend, keys)
        before = _received(server)
        assert await backend.put(keys, records) == [HIT] * 20
        assert _received(server) - before < 16384


def _received(server: RedisServer) -> int:
    return int(server.say("INFO", "stats").partition("total_net_input_bytes:")[2].partition("\r")[0])


@pytest.mark.parametrize("other", ["asynccache:b", "asynccach", "team*", "t[a-z]m:", "team?"])
async def test_prefixes_keep_caches_apart(server: RedisServer, other: str) -> None:
    """Also those that begin alike, and those that mean something to SCAN."""
    keys = keys_of(8)
    async with backend_at(server.url) as one, backend_at(f"{server.url}?prefix={other}") as two:
        server.say("SET", "teamx" + "k" * 32, "not ours")
        await put_all(one, keys)
        assert await two.exists(keys) == [MISS] * 8
        await put_all(two, keys[:3])
        assert {stored.key for stored in await _listed(two)} == {key.key for key in keys[:3]}
        await two.clear()
        assert await _listed(two) == []
        assert await one.exists(keys) == [HIT] * 8
        assert server.say("EXISTS", "teamx" + "k" * 32) == ":1\r\n"


async def test_what_left_while_it_was_looked_at_is_not_listed(server: RedisServer) -> None:
    (key,) = keys_of(1)
    async with backend_at(server.url) as backend:
        await put_all(backend, [key])
        names = [b"asynccache:" + key.key, b"asynccache:" + bytes(32)]
        assert [stored.key for stored in await backend._entries(names)] == [key.key]


async def test_with_a_ttl_it_is_known_when_a_page_was_written(server: RedisServer) -> None:
    url = f"{server.url}?ttl=1h"
    async with backend_at(server.url) as forever, backend_at(url) as backend:
        await put_all(forever, keys_of(2))
        await put_all(backend, [page_key("timed")])
        written = sorted(stored.written for stored in await _listed(backend))
        assert written[:2] == [0.0, 0.0]
        assert abs(written[2] - time.time()) < 5
        assert {stored.written for stored in await _listed(forever)} == {0.0}


async def test_pages_leave_after_their_ttl(server: RedisServer) -> None:
    keys = keys_of(5)
    async with backend_at(f"{server.url}?ttl=0.3s") as backend, backend_at(server.url) as forever:
        await put_all(backend, keys)
        await put_all(forever, [page_key("stays")])
        assert await backend.exists(keys) == [HIT] * 5
        await until_answered(backend, keys, MISS)
        assert await backend.exists([page_key("stays")]) == [HIT]



async def test_what_this_process_did_is_counted(server: RedisServer) -> None:
    keys = keys_of(6)
    async with backend_at(server.url) as backend:
        await put_all(backend, keys)
        await get_all(backend, [*keys, page_key("never")])
        stats = backend.stats()
        assert (stats["pages"], stats["bytes"], stats["get_bytes"]) == (6, 6 * (64 + 16384), 6 * (64 + 16384))
        assert (stats["errors"], stats["refused_pages"], stats["nodes"]) == (0, 0, 1)
        assert stats["connects"] == stats["connections"] == 2
    assert backend.stats()["connections"] == 0
    with pytest.raises(BackendError):
        await backend.clear()
    with pytest.raises(BackendError):
        await _listed(backend)
