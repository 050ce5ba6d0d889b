"""The protocol RESP2, without I/O: requests as buffers to send, and a reader that says where received bytes belong.

Law: the bytes of a reply land only in the buffers of this request's pages and in the reader's own memory. The buffers
of a HIT have all bytes of that page and none of another. Values are framed by their lengths, so their bytes are never
searched.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple, TypeVar

from asynccache.errors import Unavailable
from asynccache.storage import HEADER_BYTES, KEY_BYTES, PageKey, Record, Result

MISS, HIT, CORRUPT, FAILED = Result  # the members cost 0.2 µs to look up, for every page of every call

MOST_REPLY_BYTES = 64 << 20
"""Bytes of memory that the replies to one request may take, without those that are pages. The map of a large cluster
takes a hundredth of it."""
MOST_DEPTH = 8
"""The most levels of lists in lists. In the replies to our commands there are four levels at most."""
VALUE_BYTES = 64
SPARE_BYTES = 16 << 10
PIECE_BYTES = 256 << 10

Buffer = bytes | memoryview


class Refusal(NamedTuple):
    """An error reply: its first word, and all of it."""

    code: str
    text: str


class ProtocolError(Unavailable):
    """An answer that is not RESP, or does not fit what was asked: the other end is no Redis server."""


def command(*words: bytes) -> bytes:
    """Return the bytes of one request with these words."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


Command = bytes | tuple[Buffer, ...]
"""A request. One with a page in it is a tuple of pieces, since the page is sent from where it lies."""


def joined(commands: Iterable[Command]) -> Iterator[Buffer]:
    """Yield the buffers to send for these commands: each payload in pieces of ``PIECE_BYTES`` at most, and all bytes
    between two payloads joined."""
    parts = chain.from_iterable((command,) if isinstance(command, bytes) else command for command in commands)
    for text, group in groupby(parts, lambda part: isinstance(part, bytes)):
        buffers = list(group)
        for whole in (b"".join(buffers),) if text else buffers:
            yield from (whole[at : at + PIECE_BYTES] for at in range(0, len(whole), PIECE_BYTES))


_SPECIAL = b"*?[]\\^-"  # in the patterns of SCAN


class Names:
    """The names of pages on the server, and commands about them. A name is the store's prefix and the page's 32 bytes.
    So all names of a store have one length, and no name belongs to two stores, whatever their prefixes are.
    ``ttl_ms``: milliseconds that a page lives; 0: for ever."""

    def __init__(self, prefix: bytes, ttl_ms: int = 0) -> None:
        self._prefix = prefix
        self._length = len(prefix) + KEY_BYTES
        expiry = b"$2\r\nPX\r\n$%d\r\n%d\r\n" % (len(str(ttl_ms)), ttl_ms) if ttl_ms else b""
        self._words, self._options = 6 if ttl_ms else 4, b"\r\n$2\r\nNX\r\n" + expiry

    def of(self, keys: Sequence[PageKey]) -> list[bytes]:
        """Return the names of the pages with these keys."""
        prefix = self._prefix
        return [prefix + key.key for key in keys]

    def key(self, name: bytes) -> bytes:
        """Return the 32 bytes of the page with this name."""
        return name[len(self._prefix) :]

    def ours(self, names: Iterable[bytes]) -> list[bytes]:
        """Return those that are names of this store."""
        return [name for name in names if len(name) == self._length and name.startswith(self._prefix)]

    def commands(self, verb: bytes, names: Sequence[bytes]) -> list[bytes]:
        """Return the command ``verb name`` for each name."""
        head = b"*2\r\n$%d\r\n%b\r\n$%d\r\n" % (len(verb), verb, self._length)
        return [b"%b%b\r\n" % (head, name) for name in names]

    def pattern(self) -> bytes:
        """Return the pattern for SCAN. It matches all names of this store, and maybe others."""
        return b"".join(b"\\%c" % byte if byte in _SPECIAL else b"%c" % byte for byte in self._prefix) + b"*"

    def storing(self, name: bytes, record: Record) -> Command:
        """Return the command ``SET name record NX [PX ttl]``."""
        header, payload = record
        length = HEADER_BYTES + len(payload)
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b" % (self._words, len(name), name, length, bytes(header))
        return head, payload, self._options


USUAL: dict[bytes, Any] = {b"+OK": b"OK", b":1": 1, b":0": 0, b"$-1": None}

T = TypeVar("T")
Receiving = Generator[memoryview, int, T]
"""A generator that yields the buffer for the next bytes, and is sent how many bytes came."""


