"""Several stores on one server: clients, processes and prefixes; what is listed and forgotten by itself."""

from __future__ import annotations

import time

import pytest
from asynccache_backends.redis import RedisBackend

from asynccache.errors import BackendError
from asynccache.storage import PageKey, Result, Stored
from asynccache.testing.backend_suite import get_all, keys_of, page_key, put_all, record_of, same
from tests.stores.kinds import backend_at, until_answered
from tests.stores.redis_server import RedisServer

HIT, MISS = Result.HIT, Result.MISS


@pytest.fixture(autouse=True)
def _empty(redis_server: RedisServer) -> None:
    redis_server.say("FLUSHALL")


async def _listed(backend: RedisBackend) -> list[Stored]:
    return [stored async for part in backend.listing() for stored in part]


async def test_a_page_that_is_there_is_not_sent_again(redis_server: RedisServer) -> None:
    keys = keys_of(20)
    async with backend_at(redis_server.url) as backend:
        records = await put_all(backend, keys)
        before = _received(redis_server)
        assert await backend.put(keys, records) == [HIT] * 20
        assert _received(redis_server) - before < 16384


def _received(server: RedisServer) -> int:
    return int(server.say("INFO", "stats").partition("total_net_input_bytes:")[2].partition("\r")[0])


@pytest.mark.parametrize("other", ["asynccache:b", "asynccach", "team*", "t[a-z]m:", "team?"])
async def test_prefixes_keep_caches_apart(redis_server: RedisServer, other: str) -> None:
    """Also those that begin alike, and those that mean something to SCAN."""
    keys = keys_of(8)
    async with backend_at(redis_server.url) as one, backend_at(f"{redis_server.url}?prefix={other}") as two:
        redis_server.say("SET", "teamx" + "k" * 32, "not ours")
        await put_all(one, keys)
        assert await two.exists(keys) == [MISS] * 8
        await put_all(two, keys[:3])
        assert {stored.key for stored in await _listed(two)} == {key.key for key in keys[:3]}
        await two.clear()
        assert await _listed(two) == []
        assert await one.exists(keys) == [HIT] * 8
        assert redis_server.say("EXISTS", "teamx" + "k" * 32) == ":1\r\n"


async def test_keys_of_any_bytes(redis_server: RedisServer) -> None:
    """Line ends, braces, zeros, commands: a key is framed by its length and nothing else."""
    raws = [b"\r\nFLUSHALL\r\n", b"{}", b"{a}", b"\0", b"*1\r\n$8\r\nFLUSHALL\r\n", b"\xff", b"*", b"?[a]\\"]
    keys = [PageKey("../full\r\n", (text * 32)[:32]) for text in raws]
    async with backend_at(redis_server.url) as backend:
        records = [record_of(page_key(str(i))) for i in range(len(keys))]
        assert await backend.put(keys, records) == [HIT] * len(keys)
        fetched = [record_of(page_key("x")) for _ in keys]
        assert await backend.get(keys, fetched) == [HIT] * len(keys)
        assert same(records, fetched)
        assert {stored.key for stored in await _listed(backend)} == {key.key for key in keys}
        assert await backend.delete(keys) == [HIT] * len(keys)


async def test_what_left_while_it_was_looked_at_is_not_listed(redis_server: RedisServer) -> None:
    (key,) = keys_of(1)
    async with backend_at(redis_server.url) as backend:
        await put_all(backend, [key])
        names = [b"asynccache:" + key.key, b"asynccache:" + bytes(32)]
        assert [stored.key for stored in await backend._entries(names)] == [key.key]


async def test_with_a_ttl_it_is_known_when_a_page_was_written(redis_server: RedisServer) -> None:
    url = f"{redis_server.url}?ttl=1h"
    async with backend_at(redis_server.url) as forever, backend_at(url) as backend:
        await put_all(forever, keys_of(2))
        await put_all(backend, [page_key("timed")])
        written = sorted(stored.written for stored in await _listed(backend))
        assert written[:2] == [0.0, 0.0]
        assert abs(written[2] - time.time()) < 5
        assert {stored.written for stored in await _listed(forever)} == {0.0}


async def test_pages_leave_after_their_ttl(redis_server: RedisServer) -> None:
    keys = keys_of(5)
    async with backend_at(f"{redis_server.url}?ttl=0.3s") as backend, backend_at(redis_server.url) as forever:
        await put_all(backend, keys)
        await put_all(forever, [page_key("stays")])
        assert await backend.exists(keys) == [HIT] * 5
        await until_answered(backend, keys, MISS)
        assert await backend.exists([page_key("stays")]) == [HIT]



async def test_what_this_process_did_is_counted(redis_server: RedisServer) -> None:
    keys = keys_of(6)
    async with backend_at(redis_server.url) as backend:
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
