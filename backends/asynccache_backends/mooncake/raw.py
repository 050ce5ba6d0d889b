"""The client alone, with which ``asynccache bench store`` compares the backend: one thread, one blocking call for each
batch, and no checks. Like the backend, it uses the process's one client, and registered memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from asynccache.errors import BackendError
from asynccache.storage import ParsedUrl, ThreadPool
from asynccache_backends.mooncake.client import MooncakeClient, acquire
from asynccache_backends.mooncake.regions import Region, address_of, region_of
from asynccache_backends.mooncake.settings import settings_of

PREFIX = "asynccache-raw/"


class MooncakeRawClient:
    """The client; ``raw`` makes it. Each value is an object without a header."""

    def __init__(self, client: MooncakeClient) -> None:
        self._client = client
        self._worker = ThreadPool(1, "asynccache-mooncake-raw")
        self._regions: dict[Region, memoryview] = {}
        self._stored: set[str] = set()

    async def put(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """Store each value. Cancelling it returns when the client has let go of the values.

        Raises:
            BackendError: a value was not stored.
        """
        names = _names(keys)
        self._stored.update(names)
        codes = await self._call("batch_put_from", names, values)
        _insist("put", all(code == 0 for code in codes), codes)

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        """Read each value into its buffer. No key may be named twice. Cancelling it returns when the client has let go
        of the buffers.

        Raises:
            BackendError: a value is missing, or has another length than its buffer.
        """
        codes = await self._call("batch_get_into", _names(keys), into)
        _insist("get", codes == [view.nbytes for view in into], codes)

    async def exists(self, keys: Sequence[bytes]) -> None:
        """Ask whether each key exists. Cancelling it waits for the answer."""
        await self._run(lambda store: store.batch_is_exist(_names(keys)))

    async def aclose(self) -> None:
        """Remove all values that were put, and unregister all memory. Cancelling it waits all the same."""
        try:
            await self._run(lambda store: store.batch_remove(sorted(self._stored), True))
        finally:
            self._worker.close()
            for region in self._regions:
                self._client.regions.remove(region)
            self._client.release()

    async def _call(self, name: str, names: Sequence[str], views: Sequence[memoryview]) -> list[int]:
        self._register(views)
        addresses = [address_of(view) for view in views]
        sizes = [view.nbytes for view in views]
        return await self._run(lambda store: getattr(store, name)(names, addresses, sizes))

    async def _run(self, call: Callable[[Any], list[int]]) -> list[int]:
        def inside() -> list[int]:
            with self._client as store:
                return call(store)

        return await self._worker.run(inside)

    def _register(self, views: Sequence[memoryview]) -> None:
        """Register all memory of which the views are slices, unless it was registered before."""
        for owner in {id(view.obj): view.obj for view in views}.values():
            memory = memoryview(owner)
            region = region_of(memory)
            if region not in self._regions and self._client.regions.add(region):
                self._regions[region] = memory


async def raw(url: ParsedUrl) -> MooncakeRawClient:
    """Return the client for ``url``, ready for use. Raises as ``MooncakeBackend.open`` does. Cancelling it leaves
    nothing in use."""
    return MooncakeRawClient(await acquire(settings_of(url).client))


def _names(keys: Sequence[bytes]) -> list[str]:
    return [PREFIX + key.hex() for key in keys]


def _insist(what: str, done: bool, codes: Sequence[int]) -> None:
    if not done:
        raise BackendError(f"mooncake: the bare client could not {what} all values: {sorted(set(codes))[:4]}")
