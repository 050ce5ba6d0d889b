"""One server: redis-py makes the connections to it, with TLS and signed in, and asks what is answered by lists. Pages,
and questions that are answered by a line, go by ``Connection``, which takes the transport over from redis-py. From then
on the transport receives directly into a page, one buffer at a time, and uvloop's transport sends a page from where it
lies.

A server has a few connections for pages, and one for small questions, so that these never wait behind pages. A
connection serves one request at a time, and further requests wait in line. If a connection cannot be made, is lost
while it is new, or falls silent, the server is left alone for a moment. So a dead server costs an attempt now and then,
and not an attempt for every request in line.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any

import redis
from redis._parsers import _AsyncRESP2Parser
from redis.asyncio import SSLConnection

from asynccache.errors import AsyncCacheError, BackendError, ConfigError, Timeout, Unavailable
from asynccache.settle import settled
from asynccache.storage import REFUSED, Breaker, HostPort
from asynccache_backends.redis.resp import Buffer, ProtocolError, Reader, Refusal, Request, joined
from asynccache_backends.redis.settings import ENVIRONMENT, RedisSettings

AHEAD_BYTES = 2 << 20
"""Bytes of pages that are asked for before the first of them has come. A server that is sent all of a long request
prepares all replies at once, which takes memory and falls out of its processor's caches."""
MOST_ANSWERED = 16 << 20
"""Bytes in a list that is answered. The map of a large cluster takes a tenth of it."""
LOOKS = 8
"""The number of times in ``stall`` seconds that a connection looks whether more has been sent."""


class Answers(asyncio.StreamReader):
    """The bytes that redis-py reads: ``MOST_ANSWERED`` at most, so that a list without an end is an error."""

    room = MOST_ANSWERED

    def feed_data(self, data: Any) -> None:
        self.room -= len(data)
        if self.room < 0:
            self.set_exception(ConnectionError(f"answers of more than {MOST_ANSWERED} bytes"))
        else:
            super().feed_data(data)


class RedisConnection(SSLConnection):
    """A connection of redis-py, with TLS or without, as the settings say.

    redis-py's own kinds of connection override ``_connect``, too. If a version did not call it, the connection would
    use TLS and be refused, and no password would be sent in the clear. The parser is the one in Python, since hiredis
    makes room for as many items as a list says that it has.
    """

    def __init__(self, address: HostPort, settings: RedisSettings) -> None:
        user, password = settings.username or None, settings.password or None
        super().__init__(
            host=address.host, port=address.port, db=settings.database, username=user, password=password, protocol=2,
            socket_timeout=None, socket_connect_timeout=None, driver_info=None, parser_class=_AsyncRESP2Parser,
        )  # fmt: skip
        self.closed = False
        self.transport: asyncio.Transport | None = None
        """None before there is a connection."""
        self.address = address
        self._settings = settings
        self._limit: asyncio.Timeout | None = None

    async def _connect(self) -> None:
        loop, tls = asyncio.get_running_loop(), self._settings.tls
        name = None if tls is None else self._settings.tls_name or self.address.host
        reader = Answers(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        self.transport, _ = await loop.create_connection(lambda: protocol, *self.address, ssl=tls, server_hostname=name)
        self._reader, self._writer = reader, asyncio.StreamWriter(self.transport, protocol, reader, loop)
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in self.socket_keepalive_options.items():  # type: ignore[attr-defined]
            sock.setsockopt(socket.IPPROTO_TCP, option, value)

    @asynccontextmanager
    async def signed_in(self, within: float) -> AsyncIterator[None]:
        """Connect, sign in and select the database, and be used for what follows; for ``within`` seconds in all. It is
        closed if that fails.

        Raises:
            Unavailable: nobody listens, or TLS or the server refuses us. Timeout: it takes longer, or is closed.
        """
        try:
            async with asyncio.timeout(within) as self._limit:
                await self._sign_in()
                yield
        except BaseException as error:
            closed, self._limit = self.closed, None
            self.close()
            if isinstance(error, TimeoutError):
                raise Timeout(f"{self.address}: {'closed' if closed else f'no answer in {within:g} s'}") from None
            if isinstance(error, Exception) and not isinstance(error, AsyncCacheError):  # redis-py on any nonsense
                raise Unavailable(f"{self.address}: {str(error)[:200]}") from error
            raise
        finally:
            self._limit = None  # it refers to the task, and so to the caller's pages

    async def ask(self, *words: str | bytes) -> Any:
        """Send one command and return its reply, with lists as lists; a ``Refusal`` if it is an error reply."""
        await self.send_command(*words)
        try:
            return await self.read_response()
        except redis.RedisError as error:
            code = error.status_code
            if code is None and not isinstance(error, redis.ResponseError):
                raise
            return Refusal(f"{code} {error}" if code else str(error))

    def close(self) -> None:
        """End the connection at once, without a word to the server, or the attempt to make it."""
        self.closed = True
        if self.transport is not None:
            self.transport.abort()
        elif self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())
        self._reader = self._writer = None

    async def _sign_in(self) -> None:
        """Errors do not show the server's answer to a password, since it may quote the password."""
        settings = self._settings
        try:
            await self.connect()  # type: ignore[no-untyped-call]
        except Exception as error:
            if self.transport is None or not (settings.username or settings.password):
                raise
            said = getattr(error, "status_code", None) or type(error).__name__
            why = f"the server does not let us in, or has no such database ({said})"
            read = f"user and password are read from the URL, or from {ENVIRONMENT}USERNAME and {ENVIRONMENT}PASSWORD"
            raise Unavailable(f"{settings}: {why}; {read}") from None
        if self.transport is None:
            raise ConfigError(f"storage redis: redis-py {redis.__version__} does not connect by Connection._connect")
        if self.closed or await self.can_read():
            raise ProtocolError(f"{self.address}: connection lost, or answers to what was not asked yet")


