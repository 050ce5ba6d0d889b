"""Uploads: the pages of puts are put together into packs, and the packs are sent.

The pages of a put are divided into *pieces*, which wait in line. Each pack takes one or more pieces from the head of
the line. A pack that is at least half full is sent at once, as long as fewer than ``parallel`` packs are being sent. A
smaller one is sent only while fewer than two such small packs are being sent, and otherwise waits for more pieces. So
many small puts at a time make few objects, and a put that is alone never waits.

Large payloads are sent directly from their buffers. Small ones are first copied together in a thread, since each buffer
of its own costs more than its copy. A piece is ``free`` when nobody reads its payloads any more, and ``done`` when it
is known whether they are stored. If all callers of a pack have gone, it is given up.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from asynccache.errors import Unavailable
from asynccache.storage import ThreadPool, settled
from asynccache_backends.object_store.client import ObjectClient
from asynccache_backends.object_store.formats import (
    MAX_RECORDS,
    PACKS,
    NameClock,
    Pack,
    pack_entries,
    stamp_of,
    trailer_of,
)

LEAST_LENT = 64 << 10
PARTIAL = 2


class _Piece:
    """Records of one put that go into the same pack."""

    def __init__(self, keys: Sequence[bytes], headers: Sequence[bytes], payloads: Sequence[memoryview]) -> None:
        loop = asyncio.get_running_loop()
        self.keys = keys
        self.headers = headers
        self.payloads = payloads
        self.size = sum(payload.nbytes for payload in payloads)
        self.free: asyncio.Future[None] = loop.create_future()
        """Done when nobody reads its payloads any more."""
        self.done: asyncio.Future[BaseException | None] = loop.create_future()
        """Its result is None if the records are stored, else the error."""
        self.upload: _Upload | None = None
        """The pack that it went into."""

    def end(self, error: BaseException | None) -> None:
        """Tell whoever waits that the piece is stored or, with an ``error``, that it is not."""
        self.release()
        if not self.done.done():
            self.done.set_result(error)

    def release(self) -> None:
        """Drop the payloads, and let waiters know that nobody reads them any more."""
        self.payloads = ()
        if not self.free.done():
            self.free.set_result(None)


@dataclass(eq=False, repr=False)
class _Upload:
    """A pack that is being sent."""

    name: str
    pieces: list[_Piece]
    size: int
    wanted: int
    """How many of its pieces have callers that still wait."""
    task: asyncio.Task[None] = field(init=False)


class Uploads:
    """The packs that wait or are being sent.

    ``pack``: the bytes of a full pack. ``parallel``: how many are sent at a time. ``stored`` is called with every pack
    that was stored, before the callers of its pieces hear of it.
    """

    def __init__(
        self, client: ObjectClient, clock: NameClock, threads: ThreadPool, schema: bytes, *, pack: int, parallel: int,
        stored: Callable[[Pack], None],
    ) -> None:
        self._client = client
        self._clock = clock
        self._threads = threads
        self._schema = schema
        self._pack = pack
        self._parallel = parallel
        self._stored = stored
        self._line: deque[_Piece] = deque()
        self._sending: set[_Upload] = set()

    def under_way(self) -> set[str]:
        """Return the names of the packs that are being sent."""
        return {upload.name for upload in self._sending}

    async def put(
        self, keys: Sequence[bytes], headers: Sequence[bytes], payloads: Sequence[memoryview]
    ) -> list[BaseException | None]:
        """Store records. Returns for each the error for which it is not stored, or None.

        Cancelling it returns when nobody reads the payloads any more; the records may be stored or not.
        """
        shares = self._share([payload.nbytes for payload in payloads])
        pieces = [_Piece(keys[share], headers[share], payloads[share]) for share in shares]
        self._line.extend(pieces)
        self._start()
        try:
            await asyncio.wait([future for piece in pieces for future in (piece.done, piece.free)])
        except asyncio.CancelledError:
            for piece in pieces:
                self._withdraw(piece)
            await settled([piece.free for piece in pieces])
            raise
        return [piece.done.result() for piece in pieces for _ in piece.keys]

    def _share(self, sizes: Sequence[int]) -> list[slice]:
        """Divide records with these payload sizes into pieces. The pieces are about equal, and none is larger than a
        pack unless a single record is."""
        total = sum(sizes)
        target = total / max(1, -(-total // self._pack))
        cuts, start, size = [], 0, 0
        for at, length in enumerate(sizes):
            if at > start and (size + length / 2 > target or size + length > self._pack or at - start >= MAX_RECORDS):
                cuts.append(slice(start, at))
                start, size = at, 0
            size += length
        return [*cuts, slice(start, len(sizes))]

    def _withdraw(self, piece: _Piece) -> None:
        """Give up a piece whose caller was cancelled, if it waits, or its pack if that has no other callers."""
        upload = piece.upload
        if upload is None:
            if piece in self._line:
                self._line.remove(piece)
                piece.end(Unavailable("the put was cancelled"))
            return
        upload.wanted -= 1
        if not upload.wanted:
            upload.task.cancel()

    async def drain(self) -> None:
        """Give up all packs, and wait until nobody reads a payload any more."""
        while self._line:
            self._line.pop().end(Unavailable("the store is closing"))
        tasks = [upload.task for upload in self._sending]
        for task in tasks:
            task.cancel()
        await settled(tasks)

    def _start(self) -> None:
        """Send packs, each with as many pieces from the head of the line as fit, as long as one may be sent now."""
        while self._line and len(self._sending) < self._parallel:
            count = size = records = 0
            for piece in self._line:
                if count and (size + piece.size > self._pack or records + len(piece.keys) > MAX_RECORDS):
                    break
                count, size, records = count + 1, size + piece.size, records + len(piece.keys)
            partial = sum(upload.size < self._pack // 2 for upload in self._sending)
            if size < self._pack // 2 and partial >= PARTIAL:
                return
            upload = _Upload(self._clock.name(), [self._line.popleft() for _ in range(count)], size, count)
            for piece in upload.pieces:
                piece.upload = upload
            self._sending.add(upload)
            upload.task = asyncio.get_running_loop().create_task(self._send(upload))
            upload.task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Tell the pieces of a pack how its task has ended, even if it was cancelled before it began, and send the next
        pack."""
        upload = next(upload for upload in self._sending if upload.task is task)
        self._sending.discard(upload)
        error = Unavailable("the put was cancelled") if task.cancelled() else task.exception()
        for piece in upload.pieces:
            piece.end(error)
        self._start()

    async def _send(self, upload: _Upload) -> None:
        pieces, path = upload.pieces, f"{PACKS}/{upload.name}"
        payloads = [payload for piece in pieces for payload in piece.payloads]
        lengths = [payload.nbytes for payload in payloads]
        keys, headers = [k for p in pieces for k in p.keys], [h for p in pieces for h in p.headers]
        entries = pack_entries(keys, headers, lengths, stamp_of(upload.name))
        footer = entries + trailer_of(entries, self._schema)
        if upload.size >= LEAST_LENT * len(payloads):
            buffers = RequestBuffers(payloads)
            try:
                await self._client.created(path, self._client.put(path, [*buffers.take(), footer]))
            finally:
                await buffers.free()
        else:
            whole = await self._threads.run_for(upload.size, _copied, [*payloads, memoryview(footer)])
            payloads.clear()
            for piece in pieces:
                piece.release()
            await self._client.create(path, whole)
        self._stored(Pack(upload.name, upload.size + len(footer), entries))


