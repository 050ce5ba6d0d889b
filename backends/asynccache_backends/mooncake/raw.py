"""The bare client, for comparison: one thread, one blocking call a batch, nothing checked and nothing added.

What ``asynccache bench store`` measures ours against. It is the process's one client here, too, on registered memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from asynccache.errors import BackendError
from asynccache.storage import ParsedUrl, Workers, settled
from asynccache_backends.mooncake.regions import Region, address_of, region_of
from asynccache_backends.mooncake.settings import settings_of
from asynccache_backends.mooncake.shared import Shared, acquire

PREFIX = "asynccache-raw/"


class RawClient:
    """Made by ``raw``. Values are objects of their own, without a header."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._worker = Workers(1, "asynccache-mooncake-raw")
        self._regions: dict[Region, memoryview] = {}
        self._stored: set[str] = set()

    async def put(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """Store each value. Cancelling it returns after the client has let go of the values.

        Raises:
            BackendError: one of them was not stored.
        """
        names = _names(keys)
        self._stored.update(names)
        codes = await self._call("batch_put_from", names, values)
        _insist("put", all(code == 0 for code in codes), codes)

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        """Fill each buffer; no key comes twice. Cancelling it returns after the client has let go of the buffers.

        Raises:
            BackendError: one of them was not there, or of another length.
        """
        codes = await self._call("batch_get_into", _names(keys), into)
        _insist("get", codes == [view.nbytes for view in into], codes)

    async def exists(self, keys: Sequence[bytes]) -> None:
        """Ask for each key. Cancelling it waits for the answer."""
        await self._run(lambda store: store.batch_is_exist(_names(keys)))

    async def aclose(self) -> None:
        """Remove what was put, and let go of all memory. Cancelling it waits all the same."""
        try:
            await self._run(lambda store: store.batch_remove(sorted(self._stored), True))
        finally:
            self._worker.close()
            for region in self._regions:
                self._shared.regions.remove(region)
            self._shared.release()

    async def _call(self, name: str, names: Sequence[str], views: Sequence[memoryview]) -> list[int]:
        self._register(views)
        addresses = [address_of(view) for view in views]
        sizes = [view.nbytes for view in views]
        return await self._run(lambda store: getattr(store, name)(names, addresses, sizes))

    async def _run(self, call: Callable[[Any], list[int]]) -> list[int]:
        future = self._worker.call(self._inside, call)
        await settled([future])
        return future.result()

    def _inside(self, call: Callable[[Any], list[int]]) -> list[int]:
        with self._shared.client as store:
            return call(store)

    def _register(self, views: Sequence[memoryview]) -> None:
        """Register the memory that the views are slices of, whole, when it is seen for the first time."""
        for owner in {id(view.obj): view.obj for view in views}.values():
            memory = memoryview(owner)
            region = region_of(memory)
            if region not in self._regions and self._shared.regions.add(region):
                self._regions[region] = memory


async def raw(url: ParsedUrl) -> RawClient:
    """The client of ``url``, ready.

    Raises:
        ConfigError, Unavailable: as for the backend. Cancelling it leaves nothing in use.
    """
    return RawClient(await acquire(settings_of(url).client))


def _names(keys: Sequence[bytes]) -> list[str]:
    return [PREFIX + key.hex() for key in keys]


def _insist(what: str, done: bool, codes: Sequence[int]) -> None:
    if not done:
        raise BackendError(f"mooncake: the bare client could not {what} all values: {sorted(set(codes))[:4]}")
