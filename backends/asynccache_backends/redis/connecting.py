"""Making a connection: name, TCP, TLS, who we are, which database. All of it before one deadline."""

from __future__ import annotations

import asyncio
import socket
import ssl

from asynccache.errors import Timeout, Unavailable
from asynccache_backends.redis.connection import Connection, plain
from asynccache_backends.redis.links import Link, PlainLink, TlsLink
from asynccache_backends.redis.resp import Refusal, command
from asynccache_backends.redis.settings import ENVIRONMENT, Address, Settings

_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # Linux's names


class ConnectFailed(Unavailable):
    """No connection can be made now."""


async def connect(address: Address, settings: Settings) -> Connection:
    """A connection that is ready for commands.

    Raises:
        ConnectFailed: nobody listens, TLS or the server refuses us. Timeout: it takes longer than ``stall``.

    Cancelling it leaves nothing open.
    """
    try:
        async with asyncio.timeout(settings.stall):
            link = await _link(address, settings)
            return await _introduced(Connection(link, str(address), settings.stall), settings)
    except TimeoutError:
        raise Timeout(f"{address}: no connection in {settings.stall:g} s") from None
    except (OSError, UnicodeError, Unavailable) as error:  # ssl.SSLError is the first; no name may be "a..b"
        raise error if isinstance(error, ConnectFailed) else ConnectFailed(f"{address}: {error}") from error


async def _link(address: Address, settings: Settings) -> Link:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    failure: OSError = OSError("no such host")
    for family, kind, protocol, _, place in found:
        sock = socket.socket(family, kind, protocol)
        try:
            _tune(sock)
            await loop.sock_connect(sock, place)
            if settings.tls is None:
                return PlainLink(sock)
            return TlsLink(await _shake_hands(sock, settings.tls, settings.tls_name or address.host))
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure


def _tune(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _shake_hands(sock: socket.socket, context: ssl.SSLContext, name: str) -> ssl.SSLSocket:
    """TLS over ``sock``, which belongs to the result from now on."""
    wrapped = context.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
    try:
        while True:
            try:
                wrapped.do_handshake()
                return wrapped
            except ssl.SSLWantReadError:
                await _ready(wrapped.fileno(), reading=True)
            except ssl.SSLWantWriteError:
                await _ready(wrapped.fileno(), reading=False)
    except BaseException:
        wrapped.close()
        raise


async def _ready(fd: int, *, reading: bool) -> None:
    """Until the socket can be read or written."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    add, remove = (loop.add_reader, loop.remove_reader) if reading else (loop.add_writer, loop.remove_writer)
    add(fd, _set, ready)
    try:
        await ready
    finally:
        remove(fd)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def _introduced(connection: Connection, settings: Settings) -> Connection:
    try:
        if settings.password or settings.username:
            await _sign_in(connection, settings)
        if settings.database:
            await _select(connection, settings)
    except BaseException:
        connection.close()
        raise
    return connection


async def _sign_in(connection: Connection, settings: Settings) -> None:
    """Say who we are. What the server says to that is not repeated: it may quote the password."""
    user = (settings.username.encode(),) if settings.username else ()
    (reply,) = await connection.ask(plain([command(b"AUTH", *user, settings.password.encode())]))
    if isinstance(reply, Refusal):
        raise ConnectFailed(
            f"{settings}: the server refuses user and password ({reply.code}); they are read from the URL, "
            f"or from {ENVIRONMENT}USERNAME and {ENVIRONMENT}PASSWORD"
        )


async def _select(connection: Connection, settings: Settings) -> None:
    (reply,) = await connection.ask(plain([command(b"SELECT", b"%d" % settings.database)]))
    if isinstance(reply, Refusal):
        raise ConnectFailed(f"{settings}: {reply.text}")