class Reader:
    """The replies to one request: one for each of ``sinks``, a page where the sink is a record.

    Bytes are received into ``buffer`` and reported to ``received``, until ``missing`` is 0; the answers are in
    ``replies``. A page is HIT, MISS or CORRUPT. Any other reply is what RESP says: int, bytes, None, a list, or a
    ``Refusal``. ``spare``: bytes for all that is no page's payload.
    """

    def __init__(self, sinks: Sequence[Record | None], spare: int = SPARE_BYTES) -> None:
        self.replies: list[Any] = []
        self._sinks = sinks
        self._raw = bytearray(spare)
        self._spare = memoryview(self._raw)
        self._at = self._end = 0
        self._room = MOST_REPLY_BYTES
        self._steps = self._all()
        self.buffer = next(self._steps)

    @property
    def missing(self) -> int:
        """The number of replies that are still to come."""
        return len(self._sinks) - len(self.replies)

    def received(self, count: int) -> None:
        """Take up ``count`` bytes that were received into ``buffer``.

        Raises:
            ProtocolError: they are no reply to what was asked.
        """
        self.buffer = self._steps.send(count)

    def forget(self) -> None:
        """Drop all references to the buffers of the request's pages."""
        self._steps.close()
        self._sinks, self.buffer = (), self._spare

    def _all(self) -> Receiving[None]:
        plain = not any(self._sinks)
        while self.missing:
            if plain:
                self._usual()
            if self.missing:
                self.replies.append((yield from self._reply(self._sinks[len(self.replies)])))
        if self._at == self._end:
            yield self._spare
        raise ProtocolError("a reply that nobody asked for")

    def _usual(self) -> None:
        """Parse a run of the most frequent replies at once. This takes a tenth of the time of parsing each."""
        first = self._raw.find(b"\r\n", self._at, self._end)
        if first < 0 or bytes(self._spare[self._at : first]) not in USUAL:
            return
        end = max(self._at, self._raw.rfind(b"\r\n", self._at, self._end))
        for line in bytes(self._spare[self._at : end]).split(b"\r\n")[: self.missing]:
            if line not in USUAL:
                return
            self.replies.append(USUAL[line])
            self._at += len(line) + 2

    def _reply(self, record: Record | None, depth: int = 0) -> Receiving[Any]:
        """Parse one reply and return its value. ``depth`` is the number of lists around it."""
        line = yield from self._line(record)
        kind, rest = line[:1], line[1:]
        if depth:
            self._charge(len(line))
        if kind == b"$":
            return (yield from self._string(_number(rest), record))
        if kind == b"*" and record is None and depth < MOST_DEPTH:
            items: list[Any] = []
            self._charge(VALUE_BYTES * max(0, count := _number(rest)))
            while len(items) < count:
                items.append((yield from self._reply(None, depth + 1)))
            return items if count >= 0 else None
        if kind == b"+":
            return rest
        if kind == b":":
            return _number(rest)
        if kind == b"-":
            text = rest.decode(errors="replace")
            return Refusal(text.partition(" ")[0], text)
        raise ProtocolError("no RESP reply to what was asked")

    def _string(self, length: int, record: Record | None) -> Receiving[Any]:
        if length < 0:
            return None if record is None else MISS
        value: Any = HIT
        if record is None:
            self._charge(length)
            value = bytearray(length)
            yield from self._fill(memoryview(value))
        elif length == HEADER_BYTES + len(record.payload):
            yield from self._fill(record.header)
            yield from self._fill(record.payload)
        elif length > MOST_REPLY_BYTES:
            raise ProtocolError(f"{length} bytes instead of a page")
        else:
            value = CORRUPT
            while length := length - self._taken(length):
                yield from self._more(len(self._raw))
        yield from self._tail()
        return bytes(value) if record is None else value

    def _line(self, record: Record | None) -> Receiving[bytes]:
        """Take all bytes before the next line's end. If the reply may be a page, no more bytes are received than come
        before its payload."""
        limit = _before(record)
        while (end := self._raw.find(b"\r\n", self._at, self._end)) < 0:
            yield from self._more(limit)
        line = bytes(self._spare[self._at : end])
        self._at = end + 2
        return line

    def _fill(self, view: memoryview) -> Receiving[None]:
        """Fill ``view``: copy the bytes of it that were received already, and receive the others directly into it."""
        filled = self._taken(len(view))
        view[:filled] = self._spare[self._at - filled : self._at]
        while filled < len(view):
            filled += yield view[filled:]

    def _tail(self) -> Receiving[None]:
        """Take the two bytes that end a string."""
        upcoming = self._sinks[len(self.replies) + 1 : len(self.replies) + 2]
        while self._end - self._at < 2:
            yield from self._more(2 + _before(upcoming[0]) if upcoming else 2)
        if self._raw[self._at : self._at + 2] != b"\r\n":
            raise ProtocolError("a reply is longer than it says")
        self._at += 2

    def _taken(self, count: int) -> int:
        """Skip those of the next ``count`` bytes that are there already. Returns how many they are."""
        count = min(count, self._end - self._at)
        self._at += count
        return count

    def _more(self, limit: int) -> Receiving[None]:
        """Receive ``limit`` bytes at most, behind those that are there."""
        if self._end == len(self._raw) or self._at == self._end:
            left = self._raw[self._at : self._end]
            if len(left) == len(self._raw):
                raise ProtocolError("a line without an end")
            self._raw[: len(left)] = left
            self._at, self._end = 0, len(left)
        self._end += yield self._spare[self._end : self._end + limit]

    def _charge(self, size: int) -> None:
        """Note that a reply which is no page takes ``size`` bytes of memory. Raises ProtocolError if such replies take
        more than ``MOST_REPLY_BYTES`` together."""
        self._room -= size
        if self._room < 0:
            raise ProtocolError(f"replies of more than {MOST_REPLY_BYTES} bytes that are no pages")


def _before(record: Record | None) -> int:
    """Return how many bytes come before a page's payload. No more are received at once, so that the payload's bytes
    land in its own buffer. For a reply that is no page return ``SPARE_BYTES``."""
    return SPARE_BYTES if record is None else HEADER_BYTES + len(b"$%d\r\n" % (HEADER_BYTES + len(record.payload)))


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise ProtocolError("no RESP length") from None
