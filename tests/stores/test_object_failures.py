"""A real S3 server that hangs, dies, comes back empty, and calls that are cancelled: nothing raises but BackendError,
no buffer is held, and hits come back by themselves."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator

import pytest
from asynccache_backends.object_store import ObjectBackend

from asynccache.errors import Unavailable
from asynccache.storage import (
    HEADER_BYTES,
    RECORD_SCHEMA,
    CheckedStore,
    PageKey,
    Record,
    Result,
    StoreLayout,
    parse_url,
)
from asynccache.testing.backend_suite import content
from tests.storage.page_kit import fill, get, put
from tests.stores.object_server import MotoServer
from tests.stores.object_store_kit import bare, open_at, opened, some_keys, until_hit
from tests.stores.slow_proxy import DISKS, QUOTA, FullProxy, Refusal

pytestmark = pytest.mark.slow

HIT, MISS, FAILED = Result.HIT, Result.MISS, Result.FAILED
LARGE = StoreLayout({"full": 256 << 10}, RECORD_SCHEMA)            # sent from where it lies
SMALL = StoreLayout({"full": 8 << 10}, RECORD_SCHEMA)              # copied first

_numbers = itertools.count()


@pytest.fixture
def url(s3_server: MotoServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A prefix of its own; a server that was harmed is put back."""
    for name, value in s3_server.client_environment.items():
        monkeypatch.setenv(name, value)
    yield s3_server.url_at(f"failures/{next(_numbers)}") + "&refresh=0.05&request_timeout=5"
    if s3_server.pid is None:
        s3_server.start()


class Buffers:
    """Page memory that shows whether somebody still holds it."""

    def __init__(self, keys: list[PageKey], layout: StoreLayout) -> None:
        size = layout.page_bytes["full"]
        self.memory = [bytearray(content(key, size)) for key in keys]
        self.records = [Record(memoryview(bytearray(HEADER_BYTES)), memoryview(page)) for page in self.memory]

    def held(self) -> bool:
        """Whether any page is in anybody's hands but ours."""
        for record in self.records:
            record.payload.release()
        try:
            for page in self.memory:
                page.append(0)                         # impossible while there is a view of it
        except BufferError:
            return True
        return False


