"""A minimal client on obstore, with which ``asynccache bench store`` compares the backend. No cache uses it.

It puts pages together into objects of up to 4 MiB, as the backend does, since an object for each page would be far too
slow to compare with. The objects of a batch are sent at the same time, directly from the pages. Pages that lie next to
each other are read by one range read and copied to their buffers. It has nothing else: no headers, no footers, no index
that survives it, no pages that others could find, no deadlines, and it does not wait until the client has let go of a
page. It uses the backend's connection and none of the backend's code that moves pages.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from asynccache.storage import ParsedUrl
from asynccache_backends.object_store.connect import connect, settings_of

OBJECT_BYTES = 4 << 20


class ObjectRawClient:
    """The client; ``raw`` makes it. Its objects lie in ``folder``, below the URL's prefix, and ``aclose`` removes
    them."""

    def __init__(self, store: Any, folder: str) -> None:
        self._store = store
        self._folder = folder
        self._numbers = itertools.count()
        self._places: dict[bytes, tuple[str, int, int]] = {}

    async def put(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """Store a batch of values. If it is cancelled some may be stored, and the client may use the buffers for a
        moment longer."""
        groups: list[list[tuple[bytes, memoryview]]] = []
        room = 0
        for key, value in zip(keys, values, strict=True):
            if not groups or value.nbytes > room:
                groups.append([])
                room = OBJECT_BYTES
            groups[-1].append((key, value))
            room -= value.nbytes
        await asyncio.gather(*(self._put(group) for group in groups))

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        """Read a batch of values, all of which were put before. If it is cancelled the buffers' content is
        undefined."""
        runs: list[tuple[str, int, int, list[memoryview]]] = []
        for key, buffer in zip(keys, into, strict=True):
            path, start, end = self._places[key]
            if runs and runs[-1][0] == path and runs[-1][2] == start and end - runs[-1][1] <= OBJECT_BYTES:
                runs[-1] = (path, runs[-1][1], end, [*runs[-1][3], buffer])
            else:
                runs.append((path, start, end, [buffer]))
        await asyncio.gather(*(self._get(*run) for run in runs))

    async def aclose(self) -> None:
        """Remove all objects that were put."""
        import obstore

        paths = sorted({path for path, _, _ in self._places.values()})
        if paths:
            await obstore.delete_async(self._store, paths)
        self._places.clear()

    async def _put(self, group: Sequence[tuple[bytes, memoryview]]) -> None:
        import obstore

        path, at = f"{self._folder}/{next(self._numbers)}", 0
        await obstore.put_async(self._store, path, [value for _, value in group], use_multipart=False, mode="create")
        for key, value in group:
            self._places[key] = path, at, at + value.nbytes
            at += value.nbytes

    async def _get(self, path: str, start: int, end: int, buffers: Sequence[memoryview]) -> None:
        import obstore

        found: Any = await obstore.get_range_async(self._store, path, start=start, end=end)
        data = np.frombuffer(found, np.uint8)
        at = 0
        for buffer in buffers:
            np.frombuffer(buffer, np.uint8)[:] = data[at : at + buffer.nbytes]
            at += buffer.nbytes


async def raw(url: ParsedUrl) -> ObjectRawClient:
    """Return a minimal client for the store of ``url``. Nothing is sent yet."""
    client = connect(url, settings_of(url))
    return ObjectRawClient(client.store, f"{client.prefix}raw/{secrets.token_hex(8)}")
