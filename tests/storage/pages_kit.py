"""Shared by the tests of ``Pages``: memory that cannot be closed while anybody has a view of it; stores that
misbehave."""

from __future__ import annotations

import asyncio
import mmap
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from random import Random
from typing import Any

from asynccache_backends.memory import MemoryBackend

from asynccache.errors import Unavailable
from asynccache.storage import PageKey, Pages, Record, Result, StorageBackend, settled
from asynccache.testing.wrapped_backend import WrappedBackend

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

    async def exists(self, keys: Sequence[PageKey]) -> Any:
        return await self._suffer("exists", (), lambda: self.inner.exists(keys))

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> Any:
        return await self._suffer("get", records, lambda: self.inner.get(keys, records))

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> Any:
        return await self._suffer("put", records, lambda: self.inner.put(keys, records))

    async def clear(self) -> None:
        await self._suffer("clear", (), self.inner.clear)

    async def flush(self) -> None:
        await self._suffer("flush", (), self.inner.flush)

    async def aclose(self) -> None:
        await self._suffer("aclose", (), self.inner.aclose)

    async def _suffer(self, call: str, records: Sequence[Record], act: Callable[[], Awaitable[Any]]) -> Any:
        self.began.append(call)
        self.now[call] += 1
        self.most = max(self.most, self.now.total())
        self.inside.set()
        try:
            return await self._act(self.how.get(call, "works"), records, act)
        finally:
            self.now[call] -= 1

    async def _act(self, how: str | float, records: Sequence[Record], act: Callable[[], Awaitable[Any]]) -> Any:
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
            return (await act())[1:]
        if how == "hangs":
            await asyncio.Event().wait()
        if how == "is stuck":
            await settled([asyncio.get_running_loop().run_in_executor(None, self.gate.wait)])
        return await act()
