"""What the scheduler of rank 0 tells those of the other ranks before each step: who came, who was aborted, whether all
is over.

Law: an order is all that a scheduler hears from outside. Every rank applies the same orders and takes one step after
each, so whatever callers do, and when, enters on all ranks at the same point.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from asynccache import Adapter, RankFailure
from asynccache_shim.model import Sampling
from asynccache_shim.request import ExtraKey, Limits, Request, Terms, fix_terms

_LENGTH = 4


class Orders(Protocol):
    """The connection of one rank to the others, for one scheduler, which closes it. ``leads``: it is rank 0's, where
    callers come."""

    leads: bool

    async def gather(self, content: bytes) -> Sequence[bytes]:
        """What every rank gives, by rank; all call it at the same point. Cancelling it leaves the ranks unable to
        gather again.

        Raises:
            RankFailure: a rank is gone or silent.
        """
        ...

    def watch(self, lost: Callable[[RankFailure], None]) -> None:
        """Have ``lost`` called when a rank is found to be gone or silent: at most once, whatever it is busy with."""
        ...

    def send(self, order: bytes) -> None:
        """To every other rank, behind those that were sent before; never waits. Rank 0 only."""
        ...

    async def receive(self) -> bytes:
        """The next order, however long it takes. All but rank 0. Cancelling it loses none.

        Raises:
            RankFailure: rank 0 is gone or silent.
        """
        ...

    async def aclose(self, *, well: bool) -> None:
        """Leave. ``well``: after the last order; else this rank is lost to the others. Cancelling it leaves at once.
        Idempotent."""
        ...


class Arrival(NamedTuple):
    """A request and the number that it has on all ranks."""

    number: int
    request: Request


class Order(NamedTuple):
    """``aborted``: numbers, also of requests that have ended meanwhile. ``closing``: there is no step after it."""

    arrivals: tuple[Arrival, ...] = ()
    aborted: tuple[int, ...] = ()
    closing: bool = False


def encode(order: Order) -> bytes:
    """For ``decode`` elsewhere. Most orders are empty, and so is what is sent then."""
    if order == Order():
        return b""
    asked = [(number, request.terms) for number, request in order.arrivals]
    arrivals = [{"number": number, **_plain(terms)} for number, terms in asked]
    head = json.dumps({"arrivals": arrivals, "aborted": order.aborted, "closing": order.closing}).encode()
    tokens = (terms.tokens.astype("<i4").tobytes() for _, terms in asked)
    return b"".join((len(head).to_bytes(_LENGTH, "little"), head, *tokens))


def decode(content: bytes) -> Order:
    """With requests that nobody but the scheduler knows."""
    if not content:
        return Order()
    start = _LENGTH + int.from_bytes(content[:_LENGTH], "little")
    head = json.loads(content[_LENGTH:start])
    arrivals = []
    for terms in head["arrivals"]:
        stop = start + 4 * terms["tokens"]
        tokens = np.frombuffer(content[start:stop], "<i4").astype(np.int32)
        arrivals.append(Arrival(terms["number"], _request(tokens, terms)))
        start = stop
    return Order(tuple(arrivals), tuple(head["aborted"]), head["closing"])


def _plain(terms: Terms) -> dict[str, Any]:
    limits, sampling = terms.limits, terms.sampling
    seed = None if sampling.seed is None else int(sampling.seed)
    return {
        "tokens": len(terms.tokens), "priority": terms.priority, "ended": terms.ended,
        "max_new_tokens": int(limits.max_new_tokens), "stop_tokens": sorted(map(int, limits.stop_tokens)),
        "sampling": [float(sampling.temperature), float(sampling.top_p), seed],
        "extra_key": _packed(terms.extra_key),
    }  # fmt: skip


def _request(tokens: Any, terms: Any) -> Request:
    return Request(
        tokens, Limits(terms["max_new_tokens"], frozenset(terms["stop_tokens"])), priority=terms["priority"],
        extra_key=_unpacked(terms["extra_key"]), sampling=Sampling(*terms["sampling"]), ended=terms["ended"],
    )  # fmt: skip


def _packed(key: ExtraKey) -> Any:
    if isinstance(key, Adapter):
        return {"adapter": [str(key), key.lora_name, key.lora_id]}
    return {"bytes": key.hex()} if isinstance(key, bytes) else key


def _unpacked(key: Any) -> ExtraKey:
    if not isinstance(key, dict):
        return str(key) if key is not None else None
    return Adapter(*key["adapter"]) if "adapter" in key else bytes.fromhex(key["bytes"])


class Desk:
    """What callers of rank 0 have asked for since the last order."""

    def __init__(self) -> None:
        self._arrivals: list[Arrival] = []
        self._aborted: list[int] = []
        self.closing = False

    def __bool__(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self._arrivals or self._aborted or self.closing)

    def submit(self, number: int, request: Request) -> None:
        """With the next order: the terms that it has now, as the other ranks will read them.

        Raises:
            ConfigError, TypeError: they cannot be sent, or the other ranks would refuse them.
        """
        arrival = Arrival(number, request)
        ((_, elsewhere),) = decode(encode(Order((arrival,)))).arrivals
        fix_terms(request, elsewhere.terms)
        self._arrivals.append(arrival)

    def abort(self, number: int) -> Request | None:
        """With the next order; the request, if no order has told of it yet: then none will."""
        for arrival in self._arrivals:
            if arrival.number == number:
                self._arrivals.remove(arrival)
                return arrival.request
        self._aborted.append(number)
        return None

    def left(self) -> list[Request]:
        """Requests that no order has told of."""
        return [request for _, request in self._arrivals]

    def order(self) -> Order:
        """All of it, once."""
        order = Order(tuple(self._arrivals), tuple(self._aborted), self.closing)
        self._arrivals, self._aborted = [], []
        return order
