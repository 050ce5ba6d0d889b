"""Object stores under test: opened with their checks or bare, and their objects looked at behind their backs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from asynccache_backends.object_store import ObjectBackend
from asynccache_backends.object_store.client import ObjectClient, settings_of
from obstore.store import LocalStore

from asynccache.storage import CheckedStore, PageKey, ParsedUrl, Result, StoreLayout, parse_url
from asynccache.testing.backend_suite import LAYOUT, page_key

WAIT = 20.0
FOLDER = "folder"


async def open_backend(url: str, layout: StoreLayout = LAYOUT) -> ObjectBackend:
    """A backend. A URL of ``folder_url`` is the same store in a plain folder, by the same library."""
    parsed = parse_url(url)
    if parsed.scheme != FOLDER:
        return await ObjectBackend.open(parsed, layout)
    settings = settings_of(ParsedUrl("s3", "tests", parsed.options))
    client = ObjectClient(LocalStore(parsed.path, mkdir=True), "", str(parsed))
    return await ObjectBackend.open_client(client, settings, layout)


async def open_at(url: str, layout: StoreLayout = LAYOUT, timeout: float = 10.0) -> CheckedStore:
    """A store, opened as the runtime opens it."""
    return CheckedStore(await open_backend(url, layout), layout, timeout=timeout)


@asynccontextmanager
async def opened(url: str, layout: StoreLayout = LAYOUT, timeout: float = 10.0) -> AsyncIterator[CheckedStore]:
    """A store as ``open_at`` returns it, closed at the end."""
    store = await open_at(url, layout, timeout)
    try:
        yield store
    finally:
        await store.aclose()


def bare(store: CheckedStore) -> ObjectBackend:
    """The backend below the checks."""
    assert isinstance(store.backend, ObjectBackend)
    return store.backend


def folder_url(folder: Path, options: str = "refresh=0") -> str:
    """A store in a folder; others' pages are not looked for unless ``options`` say so."""
    return f"{FOLDER}:{folder}?{options}"


def objects(folder: Path, kind: str = "packs") -> list[Path]:
    """The objects of a store in a folder, in the order of their names."""
    return sorted(path for path in (folder / kind).glob("*") if path.is_file())


def packs(folder: Path) -> list[Path]:
    """The packs of a store in a folder, without tombstones."""
    return [path for path in objects(folder) if not path.suffix]


def some_keys(name: str, count: int, pool: str = "full") -> list[PageKey]:
    """Keys that depend on ``name``."""
    return [page_key(f"{name}/{i}", pool) for i in range(count)]


async def until_hit(store: CheckedStore, keys: Sequence[PageKey], expected: Result = Result.HIT) -> None:
    """Ask until all keys are answered so."""
    end = time.monotonic() + WAIT
    while set(results := await store.exists(keys)) != {expected}:
        assert time.monotonic() < end, results
        await asyncio.sleep(0.01)
