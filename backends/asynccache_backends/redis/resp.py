"""The part of RESP2 that pages need, without I/O: requests as buffers to send, and a reader that says where received
bytes belong. Answers with lists in them are read by redis-py, see ``server``.

The bytes of a reply land only in the buffers of this request's pages and in the reader's own memory. The buffers
of a HIT have all bytes of that page and none of another. Values are framed by their lengths, so their bytes are never
searched.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any, TypeVar

from asynccache.errors import Unavailable
from asynccache.storage import HEADER_BYTES, Record, Result

MISS, HIT, CORRUPT, _ = Result  # the members cost 0.2 µs to look up, for every page of every call

MOST_VALUE_BYTES = 64 << 20
"""A value that is no page is skipped up to this length."""
SPARE_BYTES = 16 << 10
PIECE_BYTES = 256 << 10

Buffer = bytes | memoryview
Command = bytes | tuple[Buffer, ...]
"""What is sent. A command with a page in it is a tuple of pieces, since the page is sent from where it lies."""
Request = tuple[Command, Record | None]
"""A command, and the record that its reply is read into; None if the reply is no page."""

ASKING = b"*1\r\n$6\r\nASKING\r\n"


class Refusal(Unavailable):
    """An error reply; its text is that of the reply."""

    @property
    def code(self) -> str:
        """The first word."""
        return str(self).partition(" ")[0]


class ProtocolError(Unavailable):
    """An answer that is not RESP, or does not fit what was asked: the other end is no Redis server."""


def about(verb: bytes, names: Sequence[bytes]) -> list[bytes]:
    """Return the command ``verb name`` for each name. All names have one length."""
    head = b"*2\r\n$%d\r\n%b\r\n$%d\r\n" % (len(verb), verb, len(names[0])) if names else b""
    return [b"%b%b\r\n" % (head, name) for name in names]


def storing(names: Sequence[bytes], records: Sequence[Record], ttl_ms: int = 0) -> list[Command]:
    """Return the command ``SET name record NX [PX ttl]`` for each name and record. All names have one length.
    ``ttl_ms``: milliseconds that the pages live; 0: for ever."""
    expiry = b"$2\r\nPX\r\n$%d\r\n%d\r\n" % (len(str(ttl_ms)), ttl_ms) if ttl_ms else b""
    words, options = 6 if ttl_ms else 4, b"\r\n$2\r\nNX\r\n" + expiry
    commands: list[Command] = []
    for name, (header, payload) in zip(names, records, strict=True):
        size = HEADER_BYTES + len(payload)
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b" % (words, len(name), name, size, bytes(header))
        commands.append((head, payload, options))
    return commands


def joined(commands: Iterable[Command]) -> Iterator[Buffer]:
    """Yield the buffers to send for these commands: each payload in pieces of ``PIECE_BYTES`` at most, and all bytes
    between two payloads joined."""
    parts = chain.from_iterable((command,) if isinstance(command, bytes) else command for command in commands)
    for text, group in groupby(parts, lambda part: isinstance(part, bytes)):
        buffers = list(group)
        for whole in (b"".join(buffers),) if text else buffers:
            yield from (whole[at : at + PIECE_BYTES] for at in range(0, len(whole), PIECE_BYTES))


USUAL: dict[bytes, Any] = {b"+OK": b"OK", b":1": 1, b":0": 0, b"$-1": None}

T = TypeVar("T")
Receiving = Generator[memoryview, int, T]
"""A generator that yields the buffer for the next bytes, and is sent how many bytes came."""


class Reader:
    """The replies to one request: one for each of ``sinks``, a page where the sink is a record.

    Bytes are received into ``buffer`` and reported to ``received``, until ``missing`` is 0; the answers are in
    ``replies``. A page is HIT, MISS or CORRUPT. Any other reply is a line: int, bytes, None or a ``Refusal``.
    ``spare``: bytes for all that is no page's payload.
    """

    def __init__(self, sinks: Sequence[Record | None], spare: int = SPARE_BYTES) -> None:
        self.replies: list[Any] = []
        self._sinks = sinks
        self._raw = bytearray(spare)
        self._spare = memoryview(self._raw)
        self._at = self._end = 0
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
        try:
            self.buffer = self._steps.send(count)
        except ValueError:
            raise ProtocolError("no number where there must be one") from None

    def forget(self) -> None:
        """Drop all references to the buffers of the request's pages."""
        self._steps.close()
        self._sinks, self.buffer = (), self._spare

    def _all(self) -> Receiving[None]:
        """Parse line after line; where no reply is a page, all lines that have come at once."""
        find = self._raw.find if any(self._sinks) else self._raw.rfind
        while self.missing > 0:
            record = self._sinks[len(self.replies)]
            while (end := find(b"\r\n", self._at, self._end)) < 0:
                yield from self._more(_before(record))
            lines, self._at = bytes(self._spare[self._at : end]).split(b"\r\n"), end + 2
            if record is not None and lines[0].startswith(b"$"):
                self.replies.append((yield from self._page(record, int(lines[0][1:]))))
            else:
                self.replies += [USUAL[line] if line in USUAL else _value(line) for line in lines]
        if self._at == self._end and not self.missing:
            yield self._spare
        raise ProtocolError("a reply that nobody asked for")

    def _page(self, record: Record, length: int) -> Receiving[Result]:
        """Receive a value of ``length`` bytes directly into ``record``, or skip it if it is no page of this size."""
        if length == -1:
            return MISS
        result = CORRUPT
        if length == HEADER_BYTES + len(record.payload):
            result = HIT
            for view in record:
                filled = self._taken(len(view))
                view[:filled] = self._spare[self._at - filled : self._at]
                while filled < len(view):
                    filled += yield view[filled:]
        elif not 0 <= length <= MOST_VALUE_BYTES:
            raise ProtocolError(f"{length} bytes instead of a page")
        else:
            while length := length - self._taken(length):
                yield from self._more(len(self._raw))
        following = self._sinks[len(self.replies) + 1 : len(self.replies) + 2]
        while self._end - self._at < 2:
            yield from self._more(2 + _before(following[0]) if following else 2)
        if self._raw[self._at : self._at + 2] != b"\r\n":
            raise ProtocolError("a reply is longer than it says")
        self._at += 2
        return result

    def _taken(self, count: int) -> int:
        """Skip those of the next ``count`` bytes that are there already. Returns how many they are."""
        count = min(count, self._end - self._at)
        self._at += count
        return count

    def _more(self, limit: int) -> Receiving[None]:
        """Receive ``limit`` bytes at most, behind those that are there."""
        left = self._raw[self._at : self._end]
        if len(left) == len(self._raw):
            raise ProtocolError("a line without an end")
        self._raw[: len(left)] = left
        self._at, self._end = 0, len(left)
        self._end += yield self._spare[self._end : self._end + limit]


def _before(record: Record | None) -> int:
    """Return how many bytes come before a page's payload. No more are received at once, so that the payload's bytes
    land in its own buffer. For a reply that is no page return ``SPARE_BYTES``."""
    return SPARE_BYTES if record is None else HEADER_BYTES + len(b"$%d\r\n" % (HEADER_BYTES + len(record.payload)))


def _value(line: bytes) -> Any:
    """Return the value of a reply that is one line."""
    kind, rest = line[:1], line[1:]
    if kind == b"+":
        return rest
    if kind == b":":
        return int(rest)
    if kind == b"-":
        return Refusal(rest.decode(errors="replace"))
    raise ProtocolError("no RESP reply to what was asked")
