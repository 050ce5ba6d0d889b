"""Whatever becomes of a store's answers on their way, no wrong byte is served, a call ends at its deadline, nobody
holds its pages then, and hits come back by themselves.

One table for every store that is reached by TCP: kinds of stores, faults by one proxy, operations. (A process has one
client of Mooncake to its end; that has its own tests. ``tests/host`` has those of the host process.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from itertools import count

import pytest

from asynccache.storage import RECORD_SCHEMA, CheckedStore, PageKey, Result, StoreLayout, open_store
from asynccache.testing.backend_suite import page_key
from tests.storage.page_kit import fill, get, put
from tests.stores.each import FIXTURES
from tests.stores.slow_proxy import Fault, SlowProxy
from tests.waiting import until

pytestmark = pytest.mark.slow

HIT, MISS, CORRUPT, FAILED = Result.HIT, Result.MISS, Result.CORRUPT, Result.FAILED
LAYOUT = StoreLayout({"full": 64 << 10}, RECORD_SCHEMA)
PAGES = 8
OPERATIONS: dict[str, Callable[[CheckedStore, list[PageKey]], Awaitable[list[Result]]]] = {
    "get": get, "put": put, "exists": CheckedStore.exists, "delete": CheckedStore.delete,
}  # fmt: skip
INDEXED = {("s3", "exists")}
"""What is answered without a question to the server."""

_numbers = count()


def some_keys() -> list[PageKey]:
    """Keys that nobody else has."""
    number = next(_numbers)
    return [page_key(f"faults/{number}/{i}") for i in range(PAGES)]


@pytest.fixture
def proxy(kind: str, request: pytest.FixtureRequest) -> Iterator[SlowProxy]:
    with SlowProxy(request.getfixturevalue(FIXTURES[kind]).port) as started:
        yield started


@pytest.fixture
def url(kind: str, proxy: SlowProxy, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Through the proxy."""
    server = request.getfixturevalue(FIXTURES[kind])
    for name, value in getattr(server, "client_environment", {}).items():
        monkeypatch.setenv(name, value)
    found: str = server.url
    if kind == "s3":
        found = server.url_at(f"faults/{next(_numbers)}") + "&refresh=0.05&request_timeout=5"
    return found.replace(f":{server.port}", f":{proxy.port}")


async def opened(url: str) -> CheckedStore:
    store = await open_store(url, LAYOUT, timeout=1.0)
    assert store is not None
    return store


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())
@pytest.mark.parametrize("kind", ["redis", "s3"])
async def test_a_fault_costs_calls_and_nothing_else(
    kind: str, fault: Fault, operation: str, url: str, proxy: SlowProxy
) -> None:
    store = await opened(url)
    old, new = some_keys(), some_keys()
    await fill(store, old)
    assert await get(store, old) == [HIT] * PAGES
    proxy.fault = fault
    async with asyncio.timeout(20):
        results = await OPERATIONS[operation](store, new if operation == "put" else old)  # a get looks at every byte
    if (kind, operation) in INDEXED:
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
    await store.aclose()


@pytest.mark.parametrize("method", ["get", "put"])
@pytest.mark.parametrize("fault", [Fault.HANG, Fault.DRIP], ids=lambda fault: fault.name.lower())
@pytest.mark.parametrize("kind", ["redis", "s3"])
async def test_a_call_that_is_cancelled_meanwhile_lets_go_of_its_pages(
    kind: str, fault: Fault, method: str, url: str, proxy: SlowProxy
) -> None:
    store = await opened(url)
    old, new = some_keys(), some_keys()
    await fill(store, old)
    proxy.fault = fault
    proxy.asked.clear()
    pages = [bytearray(64 << 10) for _ in range(PAGES)]
    views = [memoryview(page) for page in pages]
    task = asyncio.ensure_future(getattr(store, method)(old if method == "get" else new, views))
    await until(proxy.asked.is_set, "a question to the server")
    task.cancel()
    async with asyncio.timeout(20):
        await asyncio.wait([task])
    assert task.cancelled()
    for page, view in zip(pages, views, strict=True):
        view.release()
        page.append(0)                                 # impossible while there is a view of it
    proxy.fault = None
    await until(lambda: _all_hit(store, old), "a hit of every page")
    await store.aclose()


async def _all_hit(store: CheckedStore, keys: list[PageKey]) -> bool:
    return await get(store, keys) == [HIT] * PAGES
