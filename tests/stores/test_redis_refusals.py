"""A refusal of a Redis server is heard at once, and a command that it has not done is not taken for done."""

from __future__ import annotations

import asyncio
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
from asynccache.storage import HostPort, Result, parse_url
from asynccache.testing.backend_suite import LAYOUT, page_key, record_of
from tests.stores.redis_kit import opened
from tests.stores.redis_server import RedisServer
from tests.stores.test_redis_connection import PING, Script, answers, connected, peer, server_of, silent
from tests.waiting import until


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """Of its own: who may do what is changed."""
    with RedisServer() as server:
        yield server


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
    async with opened(server.url) as backend:
        await backend.put(keys, [record_of(key) for key in keys])
        server.say("ACL", "SETUSER", "default", "-strlen")
        with pytest.raises(Unavailable, match="NOPERM"):
            await anext(backend.listing())
        assert await backend.exists(keys) == [Result.HIT] * 3


async def test_a_store_that_does_not_forget_was_not_cleared(server: RedisServer) -> None:
    key = page_key("x")
    async with opened(server.url) as backend:
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
