"""Raw clients: what ``bench store`` compares a store with. A raw client moves the same pages with the least work.

Raw clients are plug-ins, as backends are: entry points of the group ``asynccache.raw_clients``, named by the URL's
scheme. Two are in this module: for files, bare pwritev and preadv on a preallocated file beside the store; for the
memory store, one memcpy for each page.
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


class MeasuredClient(Protocol):
    """A raw client. Keys have 32 bytes and are new in every round; values and buffers are page-aligned."""

    async def put(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """Store each value under its key, or raise any error."""
        ...

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        """Fill each buffer with the value that was put under its key, or raise any error."""
        ...

    async def aclose(self) -> None:
        """Remove the pages that were put, and close all connections and files."""
        ...


OpenRaw = Callable[[], Awaitable[MeasuredClient]]


def raw_client(url: str, direct: bool, size: int) -> OpenRaw | None:
    """The function that opens the raw client of the store at ``url``; None if there is no such client, or no room on
    the disk for its ``size`` bytes. ``direct``: the client of a file store uses O_DIRECT."""
    _, parsed = take_options(parse_url(url))
    if parsed.scheme == "file":
        return _file(parsed, direct, size)
    if parsed.scheme == "memory":
        return _opened(CopyClient)
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if parsed.scheme not in found:
        return None
    load: Callable[[ParsedUrl], Awaitable[MeasuredClient]] = found[parsed.scheme].load()
    return lambda: load(parsed)


def _file(url: ParsedUrl, direct: bool, size: int) -> OpenRaw | None:
    folder = Path(url.path).parent
    if shutil.disk_usage(folder).free < 2 * size:
        return None
    return _opened(lambda: FileClient(folder, size, direct))


def _opened(make: Callable[[], MeasuredClient]) -> OpenRaw:
    async def open_it() -> MeasuredClient:
        return make()

    return open_it


class CopyClient:
    """Copies each page once, into memory of this process."""

    def __init__(self) -> None:
        self._pages: dict[bytes, memoryview] = {}

    async def put(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """Copy each value in. Never waits."""
        for key, value in zip(keys, values, strict=True):
            page = self._pages.setdefault(key, memoryview(bytearray(value.nbytes)))
            copy(page, value)

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        """Copy each page out. Never waits."""
        for key, buffer in zip(keys, into, strict=True):
            copy(buffer, self._pages[key])

    async def aclose(self) -> None:
        """Forget the pages."""
        self._pages.clear()


class FileClient:
    """Writes and reads a file in the loop's thread, with one system call for each batch. The file has no name and is
    gone when it is closed. ``get`` must ask for the keys of one ``put``, in the same order."""

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
        """Write the batch with one pwritev. Blocks the loop."""
        at = self._end
        for key, value in zip(keys, values, strict=True):
            self._places[key] = self._end
            self._end += value.nbytes
        _whole(os.pwritev(self._fd, list(values), at), values)

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        """Read the batch, which lies together in the file, with one preadv. Blocks the loop."""
        _whole(os.preadv(self._fd, list(into), self._places[keys[0]]), into)

    async def aclose(self) -> None:
        """Close the file, which removes it."""
        os.close(self._fd)


def copy(target: memoryview, source: memoryview) -> None:
    """Copy ``source`` to ``target``; the GIL is released while that is done."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def page_memory(count: int, size: int) -> memoryview:
    """Page-aligned memory for ``count`` pages of ``size`` bytes, already backed by the system."""
    memory = memoryview(mmap.mmap(-1, count * size))
    np.frombuffer(memory, np.uint8)[:] = 1
    return memory


def _whole(moved: int, pages: Sequence[memoryview]) -> None:
    if moved != sum(page.nbytes for page in pages):
        raise OSError(f"the system moved {moved} bytes of a batch of {sum(page.nbytes for page in pages)}")
