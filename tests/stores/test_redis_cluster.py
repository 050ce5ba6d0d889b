"""A real cluster of three, ranks that share one Redis, and scripted servers that answer what is none."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from asynccache_backends.redis import RedisBackend
from asynccache_backends.redis.cluster import Router
from asynccache_backends.redis.resp import ProtocolError, Reader, Refusal
from asynccache_backends.redis.server import Answers
from msgspec.structs import replace
from redis.crc import key_slot

from asynccache.errors import BackendError, ConfigError, Timeout, Unavailable
from asynccache.storage import HostPort, PageKey, Result, parse_url
from asynccache.testing.backend_suite import LAYOUT, blank, get_all, keys_of, page_key, put_all, same
from tests.cli.rank_runs import FEW, PP2, TP2, Shape, hits, run, sound
from tests.storage.pages_kit import get, put
from tests.stores.kinds import backend_at, opened
from tests.stores.redis_server import SHARE, RedisCluster, RedisServer
from tests.stores.server import HOST
from tests.stores.test_redis_connection import PING, Script, answers, land, peer
from tests.waiting import until

# A real cluster of three: keys spread, slots that move, nodes that are lost.


HIT, MISS, FAILED = Result.HIT, Result.MISS, Result.FAILED


def _name(key: PageKey) -> bytes:
    return b"asynccache:" + key.key


def _counts(cluster: RedisCluster) -> list[int]:
    return [int(server.say("DBSIZE").strip(":\r\n")) for server in cluster.servers]


def _empty(cluster: RedisCluster) -> None:
    """Other tests have left pages under names of their own."""
    for server in cluster.servers:
        server.say("FLUSHALL")
    assert _counts(cluster) == [0, 0, 0]


async def test_pages_spread_over_all_and_any_one_host_leads_to_them(redis_cluster: RedisCluster) -> None:
    _empty(redis_cluster)
    keys = keys_of(90)
    async with backend_at(redis_cluster.url) as backend:
        await put_all(backend, keys)
        assert backend.stats()["nodes"] == 3
    assert min(_counts(redis_cluster)) > 10
    for url in (f"redis://{HOST}:1,{HOST}:{redis_cluster.servers[2].port}", *(s.url for s in redis_cluster.servers)):
        async with backend_at(url) as backend:
            assert await backend.exists(keys) == [HIT] * 90


async def test_cluster_off_and_on(redis_cluster: RedisCluster) -> None:
    with pytest.raises(ConfigError, match="several hosts"):
        await RedisBackend.open(parse_url(f"{redis_cluster.url}?cluster=off"), LAYOUT)
    async with backend_at(f"{redis_cluster.servers[0].url}?cluster=off") as backend:
        key = next(key for key in keys_of(99) if key_slot(_name(key)) > 10_000)
        with pytest.raises(Unavailable, match="MOVED"):
            await backend.exists([key])
    with RedisServer() as alone:
        for url in (f"{alone.url}?cluster=on", f"{alone.url},{HOST}:{alone.port}"):
            with pytest.raises(ConfigError, match="no part of a cluster"):
                await RedisBackend.open(parse_url(url), LAYOUT)
        async with backend_at(f"{alone.url}?cluster=off") as backend:
            await put_all(backend, keys_of(3))


class _Move:
    """A slot on its way from one server to another."""

    def __init__(self, cluster: RedisCluster, key: PageKey) -> None:
        self.cluster = cluster
        self.slot = key_slot(_name(key))
        self.ids = [server.say("CLUSTER", "MYID").splitlines()[1] for server in cluster.servers]
        self.source = self.slot // SHARE
        self.target = (self.source + 1) % 3

    def begin(self) -> None:
        source, target = self.cluster.servers[self.source], self.cluster.servers[self.target]
        assert target.say("CLUSTER", "SETSLOT", self.slot, "IMPORTING", self.ids[self.source]) == "+OK\r\n"
        assert source.say("CLUSTER", "SETSLOT", self.slot, "MIGRATING", self.ids[self.target]) == "+OK\r\n"

    def carry(self, key: PageKey) -> None:
        """One key."""
        source, target = self.cluster.servers[self.source], self.cluster.servers[self.target]
        assert source.say("MIGRATE", HOST, target.port, _name(key), 0, 5000) == "+OK\r\n"

    def end(self) -> None:
        for i in (self.target, self.source, 3 - self.source - self.target):
            server = self.cluster.servers[i]
            assert server.say("CLUSTER", "SETSLOT", self.slot, "NODE", self.ids[self.target]) == "+OK\r\n"

    def undo(self) -> None:
        self.source, self.target = self.target, self.source


async def test_a_slot_that_moves(redis_cluster: RedisCluster) -> None:
    """Before, half-way (ASK) and after (MOVED), with and without the page there; the map is read anew."""
    _empty(redis_cluster)
    keys = keys_of(40)
    key = keys[7]
    async with backend_at(redis_cluster.url) as backend:
        stored = await put_all(backend, keys)
        move = _Move(redis_cluster, key)
        move.begin()
        assert (await get_all(backend, keys))[0] == [HIT] * 40
        move.carry(key)
        results, fetched = await get_all(backend, keys)
        assert results == [HIT] * 40
        assert same(stored, fetched)
        assert await backend.delete([key]) == [HIT]
        assert await backend.put([key], [stored[7]]) == [HIT]
        move.end()
        results, fetched = await get_all(backend, keys)
        assert results == [HIT] * 40
        assert same(stored, fetched)
        await backend.delete(keys)
        move.undo()
        move.begin()
        move.end()
        assert await backend.put(keys, stored) == [HIT] * 40
        assert (await get_all(backend, keys))[0] == [HIT] * 40
        assert sum(_counts(redis_cluster)) == 40


async def test_servers_that_lost_their_slots_are_forgotten_and_have_no_connections(redis_cluster: RedisCluster) -> None:
    """Also one that was at work for a request when the map changed. Servers that come and go leave nothing behind."""
    _empty(redis_cluster)
    keys = keys_of(30)
    async with backend_at(redis_cluster.url) as backend:
        await put_all(backend, keys)
        router = backend._router
        stays = next(iter(router.nodes))
        others = router.nodes - {stays}
        key = next(_name(key) for key in keys if router._owners[key_slot(_name(key))] in others)
        waits = b"*3\r\n$4\r\nWAIT\r\n$1\r\n1\r\n$3\r\n300\r\n"  # ms, for a replica that is not there
        asked = asyncio.create_task(router.ask([key], [(waits, None)]))
        await asyncio.sleep(0.1)
        entry = [0, 16383, [stays.address.host.encode(), stays.address.port]]
        router._learn(stays.address, [entry])
        assert len(router._known) == 2, "one is still at work"
        assert await asked == [0]
        for i in range(1, 200):
            router._learn(stays.address, [[0, 16383, [b"10.1.0.%d" % i, 6379]]])
        router._learn(stays.address, [entry])
        assert set(router._known) == {stays.address}
        assert all(link.closed for server in others for link in server.links)
        await router.refresh()
        assert await backend.delete(keys) == [HIT] * 30


@pytest.mark.parametrize("how", ["kill", "hang"])
async def test_a_node_that_is_away_fails_its_own_pages_and_holds_up_one_call_and_not_all(
    how: str, redis_cluster: RedisCluster
) -> None:
    _empty(redis_cluster)
    keys, node = keys_of(60), redis_cluster.servers[1]
    async with opened(redis_cluster.url) as store:
        assert await put(store, keys) == [HIT] * 60
    async with opened(f"{redis_cluster.url}?stall=0.3") as store:
        getattr(node, how)()
        try:
            results = await get(store, keys)
            assert set(results) == {HIT, FAILED}
            assert 5 < results.count(FAILED) < 55
            began = asyncio.get_running_loop().time()
            assert await get(store, keys) == results
            assert asyncio.get_running_loop().time() - began < 0.25
        finally:
            node.start() if how == "kill" else node.resume()
        redis_cluster.wait()

        async def whole() -> bool:
            return FAILED not in await get(store, keys)

        await until(whole)
        gone = MISS if how == "kill" else HIT
        assert await get(store, keys) == [gone if result is FAILED else HIT for result in results]
        assert await put(store, keys) == [HIT] * 60


# Ranks that share one Redis: each writes its own shards, one writes for all what is replicated, and a new group of
# processes finds both.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "more"), [(TP2, ("--replicated", "full:tp,mamba")), pytest.param(PP2, (), marks=pytest.mark.soak)],
    ids=["tp2-replicated", "pp2"],
)  # fmt: skip
def test_a_new_group_finds_what_ranks_have_stored_together(
    shape: Shape, more: tuple[str, ...], redis_server: RedisServer, tmp_path: Path
) -> None:
    redis_server.say("FLUSHALL")
    out = tmp_path / "report.json"
    first, second = (run(shape, redis_server.url, out, "--requests", count, *more) for count in ("60", FEW))
    for report in (first, second):
        sound(report, shape)
    hits(second, "storage")
    if more:                                           # SWA alone has a copy for each rank
        stored = first["stores"]["redis"]
        assert stored["put_pages"] < 2 * first["stages"]["backup_storage"]["pages"], stored


# Its map: a router beside scripted servers.


def slot_map(*slots: tuple[int, int, HostPort]) -> bytes:
    """What a server says who asks for the map of a cluster in which these servers have the slots from first to last."""
    return b"*%d\r\n" % len(slots) + b"".join(
        b"*3\r\n:%d\r\n:%d\r\n*2\r\n$%d\r\n%b\r\n:%d\r\n" % (first, last, len(host), host.encode(), port)
        for first, last, (host, port) in slots
    )


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


@asynccontextmanager
async def rereading(how: str) -> AsyncIterator[tuple[Router, asyncio.Task[list[Any]], asyncio.Event]]:
    """A cluster's router that is reading the map anew from its first server, which has all slots and hangs, or drips:
    it says a byte of the map now and then; a request to that server; and whether the second server was asked for the
    map."""
    maps, drips, asked = Counter[str](), asyncio.Event(), asyncio.Event()

    def serves(name: str) -> Script:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while request := await reader.read(1 << 20):
                if b"SLOTS" not in request:
                    writer.write(b"+PONG\r\n")
                    continue
                maps[name] += 1
                if name == "well" or maps[name] == 1:
                    writer.write(slot_map((0, 16383, HostPort("", port))))
                    asked.set() if name == "well" else None
                    continue
                writer.write(b"*1000000\r\n" if how == "drips" else b"")
                drips.set()
                while True:
                    writer.write(b"*0\r\n" if how == "drips" else b"")
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


@pytest.mark.parametrize("how", ["hangs", "drips"])
async def test_a_server_that_does_not_say_its_map_keeps_neither_the_map_old_nor_requests_waiting(how: str) -> None:
    """Though every request has less time than ``stall``."""
    async with rereading(how) as (router, asking, asked), asyncio.timeout(5):
        while not asked.is_set():
            async with asyncio.timeout(0.2):
                assert await router.ask([b"k"], PING) == [b"PONG"]
            await asyncio.sleep(0.05)
        assert await asking == [b"PONG"]
        await until(lambda: router._refreshing is not None and router._refreshing.done())


async def test_a_router_that_is_closed_reads_no_map() -> None:
    async with rereading("drips") as (router, asking, asked), asyncio.timeout(5):
        reading = router._refreshing
        assert reading is not None
        assert await asking == [b"PONG"]
        await router.aclose()
        assert reading.cancelled()
        (reply,) = await router.ask([b"k"], PING)
        assert "closed" in str(reply)
        assert router._refreshing is reading
        assert not asked.is_set()


# What is no answer is a named error or a page that failed; it takes no memory on a stranger's word, and nothing hangs.


PATIENCE = 20.0


@pytest.mark.parametrize("data", [
    b"*1\r\n" * 200_000, b"*2\r\n:1\r\n" * 200_000, b"$400000000\r\n",
    b"*2\r\n$1\r\na\r\n$400000000\r\n", b":" + b"9" * 5000 + b"\r\n", b"*" + b"9" * 25 + b"\r\n",
])  # fmt: skip
def test_a_bomb_is_no_answer_and_takes_no_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            land(Reader([None]), data)
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
        async with saying(lambda words, port: reply, "cluster=auto"):
            pass
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


@pytest.mark.parametrize("where", [
    b"", b" ", b" x", b" 1", b" 1 h", b" 1 h:", b" 1 h:x", b" 1 h:99999999", b" 99999 h:1", b" -1 h:1", b" 1 h:0",
])  # fmt: skip
@pytest.mark.parametrize("word", [b"MOVED", b"ASK"])
async def test_a_redirection_to_nowhere_is_none(word: bytes, where: bytes) -> None:
    def answer(words: bytes, port: int) -> bytes:
        return slot_map((0, 16383, HostPort(HOST, port))) if b"SLOTS" in words else b"-%b%b\r\n" % (word, where)

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
            return slot_map((0, 16383, HostPort(HOST, port)))
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
        return slot_map((0, 16383, HostPort(HOST, port))) if len(asked) == 1 else b"*1\r\n:1\r\n"

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
