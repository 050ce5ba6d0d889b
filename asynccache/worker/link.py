"""A link: frames both ways between the head and one worker, over a TCP or Unix stream that ``sockets`` has opened; and
what one process says over its links (``Wire``).

On the wire a frame is its length (4 bytes, little endian), followed by so many bytes. Two lengths have a meaning of
their own: 0 is the *sign of life*, which each end sends when it has sent nothing else for a quarter of the time-out;
``BYE`` says that its sender has closed the link on purpose.

Laws:
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
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import Protocol, cast

from asynccache.errors import RankFailure
from asynccache.worker.messages import Message, WorksEnded, encode

MOST_FRAME = 16 << 20
"""The most bytes of a frame."""
MOST_UNSENT = 256 << 20
"""The most bytes that are kept for a peer that does not read."""
MOST_EARLY = 64 << 10
"""The most bytes that are kept here before ``begin``; one piece of the stream may come on top."""
GRACE = 2.0
"""Seconds that ``aclose`` waits until what was unsent is sent and the peer has closed, too."""
DOUBT = 0.05
"""Seconds from when a peer first seems to be silent until it is lost. This loop may have been busy for longer than the
time-out, and what the peer said meanwhile waits in the socket."""

SLICE = 1024
"""The most messages of a frame, so that a long plan is performed while its end is still being encoded."""
BYTES_PER_PAGE = 256
"""An upper bound of the bytes that a page takes in any message: its hash, a slot or two, and its share of the name of
the list that it is in."""

LENGTH = 4
_PACK, _UNPACK = struct.Struct("<I").pack, struct.Struct("<I").unpack_from
BEAT = bytes(LENGTH)
BYE = b"\xff" * LENGTH


class RankLink(Protocol):
    """One authenticated connection. All calls belong to the thread of its loop."""

    @property
    def ended(self) -> bool:
        """True once nothing comes or goes any more, as far as is known here. It may be True before ``lost`` is
        called."""
        ...

    @property
    def timeout(self) -> float:
        """Seconds of silence that are a failure, the same at both ends; see ``patience``."""
        ...

    def begin(self, heard: Callable[[bytes], None], lost: Callable[[RankFailure], None]) -> None:
        """Call ``heard`` from now on with every frame, in order, and ``lost`` at most once, after the last frame. To be
        called once. An error that ``heard`` raises ends the link. ``lost`` gets that error if it is a
        ``RankFailure``, else a ``RankFailure`` with that error as its cause."""
        ...

    def send(self, frame: bytes) -> None:
        """Send ``frame`` behind all that were sent before. Never waits; does nothing once the link has ended.

        Raises:
            ValueError: the frame is empty, or has more than ``MOST_FRAME`` bytes.
        """
        ...

    def patience(self, seconds: float | None) -> None:
        """Let silence be a failure after ``seconds`` or the link's own time-out, whichever is longer, from now on; with
        None, after the time-out again. A peer whose interpreter is held for long, as by pinning memory, cannot send its
        signs of life."""
        ...

    async def aclose(self) -> None:
        """Send what is unsent, say goodbye, and return when the peer has closed, too; ``GRACE`` seconds at most.
        ``lost`` is not called any more. Cancelling it aborts. A second call is harmless."""
        ...

    def abort(self) -> None:
        """End now; what is unsent is lost. ``lost`` is not called any more. A second call does nothing."""
        ...


class StreamLink(asyncio.Protocol):
    """``RankLink`` over a stream. Until ``established`` is called, ``take`` reads the handshake and no frame is heard.

    ``made``: called with this link when the stream is open. ``room``: how many bytes of a handshake a peer may have
    sent before they are taken.
    """

    def __init__(self, made: Callable[[StreamLink], None] | None = None, room: int = 0) -> None:
        self.room = room
        self._made = made
        self._loop = asyncio.get_running_loop()
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._came = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._rest = bytearray()
        self._is_open = False
        self._heard: Callable[[bytes], None] | None = None
        self._lost: Callable[[RankFailure], None] | None = None
        self._failure: RankFailure | None = None
        self._ended = self._leaving = self._congested = False
        self._timer: asyncio.TimerHandle | None = None
        self._timeout = self._patience = 0.0
        self._spoke = False
        self._beat_at = self._heard_at = self._doubted = 0.0

    def __repr__(self) -> str:
        state = str(self._failure or "closed") if self._ended else "opening" if self._heard is None else "open"
        return f"StreamLink({state})"

    @property
    def ended(self) -> bool:
        """See ``RankLink``."""
        return self._ended

    @property
    def timeout(self) -> float:
        """See ``RankLink``; from the end of the handshake on."""
        return self._timeout

    # the handshake

    async def take(self, count: int) -> bytes:
        """Return the next ``count`` bytes of the handshake. Cancelling it takes nothing.

        Raises:
            RankFailure: the peer has closed, or sent more than belongs here.
        """
        while len(self._rest) < count and not self._ended:
            self._came.clear()
            await self._came.wait()
        if len(self._rest) < count:
            raise self._failure or RankFailure("closed the connection")
        found = bytes(self._rest[:count])
        del self._rest[:count]
        return found

    async def take_frame(self, most: int) -> bytes:
        """Return the next frame of the handshake, without its length. Cancelling it may take the length.

        Raises:
            RankFailure: the peer has closed, or the frame has more than ``most`` bytes.
        """
        count = int.from_bytes(await self.take(LENGTH), "little")
        if count > most:
            raise RankFailure(f"sent a frame of {count} bytes where {most} are the most")
        return await self.take(count)

    def write(self, content: bytes) -> None:
        """Send ``content`` at once, with no length in front: a piece of the handshake, or a length with a meaning."""
        if self._transport is not None and not self._ended:
            self._transport.write(content)

    def established(self, timeout: float) -> None:
        """End the handshake: frames may be sent from now on. ``timeout``: seconds of silence that are a failure, at
        both ends alike. Of what comes before ``begin`` the first ``MOST_EARLY`` bytes are kept here, so that a peer
        that is gone is noticed; the rest stays in the socket."""
        self._timeout = self._patience = timeout
        if self._ended or self._transport is None:
            return
        self._is_open = True
        self._pause_early()
        self._beat_at = self._loop.time() + timeout / 4
        self._watch()

    def refuse(self) -> None:
        """Close the connection once what was written is sent: the handshake has failed."""
        if self._transport is not None:
            self._transport.close()

    # as RankLink has it

    def begin(self, heard: Callable[[bytes], None], lost: Callable[[RankFailure], None]) -> None:
        """See ``RankLink``."""
        self._heard, self._lost = heard, lost
        self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._lost is None:
            return
        self._heard_at = self._loop.time()
        rest, self._rest = bytes(self._rest), bytearray()
        self._deliver(rest)
        if self._ended:
            self._tell()
        elif self._transport is not None:
            self._transport.resume_reading()
            self._watch()

    def send(self, frame: bytes) -> None:
        """See ``RankLink``."""
        size = len(frame)
        if not 0 < size <= MOST_FRAME:
            raise ValueError(f"a frame has 1 to {MOST_FRAME} bytes, and not {size}")
        if self._ended or self._leaving:
            return
        assert self._transport is not None
        self._spoke = True
        self._transport.write(_PACK(size) + frame)
        if self._congested and (kept := self._transport.get_write_buffer_size()) > MOST_UNSENT:
            self._end(RankFailure(f"reads nothing any more: {kept} bytes are unsent"))

    def patience(self, seconds: float | None) -> None:
        """See ``RankLink``."""
        self._patience = max(self._timeout, seconds or 0.0)
        if self._timer is not None:
            self._watch()

    async def aclose(self) -> None:
        """See ``RankLink``."""
        transport = self._transport
        if not (self._ended or self._leaving) and transport is not None:
            self._leaving, self._lost = True, None
            self.write(BYE)
            transport.write_eof()
            transport.resume_reading()                 # to hear of the peer's end
        try:
            await asyncio.wait([self._closed], timeout=GRACE)
        finally:
            self.abort()

    def abort(self) -> None:
        """See ``RankLink``."""
        self._leaving, self._lost = True, None
        self._end(None)

    # sending

    def pause_writing(self) -> None:
        """See ``asyncio.Protocol``: not all was sent at once."""
        self._congested = True

    def resume_writing(self) -> None:
        """See ``asyncio.Protocol``: all that was kept is sent."""
        self._congested = False

    def _watch(self) -> None:
        """Send a sign of life if one is due, and look whether the peer has been silent for too long."""
        if self._timer is not None:
            self._timer.cancel()
        if self._ended:
            return
        now = self._loop.time()
        if now >= self._beat_at:
            if not self._spoke and not self._leaving:
                self.write(BEAT)
            self._spoke, self._beat_at = False, now + self._timeout / 4
        silent_at = inf if self._heard is None else self._heard_at + self._patience
        if now >= silent_at:
            if self._doubted == self._heard_at:
                self._end(RankFailure(f"was silent for {self._patience:g} s"))
                return
            self._doubted, silent_at = self._heard_at, now + DOUBT
        self._timer = self._loop.call_at(min(self._beat_at, silent_at), self._watch)

    # hearing

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(0)     # 0: uvloop would keep smaller pieces until its turn ends
        if self._ended:
            self._transport.abort()
        elif self._made is not None:
            self._made(self)

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        if self._ended or self._leaving:
            return
        self._heard_at = self._loop.time()
        if self._heard is not None:
            self._deliver(data)
            return
        self._rest += data
        if self._is_open:
            self._pause_early()
        elif len(self._rest) > self.room:
            self._rest.clear()
            self._end(RankFailure("sent more than belongs to a handshake"))
        self._came.set()

    def _pause_early(self) -> None:
        if self._transport is not None and len(self._rest) > MOST_EARLY:
            self._transport.pause_reading()

    def _deliver(self, data: bytes | bytearray) -> None:
        """Hand on all frames that are whole. What remains is kept until more comes; the pieces of a long frame are
        joined in place, and not copied again for each."""
        heard = self._heard
        assert heard is not None
        start, end = 0, len(data)
        if self._rest:
            self._rest += data
            data, end = self._rest, len(self._rest)
        try:
            while end - start >= LENGTH and self._lost is not None:
                begin = start + LENGTH
                size = _UNPACK(data, start)[0]
                if size > MOST_FRAME:
                    self._end(_unheard(data[start:begin], size))
                    return
                if end - begin < size:
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
        """See ``asyncio.Protocol``. Returns None, so the transport closes."""
        if self._rest and self._heard is not None:
            self._end(RankFailure("closed the connection in the middle of a frame"))

    def connection_lost(self, error: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        if not self._closed.done():
            self._closed.set_result(None)
        self._end(RankFailure("closed the connection" if error is None else f"is gone: {error}"))

    def _end(self, failure: RankFailure | None) -> None:
        if self._ended:
            return
        self._ended = True
        self._failure = failure
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        elif not self._closed.done():
            self._closed.set_result(None)
        self._came.set()
        self._loop.call_soon(self._tell)

    def _tell(self) -> None:
        """Tell the listener that the link has failed, and forget it, so that neither keeps the other alive."""
        lost, self._lost, self._heard = self._lost, None, _deaf
        if lost is not None and self._failure is not None:
            lost(self._failure)


def _unheard(length: bytes | bytearray, size: int) -> RankFailure:
    if length == BYE:
        return RankFailure("has left")
    return RankFailure(f"sent a frame of {size} bytes, where {MOST_FRAME} are the most")


def _raised(error: Exception) -> RankFailure:
    if isinstance(error, RankFailure):
        return error
    failure = RankFailure(f"sent what raised {type(error).__name__} here: {error}")
    failure.__cause__ = error
    return failure


def _deaf(_: bytes) -> None:
    """The receiver of frames that come after the end of the link: it drops them."""


# messages


class Wire:
    """Sends what one process says over its links. ``links``: those that are used; they may become fewer at any time. A
    link that ends is no matter of this class. ``failed``: called for a message that cannot be sent, which is the end of
    the group."""

    def __init__(self, links: Iterable[RankLink], failed: Callable[[RankFailure], None]) -> None:
        self.links = list(links)
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
            type(message) is WorksEnded and type(last := unsent[-1]) is WorksEnded
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


def slices(counts: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Cut lists of pages into parts that fit a frame. ``counts``: how many pages each list has. Yields each part as
    tuples: the index of a list, its first page in this part, and the page after its last one."""
    most = room = max(1, MOST_FRAME // BYTES_PER_PAGE)
    part: list[tuple[int, int, int]] = []
    for at, count in enumerate(counts):
        begin = 0
        while begin < count:
            end = min(count, begin + room)
            part.append((at, begin, end))
            room -= end - begin
            begin = end
            if not room:
                yield part
                part, room = [], most
    if part:
        yield part
