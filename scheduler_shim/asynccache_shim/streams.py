"""Orders over TCP: rank 0 listens, every other rank connects to it.

Laws:
* A frame is a length and so many bytes, of which the first says what it is; one of no bytes is a *beat*, which says
  that the sender's event loop is alive.
  Each end sends one four times in ``timeout`` and hears of the other at least once in it, also while nobody has
  anything to say and whatever the model is busy with; so an idle group stands for as long as its processes do.
* A stream that ends without a ``_BYE`` is a rank that is gone; rank 0 tells the others at once. What failed once stays
  failed.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from asynccache import RankFailure, checks
from asynccache.ranks import Ranks

TIMEOUT = 30.0
GRACE = 2.0

_LENGTH = 8
_SECRET = 16
_BEAT, _ORDER, _BYE, _LOST = b"", b"o", b"b", b"l"


async def connect_orders(ranks: Ranks, host: str = "127.0.0.1", *, timeout: float = TIMEOUT) -> StreamOrders:
    """Connect the schedulers of all ranks; every rank calls it, between opening its cache and making its scheduler.

    ``host``: an address of rank 0's machine that the others reach; only rank 0's counts. ``timeout``: seconds of
    silence that are a failure. Cancelling it leaves the others to wait in vain.

    Raises:
        RankFailure: not all ranks came.
        OSError: the address cannot be used.
        ConfigError: an argument is unusable.
    """
    checks.provider("ranks", ranks, Ranks)  # type: ignore[type-abstract]
    host, timeout = checks.text("host", host, empty=False), checks.number("timeout", timeout, above=0)
    if ranks.rank == 0:
        return await _lead(ranks, host, timeout)
    return await _follow(ranks, timeout)


async def _lead(ranks: Ranks, host: str, timeout: float) -> StreamOrders:
    door = _Door(ranks.topology.ranks - 1, timeout)
    server = await asyncio.start_server(door.greet, host, 0)
    try:
        port = server.sockets[0].getsockname()[1]
        await ranks.gather(json.dumps([host, port, door.secret.hex()]).encode())
        async with asyncio.timeout(timeout):
            await door.complete.wait()
    except BaseException as error:
        for wire in door.came.values():
            wire.abort()
        if not isinstance(error, TimeoutError):
            raise
        missing = sorted(set(range(1, ranks.topology.ranks)) - set(door.came))
        raise RankFailure(f"ranks {missing} did not connect within {timeout:g} s") from None
    finally:
        server.close()
        door.close()
    return StreamOrders(ranks, [door.came[rank] for rank in sorted(door.came)], timeout)


class _Door:
    """Where ranks come in, each of ``count`` once, who know the secret."""

    def __init__(self, count: int, timeout: float) -> None:
        self.secret = secrets.token_bytes(_SECRET)
        self.came: dict[int, Wire] = {}
        self.complete = asyncio.Event()
        self._count = count
        self._timeout = timeout
        self._silent: set[asyncio.StreamWriter] = set()
        self._look()

    def close(self) -> None:
        """Whoever has not said who it is may leave."""
        for writer in self._silent:
            writer.close()

    def _look(self) -> None:
        if len(self.came) == self._count:
            self.complete.set()

    async def greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._silent.add(writer)
        with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            try:
                async with asyncio.timeout(self._timeout):
                    said = await reader.readexactly(_SECRET + _LENGTH)
            finally:
                self._silent.discard(writer)
            rank = int.from_bytes(said[_SECRET:], "little")
            if secrets.compare_digest(said[:_SECRET], self.secret) and rank not in self.came:
                self.came[rank] = Wire(rank, reader, writer)
                self._look()
                return
        writer.close()  # a stranger


async def _follow(ranks: Ranks, timeout: float) -> StreamOrders:
    (address,) = filter(None, await ranks.gather(b""))  # of an embedder's world, rank 0 need not be the first
    host, port, secret = json.loads(address)
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        raise RankFailure(f"rank 0 cannot be reached at {host}:{port}: {error}") from error
    writer.write(bytes.fromhex(secret) + ranks.rank.to_bytes(_LENGTH, "little"))
    return StreamOrders(ranks, [Wire(0, reader, writer)], timeout)


class Wire:
    """A stream to one rank."""

    def __init__(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.rank = rank
        self._reader = reader
        self._writer = writer

    def send(self, content: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(len(content).to_bytes(_LENGTH, "little") + content)

    async def receive(self) -> bytes:
        length = int.from_bytes(await self._reader.readexactly(_LENGTH), "little")
        return await self._reader.readexactly(length)

    def end(self) -> None:
        """Nothing more comes from here."""
        if self._writer.can_write_eof() and not self._writer.is_closing():
            with suppress(OSError):
                self._writer.write_eof()

    def abort(self) -> None:
        self._writer.transport.abort()


class StreamOrders:
    """``Orders`` of one rank; ``connect_orders`` makes it."""

    def __init__(self, ranks: Ranks, wires: Sequence[Wire], timeout: float) -> None:
        self.leads = ranks.rank == 0
        self.gather = ranks.gather
        self._wires = wires
        self._timeout = timeout
        self._orders: deque[bytes] = deque()
        self._failure: RankFailure | None = None
        self._lost: Callable[[RankFailure], None] | None = None
        self._news = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._readers = [loop.create_task(self._read(wire), name=f"orders-{wire.rank}") for wire in wires]
        self._beats = loop.create_task(self._beat(), name="orders-beats")

    def __repr__(self) -> str:
        return f"StreamOrders({len(self._wires)} wires{', ' if self._failure else ''}{self._failure or ''})"

    def watch(self, lost: Callable[[RankFailure], None]) -> None:
        """See ``Orders``."""
        self._lost = lost
        if self._failure is not None:
            lost(self._failure)

    def send(self, order: bytes) -> None:
        """See ``Orders``."""
        for wire in self._wires:
            wire.send(_ORDER + order)

    async def receive(self) -> bytes:
        """See ``Orders``."""
        while not self._orders:
            if self._failure is not None:
                raise RankFailure(*self._failure.args)
            self._news.clear()
            await self._news.wait()
        return self._orders.popleft()

    async def aclose(self, *, well: bool) -> None:
        """See ``Orders``. ``well``: waits ``GRACE`` seconds at most for the others to leave, too, so that nothing that
        is still on its way is cut off."""
        self._lost = None
        self._beats.cancel()
        try:
            for wire in self._wires:
                if well:
                    wire.send(_BYE)
                wire.end()
            if well and self._readers:
                await asyncio.wait(self._readers, timeout=GRACE)
        finally:
            for task in self._readers:
                task.cancel()
            for wire in self._wires:
                wire.abort()
        await asyncio.gather(self._beats, *self._readers, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._timeout / 4)
            for wire in self._wires:
                wire.send(_BEAT)

    async def _read(self, wire: Wire) -> None:
        """To the end of the stream."""
        try:
            while (content := await self._next(wire)) != _BYE:
                self._take(content[:1], content[1:])
            self._fail(f"rank {wire.rank} has left", quietly=True)
        except TimeoutError:
            self._fail(f"rank {wire.rank} was silent for {self._timeout:g} s")
        except (OSError, asyncio.IncompleteReadError):
            self._fail(f"rank {wire.rank} closed the connection")

    def _take(self, kind: bytes, content: bytes) -> None:
        if kind == _ORDER:
            self._orders.append(content)
            self._news.set()
        elif kind == _LOST:
            self._fail(content.decode())

    async def _next(self, wire: Wire) -> bytes:
        async with asyncio.timeout(self._timeout):
            return await wire.receive()

    def _fail(self, reason: str, *, quietly: bool = False) -> None:
        """``quietly``: what has come is still to be read; there is no more."""
        if self._failure is None:
            self._failure = RankFailure(reason)
            if not quietly:
                self._tell(self._failure)
        self._news.set()

    def _tell(self, failure: RankFailure) -> None:
        for wire in self._wires if self.leads else ():
            wire.send(_LOST + str(failure).encode())
        if self._lost is not None:
            self._lost(failure)
