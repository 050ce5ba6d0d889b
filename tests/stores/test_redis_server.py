"""What only a Redis server does: it is full, refuses, wants to know who asks, forgets, lists; and maps of a cluster."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from asynccache_backends.redis import RedisBackend
from asynccache_backends.redis.cluster import Router
from asynccache_backends.redis.resp import Refusal
from asynccache_backends.redis.settings import RedisSettings
from msgspec.structs import replace
from redis.crc import key_slot

from asynccache.errors import BackendError, ConfigError, Unavailable
from asynccache.storage import HostPort, PageKey, Result, Stored, StoreLayout, parse_url
from asynccache.testing.backend_suite import LAYOUT, blank, get_all, keys_of, page_key, put_all, record_of, same
from tests.storage.page_kit import get, put
from tests.stores.kinds import backend_at, opened, until_answered
from tests.stores.redis_server import RedisServer
from tests.stores.server import HOST
from tests.stores.test_redis_connection import PING, Script, answers, connected, peer, server_of, silent
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


async def test_full_refuses_pages_and_serves_what_it_has() -> None:
    with RedisServer(maxmemory=8 << 20) as server:
        async with backend_at(server.url, BIG) as backend:
            results = await put_big(backend, 64)
            assert set(results) == {HIT, FAILED}
            stored = results.count(HIT)
            assert 8 <= stored < 32
            keys = [page_key(str(i)) for i in range(64)]
            records = [blank(key, BIG) for key in keys]
            assert await backend.get(keys, records) == [HIT if r is HIT else MISS for r in results]
            assert backend.stats()["refused_pages"] == 64 - stored
            assert backend.stats()["pages"] == stored


async def test_full_is_not_asked_again_at_once_and_takes_pages_when_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("asynccache_backends.redis.backend._now", lambda: now)
    with RedisServer(maxmemory=4 << 20) as server:
        async with backend_at(server.url, BIG) as backend:
            await put_big(backend, 64)
            assert set(await put_big(backend, 8, 100)) == {FAILED}
            before = _sets(server)
            assert set(await put_big(backend, 8, 200)) == {FAILED}
            assert _sets(server) == before
            now = 0.1
            assert set(await put_big(backend, 8, 250)) == {FAILED}
            assert _sets(server) != before
            await backend.clear()
            assert set(await put_big(backend, 4, 300)) == {FAILED}
            now += 1.0
            assert await put_big(backend, 4, 300) == [HIT] * 4
            assert await put_big(backend, 4, 400) == [HIT] * 4


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
        await plant(server, b"asynccache:" + key.key)
        assert await get(store, [key]) == [CORRUPT]
        assert await get(store, [key]) == [MISS]
        assert await put(store, [key]) == [HIT]
        assert await get(store, [key]) == [HIT]


async def plant(server: RedisServer, name: bytes) -> None:
    """A list under ``name``."""
    reader, writer = await asyncio.open_connection(HOST, server.port)
    writer.write(b"*3\r\n$5\r\nLPUSH\r\n$%d\r\n%b\r\n$1\r\nx\r\n" % (len(name), name))
    assert await reader.readline() == b":1\r\n"
    writer.close()
    await writer.wait_closed()


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


async def test_after_a_put_that_asked_for_room_and_was_cancelled_the_next_one_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("asynccache_backends.redis.backend._now", lambda: now)
    with RedisServer(maxmemory=4 << 20) as server:
        async with backend_at(server.url, BIG) as backend:
            await put_big(backend, 64)
            assert set(await put_big(backend, 8, 100)) == {FAILED}
            await backend.clear()
            now = 1.0
            server.say("CLIENT", "PAUSE", 60_000, "WRITE")
            asking = asyncio.create_task(put_big(backend, 4, 200))
            await until(lambda: "blocked_clients:1" in server.say("INFO", "clients"))
            asking.cancel()
            await asyncio.wait([asking])
            server.say("CLIENT", "UNPAUSE")
            assert asking.cancelled()
            assert await put_big(backend, 4, 300) == [HIT] * 4


# A refusal of a Redis server is heard at once, and a command that it has not done is not taken for done.


@pytest.mark.parametrize("cut", range(1, 24))
async def test_refusals_in_two_parts_are_heard_at_once(cut: int) -> None:
    """However few of their bytes come at once."""
    text, came = b"-OOM x\r\n" * 3, asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 20)
        writer.write(text[:cut])
        await came.wait()
        writer.write(text[cut:])
        await silent(reader, writer)

    async with connected(script) as connection:
        asking = asyncio.ensure_future(connection.ask([(b"x", None)] * 3))
        for _ in range(3):
            await asyncio.sleep(0.001)
        came.set()
        async with asyncio.timeout(2):
            assert [(reply.code, str(reply)) for reply in await asking] == [("OOM", "OOM x")] * 3


async def test_a_cluster_in_which_nobody_has_a_slot_is_unwilling() -> None:
    async with peer(answers(b"*0\r\n", b"*0\r\n")) as settings:
        router = Router(settings, Counter())
        await router.open()
        (reply,) = await router.ask([b"k"], PING)
        assert isinstance(reply, Refusal)
        assert reply.code == "CLUSTERDOWN"
        await router.aclose()


async def test_a_map_that_is_read_anew_ends_no_connection_that_is_being_made() -> None:
    """It has no slots any more, and says so itself, and who has them."""
    asked, signed_in = asyncio.Event(), asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 20)
        asked.set()
        await signed_in.wait()
        writer.write(b"+OK\r\n")
        await answers(b"-MOVED 1 h:1\r\n")(reader, writer)

    async with peer(script) as settings:
        router = Router(replace(settings, password="x"), Counter())
        asking = asyncio.ensure_future(router._server(settings.seeds[0]).ask(PING))
        await asked.wait()
        router._learn(settings.seeds[0], [])
        signed_in.set()
        assert [reply.code for reply in await asking] == ["MOVED"]
        await router.aclose()


async def test_a_map_that_is_read_anew_closes_no_server_that_was_chosen_for_a_request() -> None:
    """The request is about to begin, and the server has no slots any more by then."""
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await reader.read(1 << 20):
            writer.write(b"*0\r\n" if b"SLOTS" in request else b"+PONG\r\n")

    async with peer(script) as settings:
        router = Router(settings, Counter())
        await router.open()
        address = settings.seeds[0]
        router._learn(address, [[0, 16383, [address.host.encode(), address.port]]])
        asking = asyncio.ensure_future(router.ask([b"k"], PING))
        await asyncio.sleep(0)
        router._learn(address, [])
        assert await asking == [b"PONG"]
        router._learn(address, [])
        assert not router.nodes
        await router.aclose()


async def test_a_server_that_hangs_does_not_keep_the_map_old() -> None:
    """The first that would be asked for the map hangs, and every request has less time than ``stall``. The requests do
    not wait for the map, and it is asked of the next server."""
    maps = Counter[str]()
    places: list[HostPort] = []

    def serves(name: str, until_maps: float) -> Script:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while request := await reader.read(1 << 20):
                if b"SLOTS" not in request:
                    writer.write(b"+PONG\r\n")
                elif maps[name] < until_maps:
                    slots = [(0, 8191, places[0]), (8192, 16383, places[1])]
                    writer.write(b"*2\r\n" + b"".join(
                        b"*3\r\n:%d\r\n:%d\r\n*2\r\n$%d\r\n%b\r\n:%d\r\n"
                        % (first, last, len(place.host), place.host.encode(), place.port)
                        for first, last, place in slots
                    ))
                maps[name] += b"SLOTS" in request

        return script

    async with peer(serves("hangs", 1)) as one, peer(serves("well", 99)) as other:
        places += one.seeds + other.seeds
        router = Router(replace(one, seeds=tuple(places), stall=0.5), Counter())
        await router.open()
        key = next(b"%d" % i for i in range(99) if key_slot(b"%d" % i) > 8191)
        router._stale = True
        end = asyncio.get_running_loop().time() + 4
        while not maps["well"] and asyncio.get_running_loop().time() < end:
            async with asyncio.timeout(0.2):
                assert await router.ask([key], PING) == [b"PONG"]
            await asyncio.sleep(0.05)
        assert maps["well"]
        await router.aclose()


@asynccontextmanager
async def dripping() -> AsyncIterator[tuple[Router, asyncio.Task[list[Any]], asyncio.Event]]:
    """A cluster's router that is reading the map anew from its first server, which has all slots and says a byte of the
    map now and then; a request to that server; and whether the second server was asked for the map."""
    maps, drips, asked = Counter[str](), asyncio.Event(), asyncio.Event()
    one_map = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$0\r\n\r\n:%d\r\n"

    def serves(name: str) -> Script:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while request := await reader.read(1 << 20):
                if b"SLOTS" not in request:
                    writer.write(b"+PONG\r\n")
                    continue
                maps[name] += 1
                if name == "well" or maps[name] == 1:
                    writer.write(one_map % port)
                    asked.set() if name == "well" else None
                    continue
                writer.write(b"*1000000\r\n")
                drips.set()
                while True:
                    writer.write(b"*0\r\n")
                    await asyncio.sleep(0.05)

        return script

    async with peer(serves("drips")) as one, peer(serves("well")) as other:
        port = one.seeds[0].port
        router = Router(replace(one, seeds=one.seeds + other.seeds, stall=0.3), Counter())
        await router.open()
        router._stale = True
        asking = asyncio.ensure_future(router.ask([b"k"], PING))
        await drips.wait()
        try:
            yield router, asking, asked
        finally:
            asking.cancel()
            await router.aclose()


async def test_a_server_that_drips_its_map_keeps_neither_the_map_old_nor_requests_waiting() -> None:
    async with dripping() as (router, asking, asked), asyncio.timeout(5):
        await asked.wait()
        assert await asking == [b"PONG"]
        await until(lambda: router._refreshing is not None and router._refreshing.done())


async def test_a_router_that_is_closed_reads_no_map() -> None:
    async with dripping() as (router, asking, asked), asyncio.timeout(5):
        reading = router._refreshing
        assert reading is not None
        assert await asking == [b"PONG"]
        await router.aclose()
        assert reading.cancelled()
        (reply,) = await router.ask([b"k"], PING)
        assert "closed" in str(reply)
        assert router._refreshing is reading
        assert not asked.is_set()


async def test_pages_of_which_nothing_is_known_are_not_listed(server: RedisServer) -> None:
    keys = [page_key(str(i)) for i in range(3)]
    async with backend_at(server.url) as backend:
        await backend.put(keys, [record_of(key) for key in keys])
        server.say("ACL", "SETUSER", "default", "-strlen")
        with pytest.raises(Unavailable, match="NOPERM"):
            await anext(backend.listing())
        assert await backend.exists(keys) == [Result.HIT] * 3


async def test_a_store_that_does_not_forget_was_not_cleared(server: RedisServer) -> None:
    key = page_key("x")
    async with backend_at(server.url) as backend:
        await backend.put([key], [record_of(key)])
        server.say("ACL", "SETUSER", "default", "-unlink")
        with pytest.raises(Unavailable, match="NOPERM"):
            await backend.clear()


async def test_a_name_that_no_machine_can_have() -> None:
    with pytest.raises(ConfigError, match="host:port"):
        await RedisBackend.open(parse_url("redis://a..b"), LAYOUT)
    for address in (HostPort("a..b", 1), HostPort("a\0b", 1)):  # as a cluster's map may name them
        with pytest.raises(BackendError):
            await server_of(RedisSettings(seeds=(address,))).ask(PING)


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


async def test_keys_of_any_bytes(server: RedisServer) -> None:
    """Line ends, braces, zeros, commands: a key is framed by its length and nothing else."""
    raws = [b"\r\nFLUSHALL\r\n", b"{}", b"{a}", b"\0", b"*1\r\n$8\r\nFLUSHALL\r\n", b"\xff", b"*", b"?[a]\\"]
    keys = [PageKey("../full\r\n", (text * 32)[:32]) for text in raws]
    async with backend_at(server.url) as backend:
        records = [record_of(page_key(str(i))) for i in range(len(keys))]
        assert await backend.put(keys, records) == [HIT] * len(keys)
        fetched = [record_of(page_key("x")) for _ in keys]
        assert await backend.get(keys, fetched) == [HIT] * len(keys)
        assert same(records, fetched)
        assert {stored.key for stored in await _listed(backend)} == {key.key for key in keys}
        assert await backend.delete(keys) == [HIT] * len(keys)


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
