"""The table of stores: what starts each, how a URL is one of pages of its own, and what a proxy before it can do. What
a test does to a store must leave it well: the servers are shared."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from time import time_ns
from typing import Any, NamedTuple

import pytest
from asynccache_backends.object_store import ObjectBackend
from asynccache_backends.object_store.client import ObjectClient, settings_of
from obstore.store import LocalStore

from asynccache.storage import CheckedStore, PageKey, ParsedUrl, Result, StorageBackend, StoreLayout, parse_url
from asynccache.storage.attachment import backend_class
from asynccache.testing.backend_suite import LAYOUT, page_key
from tests.waiting import until


class Kind(NamedTuple):
    """A kind of store. ``server``: the fixture that starts it; none: a folder. ``own``: the URL of a server, or a
    folder, at which nobody but who knows the name has pages. ``proxied``: it is reached at one port by TCP, so that
    ``SlowProxy`` can stand before it. ``indexed``: whether a page is there is answered without a question to it."""

    server: str
    own: Callable[[Any, str], str]
    proxied: bool = False
    indexed: bool = False


def _bucket(server: Any, name: str) -> str:
    return f"{server.url_at(name)}&refresh=0.05&request_timeout=5"


KINDS = {
    "file": Kind("", lambda folder, name: f"file:{folder}/{name}?capacity=64MiB"),
    "folder": Kind("", lambda folder, name: f"folder:{folder}/{name}?refresh=0.02", indexed=True),
    "host": Kind("host_process", lambda server, name: str(server.url)),  # has no names: pages are everybody's
    "redis": Kind("redis_server", lambda server, name: f"{server.url}?prefix={name}", proxied=True),
    "cluster": Kind("redis_cluster", lambda server, name: f"{server.url}?prefix={name}"),
    "s3": Kind("s3_server", _bucket, proxied=True, indexed=True),
    "az": Kind("az_server", _bucket, indexed=True),
    "ceph": Kind("ceph_server", _bucket, indexed=True),
    "mooncake": Kind("mooncake_master", lambda server, name: f"{server.url}&namespace={name}"),
}
PROXIED = tuple(name for name, kind in KINDS.items() if kind.proxied)
ATTACHED = ("file", "host", "redis", "cluster", "s3", "mooncake")
"""Those that ``storage=`` takes; Azure's has a scheme of its own, and else it is S3's."""

_numbers = count()
_seeds = count(time_ns() // 1_000_000_000 % 5_000)


def fresh_name() -> str:
    """For a store of its own, or for keys that nobody else has."""
    return f"n{os.getpid()}-{next(_numbers)}-"


def fresh_seed() -> int:
    """For a text that no earlier test has stored."""
    return 20 + next(_seeds) % 15_000


def server_of(kind: str, request: pytest.FixtureRequest) -> Any:
    """What runs there, with this process's environment as a client of it needs it; of a folder the place."""
    if not KINDS[kind].server:
        return request.getfixturevalue("tmp_path")
    server = request.getfixturevalue(KINDS[kind].server)
    for name, value in getattr(server, "client_environment", {}).items():
        request.getfixturevalue("monkeypatch").setenv(name, value)
    return server


def store_url(kind: str, request: pytest.FixtureRequest, name: str = "") -> str:
    """What ``storage=`` takes. With a ``name`` its pages are its own; else it may hold pages of others already."""
    server = server_of(kind, request)
    return KINDS[kind].own(server, name or "kv") if name or not KINDS[kind].server else str(server.url)


# opened


async def open_backend(url: str, layout: StoreLayout = LAYOUT) -> Any:
    """A backend. A URL of ``folder_url`` is the same store as S3's, in a plain folder and by the same library."""
    parsed = parse_url(url)
    if parsed.scheme != "folder":
        return await backend_class(parsed.scheme).open(parsed, layout)
    settings = settings_of(ParsedUrl("s3", "tests", parsed.options))
    client = ObjectClient(LocalStore(parsed.path, mkdir=True), "", str(parsed))
    return await ObjectBackend.open_client(client, settings, layout)


@asynccontextmanager
async def backend_at(url: str, layout: StoreLayout = LAYOUT) -> AsyncIterator[Any]:
    """A backend, closed at the end."""
    backend: StorageBackend = await open_backend(url, layout)
    try:
        yield backend
    finally:
        await backend.aclose()


@asynccontextmanager
async def opened(url: str, layout: StoreLayout = LAYOUT, timeout: float = 10.0) -> AsyncIterator[CheckedStore]:
    """A store as the runtime opens it, closed at the end."""
    store = CheckedStore(await open_backend(url, layout), layout, timeout=timeout)
    try:
        yield store
    finally:
        await store.aclose()


def some_keys(name: str, count: int, pool: str = "full") -> list[PageKey]:
    """Keys that depend on ``name``."""
    return [page_key(f"{name}/{i}", pool) for i in range(count)]


async def until_answered(store: Any, keys: Sequence[PageKey], expected: Result = Result.HIT) -> None:
    """Ask until all keys are answered so."""

    async def answered() -> bool:
        return set(await store.exists(keys)) == {expected}

    await until(answered, f"{expected.name} of every key")


# an object store in a folder, whose objects are looked at behind its back


def folder_url(folder: Path, options: str = "refresh=0") -> str:
    """Others' pages are not looked for unless ``options`` say so."""
    return f"folder:{folder}?{options}"


def objects(folder: Path, kind: str = "packs") -> list[Path]:
    """The objects of the store, in the order of their names."""
    return sorted(path for path in (folder / kind).glob("*") if path.is_file())


def packs(folder: Path) -> list[Path]:
    """Its packs, without tombstones."""
    return [path for path in objects(folder) if not path.suffix]


def bare(store: CheckedStore) -> ObjectBackend:
    """The backend below the checks."""
    assert isinstance(store.backend, ObjectBackend)
    return store.backend
