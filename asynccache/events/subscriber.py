"""The other end: batches in order, gaps filled by replay, or told as AllBlocksCleared where they cannot be."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple, Self

import zmq

from asynccache import checks
from asynccache.errors import ConfigError
from asynccache.events.publisher import END
from asynccache.events.wire import AllBlocksCleared, Decoder, EventBatch, Layout

MOST_SECONDS = 1e6


class Received(NamedTuple):
    """One batch and its number. A batch that stands for lost ones has the number of the last of them."""

    number: int
    batch: EventBatch


class Subscriber:
    """Reads one publisher. Not thread-safe. ``patience``: seconds to wait for a replay before giving its batches up.

    A publisher that began anew is known by a number that was there before; where its numbers have outrun those of its
    former life nothing tells the two apart.
    """

    def __init__(
        self, endpoint: str, replay: str | None = None, *, topic: str = "", layout: Layout | str = Layout.MAP,
        patience: float = 1.0,
    ) -> None:  # fmt: skip
        checks.text("endpoint", endpoint, empty=False)
        if replay is not None:
            checks.text("replay", replay, empty=False)
        checks.text("topic", topic)
        self._decoder = Decoder(checks.member("layout", layout, Layout))
        self._patience = checks.number("patience", patience, 0, MOST_SECONDS)
        self._next = 0
        self._latest = 0.0
        self._replay_endpoint = replay
        self._context = zmq.Context()
        self._sub: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        try:
            self._sub.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"endpoint={endpoint!r} cannot be connected to: {error}") from error

    def __repr__(self) -> str:
        return f"Subscriber(next batch {self._next})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self._context.destroy(linger=0)

    def catch_up(self) -> Iterator[Received]:
        """Ask for all that came so far, without waiting for an event; for whoever joins late."""
        yield from self._replayed(None)

    def receive(self, timeout: float) -> Iterator[Received]:
        """The batches that come until none came for ``timeout`` seconds."""
        timeout = checks.number("timeout", timeout, 0, MOST_SECONDS)
        return self._received(timeout)

    def _received(self, timeout: float) -> Iterator[Received]:
        while self._sub.poll(int(timeout * 1000)):
            _, number, payload = self._sub.recv_multipart()
            yield from self._in_order(int.from_bytes(number, "big"), payload)

    def _in_order(self, number: int, payload: bytes) -> Iterator[Received]:
        if number < self._next:
            if self._decoder.decode(payload).ts <= self._latest:
                return  # it came by replay already
            self._next = 0  # the publisher began anew
        if number > self._next:
            yield from self._replayed(number)
        if number == self._next:
            yield self._take(number, payload)

    def _take(self, number: int, payload: bytes) -> Received:
        batch = self._decoder.decode(payload)
        self._next, self._latest = number + 1, batch.ts
        return Received(number, batch)

    def _replayed(self, until: int | None) -> Iterator[Received]:
        """What was missed before ``until``; what cannot be had is told to be lost."""
        yield from self._ask(until)
        if until is not None and self._next < until:
            self._next = until
            yield Received(until - 1, EventBatch(time.time(), [AllBlocksCleared()]))

    def _ask(self, until: int | None) -> Iterator[Received]:
        if self._replay_endpoint is None:
            return
        asking: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        asking.linger = 0
        asking.set_hwm(0)
        asking.connect(self._replay_endpoint)
        try:
            asking.send_multipart((b"", self._next.to_bytes(8, "big")))
            while asking.poll(int(self._patience * 1000)):
                number, payload = asking.recv_multipart()[-2:]  # before them the topic, or not
                if number == END:
                    return
                at = int.from_bytes(number, "big")
                if at >= self._next and (until is None or at < until):
                    yield from self._kept(at, payload)
        finally:
            asking.close()

    def _kept(self, number: int, payload: bytes) -> Iterator[Received]:
        """One replayed batch. The first may stand for those that the publisher does not have any more."""
        events = self._decoder.decode(payload).events
        if number > self._next and not (events and isinstance(events[0], AllBlocksCleared)):
            yield Received(number - 1, EventBatch(time.time(), [AllBlocksCleared()]))
        yield self._take(number, payload)
