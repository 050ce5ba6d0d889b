"""The protocol (RESP2), without I/O: requests as buffers to send, and a reader that says where bytes are to land.

The law: bytes of replies land in buffers of this request's own pages and in the reader's own, and nowhere else; a HIT
has all of its own and none of another's. Everything is framed by lengths: no byte of a key or a page is ever looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from asynccache.errors import Unavailable
from asynccache.storage import HEADER_BYTES, Record, Result
from asynccache_backends.redis.guess import Guess

MISS, HIT, CORRUPT, FAILED = Result  # the members cost 0.2 µs to look up, for every page of every call

MOST_BYTES = 512 << 20
MOST_REPLY_BYTES = 64 << 20
"""Memory that a reply may take which is no page, its lists included: a hundred times the map of a large cluster."""
MOST_DEPTH = 8
"""Of lists in lists: those that are asked for have four at most."""
VALUE_BYTES = 64
MOST_DIGITS = 20
SPARE_BYTES = 16 << 10

Buffer = bytes | memoryview


class Refusal(NamedTuple):
    """An error reply: its first word, and all of it."""

    code: str
    text: str


class ProtocolError(Unavailable):
    """What came is no RESP: whoever is at the other end, it is no Redis."""


def command(*words: bytes) -> bytes:
    """One request."""
    parts = [b"*%d\r\n" % len(words)]
    parts += [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
    return b"".join(parts)


class Sending(NamedTuple):
    """A request with a page in it, which is sent from where it lies."""

    head: bytes
    payload: memoryview
    tail: bytes


Command = bytes | Sending


def joined(commands: Iterable[Command]) -> Iterator[Buffer]:
    """The fewest buffers to send: each payload, and all that is between two of them as one."""
    text: list[bytes] = []
    for command in commands:
        if isinstance(command, bytes):
            text.append(command)
        else:
            text.append(command.head)
            yield b"".join(text)
            yield command.payload
            text = [command.tail]
    if text:
        yield b"".join(text)


class Setting:
    """``SET key value NX [PX ttl]``."""

    def __init__(self, ttl_ms: int) -> None:
        options = b"$2\r\nNX\r\n" + (b"$2\r\nPX\r\n$%d\r\n%d\r\n" % (len(str(ttl_ms)), ttl_ms) if ttl_ms else b"")
        self._count = 6 if ttl_ms else 4
        self._tail = b"\r\n" + options

    def request(self, key: bytes, record: Record) -> Sending:
        """Store ``record`` under ``key``."""
        header, payload = record
        length = HEADER_BYTES + len(payload)
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b" % (self._count, len(key), key, length, bytes(header))
        return Sending(head, payload, self._tail)


LINE, BODY, SKIP, TAIL = range(4)
"""What comes next: the first line of a value; bytes of a string, wanted or not; the end of a string. (Plain ints: an
Enum's members cost 0.2 µs to look up, and every page passes through three states.)"""


USUAL: dict[bytes, Any] = {b"+OK": b"OK", b":1": 1, b":0": 0, b"$-1": None}
_OTHER = object()


class Reader:
    """Replies of one connection. ``begin`` says what is asked; then bytes are received into ``buffers()`` and reported
    to ``received``, until ``missing`` is 0; the answers are in ``replies``.

    A reply with a record is a page: HIT, MISS or CORRUPT. Any other is what RESP says: int, bytes, None, a list, or a
    ``Refusal``.
    """

    def __init__(self, spare: int = SPARE_BYTES) -> None:
        self.replies: list[Any] = []
        self._sinks: Sequence[Record | None] = ()
        self._plain = False
        self._raw = bytearray(spare)
        self._spare = memoryview(self._raw)
        self._at = self._end = 0
        self._state = LINE
        self._guess: Guess | None = None
        self._targets: list[memoryview] = []
        self._skip = 0
        self._value: Any = None
        self._open: list[tuple[int, list[Any]]] = []
        self._room = MOST_REPLY_BYTES

    @property
    def missing(self) -> int:
        """Replies still to come."""
        return len(self._sinks) - len(self.replies)

    def begin(self, sinks: Sequence[Record | None]) -> None:
        """Expect a reply for each of ``sinks``; of a page where it is a record."""
        if self._at != self._end:
            raise ProtocolError("a reply that nobody asked for")
        self._sinks = sinks
        self._plain = not any(sinks)
        self.replies = []
        self._guess = Guess(cast(Sequence[Record], sinks)) if sinks and all(sinks) else None

    def forget(self) -> None:
        """Keep no buffer of anybody's."""
        self._sinks, self._targets, self._guess = (), [], None

    def buffers(self) -> list[memoryview]:
        """Where the next bytes belong, in order."""
        return self._next() if self._guess is None else self._guess.buffers()

    def received(self, count: int) -> None:
        """``count`` bytes are in ``buffers()``.

        Raises:
            ProtocolError: they are no reply to what was asked.
        """
        if self._guess is None:
            self._take(count)
            return
        stray = self._guess.received(count)
        texts = self._guess.texts
        self.replies += [HIT] * (texts - 1 - len(self.replies))
        if stray is not None:
            self._value, self._state = (HIT, TAIL) if texts else (None, LINE)
            self._replay(memoryview(stray))
        if stray is not None or not self.missing:
            self._guess = None

    def _replay(self, data: memoryview) -> None:
        """Receive again what had landed elsewhere."""
        while data:
            landed = 0
            for buffer in self._next():
                count = min(len(buffer), len(data) - landed)
                buffer[:count] = data[landed : landed + count]
                landed += count
            self._take(landed)
            data = data[landed:]

    def _next(self) -> list[memoryview]:
        return [*self._targets, self._spare[self._end :]]

    def _take(self, count: int) -> None:
        """``count`` bytes are where ``_next`` said."""
        while count and self._targets:
            count -= self._filled(min(count, len(self._targets[0])))
        self._end += count
        if self._plain and self._state == LINE and not self._open:
            self._usual()
        while self._steps[self._state](self):
            pass
        if self._at == self._end:
            self._at = self._end = 0
        elif self._end == len(self._raw):
            self._compact()

    def _usual(self) -> None:
        """Take what pages are mostly answered by, many at once: it is a tenth of the work."""
        end = self._raw.rfind(b"\r\n", self._at, self._end)
        lines = bytes(self._raw[self._at : end]).split(b"\r\n") if end >= 0 else []
        for line in lines[: self.missing]:
            value = USUAL.get(line, _OTHER)
            if value is _OTHER:
                return
            self.replies.append(value)
            self._at += len(line) + 2

    def _line(self) -> bool:
        raw, at = self._raw, self._at
        end = raw.find(b"\r\n", at, self._end)
        if end < 0:
            return False
        if len(self.replies) == len(self._sinks):
            raise ProtocolError("a reply that nobody asked for")
        self._at = end + 2
        self._begin_value(raw[at : at + 1], raw[at + 1 : end])
        return True

    def _begin_value(self, kind: bytearray, rest: bytearray) -> None:
        if kind == b"$":
            self._begin_bulk(_number(rest))
        elif kind == b"*":
            self._begin_array(_number(rest))
        elif kind == b"+":
            self._deliver(bytes(rest))
        elif kind == b":":
            self._deliver(_number(rest))
        elif kind == b"-":
            text = rest.decode(errors="replace")
            self._deliver(Refusal(text.partition(" ")[0], text))
        else:
            raise ProtocolError("no RESP reply")

    def _begin_bulk(self, length: int) -> None:
        record = None if self._open else self._sinks[len(self.replies)]
        if length < 0:
            self._deliver(None if record is None else MISS)
        elif length > MOST_BYTES:
            raise ProtocolError("a value longer than any can be")
        elif record is None:
            self._charge(length)
            data = bytearray(length)
            self._begin_body([memoryview(data)], data)
        elif length == HEADER_BYTES + len(record.payload):
            self._begin_body([record.header, record.payload], HIT)
        else:
            self._value, self._skip, self._state = CORRUPT, length, SKIP

    def _begin_body(self, targets: list[memoryview], value: Any) -> None:
        self._targets = targets
        self._value, self._state = value, BODY

    def _begin_array(self, count: int) -> None:
        if not self._open and self._sinks[len(self.replies)] is not None:
            raise ProtocolError("a list where a page was asked for")
        if len(self._open) >= MOST_DEPTH:
            raise ProtocolError(f"lists in lists, more than {MOST_DEPTH} deep")
        if count <= 0:
            self._deliver([] if count == 0 else None)
        else:
            self._open.append((count, []))

    def _body(self) -> bool:
        while self._targets and self._at < self._end:
            count = min(len(self._targets[0]), self._end - self._at)
            self._targets[0][:count] = self._spare[self._at : self._at + count]
            self._at += self._filled(count)
        if self._targets:
            return False
        self._state = TAIL
        return True

    def _filled(self, count: int) -> int:
        """``count`` bytes of the first target are there."""
        if count == len(self._targets[0]):
            del self._targets[0]
        else:
            self._targets[0] = self._targets[0][count:]
        return count

    def _skipping(self) -> bool:
        count = min(self._skip, self._end - self._at)
        self._at += count
        self._skip -= count
        if self._skip:
            return False
        self._state = TAIL
        return True

    def _tail(self) -> bool:
        if self._end - self._at < 2:
            return False
        if self._raw[self._at : self._at + 2] != b"\r\n":
            raise ProtocolError("a reply is longer than it says")
        self._at += 2
        self._state = LINE
        value, self._value = self._value, None
        self._deliver(bytes(value) if isinstance(value, bytearray) else value)
        return True

    def _deliver(self, value: Any) -> None:
        """A value is complete, and with it perhaps the lists that it ends."""
        while self._open:
            self._charge(VALUE_BYTES)
            count, items = self._open[-1]
            items.append(value)
            if len(items) < count:
                return
            self._open.pop()
            value = items
        self._room = MOST_REPLY_BYTES
        self.replies.append(value)

    def _charge(self, size: int) -> None:
        """Take memory for a reply that is no page, as far as anything that was asked for can need it."""
        self._room -= size
        if self._room < 0:
            raise ProtocolError(f"a reply of more than {MOST_REPLY_BYTES} bytes that is no page")

    _steps = (_line, _body, _skipping, _tail)

    def _compact(self) -> None:
        """Make room behind the part of a line that is there."""
        if self._at == 0:
            raise ProtocolError("a line without an end")
        left = self._end - self._at
        self._raw[:left] = self._raw[self._at : self._end]
        self._at, self._end = 0, left


def _number(text: bytearray) -> int:
    try:
        if len(text) > MOST_DIGITS:
            raise ValueError
        return int(text)
    except ValueError:
        raise ProtocolError("no RESP length") from None
