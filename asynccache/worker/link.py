"""A link: frames both ways between the head and one rank, over a TCP or Unix stream whose ends have proved to each
other that they know the secret; and what one process says over its links (``Wire``).

The handshake, in which everything has a fixed length until both are authenticated:

    head     GREETING, which has the version of links, and a nonce
    rank     GREETING, a nonce, and its proof: the HMAC of "worker" and both nonces
    head     its own proof, of "head" and both nonces; or ``NOT_AUTHENTICATED``
    rank     a frame: its hello
    head     a frame: ``TAKEN``, the time-out and a welcome; or ``REFUSED`` and the reason

A proof is good for one connection, since one of its nonces is the verifier's, and for one side. What is sent later is
neither encrypted nor signed: use links in a network of your own, or over a Unix socket. A stream stops reading at
twice ``LIMIT``, and at most ``MOST_STRANGERS`` have not proved themselves, so strangers cost 16 MiB at most.

A frame is its length (4 bytes, little endian), followed by that many bytes. Two lengths have a meaning of their own: 0
is the *sign of life*, which each end sends when it has sent nothing else for a quarter of the time-out; ``BYE`` says
that its sender has closed the link on purpose.

What always holds:
* Every frame is heard once, whole and in order. ``lost`` is heard at most once, after the last frame, and never from
  within ``begin`` or ``send``.
* A peer that closes, is silent past the time-out, or sends what is no frame, is lost; nothing of a frame that is not
  whole is heard.
* Nobody waits for a full socket. What a peer does not read is kept here. Two things bound how much that is: the core
  bounds the operations in flight, and a peer whose loop stands still is silent, too, so it is lost after the time-out.
  Should both fail, the link ends when ``MOST_UNSENT`` bytes are kept.
* A frame goes out at once, in one write. Messages of one turn of the loop travel in one frame, the same for every link,
  in the order in which they were put. The messages of a plan do not wait for the end of the turn. Putting never waits
  and never fails; a frame that would be too long is sent as several. Outcomes that follow each other and are alike are
  one message.
* If a message cannot be sent, the others are sent all the same, and ``failed`` is called for it.

The text of a failure says what the peer did ("was silent for 30 s"). Callers that know the peer's name put it in front.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import NamedTuple, cast

import aiofiles

from asynccache import checks
from asynccache.errors import ConfigError, RankFailure
from asynccache.unix_socket import bound
from asynccache.worker.messages import Message, WorksOver, encode

LENGTH = 4
_PACK, _UNPACK = struct.Struct("<I").pack, struct.Struct("<I").unpack_from
BEAT = bytes(LENGTH)
BYE = b"\xff" * LENGTH
LIMIT = 64 << 10
"""A stream stops reading when twice this many bytes are kept here."""
MOST_FRAME = 128 << 20
"""The most bytes of a frame."""
MOST_UNSENT = 256 << 20
"""The most bytes that are kept for a peer that does not read."""
GRACE = 2.0
"""Seconds that ``aclose`` waits until what was unsent is sent and the peer has closed, too."""
DOUBT = 0.05
"""Seconds from when a peer first seems silent until it counts as lost. If this loop was busy for longer than the
time-out, what the peer sent meanwhile still waits in the socket."""

SLICE = 1024
"""The most messages of a frame, so that a long plan is performed while its end is still being encoded."""

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
must not keep out a rank, which says all it has to say at once."""
RETRY = 0.1
"""Seconds between two attempts to connect."""
SECRET, SECRET_FILE = "ASYNCCACHE_SECRET", "ASYNCCACHE_SECRET_FILE"


