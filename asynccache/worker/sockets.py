"""Opens links: a worker connects, the head listens, and each proves to the other that it knows the secret.

The handshake, in which everything has a fixed length until both are authenticated:

    head     GREETING, which has the version of links, and a nonce
    worker   GREETING, a nonce, and its proof: the HMAC of "worker" and both nonces
    head     its own proof, of "head" and both nonces; or ``NOT_AUTHENTICATED``
    worker   a frame: its hello
    head     a frame: ``TAKEN``, the time-out and a welcome; or ``REFUSED`` and the reason

A proof is good for one connection, since one of its nonces is the verifier's, and for one side. What is sent later is
neither encrypted nor signed: use links in a network of your own, or over a Unix socket.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import aiofiles

from asynccache import checks
from asynccache.errors import ConfigError, RankFailure
from asynccache.worker.link import LENGTH, MOST_FRAME, RankLink, StreamLink

VERSION = 1
GREETING = b"acachel" + bytes([VERSION])
NONCE = PROOF = 32
NOT_AUTHENTICATED = bytes(PROOF)
TAKEN, REFUSED = b"\1", b"\0"
TIMEOUT = struct.Struct("<d")

LEAST_SECRET = 16
MOST_HELLO = 64 << 10
HANDSHAKE = 10.0
"""Seconds that a handshake may take, once there is a connection."""
MOST_STRANGERS = 128
"""The most connections that are not authenticated yet. For one more the oldest is closed: strangers that say nothing
must not keep out a worker, which says all it has to say at once."""
RETRY = 0.1
"""Seconds between two attempts to connect."""

SECRET, SECRET_FILE = "ASYNCCACHE_SECRET", "ASYNCCACHE_SECRET_FILE"

Answer = Callable[[bytes, RankLink], bytes]
"""The function that a listener calls with a worker's hello and its link. It returns the welcome and keeps the link, but
sends nothing over it yet; or it raises ``RankFailure``, whose text the worker gets."""


class ListenAddress(NamedTuple):
    """The address where a head listens: a host and a port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(address: str) -> ListenAddress:
    """Read ``127.0.0.1:7011``, ``[::1]:7011``, ``name:7011`` or ``unix:/path``.

    Raises:
        ConfigError: ``address`` is none of these.
    """
    text = checks.text("address", address)
    kind, _, path = text.partition(":")
    if kind == "unix" and path.startswith("/"):
        return ListenAddress(path=path)
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    plain = bool(host) and not any(sign in host for sign in ":[]/ ")
    if bracketed and ":" in host:
        host = host[1:-1]
        plain = True
    if not (plain and text.isascii() and port.isdecimal()):
        raise ConfigError(f"address={address!r} must be HOST:PORT, [IPV6]:PORT or unix:/PATH")
    return ListenAddress(host, checks.integer("address: port", int(port), 0, 65535))


async def find_secret(secret: bytes | None = None) -> bytes:
    """Return the secret that both ends of a link must know: ``secret``, or the value of ``ASYNCCACHE_SECRET``, or what
    is in the file that ``ASYNCCACHE_SECRET_FILE`` names. White space at the ends of the latter two is cut off.

    Raises:
        ConfigError: there is no secret, it cannot be read, or it has less than ``LEAST_SECRET`` bytes.
    """
    if secret is not None:
        if not isinstance(secret, bytes):
            raise ConfigError(f"secret must be bytes, and is of type {type(secret).__name__}")
        where, found = "secret", secret
    elif SECRET in os.environ:
        where, found = SECRET, os.fsencode(os.environ[SECRET]).strip()
    elif SECRET_FILE in os.environ:
        where = f"{SECRET_FILE}={os.environ[SECRET_FILE]}"
        try:
            async with aiofiles.open(os.environ[SECRET_FILE], "rb") as file:
                found = (await file.read()).strip()
        except OSError as error:
            raise ConfigError(f"{where} cannot be read: {error}") from None
    else:
        raise ConfigError(f"links need a secret: give one, or set {SECRET} or {SECRET_FILE}")
    if len(found) < LEAST_SECRET:
        raise ConfigError(f"{where}: a secret has at least {LEAST_SECRET} bytes, and this one {len(found)}")
    return found


def _proof(secret: bytes, side: bytes, head: bytes, worker: bytes) -> bytes:
    return hmac.digest(secret, side + head + worker, "sha256")


