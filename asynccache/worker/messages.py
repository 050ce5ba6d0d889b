"""Messages over a link: what the head says, what a rank says, and the first words of both ends.

What the head says is made from the signatures of the methods that it calls. ``@remote`` marks a method that another
process may call; ``orders_of`` makes a message of each: a typed array with the method's name and its arguments. A
coroutine is *answered*, with what it returns; a plain method is not. So a new call is one method, and what is decoded
has been checked against the method's annotations.

A frame is a MessagePack array of messages. One that holds anything else raises ``RankFailure``, which ends the link;
none of its messages is acted on. A reason, which may be any text, can always be sent: see ``sendable``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import iscoroutinefunction, signature
from typing import Any, NamedTuple, TypeVar, Union, get_type_hints

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
    """A call failed."""

    kind: str
    """The name of the error's class."""
    reason: str

    def __post_init__(self) -> None:
        self.reason = sendable(self.reason)


# what a rank says unasked


class WorksOver(Message, tag="ended"):
    """Works have ended, in this order and all with ``status``, and their buffers are let go."""

    status: Status
    works: list[int]
    """The first operation of each work."""


class BatchOver(Message, tag="over"):
    """A batch is over."""

    number: int
    error: str = ""
    """Why the engine could not run it; empty if it did."""

    def __post_init__(self) -> None:
        self.error = sendable(self.error)


class StoreKeys(Message, tag="keys"):
    """A watched store has these keys from now on or, if ``there`` is False, has them no more."""

    store: int
    there: bool
    keys: tuple[bytes, ...]


class StoreHealth(Message, tag="health"):
    """A worker's stores refuse calls from now on, or take them again."""

    shut: bool
    """True if all stores refuse calls."""


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


# calls

F = TypeVar("F", bound=Callable[..., Any])

Fold = Callable[..., Any]
"""A function that makes one answer of those of all ranks: it gets them by rank, and then the arguments of the call. It
raises ``RankFailure`` with a rank whose answer cannot be right."""

_MARK = "__remote__"


def remote(fold: Fold | None = None, *, at_once: bool = False) -> Callable[[F], F]:
    """Mark a method that other processes may call. The method itself is unchanged. ``fold``: combines the answers of
    all ranks; without it the answer of a group is None. ``at_once``: a coroutine that waits for nothing, and has ended
    before the next message is heard."""

    def mark(method: F) -> F:
        setattr(method, _MARK, (fold, at_once))
        return method

    return mark


class RemoteMethod(NamedTuple):
    """A remote method by its ``name``."""

    name: str
    message: type[Any]
    """The type of the method's message, which has the arguments in order; of a call, behind its number."""
    answer: type[Any] | None
    """The type of the answer; None: nobody answers."""
    fold: Fold | None
    at_once: bool
    """As in ``remote``, like ``fold``."""


def orders_of(*owners: type) -> dict[str, RemoteMethod]:
    """Return an order for each remote method of ``owners``. Of methods with one name the first owner's counts."""
    found: dict[str, RemoteMethod] = {}
    for owner in owners:
        for name, method in vars(owner).items():
            if hasattr(method, _MARK):
                found.setdefault(name, _order(name, method))
    return found


def _order(name: str, method: Callable[..., Any]) -> RemoteMethod:
    hints = get_type_hints(method)
    fields = [(argument, hints[argument]) for argument in list(signature(method).parameters)[1:]]
    answer = None
    if iscoroutinefunction(method):
        value = [("value", hints["return"])]
        answer = msgspec.defstruct(f"{name}_answer", value, bases=(Answer,), tag=f"{name}.answer")
    base = Message if answer is None else Call
    message = msgspec.defstruct(name, fields, bases=(base,), tag=name)
    return RemoteMethod(name, message, answer, *getattr(method, _MARK))


def order_decoder(orders: Mapping[str, RemoteMethod]) -> Callable[[bytes], list[Message]]:
    """Return a function that decodes a frame of a head."""
    return decoder(list[Union[tuple(order.message for order in orders.values())]])  # type: ignore[misc]  # noqa: UP007


def news_decoder(orders: Mapping[str, RemoteMethod]) -> Callable[[bytes], list[Message]]:
    """Return a function that decodes a frame of a rank: answers, and what it says unasked."""
    answers = [order.answer for order in orders.values() if order.answer is not None]
    kinds = (WorksOver, BatchOver, StoreKeys, StoreHealth, StoreCounters, Died, Failed, *answers)
    return decoder(list[Union[kinds]])  # type: ignore[valid-type]  # noqa: UP007
