"""The Mooncake backend against a real store: as the runtime uses it, and the shipped suite."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from itertools import count
from typing import Any

import pytest
import pytest_asyncio
from asynccache_backends.mooncake import MooncakeBackend, client
from asynccache_backends.mooncake.client import MooncakeSettings, acquire, settings_of
from asynccache_backends.mooncake.transfers import STAGE_BYTES

from asynccache.errors import ConfigError, Unavailable
from asynccache.storage import (
    HEADER_BYTES,
    PageKey,
    Record,
    Result,
    parse_url,
)
from asynccache.testing.backend_suite import (
    LAYOUT,
    aligned,
    blank,
    content,
    keys_of,
    page_key,
    put_all,
    same,
)
from tests.stores.server import HOST, free_port

# The Mooncake backend against a real store, as the runtime uses it: pools registered once, pages straight from and
# into them.


MISS, HIT, CORRUPT, FAILED = Result

_numbers = count()


async def open_at(master: Any, namespace: str, **options: str) -> MooncakeBackend:
    return await MooncakeBackend.open(parse_url(master.url, {"namespace": namespace, **options}), LAYOUT)


@pytest.fixture
def namespace() -> str:
    """One that no other test has."""
    return f"backend{next(_numbers)}."


@pytest_asyncio.fixture
async def backend(mooncake_master: Any, namespace: str) -> AsyncIterator[MooncakeBackend]:
    """Open and empty."""
    opened = await open_at(mooncake_master, namespace)
    yield opened
    await opened.aclose()


class Pool:
    """Host memory as the runtime has it: a registered slab of pages, and headers that are not registered."""

    def __init__(self, backend: MooncakeBackend, size: int, pages: int) -> None:
        slab, headers = aligned(pages * size), memoryview(bytearray(pages * HEADER_BYTES))
        backend.register("full", slab)
        self.memory = slab
        self.records = [
            Record(headers[i * HEADER_BYTES : (i + 1) * HEADER_BYTES], slab[i * size : (i + 1) * size])
            for i in range(pages)
        ]

    def fill(self, keys: Sequence[PageKey]) -> list[Record]:
        for key, record in zip(keys, self.records, strict=False):
            whole = content(key, HEADER_BYTES + record.payload.nbytes)
            record.header[:], record.payload[:] = whole[:HEADER_BYTES], whole[HEADER_BYTES:]
        return self.records[: len(keys)]

    def holds(self, keys: Sequence[PageKey], at: int = 0) -> bool:
        pairs = zip(keys, self.records[at:], strict=False)
        return all(bytes(r.header) + bytes(r.payload) == content(k, HEADER_BYTES + r.payload.nbytes) for k, r in pairs)


async def test_payloads_in_registered_pools_are_copied_by_nobody(backend: MooncakeBackend) -> None:
    pool, keys = Pool(backend, 131077, 60), keys_of(30)  # no even size, so all but one begin at odd addresses
    assert await backend.put(keys, pool.fill(keys)) == [HIT] * 30
    assert await backend.get(keys, pool.records[30:]) == [HIT] * 30
    assert pool.holds(keys, at=30)
    stats = backend.stats()
    assert (stats["staged_pages"], stats["refused_regions"]) == (0, 0)
    assert stats["registered_bytes"] == 60 * 131077 + 2 * STAGE_BYTES  # of the threads that read and write


@pytest.mark.parametrize("name", sorted(LAYOUT.page_bytes))
async def test_short_pages_go_through_the_stage_in_one_transfer(backend: MooncakeBackend, name: str) -> None:
    pool, keys = Pool(backend, LAYOUT.page_bytes[name], 200), keys_of(100, name)
    assert await backend.put(keys, pool.fill(keys)) == [HIT] * 100
    assert await backend.get(keys, pool.records[100:]) == [HIT] * 100
    assert pool.holds(keys, at=100)
    assert backend.stats()["staged_pages"] == 200


async def test_short_and_long_pages_in_one_call(backend: MooncakeBackend) -> None:
    short, long = Pool(backend, 4096, 2), Pool(backend, 1 << 20, 2)
    keys = keys_of(2)
    records = [short.fill(keys[:1])[0], long.records[1]]
    records[1].header[:], records[1].payload[:] = bytes(HEADER_BYTES), content(keys[1], 1 << 20)
    assert await backend.put(keys, records) == [HIT] * 2
    assert await backend.get(keys, [short.records[1], long.records[0]]) == [HIT] * 2
    assert same(records, [short.records[1], long.records[0]])
    assert backend.stats()["staged_pages"] == 2


async def test_a_page_longer_than_the_stage(backend: MooncakeBackend) -> None:
    key = page_key("long")
    long = Record(aligned(HEADER_BYTES), aligned(9 << 20))
    long.payload[:] = content(key, 9 << 20)
    assert await backend.put([key], [long]) == [HIT]
    back = Record(aligned(HEADER_BYTES), aligned(9 << 20))
    assert await backend.get([key], [back]) == [HIT]
    assert same([long], [back])


async def test_two_caches_may_share_a_pool_and_part_in_any_order(mooncake_master: Any, namespace: str) -> None:
    one, two = await open_at(mooncake_master, namespace), await open_at(mooncake_master, namespace)
    slab = aligned(1 << 20)
    keys = keys_of(4)
    for backend in (one, two):
        backend.register("full", slab)
        assert await backend.exists(keys) == [MISS] * 4
        assert backend.stats()["registered_bytes"] == slab.nbytes
    await one.aclose()
    headers = memoryview(bytearray(4 * HEADER_BYTES))
    size = slab.nbytes // 4
    records = [Record(headers[i * 64 : i * 64 + 64], slab[i * size : (i + 1) * size]) for i in range(4)]
    assert await two.put(keys, records) == [HIT] * 4
    assert two.stats()["staged_pages"] == 0
    await two.aclose()


async def test_memory_that_overlaps_is_refused_and_staged(backend: MooncakeBackend) -> None:
    slab = aligned(1 << 20)
    backend.register("full", slab)
    backend.register("swa", slab[4096 : 2 * 4096])
    assert await backend.exists(keys_of(1)) == [MISS]
    assert backend.stats()["refused_regions"] == 1
    assert backend.stats()["registered_bytes"] == slab.nbytes
    keys = keys_of(2, "swa")
    await put_all(backend, keys)


@pytest.mark.parametrize("size", [16384 - 1, 16384 + 1, 16384 * 2, 1])
async def test_a_page_of_another_length_is_corrupt_and_the_others_are_not(backend: MooncakeBackend, size: int) -> None:
    keys = keys_of(3)
    stored = await put_all(backend, keys)
    records = [blank(keys[0]), Record(aligned(HEADER_BYTES), aligned(size)), blank(keys[2])]
    assert await backend.get(keys, records) == [HIT, CORRUPT, HIT]
    assert same([stored[0], stored[2]], [records[0], records[2]])


async def test_a_page_that_was_just_read_can_be_deleted(backend: MooncakeBackend) -> None:
    """A read leases an object; a corrupt page must leave all the same."""
    key = page_key("leased")
    await put_all(backend, [key])
    assert await backend.get([key], [blank(key)]) == [HIT]
    assert await backend.exists([key]) == [HIT]
    assert await backend.delete([key]) == [HIT]
    assert await backend.exists([key]) == [MISS]


async def test_a_list_needs_to_know_where_the_admin_server_is(mooncake_master: Any, namespace: str) -> None:
    url = mooncake_master.url.partition("?")[0]
    blind = await MooncakeBackend.open(parse_url(url, {"namespace": namespace}), LAYOUT)
    with pytest.raises(ConfigError, match="admin="):
        await anext(blind.listing())
    await blind.aclose()
    wrong = await open_at(mooncake_master, namespace, admin=f"{HOST}:{free_port()}")
    with pytest.raises(Unavailable):
        await anext(wrong.listing())
    await wrong.aclose()


async def test_other_options_are_refused_while_the_client_is_used(mooncake_master: Any, namespace: str) -> None:
    one = await open_at(mooncake_master, namespace)
    for option in ({"segment": "16MiB"}, {"buffer": "1MiB"}, {"host": "127.0.0.2"}):
        with pytest.raises(ConfigError, match=next(iter(option))):
            await open_at(mooncake_master, namespace, **option)
    assert await one.exists(keys_of(1)) == [MISS]
    await one.aclose()


async def test_the_client_is_shared_and_stays(mooncake_master: Any, namespace: str) -> None:
    settings = settings_of(parse_url(mooncake_master.url))
    one, two = await acquire(settings), await acquire(settings)
    assert one is two
    users = one.users
    one.release()
    two.release()
    three = await acquire(settings)
    assert three is one
    assert three.users == users - 1
    three.release()


@pytest.mark.parametrize("every", [False, True], ids=["the call", "every task, as asyncio.run does"])
async def test_an_open_that_is_cancelled_leaves_nothing_in_use(
    mooncake_master: Any, monkeypatch: pytest.MonkeyPatch, every: bool
) -> None:
    options = settings_of(parse_url(mooncake_master.url))
    one = await acquire(options)
    users, begun, go_on, set_up = one.users, threading.Event(), threading.Event(), client._acquire

    def slow(options: MooncakeSettings, host: str) -> client.MooncakeClient:
        begun.set()
        go_on.wait(10)
        return set_up(options, host)

    monkeypatch.setattr(client, "_acquire", slow)
    others = asyncio.all_tasks()
    opening = asyncio.ensure_future(acquire(options))
    await asyncio.to_thread(begun.wait, 10)
    for task in asyncio.all_tasks() - others if every else {opening}:
        task.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not opening.done(), "what has begun is waited for"
    go_on.set()
    await asyncio.wait([opening])
    assert opening.cancelled()
    assert one.users == users
    one.release()


# The conformance suite against a real Mooncake store, each test in a namespace of its own.