class RequestBuffers:
    """The buffers of one request of the client. They tell when the client has let go of them.

    The client sends directly from host pages and does not say when it no longer needs them. Its future is done when
    there is an answer, or at once when it is cancelled; the request may still use the buffers for some time. But as
    long as it does, it has references to the objects that it was given. So it is given a view of its own for each
    buffer, and the buffers are free when these views are gone. They have to be memoryviews: a memoryview releases its
    buffer before its weak references are called, and an array of NumPy releases it afterwards.

    After an answer the views are usually gone, and it is enough to look. Callbacks are set only for views that are not:
    they run in a thread of the client, where a call into Python costs 10 µs.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._views = [memoryview(buffer) for buffer in buffers]
        self._refs = [weakref.ref(view) for view in self._views]
        self._told: list[weakref.ref[memoryview]] = []
        self._gone: list[weakref.ref[memoryview]] = []

    def take(self) -> list[memoryview]:
        """Return a view of each buffer, for the request. To be called once. The caller must keep no reference to the
        views."""
        views, self._views = self._views, []
        return views

    async def free(self) -> None:
        """Wait until all views are gone. Cancelling it does not shorten the waiting."""
        if all(ref() is None for ref in self._refs):
            return
        loop = asyncio.get_running_loop()
        end: asyncio.Future[None] = loop.create_future()

        def gone(ref: weakref.ref[memoryview]) -> None:
            self._gone.append(ref)  # a list, since appending is atomic and this may run in any thread
            if len(self._gone) == len(self._refs):
                with suppress(RuntimeError):  # the loop was closed, so nobody waits any more
                    loop.call_soon_threadsafe(_set, end)

        for ref in self._refs:
            view = ref()
            if view is None:
                gone(ref)
            else:
                self._told.append(weakref.ref(view, gone))
            del view  # if this is the last reference, the view ends here
        await settled([end])


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _copied(parts: Sequence[memoryview]) -> memoryview:
    """Return one buffer with ``parts`` one after another. NumPy copies, since it lets go of the GIL meanwhile."""
    import numpy as np  # imported here because commands that only inspect a store do without NumPy

    whole = np.empty(sum(part.nbytes for part in parts), np.uint8)
    at = 0
    for part in filter(None, parts):
        np.copyto(whole[at : at + part.nbytes], np.frombuffer(part, np.uint8))
        at += part.nbytes
    return whole.data
