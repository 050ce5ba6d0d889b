"""Messages over a link, but for the calls, which ``remote`` makes: what a rank says, and the first words of both ends.

A frame is a MessagePack array of messages. One that holds anything else raises ``RankFailure``, which ends the link;
none of its messages is acted on. A reason, which may be any text, can always be sent: see ``sendable``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from asynccache.core.plan import Status
from asynccache.errors import RankFailure

MOST_REASON = 4096
"""The most bytes of a reason."""


class Message(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """A value that goes over a link."""


class Hello(Message):
    """A rank's first message: the version of asynccache that it runs, and its rank."""

    version: str
    rank: int


class Welcome(Message):
    """The head's answer: how many ranks there are by tp, cp and pp."""

    topology: tuple[int, int, int]


class Call(Message):
    """A message that is answered once, with the same number."""

    call: int


class Answer(Message):
    """The answer to the call of this number."""

    call: int


class Failed(Answer, tag="failed"):
    """A call failed. ``kind``: the name of the error's class."""

    kind: str
    reason: str

    def __post_init__(self) -> None:
        self.reason = sendable(self.reason)


# what a rank says unasked


class Ended(Message, tag="ended"):
    """Works have ended, in this order and all with ``status``, and their buffers are let go. ``works``: the first
    operation of each."""

    status: Status
    works: list[int]


class BatchOver(Message, tag="over"):
    """A batch is over. ``error``: why the engine could not run it; empty if it did."""

    number: int
    error: str = ""

    def __post_init__(self) -> None:
        self.error = sendable(self.error)


class StoreKeys(Message, tag="keys"):
    """A watched store has these keys from now on or, if ``there`` is False, has them no more."""

    store: int
    there: bool
    keys: tuple[bytes, ...]


class StoreHealth(Message, tag="health"):
    """``shut``: True if all stores refuse calls."""

    shut: bool


class StoreCounters(Message, tag="counters"):
    """The stores' counters: their sums, and those of each store by name."""

    storage: dict[str, int | float]
    stores: dict[str, dict[str, int | float]]


class Died(Message, tag="died"):
    """The end of a worker that cannot go on."""

    reason: str

    def __post_init__(self) -> None:
        self.reason = sendable(self.reason)


def sendable(reason: str) -> str:
    """Return ``reason``, which may be any text, as it can be sent: not too long, and without what has no UTF-8."""
    if len(reason) * 4 <= MOST_REASON and reason.isascii():
        return reason
    return reason.encode(errors="replace")[:MOST_REASON].decode(errors="ignore")


encode = msgspec.msgpack.Encoder().encode
"""Encodes a list of messages as a frame, or one message of the handshake."""


def decoder(kind: Any) -> Callable[[bytes], Any]:
    """Return a function that decodes a value of this type. It raises ``RankFailure`` for anything else."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def decoded(frame: bytes) -> Any:
        try:
            return decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RankFailure(f"sent what is no message: {error}") from None

    return decoded
