"""A TCP proxy on loopback that takes its time when it is told to: every piece that a server answers comes ``delay``
seconds late. In a thread with a loop of its own, so that a test may change it from anywhere."""

from __future__ import annotations

import asyncio
import threading
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
        self._thread = threading.Thread(target=self._run, name="slow-proxy", daemon=True)
        self._ready = threading.Event()

    def __repr__(self) -> str:
        return f"SlowProxy({self.port} -> {self._target}, delay={self.delay})"

    def late(self, seconds: float) -> None:
        """From now on every piece of an answer comes so late."""
        self.delay = seconds

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, HOST, 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            their_reader, their_writer = await asyncio.open_connection(HOST, self._target)
        except OSError:
            writer.close()
            return
        there = asyncio.create_task(self._forward(reader, their_writer, writer))
        back = asyncio.create_task(self._pump(their_reader, writer, late=True))
        try:
            await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (there, back):
                task.cancel()
            for one in (writer, their_writer):
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
