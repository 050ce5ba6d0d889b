"""Servers and clients for tests of the host process, in one event loop or in processes of their own."""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any, cast

from asynccache_backends.host import HostBackend

from asynccache.host.behind import StoresBehind
from asynccache.host.memory import HostMemory
from asynccache.host.server import HostServer, Inherited
from asynccache.host.takeover import take_over
from asynccache.storage import CheckedStore, StoreLayout, open_store, parse_url
from asynccache.testing.backend_suite import LAYOUT

MEMORY = 16 << 20


def socket_path() -> str:
    """A path that is short enough for a socket, in a new folder."""
    return str(Path(tempfile.mkdtemp(dir=_folder())) / "s")


@cache
def _folder() -> str:
    """A folder that is gone when this process ends; its name is short, as a socket's must be."""
    folder, owner = tempfile.mkdtemp(prefix="kv"), os.getpid()
    os.chmod(folder, 0o711)  # whether others may come in is for the folders within to say

    @atexit.register
    def _() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    return folder


@asynccontextmanager
async def serving(
    path: str, *, memory: int = MEMORY, stores: Sequence[str] = (), **more: Any
) -> AsyncIterator[HostServer]:
    """A server in this event loop."""
    made = HostMemory.make(memory)
    behind = StoresBehind(stores, made.layout.size // 8) if stores else None
    if behind is not None:
        await behind.open()
    server = HostServer(path, made, behind=behind, **more)
    await server.open()
    assert server._growing is not None
    await server._growing
    try:
        yield server
    finally:
        await server.aclose()


@contextmanager
def beside(**more: Any) -> Iterator[HostServer]:
    """A server in an event loop of its own, in a thread."""
    opened: Future[tuple[HostServer, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        async with serving(socket_path(), **more) as server:
            end = asyncio.Event()
            opened.set_result((server, asyncio.get_running_loop(), end))
            await end.wait()

    thread = Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    server, loop, end = opened.result(60)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()


async def client(path: str, options: str = "") -> HostBackend:
    """A client of its own."""
    return await HostBackend.open(parse_url(f"host:{path}{options}"), LAYOUT)


@asynccontextmanager
async def opened(path: str, layout: StoreLayout = LAYOUT) -> AsyncIterator[CheckedStore]:
    """A store as engines open it. ``path`` may have options behind it."""
    store = cast("CheckedStore", await open_store(f"host:{path}", layout))
    yield store
    await store.aclose()


async def taken_from(path: str) -> Inherited:
    """What the server there hands over."""
    taken = await asyncio.to_thread(take_over, path)
    assert taken is not None
    return taken


@asynccontextmanager
async def heir(path: str) -> AsyncIterator[HostServer]:
    """A server that has taken over from the one there."""
    taken = await taken_from(path)
    server = HostServer(path, taken.memory)
    await server.open(taken)
    yield server
    await server.aclose()


@asynccontextmanager
async def served(**more: Any) -> AsyncIterator[tuple[HostServer, HostBackend]]:
    """A server and a client of it."""
    async with serving(socket_path(), **more) as server:
        backend = await client(server.path)
        try:
            yield server, backend
        finally:
            await backend.aclose()
