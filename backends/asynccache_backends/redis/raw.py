"""The least that a client can do, to hold ours against: for ``asynccache bench store``, never for a cache.

One asyncio protocol that knows two commands, sends values by ``writelines`` and receives them straight into their
buffers. Of a cluster each server is sent its part of a batch; slots must stay where they are. It knows no header, no
error but a broken assumption, no deadline. A connection per call in flight, as ours has. Ours makes its connections and
knows where keys are; no code that a page passes through is shared, so that neither can hide the other's cost.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

from asynccache.errors import BackendError, Unavailable
from asynccache.storage import ParsedUrl
from asynccache_backends.redis.connection import connect, plain
from asynccache_backends.redis.node import Lane
from asynccache_backends.redis.resp import command
from asynccache_backends.redis.routing import Request, Router
from asynccache_backends.redis.settings import Address, Settings, settings_of


class RawClient:
    """Made by ``raw``."""

    def __init__(self, settings: Settings, router: Router) -> None:
        self._settings = settings
        self._router = router
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
        with suppress(BackendError):
            unlinks = [command(b"UNLINK", key) for key in self._stored]
            await self._router.ask(Lane.WORDS, Request(self._stored, plain(unlinks)))
        self._router.close()
        for idle in self._idle.values():
            while idle:
                idle.pop().transport.abort()

    def _parts(self, keys: Sequence[bytes]) -> list[tuple[Address, list[int]]]:
        """Which keys are whose."""
        parts: dict[Address, list[int]] = {}
        for i, key in enumerate(keys):
            if (node := self._router.owner(key)) is None:
                raise Unavailable("raw client: nobody has the slot of a key")
            parts.setdefault(node.address, []).append(i)
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
        return _Protocol((await connect(owner, self._settings)).transport)


async def raw(url: ParsedUrl) -> RawClient:
    """A bare client of the server, or the cluster, that ``url`` names. Cancelling it leaves nothing open.

    Raises:
        BackendError: nobody is there.
    """
    settings = settings_of(url)
    router = Router(settings, Counter())
    await router.open()
    return RawClient(settings, router)


async def _together(calls: Sequence[Coroutine[Any, Any, None]]) -> None:
    if len(calls) == 1:
        await calls[0]
    else:
        await asyncio.gather(*calls)


class _Protocol(asyncio.BufferedProtocol):
    """Fills buffers one after the other. It knows what else will come, to the byte; anything else ends it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self._parts: deque[tuple[memoryview, bytes | None]] = deque()
        self._filled = 0
        self._done: asyncio.Future[None] | None = None
        transport.set_protocol(self)

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
