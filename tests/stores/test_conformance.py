"""Every store of the table does what the contract says: the shipped suite, and what several clients may expect."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio
from asynccache_backends.memory import MemoryBackend

from asynccache.errors import Timeout, Unavailable
from asynccache.storage import HEADER_BYTES, Listable, PageKey, Result, StorageBackend
from asynccache.testing.backend_suite import (
    LAYOUT,
    BackendSuite,
    OpenBackend,
    blank,
    get_all,
    page_key,
    put_all,
    record_of,
    same,
)
from asynccache.testing.faulty_backend import FaultyBackend
from asynccache.testing.slow_backend import SlowBackend
from tests.host.host_kit import serving, socket_path
from tests.simulated.backend import Hostility, SimulatedBackend
from tests.stores.kinds import KINDS, backend_at, fresh_name, open_backend, store_url, until_answered
from tests.stores.mooncake_server import MooncakeMaster
from tests.stores.server import HOST, free_port

HIT, MISS = Result.HIT, Result.MISS
NAMED = tuple(kind for kind in KINDS if kind not in ("file", "host", "ceph"))
"""Those in which several clients may have pages under several names."""
SECRET = "hunter2hunter2"


class TestEveryStore(BackendSuite):
    """Every backend of this distribution, and those that wrap others or are simulated. Of the host process each test
    has one, which is looked at in the end."""

    @pytest_asyncio.fixture(params=[
        "memory", "wrappers", "simulated", "file", "file direct", *NAMED, "host", "host with a folder behind",
    ])  # fmt: skip
    async def open_backend(self, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[OpenBackend]:  # type: ignore[override]
        kind, folder, pages = request.param, f"file:{tmp_path}/kv?capacity=64MiB", dict[PageKey, tuple[bytes, bytes]]()
        self.persistent = kind not in ("memory", "wrappers")
        urls = {"memory": "memory:", "file": f"{folder}&direct=off", "file direct": f"{folder}&direct=auto"}

        async def open_it() -> StorageBackend:
            if kind == "wrappers":
                return SlowBackend(FaultyBackend(MemoryBackend(), rate=0.0), latency=0.0, bandwidth=1e12)
            if kind == "simulated":
                return SimulatedBackend(Random(1), Hostility(delay=0.0), pages)
            opened: StorageBackend = await open_backend(urls[kind])
            return opened

        if not kind.startswith("host"):
            if kind in NAMED:
                urls[kind] = store_url(kind, request, fresh_name())
            yield open_it
            return
        async with serving(path := socket_path(), stores=[] if kind == "host" else [folder]) as server:
            urls[kind] = f"host:{path}"
            yield open_it
            assert not server.table.reserved_bytes
            server.table.audit()


@pytest.fixture(params=NAMED)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def name() -> str:
    return fresh_name()


@pytest.fixture
def url(kind: str, name: str, request: pytest.FixtureRequest) -> str:
    return store_url(kind, request, name)


async def test_what_one_client_stores_another_finds_and_only_under_that_name(
    kind: str, url: str, name: str, request: pytest.FixtureRequest
) -> None:
    """Names that begin alike, too; clearing one leaves the other alone."""
    keys = [page_key(str(i), ("full", "swa", "odd")[i % 3]) for i in range(30)]
    other = store_url(kind, request, name + "b")
    async with backend_at(url) as one, backend_at(url) as two, backend_at(other) as stranger:
        records = await put_all(one, keys)
        await until_answered(two, keys)
        results, fetched = await get_all(two, keys)
        assert results == [HIT] * 30
        assert same(records, fetched)
        assert await stranger.exists(keys) == [MISS] * 30
        await put_all(stranger, keys[:20])
        await stranger.clear()
        assert await one.exists(keys) == [HIT] * 30
        await put_all(stranger, keys[:5])
        await one.clear()
        assert await one.exists(keys) == [MISS] * 30
        assert await stranger.exists(keys) == [HIT] * 5 + [MISS] * 25


async def test_writers_of_one_page_do_no_harm(url: str) -> None:
    """All at once, with different bytes: one of them wins, whole, and each of them is told that it is stored."""
    key = page_key("contested")
    records = [record_of(page_key(f"other{i}")) for i in range(8)]
    async with backend_at(url) as one, backend_at(url) as two:
        puts = [backend.put([key], [record]) for backend, record in zip([one, two] * 4, records, strict=True)]
        assert await asyncio.gather(*puts) == [[HIT]] * 8
    async with backend_at(url) as one, backend_at(url) as two:
        (_, won), (_, again) = await get_all(one, [key]), await get_all(two, [key])
        assert same(won, again)
        assert sum(same(won, [record]) for record in records) == 1
        await one.put([key], [record_of(key)])
        assert same(won, (await get_all(one, [key]))[1]), "a page is written once"


async def test_every_page_is_listed_once_with_its_size_and_nobody_elses(
    kind: str, url: str, name: str, request: pytest.FixtureRequest
) -> None:
    keys = [*(page_key(str(i), ("swa", "odd")[i % 2]) for i in range(1200)), page_key("../x' OR *\r\nFLUSHALL")]
    async with backend_at(url) as backend, backend_at(store_url(kind, request, name + "b")) as other:
        await put_all(other, keys[:3])
        for at in range(0, len(keys), 100):
            await put_all(backend, keys[at : at + 100])
        assert isinstance(backend, Listable)
        listed = [page async for batch in backend.listing() for page in batch]
        assert len(listed) == len(keys)
        assert {(p.key, p.size) for p in listed} == {(k.key, HEADER_BYTES + LAYOUT.page_bytes[k.pool]) for k in keys}


async def test_a_key_twice_in_one_get_fills_both_buffers(url: str) -> None:
    keys = [page_key("a"), page_key("b"), page_key("a"), page_key("none"), page_key("none")]
    async with backend_at(url) as backend:
        stored = await put_all(backend, keys[:2])
        records = [blank(key) for key in keys]
        assert await backend.get(keys, records) == [HIT, HIT, HIT, MISS, MISS]
        assert same([stored[0], stored[1], stored[0]], records[:3])


@pytest.mark.parametrize(("url", "hangs"), [
    ("redis://:{secret}@{host}:{port}", False), ("redis://{host}:{port}?stall=0.3&cluster=off", True),
    ("s3://b/kv?endpoint=http://{host}:{port}&request_timeout=2", False), ("mooncake://{host}:{port}", False),
    ("mooncake://{host}:{port}", True),
])  # fmt: skip
async def test_a_server_that_is_not_there_or_hangs_refuses_to_open_soon_and_tells_no_secret(
    url: str, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that hangs is accepted for by the system, as it is for a stopped process."""
    if url.startswith("mooncake"):
        MooncakeMaster.installed()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, SECRET)
    port, began = free_port(), asyncio.get_running_loop().time()
    with socket.create_server((HOST, port)) if hangs else nullcontext():
        with pytest.raises(Timeout if hangs else Unavailable) as refused:
            await open_backend(url.format(host=HOST, port=port, secret=SECRET))
    assert asyncio.get_running_loop().time() - began < 8
    assert SECRET not in str(refused.value)
