"""The requests to a store below one prefix, and their errors. This module knows nothing of packs.

The client library tries a request that fails up to two times more, with back-off; nothing is tried again here. A
missing object raises ``FileNotFoundError``, a read beyond an object's end ``EOFError``, and a full store ``NoRoom``.
All else raises ``Unavailable``. Its message is one line without the query of any URL, since a query may have a
signature in it.

Cancelling an await here ends the request. The library drops it within milliseconds, and lets go of its buffers then.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from asynccache.errors import ConfigError, Unavailable
from asynccache.extras import install

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined, unused-ignore]

    from obstore.store import ObjectStore

LIST_CHUNK = 1000

_QUERY = re.compile(r"\?[^\s'\")]*")
# The library has no errors of its own for these two, and each kind of server words them in its own way.
_BEYOND = re.compile(r"\b416 |InvalidRange|range was invalid|Invalid range")
_FULL = re.compile(
    r"QuotaExceeded|StorageFull|InsufficientStorage|status code: 507|No space left on device|Disk quota exceeded"
)
_LONGEST = 300


class NoRoom(Unavailable):
    """The store answers, and is full."""


class ListedObject(NamedTuple):
    """An object in a list. ``name`` is without the folder. ``size`` is in bytes. ``written`` is the unix time at which
    it was stored, by the store's clock."""

    name: str
    size: int
    written: float


class ObjectClient:
    """Makes requests to ``store`` for objects below ``prefix``. ``shown`` is what errors call the store."""

    def __init__(self, store: ObjectStore, prefix: str, shown: str) -> None:
        self.shown = shown
        self._store = store
        self._api = require_obstore()
        self._prefix = prefix

    def __repr__(self) -> str:
        return f"ObjectClient({self.shown!r})"

    def put(self, path: str, data: Buffer | Sequence[Buffer]) -> asyncio.Future[Any]:
        """Begin to store a new object; it never replaces one. Returns the request, to be awaited by ``created``. Until
        the request has let go of the buffers (see ``RequestBuffers``) they must not change."""
        future = self._api.put_async(self._store, self._prefix + path, data, use_multipart=False, mode="create")
        return cast(asyncio.Future[Any], future)

    async def answer(self, request: asyncio.Future[Any]) -> Any:
        """Wait for a request and return its result.

        Raises:
            FileNotFoundError: there is no such object.
            Unavailable: it failed for another reason.
        """
        try:
            return await request
        except FileNotFoundError:
            raise
        except Exception as error:
            raise Unavailable(self._said(error)) from None

    async def create(self, path: str, data: Buffer | Sequence[Buffer]) -> None:
        """Store a new object. When this returns it is stored durably. If it is cancelled, it may be stored or not.
        Raises as ``created`` does."""
        await self.created(path, self.put(path, data))

    async def created(self, path: str, request: asyncio.Future[Any]) -> None:
        """Wait for the request of a ``put`` of ``path``. It is a success, too, if the store says that the object
        exists: no name is used twice, so an earlier attempt of the same request has stored it.

        Raises:
            NoRoom: the store is full.
            Unavailable: it failed for another reason.
        """
        try:
            with suppress(self._api.exceptions.AlreadyExistsError):
                await request
        except Exception as error:
            raise (NoRoom if _FULL.search(str(error)) else Unavailable)(self._said(error)) from None

    async def read(self, path: str, start: int, length: int) -> Any:
        """Read ``length`` bytes of an object from ``start`` on. Returns them as a buffer, which is shorter if the
        object ends earlier. Cancelling it is safe.

        Raises:
            EOFError: the object ends before ``start``. Other errors are those of ``answer``.
        """
        try:
            whole = self._prefix + path
            return await self.answer(self._api.get_range_async(self._store, whole, start=start, length=length))
        except Unavailable as error:
            if _BEYOND.search(str(error)):
                raise EOFError(path) from None
            raise

    async def read_all(self, path: str) -> Any:
        """Read a whole object and return it as a buffer. Cancelling it is safe. Raises as ``answer`` does."""
        found = await self.answer(self._api.get_async(self._store, self._prefix + path))
        return await self.answer(found.bytes_async())

    async def size(self, path: str) -> int:
        """Return the size of an object in bytes. Cancelling it is safe. Raises as ``answer`` does."""
        found = await self.answer(self._api.head_async(self._store, self._prefix + path))
        return int(found["size"])

    async def list(self, folder: str, after: str = "") -> AsyncIterator[list[ListedObject]]:
        """Yield the objects in a folder whose names sort after ``after``, in batches. Cancelling it is safe. Raises
        Unavailable."""
        base = f"{self._prefix}{folder}/"
        stream = self._api.list(self._store, base, offset=base + after if after else None, chunk_size=LIST_CHUNK)
        while True:
            try:
                found = await anext(stream)
            except (StopAsyncIteration, FileNotFoundError):
                return
            except Exception as error:
                raise Unavailable(self._said(error)) from None
            yield [ListedObject(o["path"][len(base) :], o["size"], o["last_modified"].timestamp()) for o in found]

    async def delete(self, paths: Sequence[str]) -> None:
        """Remove objects; a missing one is no error. Cancelling it may leave some of them. Raises Unavailable."""
        whole = [self._prefix + path for path in paths]
        if not whole:
            return
        try:
            await self.answer(self._api.delete_async(self._store, whole))
        except FileNotFoundError:  # some stores stop at the first missing object and leave the others
            for path in whole:
                try:
                    await self.answer(self._api.delete_async(self._store, path))
                except FileNotFoundError:
                    continue

    def _said(self, error: Exception) -> str:
        return f"{self.shown}: {redacted(error)}"


def redacted(error: Exception) -> str:
    """Return the class of an error and the first line of its text, without the query of any URL."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {_QUERY.sub('?...', text)[:_LONGEST]}"


def require_obstore() -> Any:
    """Import and return the client library.

    Raises:
        ConfigError: the library is not installed.
    """
    try:
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise ConfigError(f"object stores need obstore: {install('object')} ({error})") from None
    return obstore