class Link(asyncio.Protocol):
    """One end of an authenticated connection. The handshake is read from asyncio's streams; then the link takes the
    transport over, because a frame that waits for a task is a third slower. All calls belong to the thread of its loop.

    Of what comes before ``begin`` about ``LIMIT`` bytes are kept here, so that a peer that is gone is noticed; the rest
    stays in the socket. ``early``: what came with the handshake.
    """

    def __init__(self, writer: asyncio.StreamWriter, early: bytes, timeout: float) -> None:
        self.timeout = timeout
        """Seconds of silence that are a failure, the same at both ends; ``patience`` may allow more."""
        self.ended = False
        """True once nothing comes or goes any more, as far as is known here."""
        self._writer = writer                          # which would close the transport when it is forgotten
        self._transport = cast("asyncio.Transport", writer.transport)
        self._loop = asyncio.get_running_loop()
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._rest = bytearray(early)
        self._heard: Callable[[bytes], None] | None = None
        self._lost: Callable[[RankFailure], None] | None = None
        self._failure: RankFailure | None = None
        self._leaving = self._spoke = False
        self._patience = timeout
        self._heard_at = self._doubted = 0.0
        self._beat_at = self._loop.time() + timeout / 4
        self._timer = self._loop.call_at(self._beat_at, self._watch)
        self._transport.set_write_buffer_limits(0)     # 0: uvloop would keep smaller pieces until its turn ends
        self._transport.set_protocol(self)

    def __repr__(self) -> str:
        return f"Link({self._failure or 'closed' if self.ended else 'open'})"

    def begin(self, heard: Callable[[bytes], None], lost: Callable[[RankFailure], None]) -> None:
        """Call ``heard`` from now on with every frame, in order, and ``lost`` at most once, after the last frame. To be
        called once. An error that ``heard`` raises ends the link. ``lost`` gets that error if it is a
        ``RankFailure``, else a ``RankFailure`` with that error as its cause."""
        self._lost = lost
        self._loop.call_soon(self._go_on, heard)

    def _go_on(self, heard: Callable[[bytes], None]) -> None:
        if self._lost is not None:
            self._heard, self._heard_at = heard, self._loop.time()
            self._deliver(b"")
        if self.ended:
            self._tell()
        else:
            self._transport.resume_reading()
            self._watch()

    def send(self, frame: bytes) -> None:
        """Send ``frame`` behind all that were sent before. Never waits; does nothing once the link has ended.

        Raises:
            ValueError: the frame is empty, or has more than ``MOST_FRAME`` bytes.
        """
        size = len(frame)
        if not 0 < size <= MOST_FRAME:
            raise ValueError(f"a frame has 1 to {MOST_FRAME} bytes, and not {size}")
        if self.ended or self._leaving:
            return
        self._spoke = True
        self._transport.write(_PACK(size) + frame)
        if (kept := self._transport.get_write_buffer_size()) > MOST_UNSENT:
            self._end(RankFailure(f"reads nothing any more: {kept} bytes are unsent"))

    def patience(self, seconds: float | None) -> None:
        """From now on silence is a failure after ``seconds``, or after the link's own time-out if that is longer; None:
        after the time-out again. A peer whose interpreter is held, as by pinning memory, cannot send its signs of
        life."""
        self._patience = max(self.timeout, seconds or 0.0)
        self._watch()

    async def aclose(self) -> None:
        """Send what is unsent, say goodbye, and return when the peer has closed, too; ``GRACE`` seconds at most.
        ``lost`` is not called any more. Cancelling it aborts. A second call is harmless."""
        if not (self.ended or self._leaving):
            self._leaving, self._lost = True, None
            self._transport.write(BYE)
            self._transport.write_eof()
            self._transport.resume_reading()           # to hear of the peer's end
        try:
            await asyncio.wait([self._closed], timeout=GRACE)
        finally:
            self.abort()

    def abort(self) -> None:
        """End now; what is unsent is lost. ``lost`` is not called any more. A second call does nothing."""
        self._leaving, self._lost = True, None
        self._end(None)

    def disown(self) -> None:
        """Do nothing more. The connection stays as it is, for somebody else to close."""
        self.ended = True
        self._timer.cancel()

    def _watch(self) -> None:
        """Send a sign of life if one is due, and look whether the peer has been silent for too long."""
        self._timer.cancel()
        if self.ended:
            return
        now = self._loop.time()
        if now >= self._beat_at:
            if not self._spoke and not self._leaving:
                self._transport.write(BEAT)
            self._spoke, self._beat_at = False, now + self.timeout / 4
        silent_at = inf if self._heard is None else self._heard_at + self._patience
        if now >= silent_at:
            if self._doubted == self._heard_at:
                self._end(RankFailure(f"was silent for {self._patience:g} s"))
                return
            self._doubted, silent_at = self._heard_at, now + DOUBT
        self._timer = self._loop.call_at(min(self._beat_at, silent_at), self._watch)

    def data_received(self, data: bytes) -> None:
        if self.ended or self._leaving:
            return
        self._heard_at = self._loop.time()
        if self._heard is not None:
            self._deliver(data)
        else:
            self._rest += data
            if len(self._rest) > LIMIT:
                self._transport.pause_reading()

    def _deliver(self, data: bytes | bytearray) -> None:
        """Hand on all frames that are whole. What remains is kept until more comes; the pieces of a long frame are
        joined in place, and not copied again for each."""
        heard, start = self._heard, 0
        assert heard is not None
        if self._rest:
            self._rest += data
            data = self._rest
        end = len(data)
        try:
            while end >= (begin := start + LENGTH) and self._lost is not None:
                size = _UNPACK(data, start)[0]
                if size > MOST_FRAME:
                    left = data[start:begin] == BYE
                    raise RankFailure(
                        "has left" if left else f"sent a frame of {size} bytes, where {MOST_FRAME} are the most"
                    )
                if end < begin + size:
                    break
                start = begin + size
                if size:
                    heard(bytes(data[begin:start]))
        except Exception as error:
            self._end(_raised(error))
            return
        if data is self._rest:
            del self._rest[:start]
        elif start < end:
            self._rest = bytearray(data[start:])

    def eof_received(self) -> None:
        """Returns None, so the transport closes."""
        if self._rest and self._heard is not None:
            self._end(RankFailure("closed the connection in the middle of a frame"))

    def connection_lost(self, error: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)
        self._end(RankFailure("closed the connection" if error is None else f"is gone: {error}"))

    def _end(self, failure: RankFailure | None) -> None:
        if self.ended:
            return
        self.ended, self._failure = True, failure
        self._timer.cancel()
        self._transport.abort()
        if self._heard is not None:
            self._loop.call_soon(self._tell)

    def _tell(self) -> None:
        """Tell the listener that the link has failed, and forget it, so that neither keeps the other alive."""
        lost, self._lost, self._heard = self._lost, None, _deaf
        if lost is not None and self._failure is not None:
            lost(self._failure)