@pytest.mark.parametrize("layout", [LARGE, SMALL], ids=["large", "small"])
async def test_a_put_cancelled_anywhere_holds_no_buffer(url: str, layout: StoreLayout) -> None:
    backend = await ObjectBackend.open(parse_url(url), layout)
    cancelled = 0
    for turn in range(40):
        keys = some_keys(str(turn), 8)
        buffers = Buffers(keys, layout)
        task = asyncio.ensure_future(backend.put(keys, buffers.records))
        for _ in range(turn // 2):
            await asyncio.sleep(0.001 if turn % 2 else 0)
        task.cancel()
        await asyncio.wait([task])
        cancelled += task.cancelled()
        assert not buffers.held()
        records = [Record(memoryview(bytearray(64)), memoryview(bytearray(layout.page_bytes["full"]))) for _ in keys]
        for key, result, record in zip(keys, await backend.get(keys, records), records, strict=True):
            assert result is MISS or (result is HIT and record.payload == content(key, record.payload.nbytes))
    assert cancelled > 5
    await backend.aclose()


async def test_a_get_cancelled_anywhere_holds_no_buffer(url: str) -> None:
    backend = await ObjectBackend.open(parse_url(url), LARGE)
    keys = some_keys("get", 20)
    await backend.put(keys, Buffers(keys, LARGE).records)
    cancelled = 0
    for turn in range(40):
        buffers = Buffers(keys, LARGE)
        task = asyncio.ensure_future(backend.get(keys, buffers.records))
        for _ in range(turn // 2):
            await asyncio.sleep(0.001 if turn % 2 else 0)
        task.cancel()
        await asyncio.wait([task])
        cancelled += task.cancelled()
        assert not buffers.held()
    assert cancelled > 5
    await backend.aclose()


async def test_one_of_two_that_share_a_pack_may_leave(s3_server: MotoServer, url: str) -> None:
    backend = await ObjectBackend.open(parse_url(url), SMALL)
    keys = some_keys("share", 6)
    s3_server.hang()
    try:
        puts = [asyncio.ensure_future(backend.put([key], Buffers([key], SMALL).records)) for key in keys]
        await asyncio.sleep(0)
        puts[0].cancel()                               # has a pack of its own, as the next one
        puts[2].cancel()                               # waits in line, as all others
        await asyncio.wait([puts[0], puts[2]])
        puts[3].cancel()                               # shares a pack that is under way by now
        await asyncio.wait([puts[3]])
    finally:
        s3_server.resume()
    await asyncio.wait(puts)
    assert [task.cancelled() for task in puts] == [True, False, True, True, False, False]
    assert [task.result() for task in (puts[1], *puts[4:])] == [[HIT]] * 3
    assert await backend.exists(keys) == [MISS, HIT, MISS, HIT, HIT, HIT]
    assert backend.stats()["packs"] == 2
    await backend.aclose()


async def test_a_killed_server_fails_calls_soon_and_comes_back_empty(s3_server: MotoServer, url: str) -> None:
    async with opened(url, LARGE, timeout=10.0) as store:
        keys = some_keys("old", 8)
        await fill(store, keys)
        s3_server.kill()
        began = time.monotonic()
        assert await get(store, keys) == [FAILED] * 8
        assert await put(store, some_keys("new", 8)) == [FAILED] * 8
        assert time.monotonic() - began < 8
        assert store.stats()["failed_calls"] == 2
        with pytest.raises(Unavailable):
            await bare(store).get(keys, Buffers(keys, LARGE).records)
        s3_server.restart(empty=True)
        assert await get(store, keys) == [MISS] * 8
        await fill(store, keys)
        assert await get(store, keys) == [HIT] * 8
        assert store.stats()["timeouts"] == 0


@pytest.mark.parametrize("refusal", [QUOTA, DISKS], ids=["quota", "disks"])
async def test_a_full_server_refuses_pages_and_serves_what_it_has(
    s3_server: MotoServer, url: str, refusal: Refusal
) -> None:
    with FullProxy(s3_server.port) as proxy:
        async with opened(url.replace(f":{s3_server.port}", f":{proxy.port}"), LARGE) as store:
            old, new = some_keys("old", 8), some_keys("new", 8)
            await fill(store, old)
            proxy.full(refusal)
            assert await put(store, new) == [FAILED] * 8
            asked = [proxy.refused]
            for n in range(20):
                assert await put(store, some_keys(f"more {n}", 1)) == [FAILED]
                asked.append(proxy.refused)
            assert len(set(asked)) < 21, "it is left alone for a moment"
            assert await put(store, old) == [HIT] * 8
            assert await get(store, old) == [HIT] * 8
            stats = store.stats()
            assert stats["refused_pages"] == 28
            assert stats["failed_calls"] == stats["timeouts"] == stats["breaker_opened"] == 0
            proxy.full(None)
            await until_stored(store, new)
            assert await get(store, new) == [HIT] * 8


async def until_stored(store: CheckedStore, keys: list[PageKey]) -> None:
    """Put them until they are taken."""
    end = time.monotonic() + 20
    while FAILED in await put(store, keys):
        assert time.monotonic() < end
        await asyncio.sleep(0.05)


async def test_two_stores_share_a_bucket_through_an_outage(s3_server: MotoServer, url: str) -> None:
    async with opened(url) as one, opened(url) as two:
        await fill(one, some_keys("0", 5))
        await until_hit(two, some_keys("0", 5))
        s3_server.restart()                            # loses everything
        assert set(await get(two, some_keys("0", 5))) == {MISS}
        await fill(one, some_keys("1", 5))
        await until_hit(two, some_keys("1", 5))
        assert set(await get(two, some_keys("1", 5))) == {HIT}
        assert two.stats()["failed_calls"] == 0


async def test_closing_beside_a_hung_server_ends(s3_server: MotoServer, url: str) -> None:
    store = await open_at(url, LARGE)
    keys = some_keys("0", 4)
    await fill(store, keys)
    s3_server.hang()
    try:
        task = asyncio.ensure_future(get(store, keys))
        await asyncio.sleep(0.05)
        task.cancel()
        began = time.monotonic()
        await store.aclose()
        assert time.monotonic() - began < 8
        await asyncio.wait([task])
    finally:
        s3_server.resume()