class Connection(asyncio.BufferedProtocol):
    """A connection for pages, which takes over the transport of ``link``. It serves one call of ``ask`` at a time. The
    server counts as hung after ``stall`` seconds without a byte in either direction.

    When ``ask`` has returned or raised, nothing touches its buffers any more. If a request does not end well,
    because it was cancelled or the connection was lost or silent, the connection is closed at once, without a word to
    the server. So no reply is taken for that of another request, and no page that was sent in part is completed with
    other bytes: the server drops a command that it has received only in part."""

    def __init__(self, link: RedisConnection, stall: float) -> None:
        assert link.transport is not None
        self.link = link
        self.transport = link.transport
        self._stall = stall
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._done: asyncio.Future[None] | None = None
        self._failure: BackendError | None = None
        self._idle = self._reader = Reader((), spare=1)
        self._requests: Sequence[Request] = ()
        self._ahead = self._next = self._moves = 0
        self._out: deque[Buffer] = deque()
        tls = self.transport.get_extra_info("sslcontext") is not None
        self._most = 2 if tls else 16  # buffers that the transport is given at once; TLS copies them
        self._limit = int(tls)  # TCP pauses above it, TLS at it; so both call ``resume_writing`` when all is sent
        self.transport.set_write_buffer_limits(self._limit)
        self.transport.pause_reading()  # uvloop looks at the kind of protocol when reading begins
        self.transport.set_protocol(self)
        self.transport.resume_reading()

    async def ask(self, requests: Sequence[Request]) -> list[Any]:
        """Send requests, one at least, and return the reply to each.

        Raises:
            Unavailable: the connection is lost. Timeout: no byte came or went for ``stall`` seconds.

        Cancelling it closes the connection.
        """
        if self.link.closed:
            raise Unavailable(f"{self.link.address}: the connection is closed")
        records = [record for _, record in requests]
        largest = max((len(record.payload) for record in records if record is not None), default=1)
        self._requests, self._next, self._ahead = requests, 0, AHEAD_BYTES // max(1, largest) + 2
        self._reader, self._done = Reader(records), asyncio.get_running_loop().create_future()
        silent_looks = 0
        try:
            self._feed()
            while not self._done.done():
                before = self._moves, self.transport.get_write_buffer_size()
                await asyncio.wait([self._done], timeout=self._stall / LOOKS)
                moved = before != (self._moves, self.transport.get_write_buffer_size())
                silent_looks = 0 if moved else silent_looks + 1
                if silent_looks == LOOKS:
                    raise Timeout(f"{self.link.address}: silent for {self._stall:g} s")
            if self._failure is not None:
                raise self._failure
            return self._reader.replies
        except BaseException:
            self._done.cancel()
            self.link.close()
            await settled([self._lost])  # until then the transport may hold what it was to send
            raise
        finally:
            self._reader.forget()
            self._done, self._failure, self._requests, self._reader = None, None, (), self._idle
            self._out.clear()

    # what the transport calls

    def connection_lost(self, error: Exception | None) -> None:
        self._end(Unavailable(f"{self.link.address}: connection lost: {error or 'closed'}"))
        self._lost.set_result(None)

    def get_buffer(self, hint: int) -> memoryview:
        return self._reader.buffer

    def buffer_updated(self, count: int) -> None:
        self._moves += 1
        try:
            self._reader.received(count)
        except BackendError as error:
            self._end(error)
            return
        all_came, unsent = not self._reader.missing, self._out or self.transport.get_write_buffer_size()
        if len(self._reader.replies) > self._next or (all_came and unsent):
            self._end(ProtocolError(f"{self.link.address}: answers to what was not asked yet"))
        elif self._next < len(self._requests):
            self._feed()
        elif all_came:
            self._end()

    def resume_writing(self) -> None:
        self._moves += 1
        self._write()

    # a request

    def _feed(self) -> None:
        """Send commands, some of them ahead of the replies, and not one by one."""
        replies = len(self._reader.replies)
        if self._next - replies <= self._ahead // 2:
            upto = min(len(self._requests), replies + self._ahead)
            self._out.extend(joined(command for command, _ in self._requests[self._next : upto]))
            self._next = max(self._next, upto)
            self._write()

    def _write(self) -> None:
        """Send what the transport takes; the rest when it has sent all of that."""
        while self._out and not self.link.closed and not self.transport.get_write_buffer_size():
            self.transport.writelines([self._out.popleft() for _ in range(min(len(self._out), self._most))])
        if self._out and not self.link.closed:  # ``writelines`` of Python 3.12.0 to .8 and 3.13.0 to .1 does not
            self.transport.set_write_buffer_limits(self._limit)  # see that it must call ``resume_writing``; this does

    def _end(self, error: BackendError | None = None) -> None:
        """End the request under way, if there is one. With an error, end the connection, too."""
        if error is not None:
            self.link.close()
        if self._done is not None and not self._done.done():
            self._failure = error
            self._done.set_result(None)