# the worker's end


async def open_link(
    address: str, secret: bytes | None, hello: bytes, *, timeout: float
) -> tuple[RankLink, bytes]:
    """Connect to the head at ``address``, which may not be there yet, and send ``hello``. Returns the link and the
    head's welcome. ``timeout``: seconds in which the head must have answered; the head chooses the link's own time-out.
    Cancelling it leaves nothing open.

    Raises:
        ConfigError: an argument is unusable, or there is no secret.
        RankFailure: there was no head in time, the head does not know the secret, or it refused; the text has its
            reason.
    """
    where, key = parse_address(address), await find_secret(secret)
    if len(hello) > MOST_HELLO:
        raise ConfigError(f"a hello has at most {MOST_HELLO} bytes, and this one {len(hello)}")
    checks.number("timeout", timeout, above=0)
    why = ""
    try:
        async with asyncio.timeout(timeout):
            while True:
                link = StreamLink(room=len(GREETING) + NONCE)
                try:
                    return link, await _enter(where, link, key, hello)
                except OSError as error:               # no head is there, or none yet
                    why = f": {error}"
                except BaseException:
                    link.abort()
                    raise
                await asyncio.sleep(RETRY)
    except TimeoutError:
        raise RankFailure(f"the head at {where} did not answer within {timeout:g} s{why}") from None


async def _enter(where: ListenAddress, link: StreamLink, secret: bytes, hello: bytes) -> bytes:
    """Connect, and return the head's welcome. Raises ``OSError``: there was no greeting, and another attempt may get
    one; and ``RankFailure``: the head refused, or one end does not know the secret."""
    loop = asyncio.get_running_loop()
    if where.path:
        await loop.create_unix_connection(lambda: link, where.path)
    else:
        await loop.create_connection(lambda: link, where.host, where.port)
    try:
        greeting = await link.take(len(GREETING))
    except RankFailure as error:
        raise ConnectionError(f"what listens there {error}") from None
    try:
        return await _prove(link, greeting, secret, hello)
    except RankFailure as error:
        raise RankFailure(f"the head at {where} {error}") from None


async def _prove(link: StreamLink, greeting: bytes, secret: bytes, hello: bytes) -> bytes:
    if greeting[:-1] != GREETING[:-1]:
        raise RankFailure("is not one of asynccache")
    if greeting != GREETING:
        raise RankFailure(f"speaks version {greeting[-1]} of links, and this process version {VERSION}")
    theirs, ours = await link.take(NONCE), secrets.token_bytes(NONCE)
    link.room = PROOF
    link.write(GREETING + ours + _proof(secret, b"worker", theirs, ours))
    proof = await link.take(PROOF)
    if proof == NOT_AUTHENTICATED:
        raise RankFailure("does not take this secret: not authenticated")
    if not hmac.compare_digest(proof, _proof(secret, b"head", theirs, ours)):
        raise RankFailure("does not know the secret: not authenticated")
    link.room = 2 * MOST_FRAME
    link.write(len(hello).to_bytes(LENGTH, "little") + hello)
    answer = await link.take_frame(MOST_FRAME)
    kind, content = answer[:1], answer[1:]
    if kind == TAKEN and len(content) >= TIMEOUT.size:
        link.established(TIMEOUT.unpack_from(content)[0])
        return content[TIMEOUT.size :]
    if kind == REFUSED:
        raise RankFailure(f"refused: {content.decode(errors='replace')}")
    raise RankFailure("sent no answer that can be understood")


# the head's end


