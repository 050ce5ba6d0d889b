"""From puts to packs: pieces of puts wait in line, share a pack where they are small, and hear when it is stored.

A pack that is full enough leaves at once, as long as fewer than ``parallel`` are under way. One that is not leaves only
while fewer than two such are, so what is put meanwhile travels together: many small puts make few objects, and a put
alone never waits. Nothing is queued beyond what callers wait for.

Large payloads are sent from where they lie; small ones are copied together in a thread first, since a buffer of its own
costs more than the copy. A piece is ``free`` once nobody reads its payloads any more, and ``done`` once it is known
whether they are stored. A pack all of whose callers have left is given up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from asynccache.errors import Unavailable
from asynccache.storage import Workers, settled
from asynccache_backends.object_store.client import Client
from asynccache_backends.object_store.lending import Loan
from asynccache_backends.object_store.names import PACKS, Clock, stamp_of
from asynccache_backends.object_store.packs import MAX_RECORDS, Pack, pack_entries, trailer_of

LEAST_LENT = 64 << 10
INLINE_BYTES = 128 << 10
PARTIAL = 2


class Piece:
    """Records of one put, for one pack. ``done``: None once stored, or why not."""

    __slots__ = ("done", "free", "headers", "keys", "load", "payloads", "size")

    def __init__(self, keys: Sequence[bytes], headers: Sequence[bytes], payloads: Sequence[memoryview]) -> None:
        loop = asyncio.get_running_loop()
        self.keys = keys
        self.headers = headers
        self.payloads = payloads
        self.size = sum(payload.nbytes for payload in payloads)
        self.free: asyncio.Future[None] = loop.create_future()
        self.done: asyncio.Future[BaseException | None] = loop.create_future()
        self.load: _Load | None = None

    def settle(self, error: BaseException | None) -> None:
        """Nothing more happens to it."""
        self.release()
        if not self.done.done():
            self.done.set_result(error)

    def release(self) -> None:
        """Nobody reads its payloads any more."""
        self.payloads = ()
        if not self.free.done():
            self.free.set_result(None)


class _Load:
    """A pack under way. ``wanted``: pieces whose callers still wait."""

    __slots__ = ("name", "pieces", "size", "task", "wanted")

    def __init__(self, name: str, pieces: list[Piece], size: int) -> None:
        self.name = name
        self.pieces = pieces
        self.size = size
        self.wanted = len(pieces)
        self.task: asyncio.Task[None]


class Uploads:
    """``stored`` is told of every pack before its callers are."""

    def __init__(
        self, client: Client, clock: Clock, workers: Workers, schema: bytes, *, pack: int, parallel: int,
        stored: Callable[[Pack], None], lends: bool,
    ) -> None:
        self._client = client
        self._clock = clock
        self._workers = workers
        self._schema = schema
        self._pack = pack
        self._parallel = parallel
        self._stored = stored
        self._lends = lends
        self._line: deque[Piece] = deque()
        self._away: set[_Load] = set()

    def __repr__(self) -> str:
        return f"Uploads(waiting={len(self._line)}, under_way={len(self._away)})"

    def under_way(self) -> set[str]:
        """The names of packs that are being sent."""
        return {load.name for load in self._away}

    def share(self, sizes: Sequence[int]) -> list[slice]:
        """How a put's records are dealt out to pieces: evenly, and none larger than a pack unless a record is."""
        total = sum(sizes)
        target = total / max(1, -(-total // self._pack))
        cuts, start, size = [], 0, 0
        for at, length in enumerate(sizes):
            if at > start and (size + length / 2 > target or size + length > self._pack or at - start >= MAX_RECORDS):
                cuts.append(slice(start, at))
                start, size = at, 0
            size += length
        return [*cuts, slice(start, len(sizes))] if sizes else []

    def submit(self, pieces: Sequence[Piece]) -> None:
        """Get them stored. Each piece's futures tell how it went."""
        self._line.extend(pieces)
        self._start()

    def withdraw(self, piece: Piece) -> None:
        """Its caller has left. It is stored, or it is not; wait for ``free`` before its buffers are used again."""
        load = piece.load
        if load is None:
            if piece in self._line:
                self._line.remove(piece)
                piece.settle(Unavailable("the put was cancelled"))
            return
        load.wanted -= 1
        if not load.wanted:
            load.task.cancel()

    async def drain(self) -> None:
        """Give up what waits and what is under way; return when nobody reads a payload any more."""
        while self._line:
            self._line.pop().settle(Unavailable("the store is closing"))
        tasks = [load.task for load in self._away]
        for task in tasks:
            task.cancel()
        await settled(tasks)

    def _start(self) -> None:
        while self._line and len(self._away) < self._parallel:
            count, size = self._fit()
            partial = sum(load.size < self._pack // 2 for load in self._away)
            if size < self._pack // 2 and partial >= PARTIAL:
                return
            load = _Load(self._clock.name(), [self._line.popleft() for _ in range(count)], size)
            for piece in load.pieces:
                piece.load = load
            self._away.add(load)
            load.task = asyncio.get_running_loop().create_task(self._carry(load))
            load.task.add_done_callback(self._ended)

    def _fit(self) -> tuple[int, int]:
        """How many pieces from the head of the line the next pack takes, and their bytes."""
        count = size = records = 0
        for piece in self._line:
            if count and (size + piece.size > self._pack or records + len(piece.keys) > MAX_RECORDS):
                break
            count, size, records = count + 1, size + piece.size, records + len(piece.keys)
        return count, size

    async def _carry(self, load: _Load) -> None:
        """Store one pack. ``_ended`` follows, also where it is cancelled before it begins."""
        self._stored(await self._send(load))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Whatever happened, the pieces hear of it."""
        load = next(load for load in self._away if load.task is task)
        self._away.discard(load)
        error = Unavailable("the put was cancelled") if task.cancelled() else task.exception()
        for piece in load.pieces:
            piece.settle(error)
        self._start()

    async def _send(self, load: _Load) -> Pack:
        name, pieces = load.name, load.pieces
        payloads = [payload for piece in pieces for payload in piece.payloads]
        lengths = [payload.nbytes for payload in payloads]
        keys, headers = [k for p in pieces for k in p.keys], [h for p in pieces for h in p.headers]
        entries = pack_entries(keys, headers, lengths, [stamp_of(name)] * len(keys))
        footer = entries + trailer_of(entries, self._schema)
        path = f"{PACKS}/{name}"
        if self._lends and load.size >= LEAST_LENT * len(payloads):
            await self._lend(path, payloads, footer)
        else:
            await self._client.create(path, await self._joined(load, payloads, footer))
        return Pack(name, load.size + len(footer), entries)

    async def _lend(self, path: str, payloads: Sequence[memoryview], footer: bytes) -> None:
        loan = Loan(payloads)
        try:
            await self._client.created(path, self._client.put(path, [*loan.take(), footer]))
        finally:
            await loan.over()

    async def _joined(self, load: _Load, payloads: list[memoryview], footer: bytes) -> bytes:
        """The pack in one run; its pieces are free then."""
        if load.size <= INLINE_BYTES:
            data = b"".join([*payloads, footer])
        else:
            joining = self._workers.call(b"".join, [*payloads, footer])
            await settled([joining])
            data = joining.result()
        payloads.clear()
        for piece in load.pieces:
            piece.release()
        return data
