"""One connection to one server. It serves one request at a time, which has any number of commands.

Law: when ``ask`` has returned or raised, nothing touches its buffers any more. If a request does not end well, because
it was cancelled or the connection was lost or silent, the connection is closed at once, without a word to the server.
So no reply is taken for that of another request, and no page that was sent in part is completed with other bytes: the
server drops a command that it has received only in part.

The event loop looks up names and does TCP and TLS. Its transport receives directly into a page, one buffer at a time,
and uvloop's transport sends a page from where it lies.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Self, cast

from asynccache.errors import BackendError, Timeout, Unavailable
from asynccache.settle import settled
from asynccache.storage import HostPort, Record
from asynccache_backends.redis.resp import Buffer, Command, ProtocolError, Reader, Refusal, command, joined
from asynccache_backends.redis.settings import ENVIRONMENT, RedisSettings

LOOKS = 8
"""The number of times in ``stall`` seconds that a connection looks whether more has been sent."""

ASKING = command(b"ASKING")

_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # Linux's names


class CommandBatch(NamedTuple):
    """The commands of a request. ``sinks`` has for each the record that its reply is read into, or None if the reply is
    no page.

    ``ahead``: how many commands are sent before the first of them is answered. A server that is sent all of a long
    request prepares all replies at once, which takes memory and falls out of its processor's caches."""

    commands: Sequence[Command]
    sinks: Sequence[Record | None]
    ahead: int

    def part(self, which: Sequence[int]) -> CommandBatch:
        """Return some of the commands."""
        return CommandBatch([self.commands[i] for i in which], [self.sinks[i] for i in which], self.ahead)

    def asking(self) -> CommandBatch:
        """Return the same commands, each preceded by ASKING, for a server that is just taking over their slots."""
        commands = [each for command in self.commands for each in (ASKING, command)]
        return CommandBatch(commands, [each for sink in self.sinks for each in (None, sink)], self.ahead)


def plain(commands: Sequence[Command]) -> CommandBatch:
    """Return a batch of commands whose replies are no pages."""
    return CommandBatch(commands, [None] * len(commands), len(commands))


