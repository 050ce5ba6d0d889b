"""Several stores on one server: clients, processes and prefixes; what is listed and forgotten by itself."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest
from asynccache_backends.redis import RedisBackend

from asynccache.errors import BackendError
from asynccache.storage import Listable, PageKey, Result, Stored, open_store
from asynccache.testing.backend_suite import LAYOUT, get_all, keys_of, page_key, put_all, record_of, same
from tests.storage.page_kit import get, put
from tests.stores.redis_kit import checked, opened
from tests.stores.redis_server import RedisServer
from tests.waiting import until

HIT, MISS = Result.HIT, Result.MISS


@pytest.fixture(autouse=True)
def _empty(redis_server: RedisServer) -> None:
    redis_server.say("FLUSHALL")


async def _listed(backend: RedisBackend) -> list[Stored]:
    return [stored async for part in backend.listing() for stored in part]


async def test_two_clients_hit_each_other_s_pages(redis_server: RedisServer) -> None:
    keys = keys_of(20)
    async with checked(redis_server.url) as one, checked(redis_server.url) as other:
        await asyncio.gather(put(one, keys[:12]), put(other, keys[8:]))
        assert await get(one, keys) == await get(other, keys) == [HIT] * 20


async def test_writers_of_one_page_do_no_harm(redis_server: RedisServer) -> None:
    """All at once, with different bytes: one of them wins, whole, and each of them is told that it is stored."""
    key = page_key("contested")
    records = [record_of(page_key(f"other{i}")) for i in range(8)]
    async with opened(redis_server.url) as one, opened(redis_server.url) as other:
        puts = [backend.put([key], [record]) for backend, record in zip([one, other] * 4, records, strict=True)]
        assert await asyncio.gather(*puts) == [[HIT]] * 8
        (_, won), (_, again) = await get_all(one, [key]), await get_all(other, [key])
        assert same(won, again)
        assert sum(same(won, [record]) for record in records) == 1
        assert one.stats()["pages"] + other.stats()["pages"] == 1


async def test_a_page_that_is_there_is_not_sent_again(redis_server: RedisServer) -> None:
    keys = keys_of(20)
    async with opened(redis_server.url) as backend:
        records = await put_all(backend, keys)
        before = _received(redis_server)
        assert await backend.put(keys, records) == [HIT] * 20
        assert _received(redis_server) - before < 16384


def _received(server: RedisServer) -> int:
    return int(server.say("INFO", "stats").partition("total_net_input_bytes:")[2].partition("\r")[0])


CHILD = """
import asyncio, sys
sys.path.insert(0, {root!r})
from asynccache.testing.backend_suite import keys_of
from tests.storage.page_kit import get, put
from tests.stores.redis_kit import checked

async def main():
    async with checked({url!r}) as store:
        keys = keys_of(60)
        assert [int(r) for r in await get(store, keys[:30])] == [1] * 30
        assert [int(r) for r in await put(store, keys[30:])] == [1] * 30

asyncio.run(main())
"""


async def test_two_processes_hit_each_other_s_pages(redis_server: RedisServer) -> None:
    keys = keys_of(60)
    async with checked(redis_server.url) as store:
        await put(store, keys[:30])
        script = CHILD.format(root=sys.path[0] or ".", url=redis_server.url)
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stderr=subprocess.PIPE)
        _, errors = await asyncio.wait_for(child.communicate(), 60)
        assert child.returncode == 0, errors.decode()
        assert await get(store, keys) == [HIT] * 60


@pytest.mark.parametrize("other", ["asynccache:b", "asynccach", "team*", "t[a-z]m:", "team?"])
async def test_prefixes_keep_caches_apart(redis_server: RedisServer, other: str) -> None:
    """Also those that begin alike, and those that mean something to SCAN."""
    keys = keys_of(8)
    async with opened(redis_server.url) as one, opened(f"{redis_server.url}?prefix={other}") as two:
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
    async with opened(redis_server.url) as backend:
        records = [record_of(page_key(str(i))) for i in range(len(keys))]
        assert await backend.put(keys, records) == [HIT] * len(keys)
        fetched = [record_of(page_key("x")) for _ in keys]
        assert await backend.get(keys, fetched) == [HIT] * len(keys)
        assert same(records, fetched)
        assert {stored.key for stored in await _listed(backend)} == {key.key for key in keys}
        assert await backend.delete(keys) == [HIT] * len(keys)


async def test_what_is_listed(redis_server: RedisServer) -> None:
    """Every page once, with its size; more than one SCAN takes."""
    async with opened(redis_server.url) as backend:
        assert isinstance(backend, Listable)
        keys = [page_key(str(i), ("swa", "odd")[i % 2]) for i in range(2500)]
        await put_all(backend, keys)
        listed = await _listed(backend)
        assert {(s.key, s.size) for s in listed} == {(k.key, 64 + LAYOUT.page_bytes[k.pool]) for k in keys}
        assert len(listed) == 2500
        assert {stored.written for stored in listed} == {0.0}


async def test_what_left_while_it_was_looked_at_is_not_listed(redis_server: RedisServer) -> None:
    (key,) = keys_of(1)
    async with opened(redis_server.url) as backend:
        await put_all(backend, [key])
        names = [b"asynccache:" + key.key, b"asynccache:" + bytes(32)]
        assert [stored.key for stored in await backend._entries(names)] == [key.key]


async def test_with_a_ttl_it_is_known_when_a_page_was_written(redis_server: RedisServer) -> None:
    url = f"{redis_server.url}?ttl=1h"
    async with opened(redis_server.url) as forever, opened(url) as backend:
        await put_all(forever, keys_of(2))
        await put_all(backend, [page_key("timed")])
        written = sorted(stored.written for stored in await _listed(backend))
        assert written[:2] == [0.0, 0.0]
        assert abs(written[2] - time.time()) < 5
        assert {stored.written for stored in await _listed(forever)} == {0.0}


async def test_pages_leave_after_their_ttl(redis_server: RedisServer) -> None:
    keys = keys_of(5)
    async with opened(f"{redis_server.url}?ttl=0.3s") as backend, opened(redis_server.url) as forever:
        await put_all(backend, keys)
        await put_all(forever, [page_key("stays")])
        assert await backend.exists(keys) == [HIT] * 5

        async def gone() -> bool:
            return await backend.exists(keys) == [MISS] * 5

        await until(gone, seconds=5)
        assert await backend.exists([page_key("stays")]) == [HIT]



async def test_what_this_process_did_is_counted(redis_server: RedisServer) -> None:
    keys = keys_of(6)
    async with opened(redis_server.url) as backend:
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


async def test_found_by_its_scheme(redis_server: RedisServer) -> None:
    store = await open_store(redis_server.url, LAYOUT)
    assert store is not None
    assert isinstance(store.backend, RedisBackend)
    await store.aclose()
