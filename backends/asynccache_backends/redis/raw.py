"""A minimal client of Redis, with which ``asynccache bench store`` compares the backend. No cache uses it.

The client is an asyncio protocol that knows two commands. It sends values by ``writelines`` and receives them directly
into their buffers. In a cluster each server is sent its part of a batch, and no hash slot may move meanwhile. There are
no headers and no deadlines, and any reply but the expected one is an error. Each call in flight has a connection of its
own, as in the backend. The backend's code makes the connections and finds the server of a key. The client and the
backend share no code that a page passes through, so that neither can hide the cost of the other.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from asynccache.errors import BackendError, Unavailable
from asynccache.storage import HostPort, ParsedUrl
from asynccache_backends.redis.connection import Connection, plain
from asynccache_backends.redis.resp import Buffer, command
from asynccache_backends.redis.routing import Lane, RedisNode, Router
from asynccache_backends.redis.settings import RedisSettings, settings_of


class RedisRawClient:
    """The client, which ``raw`` makes."""

    def __init__(self, settings: RedisSettings, router: Router) -> None:
        self._settings = settings
        self._router = router
        self._idle: defaultdict[HostPort, list[_Protocol]] = defaultdict(list)
        self._stored: list[bytes] = []

    async def put(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """Send a SET for each value. Raises Unavailable if one is not stored. Cancelling it loses connections."""
        def call(part: list[int]) -> tuple[list[Buffer], list[Buffer]]:
            words: list[Buffer] = []
            for i in part:
                head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(keys[i]), keys[i], values[i].nbytes)
                words += (head, values[i], b"\r\n")
            return words, [b"+OK\r\n" * len(part)]

        self._stored += keys
        await self._ask(keys, call)

    async def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> None:
        """Read each value into its buffer. Raises Unavailable unless every key has a value as long as its buffer.
        Cancelling it loses connections."""
        await self._ask(keys, lambda part: ([command(b"GET", keys[i]) for i in part], _values([into[i] for i in part])))

    async def aclose(self) -> None:
        """Remove the values that were put, as far as the servers allow, and close the connections."""
        with suppress(BackendError):
            batch = plain([command(b"UNLINK", key) for key in self._stored])
            await self._router.ask(Lane.WORDS, self._stored, batch)
        self._router.close()
        for idle in self._idle.values():
            while idle:
                idle.pop().transport.abort()

    async def _ask(
        self, keys: Sequence[bytes], call: Callable[[list[int]], tuple[list[Buffer], list[Buffer]]]
    ) -> None:
        """Make one call to each server, for its part of the keys. ``call`` takes the positions of these keys and
        returns the bytes to send and the parts of the replies (see ``_Protocol.ask``)."""
        parts: defaultdict[RedisNode | None, list[int]] = defaultdict(list)
        for i, key in enumerate(keys):
            parts[self._router.owner(key)].append(i)
        await asyncio.gather(*(self._one(node, *call(part)) for node, part in parts.items()))

    async def _one(self, node: RedisNode | None, out: Sequence[Buffer], expected: Sequence[Buffer]) -> None:
        if node is None:
            raise Unavailable("raw client: nobody has the slot of a key")
        idle = self._idle[node.address]
        protocol = idle.pop() if idle else _Protocol((await Connection(node.address, self._settings).open()).transport)
        try:
            await protocol.ask(out, expected)
        except BaseException:
            protocol.transport.abort()  # else replies that are still to come would land in the buffers
            raise
        idle.append(protocol)


async def raw(url: ParsedUrl) -> RedisRawClient:
    """Return a bare client of the server, or the cluster, that ``url`` names. Cancelling it leaves nothing open.

    Raises:
        BackendError: no server answers.
    """
    settings = settings_of(url)
    router = Router(settings, Counter())
    await router.open()
    return RedisRawClient(settings, router)


class _Protocol(asyncio.BufferedProtocol):
    """A protocol that fills buffers one after the other. All bytes between them are known in advance; any other byte
    ends the connection."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self._parts: deque[tuple[memoryview, bytes | None]] = deque()
        self._filled = 0
        self._done: asyncio.Future[None] | None = None
        transport.set_protocol(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(Unavailable(f"raw client: connection lost: {error}"))

    async def ask(self, out: Sequence[Buffer], parts: Sequence[Buffer]) -> None:
        """Send ``out``, and receive ``parts`` in order. A part is a buffer to fill, or the bytes that are expected."""
        for part in parts:
            expected = part if isinstance(part, bytes) else None
            self._parts.append((memoryview(bytearray(len(part))) if isinstance(part, bytes) else part, expected))
        self._done = asyncio.get_running_loop().create_future()
        self.transport.writelines(out)
        await self._done

    def get_buffer(self, hint: int) -> memoryview:
        """Return the rest of the first part that is not complete."""
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
        if self._done is not None and not self._done.done():
            self._done.set_result(None) if error is None else self._done.set_exception(error)


def _values(into: Sequence[memoryview]) -> list[Buffer]:
    """Return the parts of the replies to GET (see ``_Protocol.ask``). For each value there are the bytes before it,
    which are the end of the value before and this one's length, and the value's buffer."""
    parts: list[Buffer] = []
    end = b""
    for buffer in into:
        parts += (b"%b$%d\r\n" % (end, buffer.nbytes), buffer)
        end = b"\r\n"
    return [*parts, end]
