"""A TCP proxy on loopback that takes its time when it is told to: every piece that a server answers comes ``delay``
seconds late. In a thread with a loop of its own, so that a test may change it from anywhere."""

from __future__ import annotations

import asyncio
import threading
import weakref
from contextlib import suppress
from typing import Self

from tests.stores.server import HOST

PIECE = 1 << 16


class SlowProxy:
    """``with SlowProxy(port) as proxy``: ``proxy.port`` is where clients connect. ``delay`` may be set at any time."""

    def __init__(self, target: int) -> None:
        self.delay = 0.0
        self.port = 0
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._transports: weakref.WeakSet[asyncio.WriteTransport] = weakref.WeakSet()
        self._thread = threading.Thread(target=self._run, name="slow-proxy", daemon=True)
        self._ready = threading.Event()

    def __repr__(self) -> str:
        return f"SlowProxy({self.port} -> {self._target}, delay={self.delay})"

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
                if late and self.delay:
                    await asyncio.sleep(self.delay)
                writer.write(data)
                await writer.drain()