def _raised(error: Exception) -> RankFailure:
    if isinstance(error, RankFailure):
        return error
    failure = RankFailure(f"sent what raised {type(error).__name__} here: {error}")
    failure.__cause__ = error
    return failure


def _deaf(_: bytes) -> None:
    """The receiver of frames that come when nobody listens any more: it drops them."""


# messages


class Wire:
    """Sends what one process says over its links. ``failed``: called for a message that cannot be sent, which is the
    end of the group.
    """

    def __init__(self, links: Iterable[Link], failed: Callable[[RankFailure], None]) -> None:
        self.links = list(links)
        """The links in use. They may become fewer at any time; a link that ends is no matter of this class."""
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._unsent: list[Message] = []
        self._held = False

    def __repr__(self) -> str:
        return f"Wire({len(self.links)} links, {len(self._unsent)} unsent)"

    def put(self, message: Message) -> None:
        """Send ``message`` with the others of this turn of the loop."""
        unsent = self._unsent
        if not unsent:
            if not self._held:
                self._loop.call_soon(self.flush)
        elif (
            type(message) is WorksOver and type(last := unsent[-1]) is WorksOver
            and last.status is message.status and len(last.works) < SLICE
        ):  # fmt: skip
            last.works += message.works
            return
        unsent.append(message)

    def send(self, messages: Iterable[Message]) -> None:
        """Send ``messages`` now, behind what was put."""
        self._unsent += messages
        self.flush()

    def hold(self) -> None:
        """Keep what is put from now on for the next ``flush``, which must follow in this turn of the loop."""
        self._held = True

    def flush(self) -> None:
        """Send now what was put."""
        unsent, self._unsent, self._held = self._unsent, [], False
        for at in range(0, len(unsent), SLICE):
            self._send(unsent[at : at + SLICE])

    def _send(self, messages: Sequence[Message]) -> None:
        if not self.links:
            return
        try:
            frame = encode(messages)
            why = f"it has {len(frame)} bytes, and a frame {MOST_FRAME} at most"
        except (ValueError, OverflowError, TypeError) as error:  # text without UTF-8, a number of more than 64 bits
            frame, why = b"", str(error)
        if 0 < len(frame) <= MOST_FRAME:
            for link in self.links:
                link.send(frame)
        elif len(messages) > 1:
            middle = len(messages) // 2
            self._send(messages[:middle])
            self._send(messages[middle:])
        else:
            self._failed(RankFailure(f"cannot send its {type(messages[0]).__name__}: {why}"))


