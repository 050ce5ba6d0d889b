"""The receiving end of KV events: batches in order. Missing batches are asked for again; batches that cannot be had are
replaced by one with AllBlocksCleared."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple, Self

import zmq

from asynccache import checks
from asynccache.errors import ConfigError
from asynccache.events.publisher import END
from asynccache.events.wire import AllBlocksCleared, Decoder, EventBatch, EventLayout

MOST_SECONDS = 1e6


class Received(NamedTuple):
    """One batch and its sequence number. A batch that stands for lost ones has the number of the last lost one."""

    number: int
    batch: EventBatch


class Subscriber:
    """Reads the batches of one publisher. Not thread-safe.

    A publisher that was started again begins at number 0, and is noticed by a number that was received before. If the
    new publisher has sent more batches than its predecessor before the subscriber receives one, the restart cannot be
    noticed.

    Args:
        endpoint: the address of the publisher's PUB socket.
        replay: the address of its ROUTER socket; None: missing batches are not asked for.
        topic: messages with other topics are not received; "" receives all.
        layout: how the publisher writes events.
        patience: seconds to wait for the next replayed batch before the rest is taken for lost.

    Raises:
        ConfigError: an argument is unusable, or ``endpoint`` is no address.
    """

    def __init__(
        self, endpoint: str, replay: str | None = None, *, topic: str = "", layout: EventLayout | str = EventLayout.MAP,
        patience: float = 1.0,
    ) -> None:  # fmt: skip
        checks.text("endpoint", endpoint, empty=False)
        if replay is not None:
            checks.text("replay", replay, empty=False)
        checks.text("topic", topic)
        self._decoder = Decoder(checks.member("layout", layout, EventLayout))
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
        """Disconnect."""
        self._context.destroy(linger=0)

    def catch_up(self) -> Iterator[Received]:
        """Ask the publisher for all batches that were not received yet, and yield them; nothing if there is no
        ``replay``. This is for a subscriber that joins late."""
        yield from self._replayed(None)

    def receive(self, timeout: float) -> Iterator[Received]:
        """Yield the batches as they come. The iteration ends when none has come for ``timeout`` seconds."""
        timeout = checks.number("timeout", timeout, 0, MOST_SECONDS)
        return self._received(timeout)

    def _received(self, timeout: float) -> Iterator[Received]:
        while self._sub.poll(int(timeout * 1000)):
            _, number, payload = self._sub.recv_multipart()
            yield from self._in_order(int.from_bytes(number, "big"), payload)

    def _in_order(self, number: int, payload: bytes) -> Iterator[Received]:
        if number < self._next:
            if self._decoder.decode(payload).ts <= self._latest:
                return  # it was received by replay before
            self._next = 0  # the publisher was started again
        if number > self._next:
            yield from self._replayed(number)
        if number == self._next:
            yield self._take(number, payload)

    def _take(self, number: int, payload: bytes) -> Received:
        batch = self._decoder.decode(payload)
        self._next, self._latest = number + 1, batch.ts
        return Received(number, batch)

    def _replayed(self, until: int | None) -> Iterator[Received]:
        """Yield the missing batches before number ``until`` (None: all there are). If some cannot be had, a batch with
        AllBlocksCleared stands for them."""
        yield from self._ask(until)
        if until is not None and self._next < until:
            self._next = until
            yield Received(until - 1, EventBatch(time.time(), [AllBlocksCleared()]))

    def _ask(self, until: int | None) -> Iterator[Received]:
        """Yield the batches before number ``until`` that the publisher has kept. If some before one of them are
        missing, and it does not begin with AllBlocksCleared itself, a batch that does comes first."""
        if self._replay_endpoint is None:
            return
        asking: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        asking.linger = 0
        asking.set_hwm(0)
        asking.connect(self._replay_endpoint)
        try:
            asking.send_multipart((b"", self._next.to_bytes(8, "big")))
            while asking.poll(int(self._patience * 1000)):
                number, payload = asking.recv_multipart()[-2:]  # the topic may stand before them
                if number == END:
                    return
                at = int.from_bytes(number, "big")
                if at >= self._next and (until is None or at < until):
                    events = self._decoder.decode(payload).events
                    if at > self._next and not (events and isinstance(events[0], AllBlocksCleared)):
                        yield Received(at - 1, EventBatch(time.time(), [AllBlocksCleared()]))
                    yield self._take(at, payload)
        finally:
            asking.close()
