"""The Mooncake backend against a real store: as the runtime uses it, and the shipped suite."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
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
from tests.stores.mooncake_child import Child
from tests.stores.mooncake_server import MooncakeMaster, answer
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


# Tests that need a process of their own: two that share a store, other options, misuse of the real client, and its
# end.


@pytest.fixture(scope="module")
def other_master() -> Iterator[MooncakeMaster]:
    """A second store."""
    with MooncakeMaster() as master:
        yield master


def segments(master: MooncakeMaster) -> int:
    return len(answer(master.admin, "/get_all_segments").split())


@pytest.mark.slow
def test_the_real_client_is_not_called_after_close(mooncake_master: Any) -> None:
    with Child() as child:
        answered = child.ask("misuse", url=mooncake_master.url)
        assert (answered["refused"], answered["state"]) == (1, "CLOSED")
        assert child.end() == 0


@pytest.mark.slow
def test_another_store_only_when_the_first_is_not_used(mooncake_master: Any, other_master: Any) -> None:
    with Child() as child:
        child.ask("open", url=mooncake_master.url, namespace="first.")
        refused = child.ask("open", url=other_master.url)
        assert refused["error"] == "ConfigError"
        assert "master" in refused["message"]
        assert child.ask("put", count=5)["HIT"] == 5
        child.ask("close")
        assert "error" not in child.ask("open", url=other_master.url)
        assert child.ask("get", count=5)["MISS"] == 5
        assert child.ask("put", count=5)["HIT"] == 5


@pytest.mark.slow
def test_a_segment_is_contributed_and_leaves_with_the_process(other_master: Any) -> None:
    """At once, and not when the master has missed it for a while."""
    before = segments(other_master)
    with Child() as child:
        assert "error" not in child.ask("open", url=other_master.url, segment="64MiB", namespace="own.")
        assert segments(other_master) == before + 1
        assert child.ask("put", count=100)["HIT"] == 100
        child.ask("close")
        assert child.end() == 0
        began = time.monotonic()
        while segments(other_master) != before:
            assert time.monotonic() - began < 3
            time.sleep(0.05)


@pytest.mark.slow
def test_set_up_freezes_the_loop_shortly(mooncake_master: Any) -> None:
    with Child() as child:
        opened = child.ask("open", url=mooncake_master.url, namespace="freeze.")
        assert opened["lag"] < 2, opened
        again = child.ask("open", url=mooncake_master.url, namespace="freeze2.")
        assert again["lag"] < 0.5, again


@pytest.mark.slow
def test_a_process_that_ends_while_a_call_is_under_way_ends_well(other_master: Any) -> None:
    with Child() as child:
        child.ask("open", url=other_master.url, namespace="inside.")
        other_master.hang()
        try:
            child.ask("leave_inside")
            assert child.end() == 0
        finally:
            other_master.resume()


@pytest.mark.slow
def test_a_process_that_ends_without_closing_anything_ends_well(mooncake_master: Any) -> None:
    with Child() as child:
        child.ask("open", url=mooncake_master.url, namespace="end.")
        child.ask("put", count=5)
        assert child.end() == 0


# Masters and owners of segments that are killed, hung, restarted and full. The cache is in a child process, which
# also says how long its loop stood still meanwhile.


TTL = 4                                            # seconds after which the master gives a silent owner up
LAG = 0.5                                          # the loop may stand still so long, on a machine that is busy


@pytest.fixture
def master() -> Iterator[MooncakeMaster]:
    """A small store."""
    with MooncakeMaster(segment=64, ttl=TTL) as master:
        yield master


@pytest.fixture
def child(master: MooncakeMaster) -> Iterator[Child]:
    """With 64 pages stored."""
    with Child() as process:
        assert "error" not in process.ask("open", url=master.url)
        assert process.ask("put", count=64)["HIT"] == 64
        yield process


def until_true(what: Callable[[], bool], seconds: float) -> None:
    """Wait for it."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.slow