class RedisServer:
    """One server."""

    def __init__(self, address: HostPort, settings: RedisSettings, counts: Counter[str]) -> None:
        self.address = address
        self.breaker = Breaker.brief()
        """Open while the server is left alone."""
        self.has_slots = True
        """False if a cluster's map no longer names it; then no idle connection is kept."""
        self.links: set[RedisConnection] = set()
        """The connections to this server, and some that are closed."""
        self._settings = settings
        self._counts = counts
        self._closed = False
        self._last = ""  # the text of the last error
        self._turns = {False: asyncio.Semaphore(1), True: asyncio.Semaphore(settings.connections)}
        self._idle: dict[bool, list[Connection]] = {False: [], True: []}

    async def ask(self, requests: Sequence[Request]) -> list[Any]:
        """Send requests and return the reply to each. They go over a connection for pages if one of them has a page,
        and else over that for small questions. One for both would cost a put a tenth more CPU time.

        Raises:
            BackendError: ``Unavailable`` if the server cannot be reached or is left alone, ``Timeout`` if it hangs.

        Cancelling it returns at once, and closes the connection if the requests were under way.
        """
        now = asyncio.get_running_loop().time
        pages = any(record is not None or type(command) is tuple for command, record in requests)
        async with self._turns[pages]:  # first come, first served
            permit = self.breaker.allow(now())
            if permit == REFUSED:
                raise Unavailable(f"{self.address}: left alone for a moment, after: {self._last}")
            self._idle[pages] = idle = [one for one in self._idle[pages] if not one.link.closed]
            old = idle.pop() if idle else None
            try:
                connection = old or await self._connected()
                replies = await connection.ask(requests)
            except BaseException as error:
                if isinstance(error, Timeout) or (old is None and isinstance(error, BackendError)):
                    self._last = str(error)  # the text alone: its traceback would keep the pages alive
                    self.breaker.failure(permit, now())
                else:  # it was cancelled, or only an old connection was lost
                    self.breaker.abandon(permit)
                raise
            self.breaker.success(permit)
            self._idle[pages].append(connection)
            if not self.has_slots or any(isinstance(reply, Refusal) and reply.code == "READONLY" for reply in replies):
                self.close(idle=True)  # READONLY: it is a replica now, and somebody else may have its name
            return replies

    async def said(self, *words: str | bytes) -> Any:
        """Send one command, over a connection of its own, and return its reply, in which there may be lists. It takes
        twice ``stall`` seconds at most. Without that limit a server that says a byte now and then, and so is never
        silent, would be waited for without end. Raises BackendError as ``ask`` does."""
        async with self._linked(2 * self._settings.stall) as link:
            reply = await link.ask(*words)
            link.close()
            return reply

    def close(self, *, idle: bool = False) -> None:
        """End all connections, so that requests under way fail, and make no new ones. With ``idle`` end only those that
        are not in use; new ones are made when they are needed."""
        self._closed = self._closed or not idle
        for link in [one.link for one in chain(*self._idle.values())] if idle else self.links:
            link.close()

    async def _connected(self) -> Connection:
        async with self._linked(self._settings.stall) as link:
            self._counts["connects"] += 1
            return Connection(link, self._settings.stall)

    @asynccontextmanager
    async def _linked(self, within: float) -> AsyncIterator[RedisConnection]:
        """Provide a new connection that has signed in, for ``within`` seconds in all. It is closed if anything
        fails."""
        if self._closed:
            raise Unavailable(f"{self.address}: the store is closed")
        link = RedisConnection(self.address, self._settings)
        self.links = {link for link in self.links if not link.closed} | {link}
        async with link.signed_in(within):
            yield link
