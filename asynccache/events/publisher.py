"""The publisher: events leave by a thread of its own, over ZeroMQ, and nobody who listens can hold up the cache.

    PUB     topic | 8-byte big-endian sequence number | payload
    ROUTER  asked for the batches from a sequence number on, answers each as (topic, number, payload), then
            (nothing, -1, nothing); without the topic for those who expect none

What the cache pays is an append, and one byte to a pipe for each batch. A subscriber that reads too slowly loses
messages at ZeroMQ's high-water mark and sees the gap in the numbers; what it asks for again comes out of the last
``keep`` batches. Where those do not reach back far enough the answer begins with a batch that says AllBlocksCleared:
so a gap is filled or announced, never passed over. The same is said when the thread itself falls too far behind.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, Self

import zmq

from asynccache import checks
from asynccache.core.plan import Cleared, Publish
from asynccache.errors import ConfigError
from asynccache.events.announcer import Announcer
from asynccache.events.notices import Notice, Opened, StorageReport
from asynccache.events.wire import AllBlocksCleared, BlockEvent, Encoder, EventBatch, Layout

END = (-1).to_bytes(8, "big", signed=True)
BATCH_EVENTS = 1024
MOST_KEPT = 1 << 30
MOST_GATHER = 60.0

_NOTICES = (Publish, Cleared, StorageReport, Opened)


class PublisherStats(NamedTuple):
    """``lost``: notices that were dropped because the thread was too far behind; each time, subscribers are told."""

    batches: int
    events: int
    bytes: int
    replays: int
    lost: int
    waiting: int


class History:
    """The last batches, for whoever missed some: at most ``keep`` of them and ``keep_bytes`` in all."""

    def __init__(self, keep: int, keep_bytes: int) -> None:
        self._keep = keep
        self._keep_bytes = keep_bytes
        self._batches: deque[tuple[int, bytes]] = deque()
        self._bytes = 0

    def add(self, number: int, payload: bytes) -> None:
        """Keep one more, and drop what is too much."""
        self._batches.append((number, payload))
        self._bytes += len(payload)
        while len(self._batches) > self._keep or (self._bytes > self._keep_bytes and len(self._batches) > 1):
            self._bytes -= len(self._batches.popleft()[1])

    def since(self, number: int, cleared: Callable[[], bytes]) -> Iterator[tuple[int, bytes]]:
        """The batches from ``number`` on. If the first of them are gone, ``cleared()`` stands for them."""
        oldest = self._batches[0][0] if self._batches else number
        if number < oldest:
            yield oldest - 1, cleared()
        yield from (batch for batch in self._batches if batch[0] >= number)


class ZmqPublisher:
    """``AsyncCache(config, on_event=publisher)``: call it with every notice, from the loop; close it afterwards.

    ``endpoint`` and ``replay`` are bound; a port ``*`` is chosen, and ``endpoint`` then says which. ``rank``: the
    data-parallel rank in every batch. ``gather``: seconds that a batch waits for more events. ``replay_topic``: whether
    a replayed batch begins with the topic; as vLLM of the time of ``layout`` has it, if nothing is said.
    """

    def __init__(
        self, endpoint: str = "tcp://*:5557", replay: str | None = None, *, topic: str = "", rank: int | None = None,
        layout: Layout | str = Layout.MAP, replay_topic: bool | None = None,
        keep: int = 10_000, keep_bytes: int = 64 << 20, gather: float = 0.002,
        backlog: int = 200_000, high_water: int = 100_000, clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        checks.text("endpoint", endpoint, empty=False)
        if replay is not None:
            checks.text("replay", replay, empty=False)
        written = checks.member("layout", layout, Layout)
        keep = checks.integer("keep", keep, 1, MOST_KEPT)
        high_water = checks.integer("high_water", high_water, 1, checks.INT32_MAX)
        self._topic = checks.text("topic", topic).encode()
        self._rank = None if rank is None else checks.integer("rank", rank, 0, checks.INT32_MAX)
        self._encoder = Encoder(written)
        topical = written is Layout.MAP if replay_topic is None else checks.flag("replay_topic", replay_topic)
        self._before = ((self._topic,), (b"",)) if topical else ((), ())
        self._history = History(keep, checks.integer("keep_bytes", keep_bytes, 1))
        self._gather = checks.number("gather", gather, 0, MOST_GATHER)
        self._limit = checks.integer("backlog", backlog, 1)
        self._clock = checks.function("clock", clock)
        self._announcer = Announcer()
        self._backlog: deque[Notice] = deque()
        self._woken = self._closing = self._losing = False
        self._lost = self._number = self._events = self._bytes = self._replays = 0
        self.error: BaseException | None = None
        self._context = zmq.Context()
        self._wake, self._awaken = socket.socketpair()
        try:
            self._pub = self._bind(zmq.PUB, endpoint, high_water)
            self._router = self._bind(zmq.ROUTER, replay, 2 * keep) if replay is not None else None
        except BaseException:
            self._release()
            raise
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay = self._router.getsockopt_string(zmq.LAST_ENDPOINT) if self._router is not None else None
        self._thread = threading.Thread(target=self._run, name="asynccache-events", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"ZmqPublisher({self.endpoint!r}, {self._number} batches, {len(self._backlog)} notices wait)"

    def __call__(self, notice: Notice) -> None:
        """Publish this soon. Never blocks, and raises for nothing that a cache tells.

        Raises:
            ConfigError: it is no notice.
        """
        checks.instance("notice", notice, _NOTICES)
        if self._closing or self.error is not None:
            self._lost += 1
            return
        full = len(self._backlog) >= self._limit and type(notice) is Publish
        if full:
            self._lost += 1
            if self._losing:
                return
            notice = Cleared()  # stands for all that is lost from here on
        self._losing = full
        self._backlog.append(notice)
        if not self._woken:
            self._woken = True
            self._ring()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, timeout: float = 5.0) -> None:
        """Send what waits and end the thread; after ``timeout`` seconds, leave the rest unsent. Twice is fine."""
        timeout = checks.number("timeout", timeout, 0, threading.TIMEOUT_MAX)
        if self._closing:
            return
        self._closing = True
        self._ring()
        self._thread.join(timeout)

    def _ring(self) -> None:
        """Wake the thread. It may have ended at any moment, and has closed the socket then."""
        with suppress(OSError):
            self._awaken.send(b"\0")

    def stats(self) -> PublisherStats:
        """Counters; from any thread."""
        return PublisherStats(
            self._number, self._events, self._bytes, self._replays, self._lost, len(self._backlog)
        )

    # the thread

    def _run(self) -> None:
        try:
            self._serve()
            self._send_all()
        except BaseException as error:  # nobody is there to hear it; the cache goes on, and ``error`` says why
            self.error = error
            self._backlog.clear()
        finally:
            self._release()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake.fileno(), zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll())
            if self._wake.fileno() in ready:
                self._wake.recv(4096)
                if not self._closing:
                    time.sleep(self._gather)
                self._woken = False
                self._send_all()
            if self._router is not None and self._router in ready:
                self._answer(self._router)

    def _send_all(self) -> None:
        while notices := self._take(BATCH_EVENTS):
            self._send(self._announcer.announce(notices))

    def _take(self, count: int) -> list[Notice]:
        backlog = self._backlog
        return [backlog.popleft() for _ in range(min(count, len(backlog)))]

    def _send(self, events: Sequence[BlockEvent]) -> None:
        if not events:
            return
        number, payload = self._number, self._encode(events)
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
        self._history.add(number, payload)
        self._number += 1
        self._events += len(events)
        self._bytes += len(payload)

    def _encode(self, events: Sequence[BlockEvent]) -> bytes:
        return self._encoder.encode(EventBatch(self._clock(), list(events), self._rank))

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        """Replay to one subscriber. Whoever does not read loses the answer, and nobody else anything."""
        frames = router.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        self._replays += 1
        who, empty, asked = frames
        since = int.from_bytes(asked, "big")
        before, before_end = self._before
        for number, payload in self._history.since(since, lambda: self._encode([AllBlocksCleared()])):
            router.send_multipart((who, empty, *before, number.to_bytes(8, "big"), payload))
        router.send_multipart((who, empty, *before_end, END, b""))

    def _bind(self, kind: int, endpoint: str, high_water: int) -> zmq.Socket[bytes]:
        bound: zmq.Socket[bytes] = self._context.socket(kind)
        bound.set_hwm(high_water)
        bound.linger = 0
        try:
            bound.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"events: cannot bind {endpoint!r}: {error}") from error
        return bound

    def _release(self) -> None:
        self._context.destroy(linger=1000 if self.error is None else 0)
        self._wake.close()
        self._awaken.close()
