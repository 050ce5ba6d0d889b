"""The receiving end of KV events: batches in order. Missing batches are asked for again; batches that cannot be had are
replaced by one with AllBlocksCleared.

``BatchOrder`` knows which batch comes next, and sees no socket. ``Subscriber`` reads one publisher; ``fleet`` has those
of many.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import zmq

from asynccache import checks
from asynccache.errors import ConfigError
from asynccache.events.publisher import END, MOST_NUMBER
from asynccache.events.wire import AllBlocksCleared, Decoder, EventBatch, EventLayout

MOST_SECONDS = 1e6


class Received(NamedTuple):
    """One batch and its sequence number. A batch that stands for lost ones has the number of the last lost one."""

    number: int
    batch: EventBatch


def read_frames(frames: Sequence[bytes]) -> tuple[bytes, int, bytes] | None:
    """Return the number's bytes, the number and the payload of a message; None: it is none. A topic, or what an answer
    begins with, may stand before them."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        return None
    number = int.from_bytes(frames[-2], "big")
    return (frames[-2], number, frames[-1]) if number < MOST_NUMBER or frames[-2] == END else None


class BatchOrder:
    """The order of one stream's batches. Pure. ``next``: the number of the batch that comes next."""

    def __init__(self, layout: EventLayout) -> None:
        self._decoder = Decoder(layout)
        self.next = 0
        self._latest = 0.0
        self._sent = -1  # the number of the last batch that came as it was sent; these numbers only grow
        self._answered = -1  # the number of the last message of an answer: those of a snapshot have all the same

    def missing(self, number: int, payload: bytes) -> int:
        """Return how many batches are missing before this one, which came over PUB; below 0: an answer has had it
        before. Any other number that has been means that the publisher was started again, and all from 0 on are
        missing.

        Raises:
            msgspec.DecodeError: the payload is no batch.
        """
        batch = self._decoder.decode(payload)
        if number < self.next:
            if number > self._sent and batch.ts <= self._latest:
                self._sent = number
                return -1
            self.next = 0
        self._sent = number
        return number - self.next

    def take(self, number: int, payload: bytes) -> Received:
        """Return the batch, and expect the one after it. Raises msgspec.DecodeError: the payload is no batch."""
        batch = self._decoder.decode(payload)
        self.next, self._latest = number + 1, max(self._latest, batch.ts)
        return Received(number, batch)

    def ask(self) -> bytes:
        """Return the number to ask for. Its answer is read with ``answer``."""
        self._answered = -1
        return self.next.to_bytes(8, "big")

    def answer(self, number: int, payload: bytes) -> list[Received]:
        """Return what is new in one message of an answer. If batches before it are missing, and it does not begin with
        AllBlocksCleared itself, a batch that does comes first. Raises msgspec.DecodeError: the payload is no batch."""
        if number < self.next and number != self._answered:
            return []
        events = self._decoder.decode(payload).events
        skipped = number > self.next and not (events and isinstance(events[0], AllBlocksCleared))
        cleared = [Received(number - 1, EventBatch(time.time(), [AllBlocksCleared()]))] if skipped else []
        self._answered = number
        return [*cleared, self.take(number, payload)]

    def give_up(self, until: int) -> list[Received]:
        """Expect ``until`` next. Return a batch with AllBlocksCleared if others before it are missing."""
        if self.next >= until:
            return []
        self.next = until
        return [Received(until - 1, EventBatch(time.time(), [AllBlocksCleared()]))]


class Subscriber:
    """Reads the batches of one publisher. Not thread-safe.

    A publisher that was started again begins at number 0, and is noticed by a number that was received before. Then a
    batch with AllBlocksCleared comes first. If the new publisher has sent more batches than its predecessor before the
    subscriber receives one, the restart cannot be noticed.

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
        self._order = BatchOrder(checks.member("layout", layout, EventLayout))
        self._patience = checks.number("patience", patience, 0, MOST_SECONDS)
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
        return f"Subscriber(next batch {self._order.next})"

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
            message = read_frames(self._sub.recv_multipart())
            if message is not None and message[0] != END:
                yield from self._in_order(message[1], message[2])

    def _in_order(self, number: int, payload: bytes) -> Iterator[Received]:
        expected, missing = self._order.next, self._order.missing(number, payload)
        if self._order.next < expected:  # the publisher was started again: what it announced before is gone
            yield Received(expected - 1, EventBatch(time.time(), [AllBlocksCleared()]))
        if missing > 0:
            yield from self._replayed(number)
            yield from self._order.give_up(number)
        if number == self._order.next:
            yield self._order.take(number, payload)

    def _replayed(self, until: int | None) -> Iterator[Received]:
        """Yield the batches before number ``until`` (None: all there are) that the publisher has kept."""
        if self._replay_endpoint is None:
            return
        asking: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        asking.linger = 0
        asking.set_hwm(0)
        asking.connect(self._replay_endpoint)
        try:
            asking.send_multipart((b"", self._order.ask()))
            while asking.poll(int(self._patience * 1000)):
                message = read_frames(asking.recv_multipart())
                if message is None:
                    continue
                if message[0] == END:
                    return
                if until is None or message[1] < until:
                    yield from self._order.answer(message[1], message[2])
        finally:
            asking.close()
