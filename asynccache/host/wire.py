"""The messages of a host process and its clients: MessagePack arrays, each in a frame of 4 bytes of length
(little-endian) and the message.

A client's first message is ``Greeting``, which no version changes but by adding fields at its end. The server answers
``Welcomed``, with the descriptor of the shared memory beside it (SCM_RIGHTS), or ``Refused``. From then on every
request has a number, and its answer the same one; answers may come in another order. ``GiveBack`` and ``Bye`` get no
answer.

Versions: a server serves clients of its own version and of the one before. Both sides ignore fields that they do not
know at the end of a message.

The memory, in this order: generations (8 bytes a slot), headers (64 bytes a slot), payloads. A page has a slot, where
its generation and its header lie, and an extent of the payloads, in units of 4 KiB. ``Welcomed`` says where each
begins. A server that comes back has another ``boot``, and other memory; one that took over another's memory has that
one's. Each connection has one boot, so answers need not repeat it. They do say how much is stored, so that nobody has
to ask.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from asynccache.errors import BackendError
from asynccache.storage import KEY_BYTES, Result

VERSION = 2
OLDEST = 1
"""The oldest version that is still understood. Version 2 has ``Hint``; all else is as in version 1."""
MOST_FRAME = 1 << 20
MOST_GREETING = 1 << 12
MOST_KEYS = 4096
LENGTH_BYTES = 4

RESULTS = tuple(Result)

Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Keys = Annotated[list[Key], Meta(max_length=MOST_KEYS)]
Numbers = Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 62)]], Meta(max_length=MOST_KEYS)]
Pools = Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=MOST_KEYS)]
Number = Annotated[int, Meta(ge=0, lt=1 << 62)]


class HostMessage(msgspec.Struct, array_like=True, gc=False, tag=True):
    """A message of either side. Its name comes first, then its fields in order."""


class Greeting(HostMessage):
    """A client begins. ``label``: whom its pages count for. ``oldest``: the oldest version that it understands."""

    version: int
    oldest: int
    label: Annotated[str, Meta(max_length=64)] = ""


class Welcomed(HostMessage):
    """The client may go on. ``version``: the one to speak. ``quota``: how many bytes its process may have reserved.
    ``longest``: the longest payload that is taken. ``pages``, ``held``: as in ``Verdicts``."""

    version: int
    boot: bytes
    size: int
    slots: int
    headers_at: int
    payloads_at: int
    quota: int
    longest: int
    pages: int
    held: int


class Refused(HostMessage):
    """The server will not do this (``number``), or have this client (0). ``for_now``: it may have it later."""

    number: int
    why: str
    for_now: bool = False


class Exist(HostMessage):
    """Which of these are stored? Answer: ``Verdicts``."""

    number: Number
    keys: Keys
    pools: Pools


class Find(HostMessage):
    """Where are these? ``sizes``: the bytes of payload that the client expects. Answer: ``Places``."""

    number: Number
    keys: Keys
    pools: Pools
    sizes: Numbers


class Reserve(HostMessage):
    """Slots for pages that will be written. Answer: ``Places``: HIT, it is stored already; MISS, there is its slot."""

    number: Number
    keys: Keys
    pools: Pools
    sizes: Numbers


class Publish(HostMessage):
    """Slots that were granted with these generations are written. Answer: ``Verdicts``, HIT where the page is
    stored now."""

    number: Number
    slots: Numbers
    generations: Numbers


class GiveBack(HostMessage):
    """Slots that were granted with these generations will not be written, and nothing copies into them any
    more. No answer. One that comes late, when the slot was published and granted again, frees nothing."""

    slots: Numbers
    generations: Numbers


class Bye(HostMessage):
    """The client ends, and nothing copies into any slot that it reserved here. No answer."""


class Remove(HostMessage):
    """Delete these, from the stores as well. Answer: ``Verdicts``."""

    number: Number
    keys: Keys
    pools: Pools


class Damaged(HostMessage):
    """Pages that lay in these slots with these generations did not verify: drop those, and nothing else. Answer:
    ``Verdicts``."""

    number: Number
    keys: Keys
    generations: Numbers


class RemoveAll(HostMessage):
    """Delete every page. Answer: empty ``Verdicts``."""

    number: Number


class Secure(HostMessage):
    """Write all pages to the stores, as safely as these can. Answer: empty ``Verdicts``."""

    number: Number


class Hint(HostMessage):
    """A hint of the client's about these pages; from version 2 on. ``verb``: PREFETCH, they will be wanted soon, have
    them in the memory; KEEP, spare them for ``seconds``; ENDED, they may go first. ``sizes``: as in ``Find``, for
    PREFETCH only. Answer: ``Verdicts``, HIT where it is as the client wants it, MISS where it is not, as for a verb
    that the server does not know."""

    number: Number
    verb: Annotated[str, Meta(max_length=16)]
    keys: Keys
    pools: Pools
    sizes: Numbers
    seconds: Annotated[float, Meta(ge=0)]


class Tell(HostMessage):
    """Answer: ``Told``."""

    number: Number


class Enumerate(HostMessage):
    """The pages in the slots from ``slot`` on, some of them. Answer: ``Enumerated``."""

    number: Number
    slot: Number


class TakeOver(HostMessage):
    """A new server wants the memory, the socket and all that lies there. Answer: ``Inheritance``, with descriptors."""

    number: Number


class Verdicts(HostMessage):
    """``pages``, ``held``: how many pages are in the memory now, and their bytes. ``codes``: a ``Result`` for each key
    or slot, one byte each."""

    number: int
    pages: int
    held: int
    codes: bytes


class Places(HostMessage):
    """``codes``: as in ``Verdicts``. For each page that has a place, in order: ``slots``, ``offsets`` (bytes from the
    start of the memory) and ``generations``."""

    number: int
    pages: int
    held: int
    codes: bytes
    slots: list[int]
    offsets: list[int]
    generations: list[int]


class Told(HostMessage):
    """``counts``: all counters, by name. ``labels``: for each label its pages, bytes and more."""

    number: int
    pages: int
    held: int
    counts: dict[str, float]
    labels: dict[str, dict[str, int]]


class Enumerated(HostMessage):
    """``slot``: from where to go on; -1: that was all. ``sizes``: bytes of payload, ``written``: unix times."""

    number: int
    pages: int
    held: int
    slot: int
    keys: list[bytes]
    sizes: list[int]
    written: list[float]


class Inheritance(HostMessage):
    """All that a new server needs: ``length`` bytes, which follow this message without a frame. It says ``Bye`` when it
    has them."""

    number: int
    pages: int
    held: int
    length: int


Requests = (
    Exist | Find | Reserve | Publish | GiveBack | Bye | Remove | Damaged | RemoveAll | Secure | Tell | Enumerate
    | TakeOver | Hint
)
Answers = Verdicts | Places | Told | Enumerated | Inheritance | Refused

_encode = msgspec.msgpack.Encoder().encode
_greeting: msgspec.msgpack.Decoder[Greeting] = msgspec.msgpack.Decoder(Greeting)
_request: msgspec.msgpack.Decoder[Requests] = msgspec.msgpack.Decoder(Requests)
_welcome: msgspec.msgpack.Decoder[Welcomed | Refused] = msgspec.msgpack.Decoder(Welcomed | Refused)
_answer: msgspec.msgpack.Decoder[Answers] = msgspec.msgpack.Decoder(Answers)
read_greeting, read_request, read_welcome, read_answer = (
    _greeting.decode, _request.decode, _welcome.decode, _answer.decode)  # fmt: skip


class Malformed(BackendError):
    """Bytes came that are no message, or that are a longer one than there can be."""


def frame(message: Any) -> bytes:
    """Return ``message`` in its frame."""
    body = _encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


class Frames:
    """Cuts what comes into frames. ``most``: the longest that there may be; whoever reads may change it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._have = bytearray()

    @property
    def held(self) -> int:
        """How many bytes have come that belong to no frame that was yielded."""
        return len(self._have)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the frames that are whole by now. Raises Malformed: the next one would be too long, or empty."""
        have = self._have
        have += data
        at = 0
        try:
            while len(have) - at >= LENGTH_BYTES:
                length = int.from_bytes(have[at : at + LENGTH_BYTES], "little")
                if not 0 < length <= self.most:
                    raise Malformed(f"a frame of {length} bytes; the longest has {self.most}")
                end = at + LENGTH_BYTES + length
                if len(have) < end:
                    break
                body = bytes(have[at + LENGTH_BYTES : end])
                at = end
                yield body
        finally:
            del have[:at]