OnHello = Callable[[bytes, Link], bytes]
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


# the rank's end


async def open_link(address: str, secret: bytes | None, hello: bytes, *, timeout: float) -> tuple[Link, bytes]:
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
                try:
                    return await _enter(where, key, hello)
                except OSError as error:  # no head is there, or none yet
                    why = f": {error}"
                await asyncio.sleep(RETRY)
    except TimeoutError:
        raise RankFailure(f"the head at {where} did not answer within {timeout:g} s{why}") from None


async def _enter(where: ListenAddress, secret: bytes, hello: bytes) -> tuple[Link, bytes]:
    """Connect, and return the link and the head's welcome. Raises ``OSError``: there was no greeting, and another
    attempt may get one; and ``RankFailure``: the head refused, or one end does not know the secret."""
    if where.path:
        reader, writer = await asyncio.open_unix_connection(where.path, limit=LIMIT)
    else:
        reader, writer = await asyncio.open_connection(where.host, where.port, limit=LIMIT)
    try:
        try:
            greeting = await _take(reader, len(GREETING))
        except RankFailure as error:
            raise ConnectionError(f"what listens there {error}") from None
        timeout, welcome = await _prove(reader, writer, greeting, secret, hello)
        return Link(writer, await _rest(reader), timeout), welcome
    except BaseException as error:
        writer.transport.abort()
        if isinstance(error, RankFailure):
            raise RankFailure(f"the head at {where} {error}") from None
        raise


async def _prove(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, greeting: bytes, secret: bytes, hello: bytes
) -> tuple[float, bytes]:
    """Carry out the rank's part of the handshake. Returns the link's time-out and the head's welcome."""
    if greeting[:-1] != GREETING[:-1]:
        raise RankFailure("is not one of asynccache")
    if greeting != GREETING:
        raise RankFailure(f"speaks version {greeting[-1]} of links, and this process version {VERSION}")
    theirs, ours = await _take(reader, NONCE), secrets.token_bytes(NONCE)
    writer.write(GREETING + ours + _proof(secret, b"worker", theirs, ours))
    proof = await _take(reader, PROOF)
    if proof == NOT_AUTHENTICATED:
        raise RankFailure("does not take this secret: not authenticated")
    if not hmac.compare_digest(proof, _proof(secret, b"head", theirs, ours)):
        raise RankFailure("does not know the secret: not authenticated")
    writer.write(_PACK(len(hello)) + hello)
    answer = await _take_frame(reader, MOST_HELLO)
    kind, content = answer[:1], answer[1:]
    if kind == REFUSED:
        raise RankFailure(f"refused: {content.decode(errors='replace')}")
    timeout = TIMEOUT.unpack_from(content)[0] if kind == TAKEN and len(content) >= TIMEOUT.size else 0.0
    if not 0 < timeout < inf:
        raise RankFailure("sent no answer that can be understood")
    return timeout, content[TIMEOUT.size :]


async def _take(reader: asyncio.StreamReader, count: int) -> bytes:
    """Return the next ``count`` bytes of the handshake. Raises ``RankFailure``: the peer has closed."""
    try:
        return await reader.readexactly(count)
    except asyncio.IncompleteReadError:
        raise RankFailure("closed the connection") from None
    except OSError as error:
        raise RankFailure(f"is gone: {error}") from None


async def _take_frame(reader: asyncio.StreamReader, most: int) -> bytes:
    """Return the next frame of the handshake. Raises ``RankFailure``: the peer has closed, or the frame has more than
    ``most`` bytes."""
    count = _UNPACK(await _take(reader, LENGTH))[0]
    if count > most:
        raise RankFailure(f"sent a frame of {count} bytes where {most} are the most")
    return await _take(reader, count)


