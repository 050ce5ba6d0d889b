"""The Mooncake backend against a real store: as the runtime uses it, and the shipped suite."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from itertools import count
from typing import Any

import pytest
import pytest_asyncio
from asynccache_backends.mooncake import MooncakeBackend, client
from asynccache_backends.mooncake.client import MooncakeSettings, acquire, settings_of
from asynccache_backends.mooncake.transfers import STAGE_BYTES

from asynccache.errors import ConfigError, Timeout, Unavailable
from asynccache.storage import (
    HEADER_BYTES,
    RECORD_SCHEMA,
    CheckedStore,
    Listable,
    PageKey,
    Record,
    Result,
    StorageBackend,
    StoreLayout,
    parse_url,
)
from asynccache.testing.backend_suite import (
    LAYOUT,
    BackendSuite,
    OpenBackend,
    aligned,
    blank,
    content,
    keys_of,
    page_key,
    put_all,
    record_of,
    same,
)
from tests.stores.mooncake_server import MooncakeMaster
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


async def test_memory_that_is_not_registered_goes_through_the_stage(backend: MooncakeBackend) -> None:
    keys = keys_of(300)
    await put_all(backend, keys)
    assert backend.stats()["staged_pages"] == 300


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


async def test_a_key_twice_in_one_get_fills_both_buffers(backend: MooncakeBackend) -> None:
    keys = [page_key("a"), page_key("b"), page_key("a"), page_key("none"), page_key("none")]
    stored = await put_all(backend, keys[:2])
    records = [blank(key) for key in keys]
    assert await backend.get(keys, records) == [HIT, HIT, HIT, MISS, MISS]
    assert same([stored[0], stored[1], stored[0]], records[:3])


async def test_a_page_that_was_just_read_can_be_deleted(backend: MooncakeBackend) -> None:
    """A read leases an object; a corrupt page must leave all the same."""
    key = page_key("leased")
    await put_all(backend, [key])
    assert await backend.get([key], [blank(key)]) == [HIT]
    assert await backend.exists([key]) == [HIT]
    assert await backend.delete([key]) == [HIT]
    assert await backend.exists([key]) == [MISS]


async def test_clear_leaves_other_namespaces_alone(mooncake_master: Any, namespace: str) -> None:
    mine, longer = await open_at(mooncake_master, namespace), await open_at(mooncake_master, namespace + "b")
    keys = keys_of(5)
    await put_all(mine, keys)
    await put_all(longer, keys)
    assert await mine.get(keys[:1], [blank(keys[0])]) == [HIT]  # leased
    await mine.clear()
    assert await mine.exists(keys) == [MISS] * 5
    assert await longer.exists(keys) == [HIT] * 5
    await longer.clear()
    await mine.aclose()
    await longer.aclose()


async def test_it_can_be_listed(backend: MooncakeBackend, mooncake_master: Any, namespace: str) -> None:
    other = await open_at(mooncake_master, namespace + "b")
    await put_all(other, keys_of(3))
    keys = [*keys_of(300, "swa"), *keys_of(2, "odd")]
    await put_all(backend, keys)
    assert isinstance(backend, Listable)
    listed = {page.key: page.size async for batch in backend.listing() for page in batch}
    assert listed == {key.key: HEADER_BYTES + LAYOUT.page_bytes[key.pool] for key in keys}
    await other.aclose()


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


async def test_a_page_is_nothing_but_its_key_to_the_store(backend: MooncakeBackend, namespace: str) -> None:
    """A pool's name is the user's text: it reaches no name in the store."""
    layout = StoreLayout({"../x' OR *": 4096}, RECORD_SCHEMA)
    key = PageKey("../x' OR *", page_key("hostile").key)
    store = CheckedStore(backend, layout)
    assert await store.put([key], [aligned(4096)]) == [HIT]
    assert [page.key async for batch in backend.listing() for page in batch] == [key.key]
    await store.delete([key])


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


async def test_no_master_is_unavailable_at_once() -> None:
    MooncakeMaster.installed()
    with pytest.raises(Unavailable, match="cannot be reached"):
        await MooncakeBackend.open(parse_url(f"mooncake://{HOST}:{free_port()}"), LAYOUT)


async def test_a_master_that_never_answers_is_a_timeout() -> None:
    """The system accepts for it, as for a stopped process; the client would freeze the process to find out."""
    MooncakeMaster.installed()
    with socket.create_server((HOST, 0)) as silent:
        began = asyncio.get_running_loop().time()
        with pytest.raises(Timeout, match="does not answer"):
            await MooncakeBackend.open(parse_url(f"mooncake://{HOST}:{silent.getsockname()[1]}"), LAYOUT)
        assert asyncio.get_running_loop().time() - began < 5


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


async def test_what_was_put_twice_is_what_was_put_first(backend: MooncakeBackend) -> None:
    """Keys are written once, whoever writes them and however often."""
    key = page_key("once")
    await put_all(backend, [key])
    other = record_of(page_key("other"))
    await asyncio.gather(*(backend.put([key], [other]) for _ in range(8)))
    back = blank(key)
    assert await backend.get([key], [back]) == [HIT]
    assert same([back], [record_of(key)])


# The conformance suite against a real Mooncake store, each test in a namespace of its own.


class TestMooncake(BackendSuite):
    persistent = True

    @pytest.fixture
    def open_backend(self, mooncake_master: Any, namespace: str) -> OpenBackend:
        async def open_backend() -> StorageBackend:
            return await MooncakeBackend.open(parse_url(mooncake_master.url, {"namespace": namespace}), LAYOUT)

        return open_backend
