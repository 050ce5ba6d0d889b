"""What a store is held against: the least that a program can do with the same machine or the same server.

A raw client is a plug-in like a backend, in the group ``asynccache.raw_clients`` by the URL's scheme. For files it is
bare pwritev and preadv on a preallocated file beside the store, for the memory store one memcpy a page; these are here.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

import numpy as np

from asynccache.storage import ParsedUrl, parse_url, take_options

GROUP = "asynccache.raw_clients"


class RawClient(Protocol):
    """Keys are 32 bytes, new ones for every round; values and buffers lie in page-aligned memory."""

    async def put(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """Store each value, or raise."""
        ...

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        """Fill each buffer with what was put, or raise."""
        ...

    async def aclose(self) -> None:
        """Remove what was put, and let go of everything."""
        ...


OpenRaw = Callable[[], Awaitable[RawClient]]


def raw_client(url: str, direct: bool, size: int) -> OpenRaw | None:
    """How to open the raw client of the store at ``url``; None where there is none, or no room for its ``size`` bytes.
    ``direct``: a file store's, with O_DIRECT."""
    _, parsed = take_options(parse_url(url))
    if parsed.scheme == "file":
        return _file(parsed, direct, size)
    if parsed.scheme == "memory":
        return _opened(CopyClient)
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if parsed.scheme not in found:
        return None
    load: Callable[[ParsedUrl], Awaitable[RawClient]] = found[parsed.scheme].load()
    return lambda: load(parsed)


def _file(url: ParsedUrl, direct: bool, size: int) -> OpenRaw | None:
    folder = Path(url.path).parent
    if shutil.disk_usage(folder).free < 2 * size:
        return None
    return _opened(lambda: FileClient(folder, size, direct))


def _opened(make: Callable[[], RawClient]) -> OpenRaw:
    async def open_it() -> RawClient:
        return make()

    return open_it


class CopyClient:
    """A memcpy per page, into memory that is there already."""

    def __init__(self) -> None:
        self._pages: dict[bytes, memoryview] = {}

    async def put(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """Copy each in. Never waits."""
        for key, value in zip(keys, values, strict=True):
            page = self._pages.setdefault(key, memoryview(bytearray(value.nbytes)))
            copy(page, value)

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        """Copy each out. Never waits."""
        for key, buffer in zip(keys, into, strict=True):
            copy(buffer, self._pages[key])

    async def aclose(self) -> None:
        """Forget the pages."""
        self._pages.clear()


class FileClient:
    """One thread, one system call a batch, on a file that is gone when it is closed. A batch is read as it was put."""

    def __init__(self, folder: Path, size: int, direct: bool) -> None:
        fd, name = tempfile.mkstemp(dir=folder)
        try:
            os.posix_fallocate(fd, 0, size)
            self._fd = os.open(name, os.O_RDWR | (os.O_DIRECT if direct else 0))
        finally:
            os.close(fd)
            os.unlink(name)
        self._places: dict[bytes, int] = {}
        self._end = 0

    async def put(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """One pwritev. Never waits."""
        at = self._end
        for key, value in zip(keys, values, strict=True):
            self._places[key] = self._end
            self._end += value.nbytes
        _whole(os.pwritev(self._fd, list(values), at), values)

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        """One preadv for a batch that lies together. Never waits."""
        _whole(os.preadv(self._fd, list(into), self._places[keys[0]]), into)

    async def aclose(self) -> None:
        """Close the file, which is the end of it."""
        os.close(self._fd)


def copy(target: memoryview, source: memoryview) -> None:
    """One memcpy; the GIL is let go for it."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def page_memory(count: int, size: int) -> memoryview:
    """Touched, page-aligned memory."""
    memory = memoryview(mmap.mmap(-1, count * size))
    np.frombuffer(memory, np.uint8)[:] = 1
    return memory


def _whole(moved: int, pages: Sequence[memoryview]) -> None:
    if moved != sum(page.nbytes for page in pages):
        raise OSError(f"the system moved {moved} bytes of a batch of {sum(page.nbytes for page in pages)}")
