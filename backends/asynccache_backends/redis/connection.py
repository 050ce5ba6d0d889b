"""One connection to one server: the only place where bytes move. One request at a time, of any number of commands.

The law: when ``ask`` has returned or raised, nothing touches its buffers. A request that does not end well, by
cancellation, loss or silence, ends the connection with it, at once and without a word to the server: so no reply can
ever be taken for another one's, and no half-sent page completed with other bytes (the server drops what is not whole).

Names, TCP and TLS are the event loop's. Its transport receives straight into a page, one buffer at a time, and uvloop's
sends from where a page lies.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from asynccache.errors import BackendError, Timeout, Unavailable
from asynccache.settle import settled
from asynccache.storage import Record
from asynccache_backends.redis.resp import Buffer, Command, ProtocolError, Reader, Refusal, command, joined
from asynccache_backends.redis.settings import ENVIRONMENT, Address, Settings

LOOKS = 8
"""How often, in ``stall`` seconds, it is looked for what has been sent."""

ASKING = command(b"ASKING")

_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # Linux's names


class ConnectFailed(Unavailable):
    """No connection can be made now."""


class Job(NamedTuple):
    """Commands, and for each the record that its reply is a page for, if it is.

    ``ahead``: how many commands are sent before the first of them is answered. A server that prepares all of a long
    answer at once falls out of its caches, and holds it in memory."""

    commands: Sequence[Command]
    sinks: Sequence[Record | None]
    ahead: int

    def part(self, which: Sequence[int]) -> Job:
        """Some of them."""
        return Job([self.commands[i] for i in which], [self.sinks[i] for i in which], self.ahead)

    def asking(self) -> Job:
        """The same, with a word before each command that a server wants which has a slot only by half."""
        commands = [each for command in self.commands for each in (ASKING, command)]
        return Job(commands, [each for sink in self.sinks for each in (None, sink)], self.ahead)


def plain(commands: Sequence[Command]) -> Job:
    """Commands whose replies are no pages."""
    return Job(commands, [None] * len(commands), len(commands))


class Connection(asyncio.BufferedProtocol):
    """Made by ``connect``. ``stall``: seconds without a byte, in either direction, after which the server counts as
    hung."""

    transport: asyncio.Transport

    def __init__(self, name: str, stall: float) -> None:
        self.closed = True
        self._name = name
        self._stall = stall
        self.loop = asyncio.get_running_loop()
        self._lost: asyncio.Future[None] = self.loop.create_future()
        self._done: asyncio.Future[None] | None = None
        self._idle = self._reader = Reader((), spare=1)
        self._job = plain(())
        self._next = 0
        self._out: deque[Buffer] = deque()
        self._moved_at = 0.0
        self._unsent = 0

    @property
    def busy(self) -> bool:
        """Whether a request is under way."""
        return self._done is not None

    async def ask(self, job: Job) -> list[Any]:
        """The reply to each command.

        Raises:
            Unavailable: the connection is lost. Timeout: no byte came or went for ``stall`` seconds.

        Cancelling it closes the connection.
        """
        if self.closed:
            raise Unavailable(f"{self._name}: the connection is closed")
        if not job.commands:
            return []
        self._done, self._moved_at = self.loop.create_future(), self.loop.time()
        self._job, self._next, self._reader = job, 0, Reader(job.sinks)
        self._watching = self.loop.call_at(self._moved_at + self._stall / LOOKS, self._look)
        try:
            self._feed()
            await self._done
            return self._reader.replies
        except BaseException:
            self._done.cancel()
            self.close()
            await settled([self._lost])  # until then the transport may hold what it was to send
            raise
        finally:
            self._watching.cancel()
            self._reader.forget()
            self._done, self._job, self._reader = None, plain(()), self._idle
            self._out.clear()

    def close(self, why: BackendError | None = None) -> None:
        """End it now; a request that is under way fails by ``why``. Twice is fine."""
        if not self.closed:
            self.closed = True
            self.transport.abort()
            self._end(why or Unavailable(f"{self._name}: closed"))

    def _end(self, error: BackendError | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None) if error is None else self._done.set_exception(error)

    # what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        tls = transport.get_extra_info("sslcontext") is not None
        self._most = 2 if tls else 16  # buffers that it is given at once; TLS copies them
        self.transport.set_write_buffer_limits(int(tls))  # it says when all is sent; TLS counts a limit that is reached
        self.closed = False

    def eof_received(self) -> None:
        self.close(Unavailable(f"{self._name}: connection lost: closed by the server"))

    def connection_lost(self, error: Exception | None) -> None:
        self.close(Unavailable(f"{self._name}: connection lost: {error}"))
        if not self._lost.done():
            self._lost.set_result(None)

    def get_buffer(self, hint: int) -> memoryview:
        return self._reader.buffer

    def buffer_updated(self, count: int) -> None:
        self._moved_at = self.loop.time()
        try:
            self._reader.received(count)
        except BackendError as error:
            self.close(error)
            return
        if len(self._reader.replies) > self._next:
            self.close(ProtocolError(f"{self._name}: answers to what was not asked yet"))
        elif self._next < len(self._job.commands):
            self._feed()
        elif not self._reader.missing and (self._out or self.transport.get_write_buffer_size()):
            self.close(ProtocolError(f"{self._name}: answers to what was not asked yet"))
        elif not self._reader.missing:
            self._end(None)

    def resume_writing(self) -> None:
        self._moved_at = self.loop.time()
        self._write()

    # a request

    def _feed(self) -> None:
        """Send commands, as far ahead of the replies as the job says, and not one by one."""
        commands, replies = self._job.commands, len(self._reader.replies)
        if self._next - replies <= self._job.ahead // 2:
            upto = min(len(commands), replies + self._job.ahead)
            self._out.extend(joined(commands[self._next : upto]))
            self._next = max(self._next, upto)
            self._write()

    def _write(self) -> None:
        """Send what the transport takes; the rest when it has sent all of that."""
        while self._out and not self.closed and not self.transport.get_write_buffer_size():
            self.transport.writelines([self._out.popleft() for _ in range(min(len(self._out), self._most))])

    def _look(self) -> None:
        """Whether it has been silent for too long."""
        now, unsent = self.loop.time(), self.transport.get_write_buffer_size()
        if unsent != self._unsent:
            self._unsent, self._moved_at = unsent, now
        if now >= self._moved_at + self._stall:
            self.close(Timeout(f"{self._name}: silent for {self._stall:g} s"))
        elif not self.closed:
            self._watching = self.loop.call_at(now + self._stall / LOOKS, self._look)


async def connect(address: Address, settings: Settings) -> Connection:
    """A connection that is ready for commands.

    Raises:
        ConnectFailed: nobody listens, TLS or the server refuses us. Timeout: it takes longer than ``stall``.

    Cancelling it leaves nothing open.
    """
    made = Connection(str(address), settings.stall)
    name = None if settings.tls is None else settings.tls_name or address.host
    try:
        async with asyncio.timeout(settings.stall):
            await made.loop.create_connection(lambda: made, *address, ssl=settings.tls, server_hostname=name)
            await _introduce(made, settings)
            return made
    except BaseException as error:
        made.close()
        if isinstance(error, TimeoutError):
            raise Timeout(f"{address}: no connection in {settings.stall:g} s") from None
        if isinstance(error, OSError | UnicodeError | Unavailable):  # ssl.SSLError is the first; no name may be "a..b"
            said = str(error) if isinstance(error, Unavailable) else f"{address}: {error}"
            raise error if isinstance(error, ConnectFailed) else ConnectFailed(said) from error
        raise


async def _introduce(connection: Connection, settings: Settings) -> None:
    """Say who we are, and which database. What the server says to a password is not repeated: it may quote it."""
    sock = connection.transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name in _KEEPALIVE.keys() & vars(socket).keys():
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), _KEEPALIVE[name])
    if settings.password or settings.username:
        user = (settings.username.encode(),) if settings.username else ()
        (reply,) = await connection.ask(plain([command(b"AUTH", *user, settings.password.encode())]))
        if isinstance(reply, Refusal):
            read = f"they are read from the URL, or from {ENVIRONMENT}USERNAME and {ENVIRONMENT}PASSWORD"
            raise ConnectFailed(f"{settings}: the server refuses user and password ({reply.code}); {read}")
    if settings.database:
        (reply,) = await connection.ask(plain([command(b"SELECT", b"%d" % settings.database)]))
        if isinstance(reply, Refusal):
            raise ConnectFailed(f"{settings}: {reply.text}")