class Listener:
    """Admits workers that connect; ``open_listener`` makes it. ``address``: where it listens, with the port that the
    system chose if none was given."""

    def __init__(self, secret: bytes, answer: Answer, timeout: float) -> None:
        self.address = ""
        self._secret = secret
        self._answer = answer
        self._timeout = timeout
        self._server: asyncio.AbstractServer | None = None
        self._strangers: dict[StreamLink, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"Listener({self.address})"

    async def open(self, where: ListenAddress) -> None:
        """Begin to listen at ``where``. To be called once. Raises ``OSError``: the address cannot be used."""
        loop = asyncio.get_running_loop()
        if where.path:
            await _unused(where.path)
            self._server = await loop.create_unix_server(self._connection, sock=_private(where.path))
            self.address = str(where)
            return
        server = await loop.create_server(self._connection, where.host, where.port)
        self._server = server
        self.address = str(where._replace(port=server.sockets[0].getsockname()[1]))

    async def aclose(self) -> None:
        """Listen no more, and close all connections that are no links yet. Links stay. A second call does nothing."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        where = parse_address(self.address)
        if where.path:
            with suppress(FileNotFoundError):
                Path(where.path).unlink()              # noqa: ASYNC240  a socket, and once
        strangers = dict(self._strangers)
        for link, task in strangers.items():
            if task.cancel():                          # else it has become a link in this very turn
                link.abort()                           # a task that is cancelled before it begins does not
        await asyncio.gather(*strangers.values(), return_exceptions=True)

    def _connection(self) -> StreamLink:
        return StreamLink(self._came, room=len(GREETING) + NONCE + PROOF)

    def _came(self, link: StreamLink) -> None:
        if self._server is None:
            link.abort()
            return
        if len(self._strangers) >= MOST_STRANGERS:
            oldest = next(iter(self._strangers))
            if self._strangers.pop(oldest).cancel():  # else it has become a link in this very turn, and stays
                oldest.abort()
        task = asyncio.get_running_loop().create_task(self._admit(link), name="asynccache-link-handshake")
        self._strangers[link] = task
        task.add_done_callback(lambda _: self._strangers.pop(link, None))

    async def _admit(self, link: StreamLink) -> None:
        """Carry out the handshake. If it fails, the connection is closed; nobody else is disturbed, and nothing is
        reported."""
        try:
            async with asyncio.timeout(HANDSHAKE):
                hello = await self._authenticated(link)
            self._take(link, hello)
        except RankFailure:
            link.refuse()
        except TimeoutError:
            link.abort()
        except BaseException:
            link.abort()
            raise

    async def _authenticated(self, link: StreamLink) -> bytes:
        ours = secrets.token_bytes(NONCE)
        link.write(GREETING + ours)
        greeting, theirs = await link.take(len(GREETING)), await link.take(NONCE)
        proof = await link.take(PROOF)
        good = hmac.compare_digest(proof, _proof(self._secret, b"worker", ours, theirs))
        if not good or greeting != GREETING:
            link.write(NOT_AUTHENTICATED)
            raise RankFailure("is not authenticated")
        link.room = LENGTH + MOST_HELLO
        link.write(_proof(self._secret, b"head", ours, theirs))
        return await link.take_frame(MOST_HELLO)

    def _take(self, link: StreamLink, hello: bytes) -> None:
        try:
            welcome = TAKEN + TIMEOUT.pack(self._timeout) + self._answer(hello, link)
        except RankFailure as error:
            reason = REFUSED + str(error).encode()
            link.write(len(reason).to_bytes(LENGTH, "little") + reason)
            raise
        link.write(len(welcome).to_bytes(LENGTH, "little") + welcome)
        link.established(self._timeout)


async def _unused(path: str) -> None:
    """Raise ``OSError`` if a process listens at ``path``: a new Unix socket there would take the path away from it."""
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return
    writer.close()
    raise OSError("somebody listens there")


def _private(path: str) -> socket.socket:
    """Return a Unix socket at ``path`` to which only this user may connect, from the first moment on. Raises
    ``OSError``: there cannot be a socket at ``path``."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(path).st_mode):
                os.unlink(path)                        # of a head that was killed
        before = os.umask(0o177)
        try:
            made.bind(path)
        finally:
            os.umask(before)
    except BaseException:
        made.close()
        raise
    return made


async def open_listener(address: str, secret: bytes | None, answer: Answer, *, timeout: float) -> Listener:
    """Listen at ``address`` (port 0: any that is free) and call ``answer`` for every worker that knows the secret.
    ``timeout``: seconds of silence that are a failure, at both ends of every link. Cancelling it leaves nothing open.

    Raises:
        ConfigError: an argument is unusable, the address cannot be used, or there is no secret.
    """
    where, key = parse_address(address), await find_secret(secret)
    checks.function("answer", answer)
    listener = Listener(key, answer, checks.number("timeout", timeout, above=0))
    try:
        await listener.open(where)
    except OSError as error:
        raise ConfigError(f"address={address!r} cannot be used: {error}") from None
    return listener
