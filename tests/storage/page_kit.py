"""Pages of a checked store whose content is a function of their key, a file store in a folder, and tests that are
simulated worlds."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from asynccache_backends.file import FileBackend
from asynccache_backends.file.segments import segment_name

from asynccache.storage import CheckedStore, PageKey, Result, StoreLayout, parse_url
from asynccache.testing.backend_suite import LAYOUT, aligned, content
from tests.simulated.loop import SimulatedLoop, simulate

# Pages of a checked store whose content is a function of their key: whatever comes back can be compared.


async def put(store: CheckedStore, keys: Sequence[PageKey]) -> list[Result]:
    """Store each key's own content."""
    sizes = store.layout.page_bytes
    return await store.put(keys, [memoryview(content(key, sizes[key.pool])) for key in keys])


async def fill(store: CheckedStore, keys: Sequence[PageKey]) -> None:
    """Store each key's own content; every page must be taken."""
    assert await put(store, keys) == [Result.HIT] * len(keys)


async def get(store: CheckedStore, keys: Sequence[PageKey]) -> list[Result]:
    """Read keys; every hit must be right."""
    pages = [aligned(store.layout.page_bytes[key.pool]) for key in keys]
    results = await store.get(keys, pages)
    for key, page, result in zip(keys, pages, results, strict=True):
        assert result is not Result.HIT or page == content(key, page.nbytes)
    return results


# A file store in a folder, and pages whose content is a function of their key.


OPENED: list[CheckedStore] = []


async def opened(folder: Path, options: str, layout: StoreLayout = LAYOUT) -> CheckedStore:
    return CheckedStore(await FileBackend.open(parse_url(f"file:{folder}?{options}"), layout), layout)


async def open_at(
    folder: Path, options: str = "capacity=16MiB&segment=1MiB", layout: StoreLayout = LAYOUT
) -> CheckedStore:
    """It is closed at the end of the test, if that does not close it."""
    OPENED.append(await opened(folder, options, layout))
    return OPENED[-1]


def file_backend(store: CheckedStore) -> FileBackend:
    assert isinstance(store.backend, FileBackend)
    return store.backend


def segment(folder: Path, number: int = 1) -> Path:
    return folder / segment_name(number)


def edit(path: Path, change: Callable[[bytearray], object]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def flip(at: int) -> Callable[[bytearray], None]:
    """The change of one bit."""

    def change(data: bytearray) -> None:
        data[at] ^= 1

    return change


def open_files(folder: Path) -> list[str]:
    """The files that this process has open under ``folder``."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return [path for path in found if str(folder) in path]


# Tests that are simulated worlds.


World = Callable[[SimulatedLoop], Coroutine[Any, Any, None]]


def in_world(world: World) -> Callable[[], None]:
    """A test that runs ``world`` under several seeds."""

    def test() -> None:
        for seed in range(5):
            simulate(world, seed)

    test.__name__ = world.__name__
    return test