async def _rest(reader: asyncio.StreamReader) -> bytes:
    """Return, at once, what has come behind the handshake. Nothing is read from ``reader`` afterwards."""
    reader.feed_eof()
    return await reader.read()


# the head's end


class Listener:
    """Admits ranks that connect; ``open_listener`` makes it."""

    def __init__(self, secret: bytes, answer: OnHello, timeout: float) -> None:
        self.address = ""
        """Where the head listens, with the port that the system chose if none was given."""
        self._secret = secret
        self._answer = answer
        self._timeout = timeout
        self._server: asyncio.AbstractServer | None = None
        self._strangers: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"Listener({self.address})"

    async def open(self, where: ListenAddress) -> None:
        """Begin to listen at ``where``. To be called once. Raises ``OSError``: the address cannot be used. ``aclose``
        must follow, also if this fails or is cancelled."""
        # asyncio gives the loop a turn once a server listens; before that it must be known here, for ``aclose``
        if where.path:
            server = await asyncio.start_unix_server(
                self._came, sock=bound(where.path), limit=LIMIT, start_serving=False
            )
        else:
            server = await asyncio.start_server(
                self._came, where.host, where.port, limit=LIMIT, start_serving=False
            )
            where = where._replace(port=server.sockets[0].getsockname()[1])
        self._server, self.address = server, str(where)
        await server.start_serving()

    async def aclose(self) -> None:
        """Listen no more, and close all connections that are no links yet. Links stay. A second call does nothing."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        where = parse_address(self.address)
        if where.path:
            with suppress(FileNotFoundError):
                Path(where.path).unlink()  # noqa: ASYNC240  a socket, and once
        strangers = dict(self._strangers)
        for writer in strangers:
            self._send_away(writer)
        await asyncio.gather(*strangers.values(), return_exceptions=True)

    def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:
            writer.transport.abort()
            return
        if len(self._strangers) >= MOST_STRANGERS:
            self._send_away(next(iter(self._strangers)))
        task = asyncio.get_running_loop().create_task(self._admit(reader, writer), name="asynccache-link-handshake")
        self._strangers[writer] = task
        task.add_done_callback(lambda _: self._strangers.pop(writer, None))

    def _send_away(self, writer: asyncio.StreamWriter) -> None:
        """Close a connection that is no link yet. It may have become one in this very turn, and stays then."""
        if self._strangers.pop(writer).cancel():
            writer.transport.abort()  # a task that is cancelled before it begins does not

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry out the handshake. If it fails, the connection is closed; nobody else is disturbed, and nothing is
        reported."""
        try:
            async with asyncio.timeout(HANDSHAKE):
                hello = await self._authenticated(reader, writer)
            link = Link(writer, await _rest(reader), self._timeout)
            try:
                answer = TAKEN + TIMEOUT.pack(self._timeout) + self._answer(hello, link)
            except RankFailure as error:
                link.disown()
                answer = REFUSED + str(error).encode()
                writer.write(_PACK(len(answer)) + answer)
                raise
            writer.write(_PACK(len(answer)) + answer)
        except RankFailure:
            writer.close()  # once what was written is sent
        except TimeoutError:
            writer.transport.abort()
        except BaseException:
            writer.transport.abort()
            raise

    async def _authenticated(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """Return the hello of a peer that knows the secret. Raises ``RankFailure``: it does not, or has closed."""
        ours = secrets.token_bytes(NONCE)
        writer.write(GREETING + ours)
        greeting, theirs, proof = [await _take(reader, count) for count in (len(GREETING), NONCE, PROOF)]
        good = hmac.compare_digest(proof, _proof(self._secret, b"worker", ours, theirs))
        if not good or greeting != GREETING:
            writer.write(NOT_AUTHENTICATED)
            raise RankFailure("is not authenticated")
        writer.write(_proof(self._secret, b"head", ours, theirs))
        return await _take_frame(reader, MOST_HELLO)


async def open_listener(address: str, secret: bytes | None, answer: OnHello, *, timeout: float) -> Listener:
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
    except BaseException as error:
        await listener.aclose()
        if isinstance(error, OSError):
            raise ConfigError(f"address={address!r} cannot be used: {error}") from None
        raise
    return listener