class Connection(asyncio.BufferedProtocol):
    """A connection, once ``open`` has made it. The server counts as hung after ``stall`` seconds without a byte in
    either direction."""

    transport: asyncio.Transport

    def __init__(self, address: HostPort, settings: RedisSettings) -> None:
        self.closed = False
        self._name = str(address)
        self._address = address
        self._settings = settings
        self._stall = settings.stall
        self.loop = asyncio.get_running_loop()
        self._attempt: asyncio.Timeout | None = None
        self._abort: Callable[[], None] = self._give_up
        self._lost: asyncio.Future[None] = self.loop.create_future()
        self._done: asyncio.Future[None] | None = None
        self._idle = self._reader = Reader((), spare=1)
        self._batch = plain(())
        self._next = 0
        self._out: deque[Buffer] = deque()
        self._moved_at = 0.0
        self._unsent = 0

    async def open(self) -> Self:
        """Connect and sign in. Returns this connection, ready for commands.

        Raises:
            Unavailable: nobody listens, or TLS or the server refuses us. Timeout: connecting takes longer than
                ``stall``, or ``close`` was called meanwhile.

        Cancelling it leaves nothing open.
        """
        address, settings, began = self._address, self._settings, self.loop.time()
        name = None if settings.tls is None else settings.tls_name or address.host
        try:
            async with asyncio.timeout(self._stall) as self._attempt:
                await self.loop.create_connection(lambda: self, *address, ssl=settings.tls, server_hostname=name)
                await self._introduce()
            return self
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise Timeout(f"{address}: no connection after {self.loop.time() - began:.3g} s") from None
            if isinstance(error, OSError | ValueError):  # SSLError is an OSError; "a..b" as a host is a ValueError
                raise Unavailable(f"{address}: {error}") from error
            raise
        finally:
            self._attempt = None  # it refers to the task, and so to the caller's pages

    async def ask(self, batch: CommandBatch) -> list[Any]:
        """Send a request and return the reply to each command.

        Raises:
            Unavailable: the connection is lost. Timeout: no byte came or went for ``stall`` seconds.

        Cancelling it closes the connection.
        """
        if self.closed:
            raise Unavailable(f"{self._name}: the connection is closed")
        if not batch.commands:
            return []
        self._done, self._moved_at = self.loop.create_future(), self.loop.time()
        self._batch, self._next, self._reader = batch, 0, Reader(batch.sinks)
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
            self._done, self._batch, self._reader = None, plain(()), self._idle
            self._out.clear()

    def close(self, why: BackendError | None = None) -> None:
        """Close the connection at once; a request under way fails with ``why``. Calling it twice is fine."""
        if not self.closed:
            self.closed = True
            self._abort()
            self._end(why or Unavailable(f"{self._name}: closed"))

    def _give_up(self) -> None:
        """End the attempt to connect, if it is not over."""
        with suppress(RuntimeError):
            if self._attempt is not None:
                self._attempt.reschedule(self.loop.time())

    def _end(self, error: BackendError | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None) if error is None else self._done.set_exception(error)

    # what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        tls = transport.get_extra_info("sslcontext") is not None
        self._most = 2 if tls else 16  # buffers that the transport is given at once; TLS copies them
        self._limit = int(tls)        # TCP pauses above it, TLS at it; so both call ``resume_writing`` when all is sent
        self.transport.set_write_buffer_limits(self._limit)
        self._abort = self.transport.abort
        if self.closed:
            self._abort()

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
        elif self._next < len(self._batch.commands):
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
        """Send commands, as far ahead of the replies as the batch says, and not one by one."""
        commands, replies = self._batch.commands, len(self._reader.replies)
        if self._next - replies <= self._batch.ahead // 2:
            upto = min(len(commands), replies + self._batch.ahead)
            self._out.extend(joined(commands[self._next : upto]))
            self._next = max(self._next, upto)
            self._write()

    def _write(self) -> None:
        """Send what the transport takes; the rest when it has sent all of that."""
        while self._out and not self.closed and not self.transport.get_write_buffer_size():
            self.transport.writelines([self._out.popleft() for _ in range(min(len(self._out), self._most))])
        if self._out and not self.closed:  # ``writelines`` of Python 3.12.0 to 3.12.8 and 3.13.0 to 3.13.1 does not
            self.transport.set_write_buffer_limits(self._limit)  # see that it must call ``resume_writing``; this does

    def _look(self) -> None:
        """End the connection if it has been silent for too long."""
        now, unsent = self.loop.time(), self.transport.get_write_buffer_size()
        if unsent != self._unsent:
            self._unsent, self._moved_at = unsent, now
        if now >= self._moved_at + self._stall:
            self.close(Timeout(f"{self._name}: silent for {self._stall:g} s"))
        elif not self.closed:
            self._watching = self.loop.call_at(now + self._stall / LOOKS, self._look)

    async def _introduce(self) -> None:
        """Sign in, and select the database. Errors do not show the server's answer to a password, since it may quote
        the password."""
        settings, sock = self._settings, self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name in _KEEPALIVE.keys() & vars(socket).keys():
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), _KEEPALIVE[name])
        if settings.password or settings.username:
            user = (settings.username.encode(),) if settings.username else ()
            (reply,) = await self.ask(plain([command(b"AUTH", *user, settings.password.encode())]))
            if isinstance(reply, Refusal):
                read = f"they are read from the URL, or from {ENVIRONMENT}USERNAME and {ENVIRONMENT}PASSWORD"
                raise Unavailable(f"{settings}: the server refuses user and password ({reply.code}); {read}")
        if settings.database:
            (reply,) = await self.ask(plain([command(b"SELECT", b"%d" % settings.database)]))
            if isinstance(reply, Refusal):
                raise Unavailable(f"{settings}: {reply.text}")
