"""Whatever becomes of a store or of its answers on their way, no wrong byte is served, a call ends at its deadline,
nobody holds its pages then, and hits come back by themselves.

One table for the stores that are reached by TCP: kinds, faults by one proxy or to the server, operations. (A process
has one client of Mooncake to its end; that has its own tests. ``tests/host`` has those of the host process.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from asynccache.storage import RECORD_SCHEMA, CheckedStore, PageKey, Record, Result, StoreLayout
from asynccache.testing.backend_suite import content
from tests.storage.pages_kit import blank, fill, get, is_free, put
from tests.stores import failing, filler
from tests.stores.kinds import KINDS, PROXIED, fresh_name, open_backend, opened, server_of, some_keys, store_url
from tests.stores.slow_proxy import Fault, SlowProxy
from tests.waiting import until

HIT, MISS, CORRUPT, FAILED = Result.HIT, Result.MISS, Result.CORRUPT, Result.FAILED
LAYOUT = StoreLayout({"full": 64 << 10}, RECORD_SCHEMA)
PAGES = 8
OPERATIONS: dict[str, Callable[[CheckedStore, list[PageKey]], Awaitable[list[Result]]]] = {
    "get": get, "put": put, "exists": CheckedStore.exists, "delete": CheckedStore.delete,
}  # fmt: skip
KILLED = ("redis", "cluster", pytest.param("s3", marks=pytest.mark.slow(10)))


@pytest.fixture
def old() -> list[PageKey]:
    return some_keys(fresh_name(), PAGES)


@pytest.fixture
def new() -> list[PageKey]:
    return some_keys(fresh_name(), PAGES)


@pytest.fixture
def server(kind: str, request: pytest.FixtureRequest) -> Any:
    return server_of(kind, request)


@pytest.fixture
def url(kind: str, request: pytest.FixtureRequest) -> str:
    return store_url(kind, request, fresh_name())


@pytest.fixture
def proxy(server: Any) -> Iterator[SlowProxy]:
    with SlowProxy(server.port) as started:
        yield started


@pytest.fixture
def through(url: str, server: Any, proxy: SlowProxy) -> str:
    return url.replace(f":{server.port}", f":{proxy.port}")


def pages(keys: list[PageKey], size: int) -> list[Record]:
    """The keys' own pages, in memory that shows whether somebody still holds it."""
    records = [blank(size) for _ in keys]
    for key, record in zip(keys, records, strict=True):
        record.payload[:] = content(key, size)
    return records


def payloads(records: list[Record]) -> list[memoryview]:
    return [record.payload for record in records]


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())
@pytest.mark.parametrize("kind", PROXIED)
async def test_a_fault_costs_calls_and_nothing_else(
    kind: str, fault: Fault, operation: str, through: str, proxy: SlowProxy, old: list[PageKey], new: list[PageKey]
) -> None:
    async with opened(through, LAYOUT, timeout=1.0) as store:
        await fill(store, old)
        assert await get(store, old) == [HIT] * PAGES
        proxy.fault = fault
        async with asyncio.timeout(20):
            results = await OPERATIONS[operation](store, new if operation == "put" else old)  # get: every byte is right
        if KINDS[kind].indexed and operation == "exists":
            assert set(results) == {HIT}
        elif fault is Fault.DRIP:
            assert set(results) <= {HIT, FAILED}
        elif fault is Fault.GARBAGE:
            assert set(results) <= {FAILED, CORRUPT}
        else:
            assert set(results) == {FAILED}
            assert store.stats()["timeouts"] == (fault is Fault.HANG)
        proxy.fault = None

        async def well() -> bool:
            return await put(store, [*old, *new]) == [HIT] * 16 == await get(store, [*old, *new])

        await until(well, "a hit of every page")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["get", "put"])
@pytest.mark.parametrize("fault", [Fault.HANG, Fault.DRIP], ids=lambda fault: fault.name.lower())
@pytest.mark.parametrize("kind", PROXIED)
async def test_a_call_that_is_cancelled_meanwhile_lets_go_of_its_pages(
    fault: Fault, method: str, through: str, proxy: SlowProxy, old: list[PageKey], new: list[PageKey]
) -> None:
    async with opened(through, LAYOUT, timeout=1.0) as store:
        await fill(store, old)
        proxy.fault = fault
        proxy.asked.clear()
        buffers = pages(old, 64 << 10)
        task = asyncio.ensure_future(getattr(store, method)(old if method == "get" else new, payloads(buffers)))
        await until(proxy.asked.is_set, "a question to the server")
        task.cancel()
        async with asyncio.timeout(20):
            await asyncio.wait([task])
        assert task.cancelled()
        assert all(map(is_free, buffers))
        proxy.fault = None
        await until(lambda: _all_hit(store, old), "a hit of every page")


