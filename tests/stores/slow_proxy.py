"""A TCP proxy on loopback through which answers come late, cut, wrong or not at all, and an S3 server that is full."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from enum import Enum
from random import Random
from typing import NamedTuple, Self

from tests.stores.server import HOST

# It takes its time when it is told to: every piece that a server answers comes ``delay`` seconds late; or it does worse
# to them. In a thread with a loop of its own, so that a test may change it from anywhere.


PIECE = 1 << 16
DRIP = 64


class Fault(Enum):
    """What becomes of a server's answers."""

    CUT = "half of each piece comes, and then the connection is closed"
    HANG = "nothing comes"
    GARBAGE = "other bytes come"
    DRIP = "they come by a few bytes at a time"


class SlowProxy:
    """``with SlowProxy(port) as proxy``: ``proxy.port`` is where clients connect. ``delay`` and ``fault`` may be set at
    any time. ``asked`` is set when a client says something."""

    def __init__(self, target: int) -> None:
        self.delay = 0.0
        self.fault: Fault | None = None
        self.asked = threading.Event()
        self.port = 0
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._transports = set[asyncio.WriteTransport]()  # nobody else holds one that waits, but for itself
        self._thread = threading.Thread(target=self._run, name="slow-proxy", daemon=True)
        self._ready = threading.Event()

    def late(self, seconds: float) -> None:
        """From now on delay every piece of an answer by ``seconds``."""
        self.delay = seconds

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._listen())

    async def _listen(self) -> None:
        server = await asyncio.start_server(self._serve, HOST, 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._over.wait()
        server.close()
        await asyncio.sleep(0.01)                      # who was accepted last has a writer by then
        for transport in self._transports:
            transport.abort()                          # what is not sent yet would outlive the loop

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        pumps: list[asyncio.Task[None]] = []
        self._transports.add(writer.transport)
        try:
            their_reader, their_writer = await asyncio.open_connection(HOST, self._target)
            writers.append(their_writer)
            self._transports.add(their_writer.transport)
            pumps.append(asyncio.create_task(self._forward(reader, their_writer, writer)))
            pumps.append(asyncio.create_task(self._pump(their_reader, writer, late=True)))
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass                                       # nobody listens there: the client is let go, too
        finally:
            for pump in pumps:
                pump.cancel()
            for one in writers:
                one.close()

    async def _forward(
        self, reader: asyncio.StreamReader, theirs: asyncio.StreamWriter, ours: asyncio.StreamWriter
    ) -> None:
        """What the client at ``ours`` says goes to the server at ``theirs``."""
        await self._pump(reader, theirs, late=False)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, late: bool) -> None:
        with suppress(OSError):
            while data := await reader.read(PIECE):
                if late:
                    await self._answer(data, writer)
                else:
                    self.asked.set()
                    writer.write(data)
                    await writer.drain()

    async def _answer(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(self.delay)
        fault = self.fault
        if fault is Fault.HANG:
            await asyncio.Event().wait()
        elif fault is Fault.CUT:
            writer.write(data[: len(data) // 2])
            raise ConnectionResetError
        elif fault is Fault.GARBAGE:
            data = Random(len(data)).randbytes(len(data))
        step = DRIP if fault is Fault.DRIP else PIECE
        for at in range(0, len(data), step):
            writer.write(data[at : at + step])
            await writer.drain()
            await asyncio.sleep(0.002 if fault is Fault.DRIP else 0)


# An S3 server that is full, where the real one never is: a proxy before it that takes no more objects when it is told
# to. All else goes on to the server and back as it is, as late as ``SlowProxy`` makes it.
#
# The refusals are those of real servers: Ceph's radosgw, over its quota (as it was seen to answer), and one whose disks
# are full (MinIO's). Requests are told apart by their heads: the client must say how long each is, and send it when it
# has the answer to the one before.


class Refusal(NamedTuple):
    """The answer of a full server."""

    status: str
    code: str


QUOTA = Refusal("403 Forbidden", "QuotaExceeded")
DISKS = Refusal("507 Insufficient Storage", "XMinioStorageFull")


class FullProxy(SlowProxy):
    """``refused``: how many objects were not taken."""

    def __init__(self, target: int) -> None:
        super().__init__(target)
        self.refused = 0
        self._refusal: Refusal | None = None

    def full(self, refusal: Refusal | None) -> None:
        """From now on refuse objects with ``refusal``; None: take them again."""
        self._refusal = refusal

    async def _forward(
        self, reader: asyncio.StreamReader, theirs: asyncio.StreamWriter, ours: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                refusal = self._refusal if head.startswith(b"PUT ") else None
                if refusal is None:
                    theirs.write(head)
                await _body(reader, _length(head), None if refusal is not None else theirs)
                if refusal is not None:
                    self.refused += 1
                    ours.write(_answer(refusal))
                    await ours.drain()


async def _body(reader: asyncio.StreamReader, length: int, to: asyncio.StreamWriter | None) -> None:
    """Pass on the rest of a request to ``to``; None: drop it."""
    while length:
        piece = await reader.read(min(PIECE, length))
        if not piece:
            raise asyncio.IncompleteReadError(b"", length)
        length -= len(piece)
        if to is not None:
            to.write(piece)
            await to.drain()


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


def _answer(refusal: Refusal) -> bytes:
    body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{refusal.code}</Code><Message></Message></Error>'
    head = f"HTTP/1.1 {refusal.status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()
