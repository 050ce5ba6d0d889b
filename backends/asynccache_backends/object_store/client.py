"""The requests that are made of a store, below one prefix, and what goes wrong with them. Knows no pack.

A request that fails has been tried again by the client library, twice at most and with back-off: nothing here tries
again. A missing object is ``FileNotFoundError``, one for which there is no room ``NoRoom``; anything else that goes
wrong is ``Unavailable``, in one line and without the query of any URL, which may hold a signature.

Cancelling an await here ends the request: the library drops it within milliseconds, and with it what it had borrowed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from asynccache.errors import ConfigError, Unavailable
from asynccache.extras import install
from asynccache.storage import completed
from asynccache_backends.object_store.local import LocalFolder

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined]

    from obstore.store import ObjectStore

LIST_CHUNK = 1000

_QUERY = re.compile(r"\?[^\s'\")]*")
_BEYOND = re.compile(r"\b416 |InvalidRange|range was invalid|Invalid range")    # the library has no error of its own
_FULL = re.compile(                                    # nor for these, and each kind of server says it in its own way
    r"QuotaExceeded|StorageFull|InsufficientStorage|status code: 507|No space left on device|Disk quota exceeded"
)
_LONGEST = 300


class NoRoom(Unavailable):
    """The store is there and takes nothing more."""


class Meta(NamedTuple):
    """An object in a list. ``name`` is what follows the folder; ``written`` is the store's own time."""

    name: str
    size: int
    written: float


class Client:
    """``store`` with everything below ``prefix``; ``shown`` is how messages name it. ``local``: the folder that it is
    in, if it is in one."""

    def __init__(self, store: ObjectStore, prefix: str, shown: str, local: LocalFolder | None = None) -> None:
        self.shown = shown
        self.local = local
        self.store = store
        self.prefix = prefix

    def __repr__(self) -> str:
        return f"Client({self.shown!r})"

    def put(self, path: str, data: Buffer | Sequence[Buffer]) -> asyncio.Future[Any]:
        """Start to store a new object; its buffers belong to the request until it has let go of them. To be awaited
        through ``answer``. It never replaces an object."""
        import obstore

        future: asyncio.Future[Any] = obstore.put_async(  # type: ignore[assignment]
            self.store, self.prefix + path, data, use_multipart=False, mode="create"
        )
        return future

    async def answer(self, request: asyncio.Future[Any]) -> Any:
        """What a request gives.

        Raises:
            FileNotFoundError: there is no such object. Unavailable: anything else.
        """
        try:
            return await request
        except FileNotFoundError:
            raise
        except Exception as error:
            raise Unavailable(self._said(error)) from None

    async def create(self, path: str, data: Buffer | Sequence[Buffer]) -> None:
        """Store a new object. It is there to stay when this returns. Cancelling it: it is, or it is not."""
        await self.created(path, self.put(path, data))

    async def created(self, path: str, request: asyncio.Future[Any]) -> None:
        """Wait for the ``put`` of ``path``. A name is used once, so if the object is there already, an earlier try of
        this very request had put it there.

        Raises:
            NoRoom: the store is full. Unavailable: anything else.
        """
        from obstore.exceptions import AlreadyExistsError

        try:
            with suppress(AlreadyExistsError):
                await request
        except Exception as error:
            raise (NoRoom if _FULL.search(str(error)) else Unavailable)(self._said(error)) from None
        if self.local is not None:
            await asyncio.to_thread(self.local.stored, path)

    async def prepare(self) -> None:
        """Make the folder ready, if the store is in one. Cancelling it waits for the end of that.

        Raises:
            Unavailable: something in it is no object, or the disk refuses.
        """
        if self.local is not None:
            try:
                await completed(asyncio.to_thread(self.local.prepare))
            except OSError as error:
                raise Unavailable(self._said(error)) from None

    async def read(self, path: str, start: int, length: int) -> Any:
        """A range of an object, as a buffer; shorter if the object ends earlier. Cancelling it is safe.

        Raises:
            EOFError: the object ends before ``start``. And what ``answer`` raises.
        """
        import obstore

        await self._look_at(path)
        try:
            return await self.answer(
                obstore.get_range_async(self.store, self.prefix + path, start=start, length=length)  # type: ignore[arg-type]
            )
        except Unavailable as error:
            if _BEYOND.search(str(error)):
                raise EOFError(path) from None
            raise

    async def read_all(self, path: str) -> Any:
        """A whole object, as a buffer. Cancelling it is safe."""
        import obstore

        await self._look_at(path)
        found = await self.answer(obstore.get_async(self.store, self.prefix + path))  # type: ignore[arg-type]
        return await self.answer(found.bytes_async())

    async def size(self, path: str) -> int:
        """An object's size now. Cancelling it is safe."""
        import obstore

        found = await self.answer(obstore.head_async(self.store, self.prefix + path))  # type: ignore[arg-type]
        return int(found["size"])

    async def list(self, folder: str, after: str = "") -> AsyncIterator[list[Meta]]:
        """The objects in a folder whose names sort after ``after``, in batches. Cancelling it is safe."""
        import obstore

        base = f"{self.prefix}{folder}/"
        stream = obstore.list(self.store, base, offset=base + after if after else None, chunk_size=LIST_CHUNK)
        while True:
            try:
                found = await anext(stream)
            except (StopAsyncIteration, FileNotFoundError):
                return
            except Exception as error:
                raise Unavailable(self._said(error)) from None
            yield [Meta(o["path"][len(base) :], o["size"], o["last_modified"].timestamp()) for o in found]

    async def delete(self, paths: Sequence[str]) -> None:
        """Remove objects; those that are not there are no error. Cancelling it leaves some of them."""
        import obstore

        whole = [self.prefix + path for path in paths]
        if not whole:
            return
        try:
            await self.answer(obstore.delete_async(self.store, whole))  # type: ignore[arg-type]
        except FileNotFoundError:  # some stores say so of the first one, and leave the rest
            for path in whole:
                try:
                    await self.answer(obstore.delete_async(self.store, path))  # type: ignore[arg-type]
                except FileNotFoundError:
                    continue

    async def _look_at(self, path: str) -> None:
        """Raises FileNotFoundError: it is not there. Unavailable: it is in a folder, and no plain file."""
        if self.local is None:
            return
        try:
            await asyncio.to_thread(self.local.check, self.prefix + path)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise Unavailable(self._said(error)) from None

    def _said(self, error: Exception) -> str:
        return f"{self.shown}: {redacted(error)}"


def redacted(error: Exception) -> str:
    """The first line of what went wrong, without the query of any URL."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {_QUERY.sub('?...', text)[:_LONGEST]}"


def require_obstore() -> Any:
    """The client library.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import obstore.store
    except ImportError as error:
        raise ConfigError(f"object stores need obstore: {install('object')} ({error})") from None
    return obstore.store