def test_the_master_is_killed_and_comes_back_empty(master: MooncakeMaster, child: Child) -> None:
    master.kill()
    first = child.ask("put", count=64, name="new")
    assert first["error"] == "Unavailable"
    assert (first["seconds"] < 10, first["lag"] < LAG) == (True, True), first
    for order in ("get", "exists", "put"):
        later = child.ask(order, count=64)
        assert later["error"] == "Unavailable"
        assert later["seconds"] < 1, "the client was asked, and not the master's port"
    master.start()
    until_true(lambda: child.ask("put", count=64).get("HIT") == 64, 20)
    got = child.ask("get", count=64)
    assert (got["HIT"], got["wrong"]) == (64, 0)


@pytest.mark.slow
def test_the_master_hangs_and_goes_on(master: MooncakeMaster, child: Child) -> None:
    master.hang()
    for order in ("get", "exists", "put"):
        answered = child.ask(order, count=64)
        assert answered["error"] == "Timeout"
        assert answered["seconds"] < 3, answered
        assert answered["lag"] < LAG, answered
    master.resume()
    until_true(lambda: child.ask("get", count=64).get("HIT") == 64, 10)
    assert child.ask("get", count=64)["wrong"] == 0


@pytest.mark.slow
def test_a_get_of_a_hung_master_that_is_cancelled_lets_go_soon(master: MooncakeMaster, child: Child) -> None:
    master.hang()
    answered = child.ask("cancel", count=64, after=0.2)
    assert answered["cancelled"]
    assert answered["held"] < 3
    again = child.ask("cancel", count=64, after=0.2)
    assert again["held"] < 0.2, "who waits for a greeting holds no buffer"
    master.resume()


@pytest.mark.slow
def test_a_cache_that_opens_at_a_hung_master_freezes_nothing(master: MooncakeMaster) -> None:
    master.hang()
    with Child() as child:
        opened = child.ask("open", url=master.url)
        assert opened["error"] == "Timeout"
        assert opened["seconds"] < 3
        assert opened["lag"] < LAG
        master.resume()
        until_true(lambda: "error" not in child.ask("open", url=master.url), 10)


@pytest.mark.slow
def test_the_owner_of_a_segment_is_killed(master: MooncakeMaster, child: Child) -> None:
    assert master.owner is not None
    master.owner.kill()
    for order in ("get", "put"):
        answered = child.ask(order, count=64, name="" if order == "get" else "new")
        assert answered["error"] == "Unavailable"
        assert answered["seconds"] < 10
    until_true(lambda: child.ask("get", count=64).get("MISS") == 64, 3 * TTL + 5)
    master.owner.start()
    until_true(lambda: child.ask("put", count=64).get("HIT") == 64, 20)
    assert child.ask("get", count=64)["wrong"] == 0


@pytest.mark.slow
def test_the_owner_of_a_segment_hangs(master: MooncakeMaster, child: Child) -> None:
    """The buffers are held until the client's transfers time out; the loop is not."""
    assert master.owner is not None
    master.owner.hang()
    answered = child.ask("get", count=64)
    assert answered["error"] == "Unavailable"
    assert (answered["seconds"] < 20, answered["lag"] < LAG) == (True, True), answered
    until_true(lambda: child.ask("get", count=64).get("MISS") == 64, 3 * TTL + 5)
    master.owner.resume()
    until_true(lambda: child.ask("put", count=64).get("HIT") == 64, 20)
    assert child.ask("get", count=64)["wrong"] == 0


@pytest.mark.slow
def test_a_full_store_fails_pages_or_evicts_and_never_lies(master: MooncakeMaster, child: Child) -> None:
    """Nearly twice what it holds."""
    stored = 0
    for batch in range(30):
        answered = child.ask("put", count=256, name=f"{batch}/")
        assert "error" not in answered, answered
        assert answered["seconds"] < 5
        stored += answered.get("HIT", 0)
    assert stored > 64 << 20 >> 14, "nothing was evicted"
    found = 0
    for batch in range(30):
        got = child.ask("get", count=256, name=f"{batch}/")
        assert got["wrong"] == 0
        found += got.get("HIT", 0)
    assert 0 < found < stored
    assert child.ask("stats")["full_waits"] > 0
