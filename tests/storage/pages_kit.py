"""Shared by the tests of ``Pages``: memory that cannot be closed while anybody has a view of it; stores that
misbehave."""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from asynccache_backends.file import FileBackend
from asynccache_backends.file.segments import segment_name
from asynccache_backends.memory import MemoryBackend

from asynccache.errors import Unavailable
from asynccache.storage import (
    CheckedStore,
    PageKey,
    Pages,
    Record,
    Result,
    StorageBackend,
    StoreLayout,
    parse_url,
    settled,
)
from asynccache.testing.backend_suite import LAYOUT, aligned, content
from asynccache.testing.wrapped_backend import WrappedBackend
from tests.simulated.loop import SimulatedLoop, simulate

_T = TypeVar("_T")

SIZE = 4096
SLOTS = 8
PATIENCE = 60.0
HIT, MISS, CORRUPT, FAILED = Result.HIT, Result.MISS, Result.CORRUPT, Result.FAILED


def keys(count: int, name: str = "key") -> list[bytes]:
    """Keys of different lengths."""
    return [f"{name} {i}".encode() * (i + 1) for i in range(count)]


def memory(size: int = SIZE, slots: int = SLOTS) -> mmap.mmap:
    """Pages, each with bytes of its own."""
    made = mmap.mmap(-1, size * slots)
    made.write(Random(size).randbytes(size * slots))
    return made


def row(made: mmap.mmap, slot: int, size: int = SIZE) -> bytes:
    return made[slot * size : (slot + 1) * size]


def open_pages(storage: str | StorageBackend | Sequence[str | StorageBackend], made: mmap.mmap, size: int = SIZE,
               namespace: str = "model-7b") -> Pages:  # fmt: skip
    return Pages.open(storage, made, size, namespace)


def result(future: Future[list[Result]]) -> list[Result]:
    return future.result(PATIENCE)


def until(there: Callable[[], bool]) -> None:
    """Return when ``there()`` is true, which another thread brings about."""
    end = time.monotonic() + PATIENCE
    while not there():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.001)


def blank(size: int) -> Record:
    """In memory of its own that can only be unmapped when nobody holds it."""
    return Record(memoryview(mmap.mmap(-1, 64)), memoryview(mmap.mmap(-1, max(1, size)))[:size])


def is_free(record: Record) -> bool:
    """Whether nobody but the caller holds the memory of ``blank``, which is gone then."""
    maps = [view.obj for view in record]
    for view in record:
        view.release()
    for memory in maps:
        assert isinstance(memory, mmap.mmap)
        memory.close()
    return True


def thread_names() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("asynccache"))


class Particular(Exception):
    """An error that is made in a way of its own, and says what it has."""

    def __init__(self, page: memoryview, *, code: int) -> None:
        super().__init__()
        self.page, self.code = page, code

    def __str__(self) -> str:
        return f"code {self.code} for {self.page.nbytes} bytes"


class Misbehaving(WrappedBackend):
    """A backend that misbehaves. ``how``: in which way, by the call's name; a number is seconds that it takes longer.
    ``inside`` is set when a call has begun to suffer. ``began``: the calls so far; ``now``: how many of each kind are
    under way; ``most``: how many were at once.

    ``hangs`` waits for ever and can be cancelled; ``is stuck`` is a thread's work that ends when ``gate`` is set, and
    not before. The frames of its errors hold everything that it was handed.
    """

    def __init__(self, inner: StorageBackend | None = None, /, **how: str | float) -> None:
        super().__init__(inner or MemoryBackend())
        self.how = how
        self.inside = threading.Event()
        self.gate = threading.Event()
        self.began: list[str] = []
        self.now = Counter[str]()
        self.most = 0

    @property
    def closed(self) -> int:
        return self.began.count("aclose")

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        return await self._suffer("exists", (), lambda: self.inner.exists(keys))

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        return await self._suffer("get", records, lambda: self.inner.get(keys, records))

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        return await self._suffer("put", records, lambda: self.inner.put(keys, records))

    async def clear(self) -> None:
        await self._suffer("clear", (), self.inner.clear)

    async def flush(self) -> None:
        await self._suffer("flush", (), self.inner.flush)

    async def aclose(self) -> None:
        await self._suffer("aclose", (), self.inner.aclose)

    async def _suffer(self, call: str, records: Sequence[Record], act: Callable[[], Awaitable[_T]]) -> _T:
        self.began.append(call)
        self.now[call] += 1
        self.most = max(self.most, self.now.total())
        self.inside.set()
        try:
            return await self._act(self.how.get(call, "works"), records, act)
        finally:
            self.now[call] -= 1

    async def _act(self, how: str | float, records: Sequence[Record], act: Callable[[], Awaitable[_T]]) -> _T:
        if isinstance(how, float):
            await asyncio.sleep(how)
        if how == "is unavailable":
            raise Unavailable(f"redis://me:s3cret@host has no answer about {len(records)} pages")
        if how == "has a bug":
            raise ValueError("a bug", [record.payload for record in records])
        if how == "has two":
            try:
                raise KeyError([record.payload for record in records])
            except KeyError as error:
                raise OSError("a bug in a bug") from error
        if how == "raises a group":
            raise ExceptionGroup("bugs", [ValueError(records[0].payload), OSError(5, "bad")])
        if how == "raises what cannot be copied":
            raise Particular(records[0].payload, code=5)
        if how == "exits":
            raise SystemExit("of a plug-in")
        if how == "cancels itself":
            raise asyncio.CancelledError
        if how == "answers too little":
            answers: Any = await act()
            fewer: _T = answers[1:]
            return fewer
        if how == "hangs":
            await asyncio.Event().wait()
        if how == "is stuck":
            await settled([asyncio.get_running_loop().run_in_executor(None, self.gate.wait)])
        return await act()


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