async def _all_hit(store: CheckedStore, keys: list[PageKey]) -> bool:
    return await get(store, keys) == [HIT] * PAGES


@pytest.mark.parametrize("size", [8 << 10, 256 << 10])  # copied first by some stores, and sent from where it lies
@pytest.mark.parametrize("method", ["get", "put"])
@pytest.mark.parametrize("kind", ["folder", "host", "redis", "cluster", pytest.param("s3", marks=pytest.mark.slow(5))])
async def test_a_call_that_is_cancelled_anywhere_holds_no_buffer(kind: str, method: str, size: int, url: str) -> None:
    backend, cancelled = await open_backend(url, StoreLayout({"full": size}, RECORD_SCHEMA)), 0
    there = some_keys(fresh_name(), PAGES)
    assert set(await backend.put(there, pages(there, size))) == {HIT}
    for turn in range(24):
        keys = there if method == "get" else some_keys(fresh_name(), PAGES)
        buffers = pages(keys, size)
        task = asyncio.ensure_future(getattr(backend, method)(keys, buffers))
        for _ in range(turn // 2):
            await asyncio.sleep(0.001 if turn % 2 else 0)
        task.cancel()
        await asyncio.wait([task])
        cancelled += task.cancelled()
        assert all(map(is_free, buffers))
        back = pages(keys[::-1], size)
        for key, result, page in zip(keys, await backend.get(keys, back), payloads(back), strict=True):
            assert (result is MISS and method == "put") or (result is HIT and page == content(key, size))
    assert cancelled > 5
    await backend.aclose()


@pytest.mark.parametrize("kind", KILLED)
async def test_a_killed_server_fails_calls_soon_and_comes_back_empty(
    url: str, server: Any, old: list[PageKey], new: list[PageKey]
) -> None:
    """Also calls that are under way. Hits come back by themselves."""
    async with opened(url, LAYOUT) as store:
        await fill(store, old)
        assert await get(store, old) == [HIT] * PAGES
        calls = [asyncio.create_task(call(store, old)) for call in (get, put, get) for _ in range(3)]
        await asyncio.sleep(0.005)
        server.kill()
        try:
            async with asyncio.timeout(16):
                for results in await asyncio.gather(*calls):
                    assert set(results) <= {HIT, FAILED}
                for _ in range(3):
                    assert await get(store, old) == await put(store, new) == [FAILED] * PAGES
        finally:
            server.restart()

        async def answered() -> bool:
            return FAILED not in await get(store, old)

        await until(answered, "an answer of the server that is back")
        assert await get(store, old) == [MISS] * PAGES
        await fill(store, old)
        assert await get(store, old) == [HIT] * PAGES
        assert store.stats()["timeouts"] == 0


@pytest.mark.parametrize("kind", KILLED)
async def test_a_call_at_a_hung_server_is_cancelled_and_the_store_closed_soon(
    url: str, server: Any, old: list[PageKey]
) -> None:
    async with opened(url, LAYOUT) as store:
        await fill(store, old)
        server.hang()
        try:
            buffers, loop = pages(old, 64 << 10), asyncio.get_running_loop()
            tasks = [asyncio.ensure_future(store.get(old, payloads(buffers))), asyncio.ensure_future(get(store, old))]
            await asyncio.sleep(0.05)
            tasks[0].cancel()
            async with asyncio.timeout(2):
                await asyncio.wait(tasks[:1])
            assert tasks[0].cancelled()
            assert all(map(is_free, buffers))
            began = loop.time()
            await store.aclose()
            assert loop.time() - began < 8
            await asyncio.wait(tasks)
        finally:
            server.resume()
    async with opened(url, LAYOUT) as store:
        await until(lambda: _all_hit(store, old), "a hit of every page")


@pytest.mark.slow(2)
@pytest.mark.parametrize("place", ["file:{}/kv?capacity=256MiB&segment=8MiB&direct=off",
                                   "file:{}/kv?capacity=256MiB&segment=8MiB&direct=auto", "folder:{}?refresh=0", "s3"])
async def test_what_a_killed_writer_had_stored_is_there(
    place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """kill -9 at any moment, and again and again."""
    url = store_url("s3", request, fresh_name()) if place == "s3" else place.format(tmp_path)
    rng, history = Random(f"kill {place}"), list[filler.Said]()
    for round_ in range(4):
        history.append(filler.killed_after(rng.randrange(3, 60), url, round_))
        async with opened(url) as store:
            await filler.check(store, history)
            assert not store.stats().get("unreadable_packs")


# The stress tool on every kind of store while trouble comes and goes.


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow(course.seconds) if course.seconds else pytest.mark.soak)
    for name, course in failing.COURSES.items()
])  # fmt: skip
def test_nothing_goes_wrong_while_a_store_fails(name: str) -> None:
    assert failing.run(name).phases
