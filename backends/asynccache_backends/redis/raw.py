"""The least that a client can do, to hold ours against: for ``asynccache bench store``, never for a cache.

One asyncio protocol that knows two commands, sends values by ``writelines`` and receives them straight into their
buffers. It knows no header, no error but a broken assumption, no cluster, no deadline. A connection per call in
flight, as ours has. It shares no code with the backend beyond the URL, so that neither can hide the other's cost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

from asynccache.errors import Unavailable
from asynccache.storage import ParsedUrl
from asynccache_backends.redis.settings import Settings, settings_of


class RawClient:
    """Made by ``raw``."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._idle: list[_Protocol] = []
        self._stored: list[bytes] = []

    async def put(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """SET each. Cancelling it loses a connection."""
        out: list[bytes | memoryview] = []
        for key, value in zip(keys, values, strict=True):
            out += (b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, value.nbytes), value, b"\r\n")
        protocol = await self._take()
        await protocol.ask(out, [b"+OK\r\n" * len(keys)])
        self._stored += keys
        self._idle.append(protocol)

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        """GET each; all of them are there, and as long as their buffers. Cancelling it loses a connection."""
        out = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key) for key in keys]
        protocol = await self._take()
        await protocol.ask([b"".join(out)], _values(into))
        self._idle.append(protocol)

    async def aclose(self) -> None:
        """Remove what was put, as far as it is there still, and close the connections."""
        words = [b"*2\r\n$3\r\nDEL\r\n$%d\r\n%b\r\n" % (len(key), key) for key in self._stored]
        if words and self._idle:
            with suppress(ValueError, Unavailable):    # some have left for want of room
                await self._idle[-1].ask(words, [b":1\r\n" * len(words)])
        while self._idle:
            self._idle.pop().transport.abort()

    async def _take(self) -> _Protocol:
        if self._idle:
            return self._idle.pop()
        (host, port), *_ = self._settings.seeds
        tls = self._settings.tls
        name = None if tls is None else self._settings.tls_name or host
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_connection(_Protocol, host, port, ssl=tls, server_hostname=name)
        words = [word.encode() for word in (self._settings.username, self._settings.password) if word]
        if words:
            auth = [b"*%d\r\n$4\r\nAUTH\r\n" % (1 + len(words)), *(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)]
            await protocol.ask(auth, [b"+OK\r\n"])
        if self._settings.database:
            await protocol.ask([b"SELECT %d\r\n" % self._settings.database], [b"+OK\r\n"])
        return protocol


async def raw(url: ParsedUrl) -> RawClient:
    """A bare client of the server that ``url`` names."""
    return RawClient(settings_of(url))


class _Protocol(asyncio.BufferedProtocol):
    """Fills buffers one after the other. It knows what else will come, to the byte; anything else ends it."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._parts: deque[tuple[memoryview, bytes | None]] = deque()
        self._filled = 0
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(Unavailable(f"raw client: connection lost: {error}"))

    async def ask(self, out: Sequence[bytes | memoryview], parts: Sequence[memoryview | bytes]) -> None:
        """Send ``out``, and receive ``parts``: buffers to fill, and bytes that are expected."""
        for part in parts:
            expected = part if isinstance(part, bytes) else None
            self._parts.append((memoryview(bytearray(len(part))) if isinstance(part, bytes) else part, expected))
        self._done = asyncio.get_running_loop().create_future()
        self.transport.writelines(out)
        await self._done

    def get_buffer(self, hint: int) -> memoryview:
        """The rest of the first part."""
        return self._parts[0][0][self._filled :] if self._parts else memoryview(bytearray(1))

    def buffer_updated(self, count: int) -> None:
        if not self._parts:
            self._end(Unavailable("raw client: the server said more than it was asked"))
            return
        buffer, expected = self._parts[0]
        self._filled += count
        if expected is not None and buffer[: self._filled] != expected[: self._filled]:
            self._end(Unavailable(f"raw client: expected {expected[:40]!r}, got {bytes(buffer[:40])!r}"))
        elif self._filled == len(buffer):
            self._filled = 0
            self._parts.popleft()
            if not self._parts:
                self._end(None)

    def _end(self, error: Exception | None) -> None:
        if error is not None:
            self.transport.abort()
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


def _values(into: Sequence[memoryview]) -> list[memoryview | bytes]:
    """How replies to GET look: a length, the value, and the end of the one with the length of the next."""
    parts: list[memoryview | bytes] = []
    end = b""
    for buffer in into:
        parts += (b"%b$%d\r\n" % (end, buffer.nbytes), buffer)
        end = b"\r\n"
    return [*parts, end]
