"""A real cluster of three, and ranks that share one Redis."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from asynccache_backends.redis import RedisBackend
from redis.crc import key_slot

from asynccache.errors import ConfigError, Unavailable
from asynccache.storage import PageKey, Result, parse_url
from asynccache.testing.backend_suite import LAYOUT, get_all, keys_of, put_all, same
from tests.cli.rank_runs import FEW, PP2, TP2, Shape, hits, run, sound
from tests.storage.page_kit import get, put
from tests.stores.kinds import backend_at, opened
from tests.stores.redis_server import RedisCluster, RedisServer
from tests.stores.server import HOST
from tests.waiting import until

# A real cluster of three: keys spread, slots that move, nodes that are lost.


HIT, MISS, FAILED = Result.HIT, Result.MISS, Result.FAILED


def _name(key: PageKey) -> bytes:
    return b"asynccache:" + key.key


def _counts(cluster: RedisCluster) -> list[int]:
    return [int(server.say("DBSIZE").strip(":\r\n")) for server in cluster.servers]


async def _empty(cluster: RedisCluster) -> None:
    async with backend_at(cluster.url) as backend:
        await backend.clear()
    assert _counts(cluster) == [0, 0, 0]


async def test_pages_spread_over_all_and_come_back_in_order(redis_cluster: RedisCluster) -> None:
    await _empty(redis_cluster)
    keys = keys_of(90)
    async with backend_at(redis_cluster.url) as backend:
        stored = await put_all(backend, keys)
        assert min(_counts(redis_cluster)) > 10
        results, fetched = await get_all(backend, keys[::-1])
        assert results == [HIT] * 90
        assert same(stored[::-1], fetched)
        assert backend.stats()["nodes"] == 3
        listed = {entry.key async for part in _parts(backend) for entry in part}
        assert listed == {key.key for key in keys}
        await backend.clear()
        assert _counts(redis_cluster) == [0, 0, 0]


async def _parts(backend: RedisBackend) -> Any:
    async for part in backend.listing():
        yield part


async def test_any_one_host_leads_to_the_cluster(redis_cluster: RedisCluster) -> None:
    await _empty(redis_cluster)
    keys = keys_of(30)
    async with backend_at(redis_cluster.url) as backend:
        await put_all(backend, keys)
    for server in redis_cluster.servers:
        async with backend_at(server.url) as backend:
            assert await backend.exists(keys) == [HIT] * 30
    url = f"redis://{HOST}:1,{HOST}:{redis_cluster.servers[2].port}"
    async with backend_at(url) as backend:
        assert await backend.exists(keys) == [HIT] * 30


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
        self.source = next(i for i, server in enumerate(cluster.servers) if self._owns(server))
        self.target = (self.source + 1) % 3

    def _owns(self, server: RedisServer) -> bool:
        return not server.say("GET", self._tag()).startswith("-MOVED")

    def _tag(self) -> str:
        """A name in the slot that can be typed."""
        return next(f"{{{i}}}" for i in range(1 << 20) if key_slot(b"{%d}" % i) == self.slot)

    def begin(self) -> None:
        source, target = self.cluster.servers[self.source], self.cluster.servers[self.target]
        assert target.say("CLUSTER", "SETSLOT", self.slot, "IMPORTING", self.ids[self.source]) == "+OK\r\n"
        assert source.say("CLUSTER", "SETSLOT", self.slot, "MIGRATING", self.ids[self.target]) == "+OK\r\n"

    async def carry(self, key: PageKey) -> None:
        """One key."""
        name = _name(key)
        source, target = self.cluster.servers[self.source], self.cluster.servers[self.target]
        words = [b"MIGRATE", HOST.encode(), b"%d" % target.port, name, b"0", b"5000"]
        assert await _say(source, words) == b"+OK\r\n"

    def end(self) -> None:
        for i in (self.target, self.source, 3 - self.source - self.target):
            server = self.cluster.servers[i]
            assert server.say("CLUSTER", "SETSLOT", self.slot, "NODE", self.ids[self.target]) == "+OK\r\n"

    def undo(self) -> None:
        self.source, self.target = self.target, self.source


async def _say(server: RedisServer, words: Sequence[bytes]) -> bytes:
    reader, writer = await asyncio.open_connection(HOST, server.port)
    writer.write(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words))
    line = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return line


async def test_a_slot_that_moves(redis_cluster: RedisCluster) -> None:
    """Before, half-way (ASK) and after (MOVED), with and without the page there; the map is read anew."""
    await _empty(redis_cluster)
    keys = keys_of(40)
    key = keys[7]
    async with backend_at(redis_cluster.url) as backend:
        stored = await put_all(backend, keys)
        move = _Move(redis_cluster, key)
        move.begin()
        assert (await get_all(backend, keys))[0] == [HIT] * 40
        await move.carry(key)
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
    await _empty(redis_cluster)
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


async def test_a_node_that_is_lost_fails_its_own_pages(redis_cluster: RedisCluster) -> None:
    await _empty(redis_cluster)
    keys = keys_of(60)
    lost = redis_cluster.servers[1]
    async with opened(redis_cluster.url) as store:
        assert await put(store, keys) == [HIT] * 60
        lost.kill()
        results = await get(store, keys)
        assert Counter(results) == {HIT: results.count(HIT), FAILED: results.count(FAILED)}
        assert 5 < results.count(FAILED) < 55
        assert await get(store, keys) == results
        lost.start()
        redis_cluster._wait()

        async def whole() -> bool:
            return FAILED not in await get(store, keys)

        await until(whole)
        again = await get(store, keys)
        assert [MISS if result is FAILED else HIT for result in results] == again
        assert await put(store, keys) == [HIT] * 60


async def test_a_node_that_hangs_holds_up_one_call_and_not_all(redis_cluster: RedisCluster) -> None:
    await _empty(redis_cluster)
    keys = keys_of(60)
    hung = redis_cluster.servers[0]
    async with opened(redis_cluster.url) as store:
        assert await put(store, keys) == [HIT] * 60
    async with opened(f"{redis_cluster.url}?stall=0.3") as store:
        hung.hang()
        try:
            results = await get(store, keys)
            assert {HIT, FAILED} == set(results)
            began = asyncio.get_running_loop().time()
            assert await get(store, keys) == results
            assert asyncio.get_running_loop().time() - began < 0.25
        finally:
            hung.resume()

        async def whole() -> bool:
            return await get(store, keys) == [HIT] * 60

        await until(whole)


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
