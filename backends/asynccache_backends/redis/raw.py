"""The least that a client can do, to hold ours against: for ``asynccache bench store``, never for a cache.

One asyncio protocol that knows two commands, sends values by ``writelines`` and receives them straight into their
buffers. Of a cluster it reads the map once, and sends each server its part of a batch; slots must stay where they are.
It knows no header, no error but a broken assumption, no deadline. A connection per call in flight, as ours has. It
shares no code with the backend beyond the URL and what a slot is, so that neither can hide the other's cost.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, cast

from asynccache.errors import Unavailable
from asynccache.storage import ParsedUrl
from asynccache_backends.redis.routing import SLOTS, slot_of
from asynccache_backends.redis.settings import Address, Settings, settings_of


class RawClient:
    """Made by ``raw``. ``owners``: the server of each slot; or the only one there is."""

    def __init__(self, settings: Settings, owners: Sequence[Address]) -> None:
        self._settings = settings
        self._owners = owners
        self._idle: defaultdict[Address, list[_Protocol]] = defaultdict(list)
        self._stored: list[bytes] = []

    async def put(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """SET each. Cancelling it loses connections."""
        self._stored += keys
        await _together([
            self._put(owner, [keys[i] for i in part], [values[i] for i in part]) for owner, part in self._parts(keys)
        ])  # fmt: skip

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        """GET each; all of them are there, and as long as their buffers. Cancelling it loses connections."""
        await _together([
            self._get(owner, [keys[i] for i in part], [into[i] for i in part]) for owner, part in self._parts(keys)
        ])  # fmt: skip

    async def aclose(self) -> None:
        """Remove what was put, as far as it is there still, and close the connections."""
        for owner, part in self._parts(self._stored):
            words = [b"*2\r\n$3\r\nDEL\r\n$%d\r\n%b\r\n" % (len(self._stored[i]), self._stored[i]) for i in part]
            if self._idle[owner]:
                with suppress(ValueError, Unavailable):    # some have left for want of room
                    await self._idle[owner][-1].ask(words, [b":1\r\n" * len(words)])
        for idle in self._idle.values():
            while idle:
                idle.pop().transport.abort()

    def _parts(self, keys: Sequence[bytes]) -> list[tuple[Address, Sequence[int]]]:
        """Which keys are whose."""
        if len(self._owners) == 1:
            return [(self._owners[0], range(len(keys)))] if keys else []
        parts: dict[Address, list[int]] = {}
        for i, key in enumerate(keys):
            parts.setdefault(self._owners[slot_of(key)], []).append(i)
        return list(parts.items())

    async def _put(self, owner: Address, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        out: list[bytes | memoryview] = []
        for key, value in zip(keys, values, strict=True):
            out += (b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, value.nbytes), value, b"\r\n")
        protocol = await self._take(owner)
        await protocol.ask(out, [b"+OK\r\n" * len(keys)])
        self._idle[owner].append(protocol)

    async def _get(self, owner: Address, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        out = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key) for key in keys]
        protocol = await self._take(owner)
        await protocol.ask([b"".join(out)], _values(into))
        self._idle[owner].append(protocol)

    async def _take(self, owner: Address) -> _Protocol:
        if self._idle[owner]:
            return self._idle[owner].pop()
        host, port = owner
        loop, (tls, name) = asyncio.get_running_loop(), _tls(self._settings, host)
        _, protocol = await loop.create_connection(_Protocol, host, port, ssl=tls, server_hostname=name)
        for words in _greeting(self._settings):
            await protocol.ask([words], [b"+OK\r\n"])
        return protocol


async def raw(url: ParsedUrl) -> RawClient:
    """A bare client of the server, or the cluster, that ``url`` names. Cancelling it leaves nothing open.

    Raises:
        OSError: nobody is there.
    """
    settings = settings_of(url)
    owners = [settings.seeds[0]]
    if settings.cluster != "off":
        owners = _owners(await _slots(settings)) or owners
    return RawClient(settings, owners)


async def _together(calls: Sequence[Coroutine[Any, Any, None]]) -> None:
    if len(calls) == 1:
        await calls[0]
    else:
        await asyncio.gather(*calls)


def _greeting(settings: Settings) -> list[bytes]:
    """What is said first on a connection, each answered by OK."""
    words = [word.encode() for word in (settings.username, settings.password) if word]
    auth = b"*%d\r\n$4\r\nAUTH\r\n" % (1 + len(words)) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)
    return [auth] * bool(words) + [b"SELECT %d\r\n" % settings.database] * bool(settings.database)


def _tls(settings: Settings, host: str) -> tuple[Any, str | None]:
    return settings.tls, None if settings.tls is None else settings.tls_name or host


async def _slots(settings: Settings) -> Any:
    """What the first server says of its cluster; not a list, if it is none."""
    host, port = settings.seeds[0]
    tls, name = _tls(settings, host)
    reader, writer = await asyncio.open_connection(host, port, ssl=tls, server_hostname=name)
    try:
        for words in _greeting(settings):
            writer.write(words)
            await _reply(reader)
        writer.write(b"CLUSTER SLOTS\r\n")
        return await _reply(reader)
    finally:
        writer.transport.abort()


async def _reply(reader: asyncio.StreamReader) -> Any:
    line = (await reader.readuntil(b"\r\n"))[:-2]
    if line[:1] == b"*":
        return [await _reply(reader) for _ in range(int(line[1:]))]
    if line[:1] == b"$":
        return (await reader.readexactly(int(line[1:]) + 2))[:-2]
    return int(line[1:]) if line[:1] == b":" else line


def _owners(slots: Any) -> list[Address]:
    """The server of each slot; [], if it is no cluster."""
    found: dict[int, Address] = {}
    for first, last, (host, port, *_), *_ in slots if isinstance(slots, list) else ():
        found.update(dict.fromkeys(range(first, last + 1), Address(host.decode(), port)))
    return [found[slot] for slot in range(SLOTS)] if len(found) == SLOTS else []


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
